"""The recipe: a dense model given an expanded one's structure, and nothing hostile believed."""

import copy
import json

import pytest
import torch
from kinds import SORTS, Deep, Filters, Plain
from torch import nn

from fissile import MLP, FileError, dropconnect, expand, load, nonzeros, save, to_dense, to_masked
from fissile.recipe import rebuild, recipe_of

EVERY = pytest.mark.parametrize("sort", SORTS.values(), ids=SORTS)


def shapes(model):
    return {key: (value.shape, value.dtype) for key, value in model.state_dict().items()}


def filled(skeleton, wide):
    rebuild(skeleton, json.loads(json.dumps(recipe_of(wide))))
    skeleton.load_state_dict(wide.state_dict())
    return skeleton


@EVERY
@pytest.mark.parametrize("convert", [lambda m: m, to_masked], ids=["as it is", "masked"])
def test_a_narrow_and_a_wide_model_become_the_expanded_one(sort, convert, tmp_path):
    torch.manual_seed(0)
    dense = sort.make()
    wide = convert(expand(dense, 2)).eval()
    x = sort.inputs()
    for skeleton in (sort.make(), sort.make(neurons=12), to_dense(wide)):
        back = filled(skeleton, wide).eval()
        assert recipe_of(back) == recipe_of(wide)
        assert repr(back) == repr(wide)
        assert shapes(back) == shapes(wide)
        assert nonzeros(back) == nonzeros(wide)
        torch.testing.assert_close(back(x), wide(x))
    save(wide, tmp_path / "wide")
    for skeleton in (sort.make(), sort.make(neurons=12)):
        torch.testing.assert_close(load(tmp_path / "wide", skeleton).eval()(x), wide(x))


@EVERY
def test_rebuilding_again_changes_nothing(sort):
    wide = expand(sort.make(), 2)
    twin = copy.deepcopy(wide)
    rebuild(wide, recipe_of(wide))
    for one, other in zip(wide.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_some_places_dropconnect_and_a_dense_model():
    model = Deep()
    wide = expand(model, 3, where="blocks.1")
    assert set(recipe_of(wide)["layers"]) == {f"blocks.1.mlp.{n}" for n in ("gate", "up", "down")}
    assert shapes(filled(Deep(), wide)) == shapes(wide)
    control = dropconnect(MLP([6, 4, 2]), 2)
    assert shapes(filled(MLP([6, 4, 2]), control)) == shapes(control)
    assert recipe_of(model)["layers"] == {}
    rebuild(model, recipe_of(model))


def test_device_dtype_mode_and_what_learns_are_the_models():
    wide = expand(Plain(), 2)
    skeleton = Plain().to(torch.bfloat16).eval()
    skeleton.one.weight.requires_grad_(False)
    skeleton.norm.bias.requires_grad_(False)
    rebuild(skeleton, recipe_of(wide))
    assert skeleton.one.weight.dtype is torch.bfloat16
    assert not skeleton.one.training
    assert not skeleton.one.weight.requires_grad
    assert skeleton.one.bias.requires_grad
    assert not skeleton.norm.bias.requires_grad
    assert nonzeros(skeleton).weights == 0, "it has weights before any were loaded"
    empty = Plain().to("meta")
    rebuild(empty, recipe_of(wide))
    assert empty.one.weight.is_meta
    assert empty.norm.weight.is_meta


def test_an_expansion_of_a_transformer_layer_stays_off_the_fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, batch_first=True)
    dense = nn.TransformerEncoder(layer, 1).eval()
    wide = expand(dense, 2)
    back, x = filled(copy.deepcopy(dense), wide), torch.randn(2, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(back(x), to_dense(wide)(x))


def test_the_config_becomes_the_wide_ones():
    class Config:
        d_ff = 5

    class Described(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.mlp = config, Plain(6, config.d_ff, 6)

        def forward(self, x):
            return self.mlp(x)

    wide, narrow = expand(Described(Config()), 2), Described(Config())
    rebuild(narrow, recipe_of(wide))
    assert narrow.config.d_ff == 10
    built_wide = Described(wide.config)
    rebuild(built_wide, recipe_of(wide))
    assert built_wide.config.d_ff == 10


HUGE = 10**13
HOSTILE = {
    "no table": lambda r: r.update(layers=[]),
    "norms no table": lambda r: r.update(norms=3),
    "an entry no table": lambda r: r["layers"].update(one="masked"),
    "unknown kind": lambda r: r["layers"]["one"].update(kind="pickle"),
    "kind no word": lambda r: r["layers"]["one"].update(kind=["masked"]),
    "no such layer": lambda r: r["layers"].update(three=r["layers"]["one"]),
    "the model itself": lambda r: r["layers"].update({"": r["layers"]["one"]}),
    "a parameter": lambda r: r["layers"].update({"one.weight": r["layers"]["one"]}),
    "a norm as layer": lambda r: r["layers"].update(norm=r["layers"]["one"]),
    "outputs huge": lambda r: r["layers"]["one"].update(outputs=HUGE),
    "alpha and outputs huge": lambda r: r["layers"]["one"].update(outputs=6 * HUGE, alpha=HUGE),
    "alpha above the fan-in": lambda r: r.update(
        layers={
            "one": {"kind": "partitioned", "inputs": 8, "outputs": 54, "alpha": 9},
            "two": {"kind": "masked", "inputs": 54, "outputs": 5},
        },
        norms={"norm": 54},
    ),
    "a mask above the fan-in": lambda r: r.update(
        layers={
            "one": {"kind": "masked", "inputs": 8, "outputs": 54},
            "two": {"kind": "masked", "inputs": 54, "outputs": 5},
        },
        norms={"norm": 54},
    ),
    "alpha negative": lambda r: r["layers"]["one"].update(outputs=-12, alpha=-2),
    "alpha true": lambda r: r["layers"]["one"].update(outputs=6, alpha=True),
    "alpha of a mask": lambda r: r["layers"]["two"].update(alpha=2),
    "alpha missing": lambda r: r["layers"]["one"].pop("alpha"),
    "inputs missing": lambda r: r["layers"]["one"].pop("inputs"),
    "inputs a fraction": lambda r: r["layers"]["one"].update(inputs=8.0),
    "second huge": lambda r: r["layers"]["two"].update(inputs=6 * HUGE),
    "second with copies nobody makes": lambda r: r["layers"]["two"].update(inputs=18),
    "second grown on both sides": lambda r: r["layers"]["two"].update(inputs=12, outputs=10),
    "second smaller": lambda r: r["layers"]["two"].update(inputs=3),
    "norm huge": lambda r: r["norms"].update(norm=HUGE),
    "norm no number": lambda r: r["norms"].update(norm="12"),
    "norm of nothing": lambda r: r["norms"].update(one=12),
    "another sort": lambda r: r["layers"]["one"].update(kind="partitioned-conv"),
    "turned": lambda r: r["layers"]["one"].update(transposed=True),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_recipe_is_refused_and_changes_nothing(name):
    recipe = json.loads(json.dumps(recipe_of(expand(Plain(), 2))))
    HOSTILE[name](recipe)
    model = Plain()
    before = repr(model)
    with pytest.raises(FileError):
        rebuild(model, recipe)
    assert repr(model) == before


def test_recipes_of_other_models_are_refused():
    recipe = recipe_of(expand(Filters(), 2))
    for other in (Filters(inputs=9), Filters(neurons=5), Plain()):
        with pytest.raises(FileError):
            rebuild(other, recipe)
    for odd in ([], None, "layers"):
        with pytest.raises(FileError):
            rebuild(Plain(), odd)
    wider = expand(Plain(neurons=12), 2)
    with pytest.raises(FileError, match="features in the model"):
        rebuild(wider, recipe_of(expand(Plain(), 2)))
    grouped = nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.ReLU(), nn.Conv2d(4, 4, 1))
    recipe = recipe_of(expand(nn.Sequential(nn.Conv2d(4, 4, 1), *grouped[1:]), 2))
    with pytest.raises(FileError, match="'0' is a Conv2d"):
        rebuild(grouped, recipe)
