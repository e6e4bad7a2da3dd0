"""How fast the paper's CNN trains: loops a user would write against ours, alone and side by side.

    PYTHONPATH=src python benchmarks/cnn.py --device cuda [--steps 200] [--to benchmarks/results]

Prints images per second and, as its last line, one JSON object with the ratios; `--to` also
writes all of it to a file in that folder.
"""

import argparse
import contextlib
import datetime
import json
import pathlib
import statistics
import sys
import time

import torch
from bank import commit, machine
from torch.nn import functional

from fissile.bank.loop import Recipe
from fissile.bank.vision import ConvNet, Images, Network
from fissile.bank.vision.convnet import scaled
from fissile.bank.vision.train import SIDE_BY_SIDE, Job, _engine

PROJECTION, NEURONS, CLASSES = 256, 20, 100
RECIPE = Recipe()
#: What matrix units do at most by the vendor's data sheet, dense bfloat16, in TFLOP/s.
PEAKS = {"NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989, "NVIDIA A100-SXM4-80GB": 312}


def operations(size):
    """Floating-point operations of a training step for one image: forward, and twice backward."""
    model = ConvNet(PROJECTION, NEURONS, CLASSES)
    count = 0

    def add(module, _, output):
        nonlocal count
        pixels = output[0, 0].numel() if output.ndim == 4 else 1
        count += 2 * module.weight.numel() * pixels

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.register_forward_hook(add)
    model.eval()(torch.zeros(1, 3, size, size))
    return 3 * count


def make_images(steps, size, seed=0):
    """Random images; the arithmetic does not depend on what they show."""
    generator = torch.Generator().manual_seed(seed)
    shape = (steps * RECIPE.batch, size, size, 3)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    y = torch.randint(0, CLASSES, (len(x),), generator=generator)
    y[0] = CLASSES - 1
    return Images(x, y, x[: RECIPE.batch], y[: RECIPE.batch])


def rate_of(run, images, device, repeats=3):
    """Run once to warm up, then return the median images per second of several runs."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    run()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - start)
    return images / statistics.median(times)


def loop(images, device, fast):
    """What a user would write, with the data on the device and without a DataLoader."""
    model = ConvNet(PROJECTION, NEURONS, CLASSES, seed=0).to(device)
    if fast:
        model = model.to(memory_format=torch.channels_last)
    adam = torch.optim.Adam(model.parameters(), RECIPE.lr, weight_decay=2 * RECIPE.l2)
    mean, deviation = (part.to(device) for part in images.scale())
    x, y = images.x.to(device), images.y.to(device)
    layout = torch.channels_last if fast else torch.contiguous_format
    kind = torch.device(device).type
    low = torch.autocast(kind, torch.bfloat16) if fast else contextlib.nullcontext()

    def run():
        for rows in torch.randperm(len(x), device=device).split(RECIPE.batch):
            batch = scaled(x[rows], mean, deviation).contiguous(memory_format=layout)
            with low:
                loss = functional.cross_entropy(model(batch), y[rows])
            loss = loss + RECIPE.l1 * model.head.layers[0].weight.abs().sum()
            adam.zero_grad()
            loss.backward()
            adam.step()

    return run


def ours(images, device, together):
    """An epoch of some networks side by side, as `fissile.bank.vision.train` does it."""
    engine = _engine(images, RECIPE, torch.device(device), "auto", together, mirror=False)
    jobs = []
    for seed in range(together):
        network = Network(PROJECTION, NEURONS, seed)
        jobs.append(Job.begin(seed, network, CLASSES, RECIPE, sys.maxsize))
    trainings = [engine.train(job) for job in jobs]

    def run():
        until = jobs[0].epoch + 1
        while any(job.epoch < until for job in jobs):
            for job, training in zip(jobs, trainings, strict=True):
                if job.epoch < until:
                    next(training)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", type=int, default=32, help="of the images, in pixels")
    parser.add_argument("--together", type=int, nargs="+", default=[SIDE_BY_SIDE])
    parser.add_argument("--commit", default=None, help="recorded with the result")
    parser.add_argument("--to", default=None, help="a folder for the result")
    options = parser.parse_args()
    device, images = options.device, make_images(options.steps, options.size)
    torch.backends.cuda.matmul.allow_tf32 = True  # as a user who looks for speed would
    rates = {}

    def measure(name, run, networks=1):
        rates[name] = rate_of(run, networks * len(images.x), device)
        print(f"{name:32} {rates[name]:8,.0f} images/s", flush=True)

    measure("loop, float32 (tf32)", loop(images, device, False))
    measure("loop, channels-last bfloat16", loop(images, device, True))
    torch.backends.cuda.matmul.allow_tf32 = False
    for together in [1, *options.together] if device == "cuda" else [1]:
        measure(f"fissile, {together} side by side", ours(images, device, together), together)
    report(options, rates)


def report(options, rates):
    """Print the table and the JSON object, and write both down."""
    each = operations(options.size)
    first = next(iter(rates.values()))
    lines = [f"{'':32} images/s   ratio  TFLOP/s"]
    for name, rate in rates.items():
        lines.append(f"{name:32} {rate:8,.0f} {rate / first:7.2f} {each * rate / 1e12:8.2f}")
    name, best = machine(options.device), max(rates.values())
    peak = PEAKS.get(name)
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": name,
        "commit": options.commit or commit(),
        "torch": torch.__version__,
        "steps": options.steps,
        "images_per_second": {key: round(rate) for key, rate in rates.items()},
        "ratios": {key: round(rate / first, 2) for key, rate in rates.items()},
        "gflop_per_image": round(each / 1e9, 3),
        "tflop_per_second": round(each * best / 1e12, 1),
        "share_of_peak": round(each * best / 1e12 / peak, 3) if peak else None,
    }
    text = "\n".join([*lines, json.dumps(result)])
    if options.to:
        path = pathlib.Path(options.to)
        path.mkdir(parents=True, exist_ok=True)
        short = name.split()[-1].lower() if options.device == "cuda" else "cpu"
        (path / f"{result['date']}-cnn-{short}.txt").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
