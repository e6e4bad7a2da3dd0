"""Which settings of the GPU kernel suit which shapes, and where batched PyTorch overtakes it.

    PYTHONPATH=src python benchmarks/gpu_shapes.py

Microseconds per network and step, for 600 networks of each shape; `plain` is the bank's plain
engine with CUDA graphs. `fits` and `_suiting` of `fissile.bank.gpu` follow this table.
"""

import functools
import statistics
import sys
import time

import torch

from fissile._common.random import order_keys
from fissile.bank import Bank, Data, Spec, gpu

NETWORKS, BATCH, STEPS = 600, 64, 40
SHAPES = [
    (8, 32, 1), (16, 32, 1), (32, 32, 1), (64, 32, 1), (8, 128, 1), (32, 64, 1), (16, 128, 1),
    (32, 128, 1), (64, 128, 1), (16, 32, 10), (10, 256, 10), (8, 512, 10), (8, 512, 100),
    (16, 512, 100),
]  # fmt: skip
SETTINGS = [(16, 1), (32, 1), (32, 2), (16, 4), (32, 4), (64, 4), (16, 8), (32, 8)]
DEADLINE = 420


def make_data(inputs, outputs):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(BATCH * STEPS, inputs, generator=generator)
    y = torch.randint(0, max(2, outputs), (len(x),), generator=generator)
    return Data(x, y, x[:BATCH], y[:BATCH])


def seconds(call, repeats=3):
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def kernel(shape, data):
    """Return a function that trains an epoch with some settings of the kernel."""
    hidden, inputs, outputs = shape
    sizes = [(hidden, inputs), (hidden,), (outputs, hidden), (outputs,)]

    def zeros():
        return tuple(torch.zeros(NETWORKS, *size, device="cuda") for size in sizes)

    values = tuple(torch.randn(NETWORKS, *size, device="cuda") / inputs**0.5 for size in sizes)
    dials = [torch.full((NETWORKS,), value, device="cuda") for value in (1e-3, 1e-7, 1e-5)]
    step = torch.zeros(NETWORKS, dtype=torch.int64, device="cuda")
    networks = gpu.Networks(*values, zeros(), zeros(), step, *dials)
    x, y = data.x.cuda()[None], data.y.int().cuda()[None]
    which = torch.zeros(NETWORKS, dtype=torch.int32, device="cuda")
    sets = gpu.DataSets(x, y, x[:, :BATCH].contiguous(), y[:, :BATCH].contiguous(), which)
    keys = order_keys(torch.arange(NETWORKS).cuda()[:, None], torch.zeros(1).long().cuda())
    return lambda **settings: gpu.train(networks, sets, keys, batch=BATCH, **settings)


def plain(shape, data):
    hidden, inputs, outputs = shape
    specs = [Spec([inputs, hidden, outputs], data, seed=seed) for seed in range(NETWORKS)]
    bank = Bank(specs, device="cuda", engine="plain")
    epochs = [0]

    def call():
        epochs[0] += 5
        bank.train(until=epochs[0])

    return seconds(call, 2) / 5


def main():
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    began = time.perf_counter()
    print(torch.cuda.get_device_name(), torch.__version__, f"{NETWORKS} networks")
    print(f"{'h, d, C':<16}" + "".join(f"{f'{c}x{w}w':>9}" for c, w in SETTINGS) + f"{'plain':>9}")
    for shape in SHAPES:
        data = make_data(*shape[1:])
        call = kernel(shape, data)
        row = []
        for chunk, warps in SETTINGS:
            if time.perf_counter() - began > DEADLINE:
                break
            row.append(seconds(functools.partial(call, chunk=chunk, num_warps=warps)))
        row.append(plain(shape, data))
        scale = 1e6 / NETWORKS / STEPS
        print(f"{shape!s:<16}" + "".join(f"{value * scale:>9.4f}" for value in row), flush=True)


if __name__ == "__main__":
    main()
