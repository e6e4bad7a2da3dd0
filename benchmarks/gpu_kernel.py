"""Time the bank's GPU kernel over its settings, and check each of them against float64.

    PYTHONPATH=src python benchmarks/gpu_kernel.py

Times are microseconds per network and step; the fastest settings come last.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time

import torch
import triton

from fissile import MLP
from fissile._common.random import order_keys
from fissile.bank import gpu
from fissile.bank.loop import Recipe, fit

HIDDEN, INPUTS, BATCH, SAMPLES, TESTS = 8, 32, 64, 10_000, 1_000
RECIPE = Recipe(batch=BATCH)
COUNTS = [100, 600, 2_000, 10_000]
SETS = [1, 100]
PROBLEMS = list(itertools.product(COUNTS, SETS))
#: (chunk, warps): more warps for one network help where there are too few networks.
SHAPES = [(16, 1), (32, 1), (32, 2), (64, 2), (64, 4)]
PRECISIONS = ["ieee", "tf32x3", "tf32"]
SETTINGS = list(itertools.product(PRECISIONS, SHAPES))
EPOCHS_CHECKED = 2
DEADLINE = 165  # seconds, after which nothing new is measured

DEVICE = "cuda"
NAMES = ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"]


def make_sets(sets, dtype=torch.float32):
    """Boolean inputs with the labels of a random teacher, on the device."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randint(0, 2, (sets, SAMPLES + TESTS, INPUTS), generator=generator, device=DEVICE)
    teacher = torch.randn(sets, INPUTS, 1, generator=generator, device=DEVICE)
    y = ((x - 0.5) @ teacher).squeeze(-1).gt(0).int()
    x = x.to(dtype)
    parts = x[:, :SAMPLES], y[:, :SAMPLES], x[:, SAMPLES:], y[:, SAMPLES:]
    return [part.contiguous() for part in parts]


def make_networks(models, count):
    """The models over and over, with fresh optimizers."""
    parameters = [torch.stack([m.get_parameter(name) for m in models]) for name in NAMES]
    index = torch.arange(count, device=DEVICE) % len(models)
    parameters = [p.detach().float().to(DEVICE)[index].contiguous() for p in parameters]
    return gpu.Networks(
        *parameters,
        tuple(torch.zeros_like(p) for p in parameters),
        tuple(torch.zeros_like(p) for p in parameters),
        torch.zeros(count, dtype=torch.int64, device=DEVICE),
        *(torch.full((count,), v, device=DEVICE) for v in (RECIPE.lr, RECIPE.l1, RECIPE.l2)),
    )


def launcher(networks, parts, epochs=1):
    """Return a function that launches the kernel with some settings and returns its curves."""
    count = len(networks.w1)
    seeds = torch.arange(count)
    keys = torch.stack([order_keys(seeds, epoch) for epoch in range(epochs)], 1).to(DEVICE)
    data = gpu.DataSets(*parts, (seeds % len(parts[0])).int().to(DEVICE))
    return lambda **settings: gpu.train(networks, data, keys, batch=BATCH, **settings)


def time_of(call, repeats=3):
    """Return the median time of a call in seconds, after one that compiles and warms up."""
    call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def references(models, parts):
    """Train copies of the models in float64 with the plain loop, on the CPU."""
    trained = []
    for seed, model in enumerate(models):
        twin = MLP(model.sizes).double()
        twin.load_state_dict(model.state_dict())
        adam = torch.optim.Adam(twin.parameters(), RECIPE.lr)
        x, y = parts[0][seed].cpu().double(), parts[1][seed].cpu().long()
        fit(twin, adam, x, y, epochs=EPOCHS_CHECKED, seed=seed, recipe=RECIPE)
        trained.append(twin)
    return trained


def distance_of(models, trained, parts, **settings):
    """Return the largest relative distance of a parameter from the reference."""
    networks = make_networks(models, len(models))
    curves = launcher(networks, parts, EPOCHS_CHECKED)(**settings)
    if curves.finished.tolist() != [EPOCHS_CHECKED] * len(models):
        return math.nan
    distances = []
    for name in NAMES:
        stack = dict(zip(NAMES, (networks.w1, networks.b1, networks.w2, networks.b2), strict=True))
        for i, twin in enumerate(trained):
            reference = twin.get_parameter(name).detach()
            distances.append((stack[name][i].cpu().double() - reference).norm() / reference.norm())
    return float(torch.stack(distances).max())  # a NaN wins


def main():
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    began = time.perf_counter()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    torch.manual_seed(0)
    pool = [MLP([INPUTS, HIDDEN, 1]) for _ in range(100)]
    parts = {sets: make_sets(sets) for sets in SETS}
    few = [part[:3].contiguous() for part in parts[100]]
    trained = references(pool[:3], few)
    calls = {
        (count, sets): launcher(make_networks(pool, count), parts[sets]) for count, sets in PROBLEMS
    }
    steps = -(-SAMPLES // BATCH)

    def measure(call, count, **settings):
        if time.perf_counter() - began > DEADLINE:
            return math.nan
        try:
            return time_of(lambda: call(**settings)) / count / steps * 1e6
        except Exception as error:  # a setting that does not compile must not hide the others
            print("failed:", settings, repr(error)[:200])
            return math.nan

    print("\nmicroseconds per network and step; columns: error, then networks x data sets")
    print(" " * 24, "error".rjust(8), *(f"{c}x{s}".rjust(10) for c, s in PROBLEMS))
    times = {}
    for precision, (chunk, warps) in SETTINGS:
        settings = {"chunk": chunk, "num_warps": warps, "precision": precision}
        error = distance_of(pool[:3], trained, few, **settings)
        row = [measure(calls[problem], problem[0], **settings) for problem in PROBLEMS]
        times |= {(precision, chunk, warps, *p): t for p, t in zip(PROBLEMS, row, strict=True)}
        label = f"{precision:6} chunk {chunk} warps {warps}"
        print(f"{label:24} {error:8.1e}", *(f"{t:10.4f}" for t in row), flush=True)

    def best(precision, count, sets):
        """Return the fastest shape for a problem."""
        found = {s: times[precision, *s, count, sets] for s in SHAPES}
        return min(SHAPES, key=lambda s: math.inf if math.isnan(found[s]) else found[s])

    print("\nvariants of the fastest shape, 100 data sets")
    narrow = make_sets(100, torch.uint8)
    variants = {
        "as it is": (False, {}),
        "uint8": (True, {}),
    }
    for precision, count in itertools.product(PRECISIONS[:2], (600, 10_000)):
        chunk, warps = best(precision, count, 100)
        slim = launcher(make_networks(pool, count), narrow)
        for name, (is_narrow, changes) in variants.items():
            call = slim if is_narrow else calls[count, 100]
            settings = {"chunk": chunk, "num_warps": warps, "precision": precision} | changes
            t = measure(call, count, **settings)
            print(f"{count:6} {precision:6} chunk {chunk} warps {warps} {name:16} {t:8.4f}")

    print("\nfastest settings")
    for (count, sets), precision in itertools.product(PROBLEMS, PRECISIONS):
        chunk, warps = best(precision, count, sets)
        t = times[precision, chunk, warps, count, sets]
        print(f"{count:6} x {sets:3} {precision:6} {t:8.4f} us (chunk {chunk}, {warps} warps)")
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
