"""Files of packed models: the narrow network's bytes, and the same bits back."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import cases
from packed_models import LAYOUTS, parts, round_trip, same
from place_models import EVERY, Deep
from torch import nn

from fissile import MLP, FileError, expand, load, pack, save, to_masked, unpack
from fissile.io.packing import pack_file, unpack_file
from fissile.packed import dispatch, files
from fissile.packed.bits import MANTISSA

pytestmark = pytest.mark.slow  # together: make quick leaves them out

DTYPES = list(MANTISSA)
LINES = pytest.mark.parametrize("layout", LAYOUTS)
KINDS = pytest.mark.parametrize("dtype", DTYPES)
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 16}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(dispatch, "kernels_for", lambda device: None)


@settings(max_examples=15, deadline=None)
@given(
    case=cases(dtype=torch.float32, plain=False),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
)
def test_an_mlp_comes_back_bit_for_bit(case, layout, dtype, tmp_path_factory):
    wide = expand(case.model, case.alpha, case.split, seed=case.seed)
    packed = pack(wide, dtype=dtype, layout=layout)
    back = round_trip(packed, tmp_path_factory.mktemp("files"))
    x = torch.randn(3, wide.sizes[0]).to(dtype)
    assert torch.equal(back(x), packed(x))
    assert same(unpack(back), unpack(packed))


@EVERY
@LINES
@KINDS
def test_every_kind_of_place_comes_back(sort, layout, dtype, tmp_path):
    torch.manual_seed(0)
    dense = sort.make(inputs=16, neurons=8)
    before = copy.deepcopy(dense)
    packed = pack(expand(dense, 4), dtype=dtype, layout=layout)
    back = round_trip(packed, tmp_path, dense)
    x = sort.inputs(16, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(back(x), packed(x))
    assert same(before, dense), "the given model is left alone"
    assert all(p.requires_grad for p in dense.parameters())
    with pytest.raises(FileError, match=r"give load\(\) the model"):
        load(tmp_path / "one")
    assert same(load(tmp_path / "one", expand(dense, 4, seed=5)), packed)


SMALL, LARGE = [512, 32, 100], [512, 512, 512]


@pytest.mark.parametrize(
    ("sizes", "alpha"), [*((SMALL, alpha) for alpha in (2, 3, 4, 8, 16)), (LARGE, 2), (LARGE, 8)]
)
def test_a_file_has_the_bytes_of_the_narrow_network(sizes, alpha, tmp_path):
    torch.manual_seed(0)
    dense = MLP(sizes)
    wide = expand(dense, alpha, budget="all")
    for dtype in DTYPES:
        narrow = copy.deepcopy(dense).to(dtype)
        save(narrow, tmp_path / "narrow")
        save(pack(wide, dtype=dtype), tmp_path / "packed")
        tensors = parts(tmp_path / "packed")[0]
        assert sum(t.nbytes for t in tensors.values()) == sum(p.nbytes for p in narrow.parameters())
        assert {t.dtype for t in tensors.values()} == {dtype}
        sizes_of = [(tmp_path / name).stat().st_size for name in ("narrow", "packed")]
        assert abs(sizes_of[1] / sizes_of[0] - 1) < 0.01
    assert same(load(tmp_path / "packed"), pack(wide, dtype=DTYPES[-1]))


def test_the_smallest_models_have_their_pattern_beside_them(tmp_path):
    torch.manual_seed(0)
    found = set()
    for alpha in (2, 4, 16):
        wide = expand(MLP([32, 8, 1]), alpha, budget="all")
        for dtype in DTYPES:
            round_trip(pack(wide, dtype=dtype), tmp_path)
            found.add("fissile.pattern" in parts(tmp_path / "one")[0])
    assert found == {True, False}


def test_deep_models_and_parts_of_models(tmp_path):
    torch.manual_seed(0)
    deep = Deep()
    round_trip(pack(expand(deep, 2)), tmp_path, deep)
    norms = MLP(
        [16, 6, 16, 6, 3], embedding=16, layer_norm=True, activation=nn.PReLU(), dropout=0.1
    )
    round_trip(pack(expand(norms, 2), dtype=torch.float16), tmp_path)
    bare = nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    round_trip(pack(expand(bare, 2)), tmp_path, bare)
    slopes = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.PReLU(4), nn.Linear(4, 2))
    round_trip(pack(expand(slopes, 2)), tmp_path, slopes)
    encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    back = round_trip(pack(expand(encoder, 2)), tmp_path, encoder)
    assert back(torch.randn(2, 3, 8)).shape == (2, 3, 8)
    for layout in LAYOUTS:
        round_trip(pack(expand(MLP([8, 4, 2]), 1), layout=layout), tmp_path)
        empty = expand(MLP([8, 4, 2]), 2)
        empty.layers[2].mask.zero_()
        empty.layers[0].owner.fill_(-1)
        round_trip(pack(empty, layout=layout), tmp_path)


def test_what_did_not_learn_does_not_learn_when_unpacked(tmp_path):
    wide = expand(MLP([8, 4, 2]), 2)
    wide.layers[0].requires_grad_(False)
    frozen = {"layers.0.weight", "layers.0.bias"}
    for given_model in (None, MLP([8, 4, 2])):
        back = unpack(round_trip(pack(wide), tmp_path, given_model))
        assert {name for name, p in back.named_parameters() if not p.requires_grad} == frozen
        assert back.train()(torch.randn(2, 8)).requires_grad


def test_the_dtype_and_the_device_are_those_of_the_file_and_the_model(tmp_path):
    packed = pack(expand(MLP([8, 4, 2]), 2), dtype=torch.bfloat16)
    save(packed, tmp_path / "m")
    assert same(load(tmp_path / "m", MLP([8, 4, 2]).double()), packed)
    assert {p.device.type for p in load(tmp_path / "m", device="meta").parameters()} == {"meta"}
    with pytest.raises(FileError, match="dense or an expanded model"):
        load(tmp_path / "m", packed)


def test_saving_changes_nothing(tmp_path):
    for layout in LAYOUTS:
        packed = pack(expand(MLP([8, 4, 2]), 2), layout=layout)
        before = copy.deepcopy(packed)
        save(packed, tmp_path / "m")
        assert same(before, packed)


def test_a_file_rounds_once_more_what_was_cast_since(tmp_path):
    """A cast keeps the owners alone; packing in that dtype at once leaves nothing to round."""
    torch.manual_seed(0)
    wide = expand(MLP([32, 8, 5]), 4)
    packed = pack(wide).half()
    save(packed, tmp_path / "m")
    back = round_trip(load(tmp_path / "m"), tmp_path)
    assert torch.equal(back.layers[0].owner(), packed.layers[0].owner())
    for one, other in zip(back.parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-6, atol=0)
    round_trip(pack(wide, layout="plane").half(), tmp_path)


@pytest.mark.parametrize("name", ["BertModel", "GPT2LMHeadModel", "GPT2Model"])
def test_models_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings_of = BERT | {"intermediate_size": 24} if name == "BertModel" else GPT2
    settings_of |= {"bos_token_id": 1, "eos_token_id": 2}
    kind = getattr(transformers, name)
    dense = kind(kind.config_class(**settings_of)).eval()
    wide = expand(dense, 2).eval()
    packed = pack(wide)
    ids = torch.randint(3, 40, (2, 5))
    with torch.no_grad():
        one, two = packed(ids)[0], wide(ids)[0]
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
        assert not torch.equal(one, dense(ids)[0])
        back = round_trip(packed, tmp_path, dense)
        assert torch.equal(back(ids)[0], one)
    for refused in (packed, back, copy.deepcopy(packed)):
        with pytest.raises(ValueError, match=r"write the file with fissile.save, .* fissile.load"):
            refused.save_pretrained(tmp_path / "pretrained")
    assert not (tmp_path / "pretrained").exists()
    assert len([*back.parameters()]) == len([*packed.parameters()]), "what was tied is tied"
    unpack(back).save_pretrained(tmp_path / "pretrained")
    assert same(unpack(packed), unpack(back))


def test_a_model_on_the_meta_device_is_filled_on_the_cpu(tmp_path):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    packed = pack(expand(dense, 2).eval())
    save(packed, tmp_path / "m")
    empty = copy.deepcopy(dense).to("meta")
    back = load(tmp_path / "m", empty)
    assert same(back, packed)
    assert {t.device.type for t in back.state_dict().values()} == {"cpu"}
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert {p.device.type for p in load(tmp_path / "m", empty, device="meta").parameters()} == {
        "meta"
    }
    empty.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(FileError, match="table is on the meta device and not in the file"):
        load(tmp_path / "m", empty)


@LINES
@pytest.mark.parametrize(("sizes", "alpha"), [([64, 16, 10], 4), ([8, 4, 2], 4), ([8, 4, 2], 1)])
def test_the_default_device_makes_no_difference(sizes, alpha, layout, tmp_path):
    torch.manual_seed(0)
    wide = expand(MLP(sizes), alpha)
    packed = pack(wide, layout=layout, dtype=torch.float16)
    save(wide, tmp_path / "wide")
    with torch.device("meta"):
        again = pack(wide, layout=layout, dtype=torch.float16)
        back = round_trip(packed, tmp_path)
        pack_file(tmp_path / "wide", tmp_path / "file", layout=layout, dtype=torch.float16)
        unpack_file(tmp_path / "one", tmp_path / "unpacked")
    assert same(again, packed)
    assert same(back, packed)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "one").read_bytes()
    assert same(load(tmp_path / "unpacked"), unpack(packed))


@pytest.mark.parametrize("last", [1e-6, 1e6])
def test_whatever_expand_makes_of_the_places_can_be_written(last, tmp_path, monkeypatch):
    """With all weights in one of the layers, the other is nothing but places."""
    monkeypatch.setattr(files, "_ALWAYS", 0)
    torch.manual_seed(0)
    dense = MLP([40, 300, 40])
    with torch.no_grad():
        dense.layers[2].weight *= last
    wide = expand(dense, 16)
    if last > 1:
        assert wide.layers[0].nonzeros() == 0
    for model in (wide, to_masked(wide)):
        round_trip(pack(model), tmp_path)


def test_what_could_not_be_read_is_not_written(tmp_path):
    wide = expand(MLP([1100, 1000, 1]), 2)
    wide.layers[0].owner.fill_(-1)
    wide.layers[2].mask.zero_()
    with pytest.raises(FileError, match=r"1,102,000 places have too few weights .*\"plane\""):
        save(pack(wide), tmp_path / "m")
    assert not (tmp_path / "m").exists()
    round_trip(pack(wide, layout="plane"), tmp_path)


def test_a_file_of_convolutions_says_how_large_their_filters_are(tmp_path):
    dense = nn.Sequential(nn.Conv2d(4, 4, (3, 1)), nn.ReLU(), nn.Conv2d(4, 2, 5))
    round_trip(pack(expand(dense, 2)), tmp_path, dense)
    layers = parts(tmp_path / "one")[1]["layers"]
    assert [entry["kernel"] for entry in layers.values()] == [[3, 1], [5, 5]]
