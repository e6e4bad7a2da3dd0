"""Packed models and their files, for the tests that call, write, read and damage them."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fissile import MLP, expand, load, nonzeros, save
from fissile.layers import SparseLayer
from fissile.packed.bits import MANTISSA
from fissile.packed.files import checksum, lengthened, opened, sealed

DTYPES = list(MANTISSA)
LAYOUTS = ["inline", "plane"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LINES = pytest.mark.parametrize("layout", LAYOUTS)
KINDS = pytest.mark.parametrize("dtype", DTYPES)


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
    save_file(tensors, path, {"fissile": sealed(json.dumps(recipe))})


def wide_mlp(sizes=(32, 8, 5), alpha=4, **how):
    torch.manual_seed(0)
    return expand(MLP(list(sizes), **how), alpha).eval()


def layers_of(model, kind=SparseLayer):
    return {name: m for name, m in model.named_modules() if isinstance(m, kind)}


def close(one, other, dtype):
    how = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(one.double(), other.double(), **how)
