"""The commands ``fissile pack``, ``unpack`` and ``bench`` on files."""

import json

import pytest
import torch
from command import called
from packed_models import write
from place_models import Filters, Fused, Gated
from safetensors import safe_open
from torch import nn

import fissile
from fissile.expansion.structure import recipe_of
from fissile.io.packing import pack_file, read, unpack_file
from fissile.packed.files import dense_sizes, lengthened, opened

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Saved models: expanded, packed, dense, convolutional."""
    place = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    wide = fissile.expand(fissile.MLP([32, 16, 10]), 4)
    fissile.save(wide, place / "wide.safetensors")
    fissile.save(fissile.pack(wide), place / "packed.safetensors")
    fissile.save(fissile.MLP([8, 4, 2]), place / "dense.safetensors")
    filters = fissile.expand(Filters(), 2)
    fissile.save(filters, place / "filters.safetensors")
    fissile.save(fissile.pack(filters), place / "packed-filters.safetensors")
    rewrite(
        place / "packed-filters.safetensors", place / "no-kernel.safetensors",
        lambda recipe: [entry.pop("kernel") for entry in recipe["layers"].values()],
    )  # fmt: skip
    return place


class Nested(nn.Module):
    """Expanded layers under dotted names, beside tensors of all sorts."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"block": nn.Sequential(nn.Linear(8, 6), nn.GELU())})
        self.body["block"].extend([nn.BatchNorm1d(6), nn.Linear(6, 5), nn.LayerNorm(5)])
        self.table = nn.Embedding(3, 7)

    def forward(self, x):
        return self.body["block"](x)


def deep():
    model = fissile.MLP([16, 12, 8, 4], layer_norm=True, embedding=12, activation="prelu")
    model.layers[0].bias.requires_grad_(False)
    return model


def same_bytes(one, other):
    return one.read_bytes() == other.read_bytes()


# --- packing


@pytest.mark.parametrize("layout", ["inline", "plane"])
@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize("make", [lambda: fissile.MLP([32, 16, 10]), deep])
def test_an_mlp_is_packed_as_in_memory_byte_for_byte(make, dtype, layout, tmp_path):
    torch.manual_seed(1)
    file, mine, theirs = (tmp_path / name for name in "abc")
    fissile.save(fissile.expand(make(), 4), file)
    chosen = () if dtype is None else ("--dtype", dtype)
    called("pack", file, "-o", mine, "--layout", layout, *chosen)
    packed = fissile.pack(fissile.load(file), dtype=DTYPES.get(dtype), layout=layout)
    fissile.save(packed, theirs)
    assert same_bytes(mine, theirs)


@pytest.mark.parametrize("layout", ["inline", "plane"])
@pytest.mark.parametrize("make", [Gated, Fused, Filters, Nested])
def test_any_model_is_packed_without_its_code(make, layout, tmp_path):
    torch.manual_seed(2)
    wide = fissile.expand(make(), 2)
    file, mine, theirs = (tmp_path / name for name in "abc")
    fissile.save(wide, file)
    done = pack_file(file, mine, dtype=torch.float16, layout=layout)
    packed = fissile.pack(wide, dtype=torch.float16, layout=layout)
    fissile.save(packed, theirs)
    assert same_bytes(mine, theirs)
    loaded = fissile.load(mine, make())
    for one, other in zip(packed.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
    dense = make().half().state_dict().values()
    assert done.narrow == sum(tensor.nbytes for tensor in dense)
    assert done.before == file.stat().st_size
    assert done.after == mine.stat().st_size
    assert done.tensors_after < done.tensors_before
    assert (done.bits > 0) == (layout == "inline")


def test_the_way_back(folder, tmp_path):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    called("unpack", folder / "packed.safetensors", "-o", mine)
    fissile.save(fissile.unpack(fissile.load(folder / "packed.safetensors")), theirs)
    assert same_bytes(mine, theirs)
    again = tmp_path / "again"
    called("pack", mine, "-o", again)
    assert same_bytes(again, folder / "packed.safetensors")


@pytest.mark.parametrize("layout", ["inline", "plane"])
def test_convolutions_come_back_too(layout, tmp_path):
    file, packed, mine, theirs = (tmp_path / name for name in "abcd")
    fissile.save(fissile.expand(Filters(), 2), file)
    called("pack", file, "-o", packed, "--layout", layout)
    called("unpack", packed, "-o", mine)
    fissile.save(fissile.unpack(fissile.load(packed, Filters())), theirs)
    assert same_bytes(mine, theirs)
    assert {m.kernel_size for m in read(packed).layers.values()} == {(3, 3), (1, 1)}


def test_of_another_model_too(tmp_path):
    file, packed, back = (tmp_path / name for name in "abc")
    wide = fissile.expand(Gated(), 2)
    fissile.save(wide, file)
    pack_file(file, packed, layout="plane")  # which rounds nothing in float32
    unpack_file(packed, back)
    loaded = fissile.load(back, Gated())
    x = torch.randn(3, 8)
    assert torch.equal(loaded(x), wide(x))


def test_the_table_says_what_came_of_it(folder, tmp_path):
    out = called(
        "pack", folder / "wide.safetensors", "-o", tmp_path / "p", "--dtype", "float16"
    ).stdout
    size, weights = (tmp_path / "p").stat().st_size, 32 * 16 + 16 * 10
    numbers = weights + 16 + 10
    for text in (f"{size:,} bytes", f"{2 * numbers:,} bytes", f"{weights} weights", "1.0", "×"):
        assert text in out
    assert "bits say where it goes" in out


def test_a_file_already_there_is_replaced(folder, tmp_path):
    to = tmp_path / "p"
    to.write_text("something else")
    called("pack", folder / "wide.safetensors", "-o", to)
    assert same_bytes(to, folder / "packed.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def rewrite(path, to, change=lambda recipe: None, tensors=lambda tensors: None):
    """Copy a file with another recipe or other tensors."""
    with safe_open(path, framework="pt") as file:
        recipe = json.loads(opened(lengthened(file.metadata()["fissile"])))
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    change(recipe)
    tensors(found)
    write(to, found, recipe)


def test_narrow_sizes_are_those_before_the_split():
    assert dense_sizes(recipe_of(fissile.expand(Gated(), 2))) == {
        "up": (8, 6),
        "gate": (8, 6),
        "down": (6, 5),
    }
    masked = fissile.to_masked(fissile.expand(fissile.MLP([32, 8, 1]), 2))
    assert dense_sizes(recipe_of(masked)) == {}


# --- mistakes


@pytest.mark.parametrize(
    ("command", "file", "to", "message"),
    [
        ("pack", "packed", "new", "packed already"),
        ("pack", "dense", "new", "no expanded layers"),
        ("pack", "nothing", "new", "No such file or directory; give another"),
        ("pack", "wide", "", "is a folder"),
        ("pack", "wide", "wide.safetensors", "is the model itself"),
        ("pack", "wide", "nowhere/new", "could not write"),
        ("unpack", "wide", "new", "it is not packed"),
        ("unpack", "no-kernel", "new", "without a kernel in the recipe"),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(command, file, to, message, folder):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    err = called(command, folder / f"{file}.safetensors", "-o", folder / to, code=1).stderr
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("layout", ["inline", "plane"])
@pytest.mark.parametrize(
    "key", ["layers.0.bias", "layers.1.weight", "layers.1.bias", "layers.3.bias"]
)
def test_what_would_become_infinite_is_not_packed(key, layout, tmp_path):
    wide = fissile.expand(fissile.MLP([8, 4, 2], layer_norm=True), 2)
    with torch.no_grad():
        wide.get_parameter(key)[0] = 1e6
    fissile.save(wide, tmp_path / "a")
    how = ("--layout", layout, "--dtype")
    err = called("pack", tmp_path / "a", "-o", tmp_path / "b", *how, "float16", code=1).stderr
    assert "not finite in torch.float16" in err
    assert key.removesuffix(".bias") in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "b").exists()
    with pytest.raises(fissile.FissileError, match="not finite in"):
        fissile.pack(wide, dtype=torch.float16, layout=layout)
    called("pack", tmp_path / "a", "-o", tmp_path / "b", *how, "bfloat16")


def test_nor_what_becomes_infinite_in_a_buffer(tmp_path):
    wide = fissile.expand(Nested(), 2)
    wide.body["block"][2].running_var[0] = 1e6
    fissile.save(wide, tmp_path / "a")
    with pytest.raises(fissile.FissileError, match=r"running_var is not finite in torch.float16"):
        pack_file(tmp_path / "a", tmp_path / "b", dtype=torch.float16)


def test_a_dropconnect_model_has_nothing_to_pack(tmp_path):
    fissile.save(fissile.dropconnect(fissile.MLP([8, 4, 2]), 2), tmp_path / "a")
    assert "DropConnect" in called("pack", tmp_path / "a", "-o", tmp_path / "b", code=1).stderr


def renamed(old, new):
    def change(found):
        found[new] = found.pop(old)

    return change


def put(key, value):
    return lambda found: found.update({key: value(found[key])})


@pytest.mark.parametrize(
    ("recipe", "tensors", "message"),
    [
        (None, put("layers.0.owner", lambda t: t + 9), "holds numbers outside -1"),
        (None, put("layers.0.owner", lambda t: t[:, :4].contiguous()), "has shape (16, 4)"),
        (None, put("layers.0.owner", lambda t: t.int()), "no tensor of"),
        (None, put("layers.2.mask", lambda t: t.int()), "no tensor of"),
        (None, put("layers.0.bias", lambda t: t[:3].clone()), "has shape (3,)"),
        (None, put("layers.0.weight", lambda t: t[None]), "not what the recipe says"),
        (None, put("layers.0.weight", lambda t: t / 0), "NaN or infinite"),
        (None, renamed("layers.0.owner", "layers.0.odd"), "do not fit"),
        (lambda r: r["layers"]["layers.0"].update(alpha=4.0), None, "alpha=4.0"),
        (lambda r: r["layers"]["layers.0"].update(kind="odd"), None, "unknown kind"),
        (lambda r: r["layers"].update({"a..b": {}}), None, "do not fit"),
        (lambda r: r["layers"].update({"a": 3}), None, "do not fit"),
        (lambda r: r.update(pairs=3), None, "no list"),
        (lambda r: r.update(frozen=3), None, "no list of names"),
        (lambda r: r.update(version=9), None, "version 9"),
    ],
)
def test_hostile_files_get_one_line(recipe, tensors, message, folder, tmp_path):
    bad = tmp_path / "bad"
    nothing = lambda _: None  # noqa: E731
    rewrite(folder / "wide.safetensors", bad, recipe or nothing, tensors or nothing)
    err = called("pack", bad, "-o", tmp_path / "new", code=1).stderr
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["wide", "packed"])
def test_torn_files_get_one_line(name, folder, tmp_path):
    whole = (folder / f"{name}.safetensors").read_bytes()
    torn = tmp_path / "torn"
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        torn.write_bytes(whole[:size])
        err = called("unpack", torn, "-o", tmp_path / "new", code=1).stderr
        assert "not a readable safetensors file" in err
    assert not (tmp_path / "new").exists()


def test_a_flipped_bit_of_a_packed_file_is_found(folder, tmp_path):
    whole = bytearray((folder / "packed.safetensors").read_bytes())
    whole[-20] ^= 1
    (tmp_path / "bad").write_bytes(whole)
    err = called("unpack", tmp_path / "bad", "-o", tmp_path / "new", code=1).stderr
    assert "checksum" in err


# --- timing


@pytest.mark.parametrize("name", ["wide", "packed"])
def test_bench_times_layers_and_network(name, folder):
    file = folder / f"{name}.safetensors"
    out = called("bench", file, "--batch", 1, "--batch", 3, "--seconds", 0).stdout
    lines = out.splitlines()
    for layer, shape in (("layers.0", "32 → 64"), ("layers.2", "64 → 10"), ("whole", "→ 16 →")):
        mine = [line for line in lines if layer in line and shape in line]
        assert len(mine) == 2
        for line in mine:
            assert line.count("×") == 3  # expanded, inline, plane
            assert " - " not in line


def test_bench_of_another_model_in_another_dtype(tmp_path):
    fissile.save(fissile.to_masked(fissile.expand(Gated(), 2)), tmp_path / "a")
    out = called("bench", tmp_path / "a", "--dtype", "bfloat16", "--seconds", 0).stdout
    for layer in ("up", "gate", "down"):
        assert f"{layer}, dense: the file does not say how wide it was" in out
    assert "whole network" not in out


def test_bench_says_what_it_cannot_time(folder, tmp_path):
    for name in ("filters", "packed-filters"):
        err = called("bench", folder / f"{name}.safetensors", code=1).stderr
        assert "convolutions, which are not timed" in err
    err = called("bench", folder / "wide.safetensors", "--device", "abacus", code=1).stderr
    assert "abacus" in err
    assert "no expanded layers" in called("bench", folder / "dense.safetensors", code=1).stderr


def test_layers_that_read_are_those_that_were_saved(folder):
    wide = fissile.load(folder / "wide.safetensors")
    for name, layer in read(folder / "wide.safetensors").layers.items():
        assert torch.equal(layer.dense_weight(), wide.get_submodule(name).dense_weight())


def test_help_has_examples():
    for command in ("pack", "unpack", "bench"):
        assert "Example" in called(command, "--help").stdout
