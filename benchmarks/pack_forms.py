"""A trained network in every form of pack_accuracy.py, and what is measured of each."""

import copy
from pathlib import Path

import torch
from torch.nn import functional

import fissile
from fissile.bank.stack import linear_layers
from fissile.layers import REMOVED, weight_of
from fissile.packed.convert import inline_layers, living, settled, stream_of

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def forms(model, alpha):
    """Return a network in every dtype: as it is and, if it is expanded, packed in both layouts."""
    for name, dtype in DTYPES.items():
        yield name, "unpacked", copy.deepcopy(model).to(dtype)
        for layout in ("inline", "plane") if alpha > 1 else ():
            yield name, layout, fissile.pack(model, dtype=dtype, layout=layout)


@torch.no_grad()
def written_out(model, x, dtype):
    """Predict with the weights written out; every form in the same arithmetic, the kernels'.

    Inputs, weights and each layer's results are of the dtype, sums are in float32. Forms differ in
    their weights alone, not in the order in which somebody's matrix product adds.
    """
    layers = linear_layers(model)
    for layer in layers:
        x = functional.linear(x.to(dtype).float(), weight_of(layer).float(), layer.bias.float())
        x = x if layer is layers[-1] else x.relu()
    return x.to(dtype).argmax(-1)


@torch.no_grad()
def by_itself(model, x, dtype):
    """Predict with the model as a user would call it."""
    return model.eval()(x.to(dtype)).argmax(-1)


def rounding(model, trained, dtype):
    """Return how far the weights are off: all of them as a share of their size, and the worst.

    The worst is looked for among weights that are normal numbers: below, all bits are scarce.
    """
    old, new = (
        torch.cat([weight_of(layer).double().flatten() for layer in linear_layers(one)])
        for one in (trained, model)
    )
    normal = old.abs() >= torch.finfo(dtype).tiny
    worst = ((new - old)[normal] / old[normal]).abs().max()
    return {"rounding": short((new - old).norm() / old.norm()), "most_rounded": short(worst)}


def given_away(model):
    """Return how many bits of a weight, on average, say which child owns it and where it goes.

    Where the places do not fit into the weights, their pattern lies apart and takes none.
    """
    layers = inline_layers(model)
    counts = [len(living(layer)) for layer in layers.values()]
    owners = sum(one.owner_bits * n for one, n in zip(layers.values(), counts, strict=True))
    apart = bool(layers) and settled(layers) is None
    places = 0 if apart else len(stream_of(layers))
    weights = max(1, sum(counts))
    return {
        "owner_bits": short(owners / weights),
        "place_bits": short(places / weights),
        "pattern_apart": int(apart),
    }


def empty(model):
    """Return the share of the first layer's places that hold no weight after the split."""
    owner = getattr(linear_layers(model)[0], "owner", torch.zeros(1))
    return short((owner == REMOVED).float().mean())


def short(number):
    """Keep the digits that mean something in a file."""
    return float(f"{float(number):.4g}")


def sizes(model, folder):
    """Return the bytes of a model's file, those of them that are tensors, and those in memory."""
    path = Path(folder) / "model.safetensors"
    fissile.save(model, path)
    whole = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    again = fissile.load(path).state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(again[key], tensor), f"{key} is not in the file as it was saved"
    held = [*model.parameters(), *model.buffers()]
    memory = sum(tensor.numel() * tensor.element_size() for tensor in held)
    return {"file": whole, "tensors": whole - 8 - header, "memory": memory}


@torch.no_grad()
def measured(trial, trained, data, folder):
    """Measure every form of a network, beside itself unpacked in the same dtype and in float32."""
    first = {}  # what it predicts unpacked, in each dtype
    for name, layout, model in forms(trained, trial.arm.alpha):
        dtype = DTYPES[name]
        plain = model if layout == "unpacked" else fissile.unpack(model)
        found = written_out(plain, data.x_test, dtype)
        called = by_itself(model, data.x_test, dtype)
        first.setdefault(name, found)
        yield {
            "arm": trial.arm.name,
            "alpha": trial.arm.alpha,
            "neurons": trial.neurons,
            "trial": trial.number,
            "dtype": name,
            "layout": layout,
            "correct": int((found == data.y_test).sum()),
            "changed": int((found != first[name]).sum()),
            "changed_from_float32": int((found != first["float32"]).sum()),
            "called_correct": int((called == data.y_test).sum()),
            "called_differently": int((called != found).sum()),
            "empty": empty(trained),
            **rounding(plain, trained, dtype),
            **given_away(model),
            **sizes(model, folder),
        }
