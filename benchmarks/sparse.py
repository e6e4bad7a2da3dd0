"""How fast sparse networks train: an ordinary loop with masks, one plan at a time, all in step.

    python benchmarks/sparse.py                  # two cores, two minutes
    python benchmarks/sparse.py --device cuda

All train the six plans of the recommended recipe, for 512 inputs, 100 classes and 20,000 non-zeros.
Prints microseconds per network and step; the last line is one JSON object with the ratios.
"""

import argparse
import datetime
import json
import sys
import time

import torch
from about import commit, machine
from torch import nn
from torch.nn import functional

from fissile.bank.sparse import train
from fissile.bank.sparse.plan import recommended_plans as plans

INPUTS, CLASSES, BUDGET = 512, 100, 20_000


class Masked(nn.Module):
    """A hidden layer and a linear one beside it, each weight times its mask, as one would write."""

    def __init__(self, hidden):
        super().__init__()
        self.first = nn.Linear(INPUTS, hidden) if hidden else None
        self.second = nn.Linear(hidden, CLASSES, bias=False) if hidden else None
        self.direct = nn.Linear(INPUTS, CLASSES)
        for layer in (self.first, self.second, self.direct):
            if layer is not None:
                layer.register_buffer("mask", torch.ones_like(layer.weight))

    def forward(self, x):
        found = functional.linear(x, self.direct.weight * self.direct.mask, self.direct.bias)
        if self.first is None:
            return found
        said = functional.linear(x, self.first.weight * self.first.mask, self.first.bias).relu()
        return found + functional.linear(said, self.second.weight * self.second.mask)


def loop(found, x, y, batch, device):
    """Train the plans one after another in an ordinary loop; pruning is left out."""
    for plan in found:
        model = Masked(plan.hidden).to(device)
        adam = torch.optim.AdamW(model.parameters(), plan.lr, weight_decay=plan.decay)
        for rows in torch.randperm(len(x), device=device).split(batch):
            seen = functional.dropout(x[rows], plan.dropout)
            loss = functional.cross_entropy(model(seen), y[rows], label_smoothing=plan.smooth)
            adam.zero_grad()
            loss.backward()
            adam.step()


def alone(found, seeds, x, y, batch, device):
    for plan in found:
        for seed in seeds:
            train([plan], [seed], x, y, outputs=CLASSES, epochs=1, batch=batch, device=device)


def together(found, seeds, x, y, batch, device):
    train(found, seeds, x, y, outputs=CLASSES, epochs=1, batch=batch, device=device)


def timed(run, device):
    """Run once to warm up, then take the shorter of two."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    device, batch, seeds = options.device, options.batch, range(options.seeds)
    x = torch.randn(options.steps * batch, INPUTS, device=device)
    y = torch.randint(CLASSES, (len(x),), device=device)
    found = plans(BUDGET, INPUTS, CLASSES)
    ways = {
        "ordinary loop": (lambda: loop(found, x, y, batch, device), len(found)),
        "one at a time": (
            lambda: alone(found, seeds, x, y, batch, device),
            len(found) * len(seeds),
        ),
        "side by side": (
            lambda: together(found, seeds, x, y, batch, device),
            len(found) * len(seeds),
        ),
    }
    micro = {}
    for name, (run, networks) in ways.items():
        micro[name] = 1e6 * timed(run, device) / (options.steps * networks)
        print(f"{name:14} {micro[name]:9.1f} µs per network and step", flush=True)
    about = {
        "machine": machine(device),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "command": " ".join(["python", "benchmarks/sparse.py", *sys.argv[1:]]),
        "microseconds": {name: round(value, 1) for name, value in micro.items()},
    }
    ratios = {name: round(micro["ordinary loop"] / value, 2) for name, value in micro.items()}
    print(json.dumps(about | {"times as fast as the ordinary loop": ratios}))


if __name__ == "__main__":
    main()
