"""Files of packed models, for the tests that write, read and damage them."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fissile import load, nonzeros, save
from fissile.packed.files import checksum
from fissile.packed.header import lengthened, opened

LAYOUTS = ["inline", "plane"]


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
