"""Packed files that are damaged, foreign, hostile or of a later version: one clear error."""

import base64
import copy
import json
import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_models import LAYOUTS, parts, same, write
from safetensors.torch import save_file
from torch import nn

from fissile import MLP, FileError, expand, load, pack, save, to_dense, unpack
from fissile.io import packing
from fissile.packed import dispatch
from fissile.packed import files as packs
from fissile.packed.files import lengthened, opened, sealed, shortened
from fissile.packed.layers import Packed

pytestmark = pytest.mark.slow  # together: make quick leaves them out


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(dispatch, "kernels_for", lambda device: None)


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


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=30, deadline=None)
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
    mlp = {"sizes": [500] * 25, "embedding": None, "layer_norm": False, "dropout": 0.0}
    layers, pairs, tensors = {}, [], {"fissile.pattern": torch.zeros(200, dtype=torch.uint8)}
    for one, two in ((f"layers.{4 * k}", f"layers.{4 * k + 2}") for k in range(12)):
        layers[one] = {"kind": "partitioned", "inputs": 500, "outputs": 1000, "alpha": 2}
        layers[two] = {"kind": "masked", "inputs": 1000, "outputs": 500, "group": 2}
        pairs.append({"firsts": [one], "between": [], "second": two})
        for name in (one, two):
            layers[name]["layout"] = "inline"
            tensors[f"{name}.weight"] = torch.zeros(0)
            tensors[f"{name}.bias"] = torch.zeros(layers[name]["outputs"])
    recipe = {"version": 1, "frozen": [], "mlp": mlp | {"activation": relu}, "layers": layers}
    write(tmp_path / "m", tensors, recipe | {"norms": {}, "pairs": pairs})
    with pytest.raises(FileError, match=r"'layers.6' has 500 × 1000 places for too few weights"):
        load(tmp_path / "m")


def deflated(text, after=b""):
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, packs._WORDS)
    return "z" + base64.b85encode(packer.compress(text.encode()) + packer.flush() + after).decode()


def test_a_recipe_that_unpacks_without_end_is_not_unpacked(tmp_path):
    tensors = {"a": torch.zeros(2)}
    endless = deflated(" " * 2**21)
    for text in (endless, "z", "z" + "!" * 11, "zé", "z" + "~" * 50, "0" * 8 + "{}"):
        save_file(tensors, tmp_path / "m", {"fissile": text})
        with pytest.raises(FileError, match="recipe is damaged"):
            load(tmp_path / "m")
    (tmp_path / "m").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(FileError, match="not a readable"):
        load(tmp_path / "m")


def test_a_recipe_is_shortened_if_it_comes_back():
    blank, names = sealed(" " * 2**21), sealed(json.dumps([f"layers.{i}" for i in range(2000)]))
    assert shortened(blank) == blank, "what would not be believed is not written"
    assert len(shortened(names)) < len(names) / 2
    for text in (blank, names, sealed("{}")):
        assert lengthened(shortened(text)) == text
    assert lengthened(deflated("{}")) == "{}"
    with pytest.raises(ValueError, match="does not end where it should"):
        lengthened(deflated("{}", after=b"more"))


def test_files_of_a_later_version_ask_for_it(clean, tmp_path):
    path = tmp_path / "m"
    for text in ("y" + shortened("{}"), "Z", "é{}"):
        save_file({"a": torch.zeros(2)}, path, {"fissile": text})
        with pytest.raises(
            FileError, match=r"m: its recipe begins with .*newer fissile; update it"
        ):
            load(path)
    path.write_bytes(clean["inline"][0])
    tensors, recipe = parts(path)
    entry(recipe).update(layout="spiral")
    write(path, tensors, recipe)
    for read in (load, packing.read):
        with pytest.raises(FileError, match=r"'spiral': written by a newer fissile; update it"):
            read(path)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 8), nn.Linear(8, 5, bias=False)
        self.body = MLP([8, 4, 8])
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.body(self.table(x)))


def test_what_is_tied_in_the_model_must_be_equal_in_the_file(tmp_path):
    torch.manual_seed(0)
    dense, path = Tied(), tmp_path / "m"
    with torch.no_grad():
        dense.table.weight[0, 0] = torch.nan
    save(pack(expand(dense, 2, where="body")), path)
    back = load(path, dense)
    assert back.head.weight is back.table.weight
    tensors, recipe = parts(path)
    tensors["head.weight"][1, 1] += 1
    write(path, tensors, recipe)
    with pytest.raises(FileError, match=r"table.weight and head.weight are one .* two in the file"):
        load(path, dense)


KERNELS = [[3, 4], [3], [3, 3, 3], [3, -3], [True, 3], [3.0, 3], "33", 9, None, [10**9] * 2]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_filters_of_another_size_are_refused(kernel, tmp_path):
    size = (1, 3) if kernel == [True, 3] else 3
    dense = nn.Sequential(nn.Conv2d(2, 2, size), nn.ReLU(), nn.Conv2d(2, 2, 1))
    path = tmp_path / "m"
    save(pack(expand(dense, 2)), path)
    tensors, recipe = parts(path)
    entry(recipe, "0").update(kernel=kernel)
    write(path, tensors, recipe)
    for read in (lambda: load(path, dense), lambda: packing.read(path)):
        with pytest.raises(FileError, match=str(path)):
            read()


def test_a_linear_layer_has_no_filters(clean, tmp_path):
    path = tmp_path / "m"
    path.write_bytes(clean["plane"][0])
    tensors, recipe = parts(path)
    entry(recipe).update(kernel=[1, 1])
    write(path, tensors, recipe)
    for read in (load, packing.read):
        with pytest.raises(FileError, match=r"kernel=\[1, 1\] in the recipe, not None"):
            read(path)


def test_a_layer_of_other_sizes_than_the_model_is_refused(tmp_path):
    bare = nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    save(pack(expand(bare, 2), layout="plane"), tmp_path / "m")
    tensors, recipe = parts(tmp_path / "m")
    put(tensors, "0.weight", lambda w: w[:2].clone())
    put(tensors, "0.planes", lambda p: p[:, :2].clone())
    write(tmp_path / "m", tensors, recipe)
    with pytest.raises(FileError, match=r"0.weight is not the matrix of the recipe"):
        load(tmp_path / "m", bare)


def test_children_that_no_parents_have_are_refused(tmp_path):
    bare = nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    save(pack(expand(bare, 2), layout="plane"), tmp_path / "m")
    tensors, recipe = parts(tmp_path / "m")
    entry(recipe, "0").update(outputs=9)
    write(tmp_path / "m", tensors, recipe)
    for read in (lambda: load(tmp_path / "m", bare), lambda: packing.read(tmp_path / "m")):
        with pytest.raises(FileError, match="in the recipe"):
            read()


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
    with pytest.raises(FileError, match=r"1.layers.0.owner holds numbers outside -1 .. 1"):
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
