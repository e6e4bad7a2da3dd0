"""Files of packed models: the narrow network's bytes, the same bits back, else one error."""

import copy
import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import EVERY, Deep
from networks import cases
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from fissile import MLP, FileError, expand, load, nonzeros, pack, save, to_dense, unpack
from fissile.packed import run
from fissile.packed.bits import MANTISSA
from fissile.packed.files import checksum, opened, sealed
from fissile.packed.header import lengthened, shortened
from fissile.packed.layers import Packed

DTYPES = list(MANTISSA)
LAYOUTS = ["inline", "plane"]
LINES = pytest.mark.parametrize("layout", LAYOUTS)
KINDS = pytest.mark.parametrize("dtype", DTYPES)
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 16}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(run, "_kernels", lambda kind: None)


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(
        one[k].dtype is other[k].dtype and one[k].shape == other[k].shape
        and torch.equal(one[k].flatten().view(torch.uint8), other[k].flatten().view(torch.uint8))
        for k in one
    )  # fmt: skip


def round_trip(packed, folder, model=None):
    """Save, load and save again: the same bits every time."""
    save(packed, folder / "one")
    back = load(folder / "one", model)
    save(back, folder / "two")
    assert (folder / "one").read_bytes() == (folder / "two").read_bytes()
    assert same(back, packed)
    assert [type(m) for m in back.modules()] == [type(m) for m in packed.modules()]
    assert nonzeros(back) == nonzeros(packed)
    assert not any(m.training for m in back.modules())
    assert not any(p.requires_grad for p in back.parameters())
    return back


def parts(path):
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return tensors, json.loads(opened(lengthened(file.metadata()["fissile"])))


def write(path, tensors, recipe):
    """Write what no honest program would, with checksums that are right."""
    recipe["crc32"] = checksum(tensors)
    save_file(tensors, path, {"fissile": json.dumps(recipe)})


# --- round trips


@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("alpha", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("sizes", [[512, 32, 100], [512, 512, 512]], ids=str)
def test_a_file_has_the_bytes_of_the_narrow_network(alpha, sizes, tmp_path):
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


# --- files that are damaged, foreign or hostile


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Two files with all kinds of tensors, and what they hold."""
    folder, found = tmp_path_factory.mktemp("clean"), {}
    torch.manual_seed(0)
    for layout in LAYOUTS:
        packed = pack(expand(MLP([16, 4, 3], layer_norm=True), 3), dtype=torch.float16,
                      layout=layout)  # fmt: skip
        save(packed, folder / layout)
        found[layout] = (folder / layout).read_bytes(), packed
    return found


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_torn_or_flipped_file_is_refused_or_the_same(clean, data, tmp_path_factory):
    whole, packed = clean[data.draw(st.sampled_from(LAYOUTS))]
    path, damaged = tmp_path_factory.getbasetemp() / "flipped", bytearray(whole)
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    try:
        back = load(path)
    except FileError:
        return
    assert same(back, packed), "only a blank may have changed"
    assert repr(back) == repr(packed)


def test_every_byte_of_the_recipe_counts(clean, tmp_path):
    """A recipe of other letters that still is one: the checksum before it tells."""
    text = opened(lengthened(shortened(sealed('{"name":"relu"}'))))
    assert text == '{"name":"relu"}'
    with pytest.raises(ValueError, match="checksum differs"):
        opened(sealed(text).replace("relu", "selu"))
    for layout in LAYOUTS:
        (tmp_path / "m").write_bytes(clean[layout][0])
        tensors, recipe = parts(tmp_path / "m")
        changed = sealed(json.dumps(recipe)).replace("relu", "selu")
        save_file(tensors, tmp_path / "m", {"fissile": shortened(changed)})
        with pytest.raises(FileError, match="recipe is damaged: its checksum differs"):
            load(tmp_path / "m")


def test_numbers_of_another_kind_are_noticed(clean, tmp_path):
    """The same bytes under another dtype, as a flipped letter in the file's own header does it."""
    whole = clean["plane"][0]
    for old, new in ((b'"F16"', b'"I16"'), (b'"U8"', b'"I8"')):
        (tmp_path / "m").write_bytes(whole.replace(old, new, 1))
        assert whole.count(old)
        with pytest.raises(FileError, match="checksum differs"):
            load(tmp_path / "m")


def entry(recipe, name="layers.0"):
    return recipe["layers"][name]


def put(tensors, key, change):
    tensors[key] = change(tensors[key].clone())


def changed(index, value):
    def change(tensor):
        tensor.view(-1)[index] = value
        return tensor

    return change


BOTH = {
    "alpha one": lambda t, r: entry(r).update(alpha=1),
    "alpha two": lambda t, r: entry(r).update(alpha=2),
    "alpha six": lambda t, r: entry(r).update(alpha=6),
    "alpha huge": lambda t, r: entry(r).update(alpha=10**12),
    "alpha a fraction": lambda t, r: entry(r).update(alpha=3.0),
    "alpha true": lambda t, r: entry(r).update(alpha=True),
    "no alpha": lambda t, r: entry(r).pop("alpha"),
    "alpha where none is": lambda t, r: entry(r, "layers.3").update(alpha=1),
    "inputs halved": lambda t, r: entry(r).update(inputs=8),
    "inputs doubled": lambda t, r: entry(r, "layers.3").update(inputs=24),
    "inputs huge": lambda t, r: entry(r).update(inputs=10**12),
    "outputs doubled": lambda t, r: entry(r, "layers.3").update(outputs=6),
    "another layout": lambda t, r: entry(r).update(layout={"inline": "plane", "plane": "inline"}[entry(r)["layout"]]),  # noqa: E501
    "another layout behind": lambda t, r: entry(r, "layers.3").update(layout={"inline": "plane", "plane": "inline"}[entry(r)["layout"]]) or entry(r, "layers.3").update(group=12),  # noqa: E501
    "unknown layout": lambda t, r: entry(r).update(layout="2:4"),
    "layout a number": lambda t, r: entry(r).update(layout=1),
    "layout a list": lambda t, r: entry(r).update(layout=["inline"]),
    "one layer not packed": lambda t, r: entry(r).pop("layout"),
    "other layer not packed": lambda t, r: entry(r, "layers.3").pop("layout"),
    "kinds exchanged": lambda t, r: entry(r).update(kind="masked"),
    "a convolution": lambda t, r: entry(r).update(kind="partitioned-conv"),
    "dropconnect": lambda t, r: entry(r, "layers.3").update(kind="dropconnect"),
    "transposed": lambda t, r: entry(r).update(transposed=True),
    "group zero": lambda t, r: entry(r, "layers.3").update(group=0),
    "group three": lambda t, r: entry(r, "layers.3").update(group=3),
    "group twelve": lambda t, r: entry(r, "layers.3").update(group=12),
    "group of another size": lambda t, r: entry(r, "layers.3").update(group=4 if entry(r, "layers.3")["group"] != 4 else 2),  # noqa: E501
    "group negative": lambda t, r: entry(r, "layers.3").update(group=-4),
    "group a word": lambda t, r: entry(r, "layers.3").update(group="4"),
    "group huge": lambda t, r: entry(r, "layers.3").update(group=10**18),
    "no group": lambda t, r: entry(r, "layers.3").pop("group"),
    "layer no table": lambda t, r: r["layers"].update({"layers.0": "layout"}),
    "sizes huge": lambda t, r: r["mlp"].update(sizes=[10**9, 10**9, 10**9]),
    "other sizes": lambda t, r: r["mlp"].update(sizes=[16, 4, 4]),
    "no norms": lambda t, r: r.update(norms={}),
    "frozen what is not there": lambda t, r: r.update(frozen=["layers.9.weight"]),
    "frozen a word": lambda t, r: r.update(frozen="layers.0.weight"),
    "frozen a buffer": lambda t, r: r.update(frozen=["layers.3.live"]),
    "bias short": lambda t, r: put(t, "layers.0.bias", lambda b: b[:1].clone()),
    "bias long": lambda t, r: put(t, "layers.3.bias", lambda b: torch.cat([b, b])),
    "bias of another dtype": lambda t, r: put(t, "layers.0.bias", torch.Tensor.float),
    "bias of whole numbers": lambda t, r: put(t, "layers.3.bias", torch.Tensor.short),
    "no bias": lambda t, r: t.pop("layers.3.bias"),
    "norm of whole numbers": lambda t, r: put(t, "layers.1.weight", torch.Tensor.short),
    "extra tensor": lambda t, r: t.update({"layers.0.owner": torch.zeros(2)}),
    "no weight": lambda t, r: t.pop("layers.0.weight"),
    "weight a matrix or row": lambda t, r: put(t, "layers.0.weight", lambda w: w[None].clone()),
    "weight too short": lambda t, r: put(t, "layers.3.weight", lambda w: w[:-1].clone()),
    "weight too long": lambda t, r: put(t, "layers.3.weight", lambda w: torch.cat([w, w])),
    "weight empty": lambda t, r: put(t, "layers.0.weight", lambda w: w.flatten()[:0].clone()),
    "weight double": lambda t, r: put(t, "layers.0.weight", torch.Tensor.double),
    "weight of bytes": lambda t, r: put(t, "layers.3.weight", torch.Tensor.char),
    "weight NaN": lambda t, r: put(t, "layers.0.weight", changed(0, torch.nan)),
    "weight infinite": lambda t, r: put(t, "layers.3.weight", changed(0, torch.inf)),
}  # fmt: skip

INLINE = {
    "a weight that is none": lambda t, r: put(t, "layers.0.weight", changed(3, 0.0)),
    "an owner outside": lambda t, r: put(
        t, "layers.0.weight", lambda w: (w.view(torch.int16) | 3).view(torch.float16)
    ),
    "the pattern is zeros": lambda t, r: t.update(
        {"fissile.pattern": torch.zeros(200, dtype=torch.uint8)}
    ),
    "the pattern is ones": lambda t, r: t.update(
        {"fissile.pattern": torch.full((200,), 255, dtype=torch.uint8)}
    ),
    "the pattern is short": lambda t, r: t.update(
        {"fissile.pattern": torch.zeros(1, dtype=torch.uint8)}
    ),
    "the pattern is no bytes": lambda t, r: t.update({"fissile.pattern": torch.zeros(200)}),
    "the pattern is a matrix": lambda t, r: t.update(
        {"fissile.pattern": torch.zeros(20, 20, dtype=torch.uint8)}
    ),
    "many places": lambda t, r: hollow(t, r, 10**8),
    "a live of its own": lambda t, r: t.update({"layers.9.live": torch.zeros(3, 2)}),
}  # fmt: skip

PLANE = {
    "owners outside": lambda t, r: t["layers.0.planes"].fill_(255),
    "owners of what is not there": lambda t, r: t["layers.0.weight"].zero_(),
    "planes of another shape": lambda t, r: put(t, "layers.0.planes", lambda p: p[:1].clone()),
    "planes of another dtype": lambda t, r: put(t, "layers.0.planes", torch.Tensor.int),
    "no planes": lambda t, r: t.pop("layers.0.planes"),
    "fewer parents": lambda t, r: put(t, "layers.0.weight", lambda w: w[:2].clone())
    or put(t, "layers.0.planes", lambda p: p[:, :2].clone()),
    "live all": lambda t, r: t["layers.3.live"].fill_(255),
    "live none": lambda t, r: t["layers.3.live"].zero_(),
    "live of floats": lambda t, r: put(t, "layers.3.live", torch.Tensor.float),
    "live short": lambda t, r: put(t, "layers.3.live", lambda m: m[:1].clone()),
    "live wide": lambda t, r: put(t, "layers.3.live", lambda m: torch.cat([m, m * 0], 1)),
    "live beyond the last group": lambda t, r: beyond(t),
    "no live": lambda t, r: t.pop("layers.3.live"),
}  # fmt: skip


def hollow(tensors, recipe, places):
    """A layer far larger than its weights, whose pattern is short all the same."""
    for key in ("layers.0.weight", "layers.3.weight"):
        tensors[key] = tensors[key][:0].clone()
    tensors["fissile.pattern"] = torch.zeros(200, dtype=torch.uint8)
    recipe["mlp"]["sizes"][0] = places
    entry(recipe).update(inputs=places)


def beyond(tensors):
    tensors["layers.3.live"][0, -1] |= 128


HOSTILE = [
    (layout, name)
    for layout, more in (("inline", INLINE), ("plane", PLANE))
    for name in (*BOTH, *more)
]


@pytest.mark.parametrize(("layout", "name"), HOSTILE)
def test_a_hostile_file_is_refused(clean, layout, name, tmp_path):
    path = tmp_path / "m"
    path.write_bytes(clean[layout][0])
    tensors, recipe = parts(path)
    write(path, tensors, recipe)
    assert same(load(path), clean[layout][1]), "the file is good before it is changed"
    (BOTH | INLINE | PLANE)[name](tensors, recipe)
    write(path, tensors, recipe)
    with pytest.raises(FileError, match=str(path)) as refused:
        load(path)
    assert "checksum" not in str(refused.value), "the check behind the checksum was not reached"


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10_000))
def test_whatever_is_in_the_tensors_becomes_a_sound_model_or_an_error(
    clean, data, seed, tmp_path_factory
):
    layout = data.draw(st.sampled_from(LAYOUTS))
    path = tmp_path_factory.getbasetemp() / "sound"
    path.write_bytes(clean[layout][0])
    tensors, recipe = parts(path)
    key = data.draw(st.sampled_from(sorted(tensors)))
    torch.manual_seed(seed)
    raw = tensors[key].flatten().view(torch.uint8)
    where = torch.randperm(len(raw))[: data.draw(st.integers(1, 40))]
    raw[where] = torch.randint(0, 256, where.shape, dtype=torch.uint8)
    write(path, tensors, recipe)
    try:
        back = load(path)
    except FileError:
        return
    for layer in back.modules():
        if isinstance(layer, Packed):
            assert layer.misfit() is None
            assert layer.weight.isfinite().all()
    x = torch.randn(2, 16).half()
    found, wanted = back(x), to_dense(unpack(back))(x)
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_a_file_costs_no_more_memory_than_its_weights_allow(tmp_path):
    """Each of many large and empty layers might pass; together they are too many."""
    relu = {"name": "relu", "settings": {"inplace": False}}
    mlp = {"sizes": [2000] * 25, "embedding": None, "layer_norm": False, "dropout": 0.0}
    layers, pairs, tensors = {}, [], {"fissile.pattern": torch.zeros(200, dtype=torch.uint8)}
    for one, two in ((f"layers.{4 * k}", f"layers.{4 * k + 2}") for k in range(12)):
        layers[one] = {"kind": "partitioned", "inputs": 2000, "outputs": 4000, "alpha": 2}
        layers[two] = {"kind": "masked", "inputs": 4000, "outputs": 2000, "group": 2}
        pairs.append({"firsts": [one], "between": [], "second": two})
        for name in (one, two):
            layers[name]["layout"] = "inline"
            tensors[f"{name}.weight"] = torch.zeros(0)
            tensors[f"{name}.bias"] = torch.zeros(layers[name]["outputs"])
    recipe = {"version": 1, "frozen": [], "mlp": mlp | {"activation": relu}, "layers": layers}
    write(tmp_path / "m", tensors, recipe | {"norms": {}, "pairs": pairs})
    with pytest.raises(FileError, match=r"'layers.4' has 4000 × 2000 places for too few weights"):
        load(tmp_path / "m")


def test_a_recipe_that_unpacks_without_end_is_not_unpacked(clean, tmp_path):
    tensors = {"a": torch.zeros(2)}
    for text in (shortened(" " * 2**27), "z", "z" + "!" * 11, "zé", "z" + "~" * 50, "0" * 8 + "{}"):
        save_file(tensors, tmp_path / "m", {"fissile": text})
        with pytest.raises(FileError, match="recipe is damaged"):
            load(tmp_path / "m")
    (tmp_path / "m").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(FileError, match="not a readable"):
        load(tmp_path / "m")


def test_a_layer_of_other_sizes_than_the_model_is_refused(tmp_path):
    bare = nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    save(pack(expand(bare, 2), layout="plane"), tmp_path / "m")
    tensors, recipe = parts(tmp_path / "m")
    put(tensors, "0.weight", lambda w: w[:2].clone())
    put(tensors, "0.planes", lambda p: p[:, :2].clone())
    write(tmp_path / "m", tensors, recipe)
    with pytest.raises(FileError, match=r"0.weight is not the matrix of the recipe"):
        load(tmp_path / "m", bare)


def test_models_that_are_packed_in_part(tmp_path):
    torch.manual_seed(0)
    dense = nn.Sequential(MLP([8, 4, 6]), MLP([6, 4, 2]))
    mixed = nn.Sequential(pack(expand(dense[0], 2)), expand(dense[1], 2)).eval()
    save(mixed, tmp_path / "m")
    back = load(tmp_path / "m", dense)
    assert same(back, mixed)
    assert torch.equal(back(torch.ones(2, 8)), mixed(torch.ones(2, 8)))
    tensors, recipe = parts(tmp_path / "m")
    tensors["1.layers.0.owner"].fill_(2)
    write(tmp_path / "m", tensors, recipe)
    with pytest.raises(FileError, match=r"1.layers.0.owner names a child outside 0 .. 1"):
        load(tmp_path / "m", dense)


def test_a_model_that_does_not_fit_is_refused(clean, tmp_path):
    path = tmp_path / "m"
    for layout in LAYOUTS:
        path.write_bytes(clean[layout][0])
        for other in (
            MLP([16, 4, 3]),
            MLP([16, 8, 3], layer_norm=True),
            MLP([32, 4, 3], layer_norm=True),
            nn.Sequential(nn.Linear(16, 4)),
            nn.Linear(16, 4),
        ):
            before = copy.deepcopy(other)
            with pytest.raises(FileError):
                load(path, other)
            assert same(before, other)
