"""Files that once found something, each made from nothing: what `fuzz.py` kept."""

import json
import math
import os

from fuzz import FORMATS, both, read_classifier
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import nn

import fissile
from fissile.data import read_features
from fissile.io import packing
from fissile.packed.files import checksum, lengthened, opened, sealed


def sizes_bomb(folder):
    """Half a million layers in four kilobytes: 265 seconds and 3.4 GB to build."""
    return rewritten(folder, "packed", lambda recipe: recipe["mlp"].update(sizes=[1] * 500_000))


def size_of_2_64(folder):
    return rewritten(folder, "packed", lambda recipe: recipe["mlp"]["sizes"].__setitem__(0, 2**64))


def slope_nan(folder):
    def change(recipe):
        settings = {"negative_slope": math.nan, "inplace": False}
        recipe["mlp"]["activation"] = {"name": "leakyrelu", "settings": settings}

    return rewritten(folder, "dense", change)


def rewritten(folder, kind, change):
    path = FORMATS[kind].make(folder)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    about = json.loads(data[8 : 8 + size])["__metadata__"]
    recipe = json.loads(opened(lengthened(about["fissile"])))
    change(recipe)
    save_file(load_tensors(data), path, about | {"fissile": sealed(json.dumps(recipe))})
    return path


def label_bomb(folder):
    """A label of a million letters among 20,000: numpy asks for 74.5 GiB."""
    path = FORMATS["classifier of the paper"].make(folder)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    about = json.loads(data[8 : 8 + size])["__metadata__"]
    note = json.loads(opened(about["fissile.sklearn"]))
    note["classes"]["values"] = [*sorted(f"{k:05}" for k in range(20_000)), "z" * 10**6]
    about["fissile.sklearn"] = sealed(json.dumps(note))
    save_file(load_tensors(data), path, about)
    return path


def wrong_histogram(folder):
    """One byte of a footer: RowGroupMetaData.column() ends the interpreter."""
    import pyarrow
    from pyarrow import parquet

    columns = {"features": [[1.0, 2.0]] * 4, "label": [0, 1, 0, 1]}
    made = pyarrow.table(columns | {"split": ["train", "train", "test", "test"]})
    path = folder / "t.parquet"
    parquet.write_table(made, path, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[-821] = 1
    path.write_bytes(data)
    return path


def endless(name):
    def make(folder):
        path = FORMATS[name].make(folder)
        for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
            file.unlink()
            file.symlink_to("/dev/zero")
        return path

    return make


def waiting(name):
    def make(folder):
        path = FORMATS[name].make(folder)
        for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
            file.unlink()
            os.mkfifo(file)
        return path

    return make


def deep_name(folder):
    """A layer's name with 100,000 dots: as many modules."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    fissile.save(fissile.expand(model, 2), folder / "m")
    data = (folder / "m").read_bytes()
    size = int.from_bytes(data[:8], "little")
    recipe = json.loads(opened(json.loads(data[8 : 8 + size])["__metadata__"]["fissile"]))
    far = "a." * 100_000 + "0"
    tensors = {far + k[1:] if k[0] == "0" else k: v for k, v in load_tensors(data).items()}
    recipe["layers"][far] = recipe["layers"].pop("0")
    recipe["pairs"][0]["firsts"] = [far]
    recipe["crc32"] = checksum(tensors)
    save_file(tensors, folder / "m", {"fissile": sealed(json.dumps(recipe))})
    return folder / "m"


KEPT = {
    "half a million sizes": (sizes_bomb, both),
    "a size of 2^64": (size_of_2_64, both),
    "a slope that is NaN": (slope_nan, both),
    "one long label": (label_bomb, read_classifier),
    "a histogram of the wrong length": (wrong_histogram, read_features),
    "a name of many parts": (deep_name, packing.read),
} | {
    f"{name} that {how.__name__}": (how(name), FORMATS[name].read)
    for how in (endless, waiting)
    for name in FORMATS
    if name not in ("packed npz", "packed plane")
}
