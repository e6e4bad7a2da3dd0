"""The recipe: a dense model given an expanded one's structure, and nothing hostile believed."""

import copy
import json

import pytest
import torch
from place_models import SORTS, Deep, Filters, Plain
from torch import nn
from torch.nn import functional

from fissile import MLP, FileError, dropconnect, expand, load, nonzeros, save, to_dense, to_masked
from fissile.expansion.structure import rebuild, recipe_of

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


class Halved(nn.Module):
    """What widens between the layers is half as wide as the first one."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(8, 3)
        self.norm, self.slope = nn.LayerNorm(8), nn.PReLU(8)

    def forward(self, x):
        return self.down(self.slope(self.norm(functional.glu(self.up(x)))))


@pytest.mark.parametrize("paired", [True, False], ids=["pairs", "no pairs"])
@pytest.mark.parametrize("convert", [lambda m: m, to_masked], ids=["as it is", "masked"])
def test_norms_after_the_halves_were_joined(paired, convert, tmp_path):
    torch.manual_seed(0)
    wide = convert(expand(Halved(), 2))
    if not paired:
        wide.down.pair = None
    assert recipe_of(wide)["norms"] == {"norm": 16, "slope": 16}
    save(wide, tmp_path / "wide")
    x = torch.randn(4, 6)
    torch.testing.assert_close(load(tmp_path / "wide", Halved())(x), wide(x))


def renamed_pairs(model):
    return [(pair["firsts"], pair["between"], pair["second"]) for pair in recipe_of(model)["pairs"]]


def test_pairs_are_known_wherever_the_layers_go():
    wide = to_masked(expand(Deep(), 2))
    blocks = [
        ([f"blocks.{i}.mlp.gate", f"blocks.{i}.mlp.up"], [], f"blocks.{i}.mlp.down")
        for i in range(3)
    ]
    head = [([f"head.layers.{i}"], [], f"head.layers.{i + 2}") for i in (0, 4)]
    assert renamed_pairs(wide) == blocks + head
    around = nn.ModuleDict({"first": copy.deepcopy(wide.head), "second": wide.head})
    assert renamed_pairs(around) == [
        ([f"{name}.layers.{i}"], [], f"{name}.layers.{i + 2}")
        for name in ("first", "second")
        for i in (0, 4)
    ]
    assert renamed_pairs(expand(Plain(), 2)) == [(["one"], ["norm"], "two")]
    assert renamed_pairs(filled(Plain(), expand(Plain(), 2))) == [(["one"], ["norm"], "two")]
    assert "pairs" not in recipe_of(wide.head.layers[2:]), "half a pair was called one"
    other = nn.Sequential(wide.head.layers[1], wide.head.layers[2])
    assert "pairs" not in recipe_of(other)


def test_a_recipe_may_have_no_pairs():
    wide = expand(Plain(), 2)
    recipe = recipe_of(wide)
    del recipe["pairs"]
    model = Plain()
    rebuild(model, recipe)
    model.load_state_dict(wide.state_dict())
    assert shapes(model) == shapes(wide)
    assert recipe_of(model) == recipe


class Noted(Plain):
    """A model that transformers would save, with a config of some sort."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def save_pretrained(self, folder): ...


class Closed:
    __slots__ = ()


@pytest.mark.parametrize(
    "config",
    [{"d_ff": 6}, nn.Identity(), Closed(), (6, 5)],
    ids=["dictionary", "module", "closed", "tuple"],
)
def test_a_config_that_takes_no_notes_stays_as_it_is(config):
    before = repr(config)
    dense = Noted(config)
    wide = expand(dense, 2)
    expand(dense, 2, inplace=True)
    assert shapes(dense) == shapes(wide)
    assert type(to_dense(dense).one) is nn.Linear
    assert repr(dense.config) == before


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
WITHOUT_PAIRS = list(HOSTILE)
HOSTILE |= {
    "pairs no list": lambda r: r.update(pairs={}),
    "a pair no table": lambda r: r.update(pairs=["one"]),
    "a pair of other things": lambda r: r["pairs"][0].update(third="one"),
    "a pair of numbers": lambda r: r["pairs"][0].update(second=2),
    "firsts one word": lambda r: r["pairs"][0].update(firsts="one"),
    "no firsts": lambda r: r["pairs"][0].update(firsts=[]),
    "a pair with itself": lambda r: r["pairs"][0].update(firsts=["two"]),
    "twice the same first": lambda r: r["pairs"][0].update(firsts=["one", "one"]),
    "a pair turned round": lambda r: r["pairs"][0].update(firsts=["two"], second="one"),
    "a pair that is not there": lambda r: r["pairs"][0].update(second="three"),
    "the same pair twice": lambda r: r["pairs"].append(r["pairs"][0]),
    "no pairs": lambda r: r["pairs"].clear(),
    "half a pair": lambda r: r["layers"].pop("one"),
    "the other half": lambda r: r["layers"].pop("two"),
    "half a pair in no pair": lambda r: (r["layers"].pop("one"), r["pairs"].clear()),
    "a first that does not grow": lambda r: r["layers"]["one"].update(outputs=6, alpha=1),
    "a norm that does not grow": lambda r: r["norms"].update(norm=6),
    "a norm that is not noted": lambda r: r["norms"].clear(),
    "a norm that is no norm": lambda r: r["pairs"][0].update(between=["one"]),
    "a norm of no pair": lambda r: r["pairs"][0].update(between=[]),
}


@pytest.mark.parametrize(
    ("name", "paired"), [(n, True) for n in HOSTILE] + [(n, False) for n in WITHOUT_PAIRS]
)
def test_a_hostile_recipe_is_refused_and_changes_nothing(name, paired):
    recipe = json.loads(json.dumps(recipe_of(expand(Plain(), 2))))
    HOSTILE[name](recipe)
    if not paired:
        del recipe["pairs"]
    model = Plain()
    before = repr(model)
    with pytest.raises(FileError):
        rebuild(model, recipe)
    assert repr(model) == before


@pytest.mark.parametrize("missing", ["head.layers.0", "head.layers.2", "blocks.0.mlp.up"])
def test_half_a_pair_is_refused_beside_whole_ones(missing):
    recipe = recipe_of(expand(Deep(), 2))
    del recipe["layers"][missing]
    with pytest.raises(FileError, match=f"pairs '{missing}', which it does not expand"):
        rebuild(Deep(), recipe)
    recipe["pairs"] = [p for p in recipe["pairs"] if missing not in (*p["firsts"], p["second"])]
    with pytest.raises(FileError, match="belongs to 0 pairs"):
        rebuild(Deep(), recipe)


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
