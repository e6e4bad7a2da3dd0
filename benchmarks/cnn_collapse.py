"""What makes narrow heads of the paper's CNN collapse to chance: one change at a time.

    PYTHONPATH=src python benchmarks/cnn_collapse.py --device cuda --data DATA [--to FILE]

In the paper every dense head of 4 neurons ends at 1.0 % (all ten trials), heads of 8 at 14.1 %
and 1.0 % (projections of 256 and 512), heads of 16 at 48.0 % and 13.8 %. Here a head has
collapsed if it is right for at most 1.5 % of the test images after the last epoch. Prints for
each reading and head how many seeds collapsed and, in brackets, the best accuracy; the last line
is one JSON object, which `--to` also writes.
"""

import argparse
import json
import pathlib
import time
from functools import partial

import torch
from about import made, needs_gpu
from torch import nn

from fissile.bank.loop import Recipe
from fissile.bank.vision import ConvNet, Images
from fissile.bank.vision.graphs import Graphs
from fissile.bank.vision.train import SIDE_BY_SIDE, Job, make_adam
from fissile.data import load

#: Projection and neurons, and the paper's accuracy after 25 + 25 epochs in %.
HEADS = {(256, 4): 1.0, (256, 8): 14.1, (256, 16): 48.0, (512, 4): 1.0, (512, 16): 13.8}
CHANCE = 0.015


def xavier(layer):
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)


def kaiming(layer):
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)


def normal(layer, std):
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)


#: Each reading: the recipe, how the head's layers begin, mirrored images, the precision.
READINGS = {
    "as the study was: not mirrored": {},
    "mirrored images": {"mirror": True},
    "no penalties": {"l1": 0.0, "l2": 0.0},
    "no penalties, mirrored images": {"l1": 0.0, "l2": 0.0, "mirror": True},
    "head normal, deviation 1": {"begin": partial(normal, std=1.0)},
    "head normal, deviation 0.1": {"begin": partial(normal, std=0.1)},
    "head normal, deviation 0.01": {"begin": partial(normal, std=0.01)},
    "head Xavier, biases 0": {"begin": xavier},
    "head Kaiming, biases 0": {"begin": kaiming},
    "rate 3e-3": {"lr": 3e-3},
    "no L2": {"l2": 0.0},
    "orthogonality 1e-1": {"orthogonal": 1e-1},
    "orthogonality 1e-3": {"orthogonal": 1e-3},
    "no L1": {"l1": 0.0},
    "float16, loss not scaled": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
}
FIELDS = ("lr", "l1", "l2", "orthogonal")


def begun(number, head, seed, classes, recipe, epochs, begin):
    """Return a network that is still to be trained, its head begun in another way if asked for."""
    torch.manual_seed(seed)
    model = ConvNet(*head, classes, seed=seed)
    if begin is not None:
        for layer in model.head.modules():
            if isinstance(layer, nn.Linear):
                begin(layer)
    return Job(number, None, seed, model, make_adam(model, recipe), epoch=0, until=epochs)


def trained(jobs, engine):
    """Train jobs side by side and return the test accuracy of each after its last epoch."""
    waiting, active = list(jobs), []
    while waiting or active:
        while waiting and len(active) < SIDE_BY_SIDE:
            active.append(engine.train(waiting.pop(0)))
        steps = active.pop(0)
        if next(steps, "done") is None:
            active.append(steps)
    return [job.accuracy[-1] for job in jobs]


def searched(images, reading, heads, seeds, epochs, device):
    recipe = Recipe(**{name: reading[name] for name in FIELDS if name in reading})
    dtype, mirror = reading.get("dtype", torch.bfloat16), reading.get("mirror", False)
    engine = Graphs(images, recipe, torch.device(device), dtype, SIDE_BY_SIDE, mirror=mirror)
    pairs = [(head, seed) for head in heads for seed in range(seeds)]
    jobs = [
        begun(number, head, seed, images.classes, recipe, epochs, reading.get("begin"))
        for number, (head, seed) in enumerate(pairs)
    ]
    found = dict.fromkeys(heads, ())
    for (head, _), accuracy in zip(pairs, trained(jobs, engine), strict=True):
        found[head] += (round(accuracy, 4),)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", type=pathlib.Path, help="a folder with CIFAR-100")
    parser.add_argument("--images", type=int, default=50_000, help="train on so many")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--readings", nargs="*", default=list(READINGS))
    parser.add_argument("--for", type=float, default=1e9, dest="seconds", help="begin none later")
    parser.add_argument("--to", type=pathlib.Path)
    given = parser.parse_args()
    needs_gpu()
    held = load("cifar100", given.data)
    part = slice(0, given.images)
    arrays = held.x[part], held.y[part], held.x_test, held.y_test
    images = Images(*map(torch.tensor, arrays))
    begin, rows = time.perf_counter(), {}
    print(f"{'collapsed of ' + str(given.seeds):36}" + "".join(f"{h!s:>11}" for h in HEADS))
    for name in given.readings:
        if time.perf_counter() - begin > given.seconds:
            break
        try:
            found = searched(images, READINGS[name], HEADS, given.seeds, given.epochs, given.device)
        except Exception as error:  # a precision that an engine does not have, say
            print(f"{name:36}{type(error).__name__}: {error}"[:200], flush=True)
            continue
        rows[name] = {f"{p} x {n}": list(each) for (p, n), each in found.items()}
        cells = (f"{sum(a <= CHANCE for a in each)} ({max(each):.2f})" for each in found.values())
        print(f"{name:36}" + "".join(f"{cell:>11}" for cell in cells), flush=True)
    about = {**made(given.device), "images": given.images, "epochs": given.epochs, "accuracy": rows}
    print(json.dumps(about))
    if given.to:
        given.to.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
