"""Up to which batch a packed layer's kernel pays; beyond it, weights are written out first.

    python benchmarks/pack_limits.py                  # two cores, some six minutes
    python benchmarks/pack_limits.py --device cuda

Times both ways through one layer, batch after batch, in every dtype: W1' by alpha, W2' by the size
of its groups. The limits in src/fissile/packed/cpu/__init__.py and gpu/__init__.py are read off the
table, which shows the kernel's time over the other's. The last line is one JSON object.
"""

import argparse
import json
import time
from itertools import product
from pathlib import Path

import torch
from about import made
from pack_layers import masked, partitioned

from fissile.packed import dispatch
from fissile.packed.timing import Rival, race

SIZES = {"cpu": [(1024, 1024), (4096, 1024)], "cuda": [(4096, 4096), (14336, 4096)]}
BATCHES = [32, 64, 128, 256, 512, 1024, 2048]
KINDS = {"W1": partitioned, "W2": masked}


def forced(rival, kernels, kernel):
    """Return a call that goes the one way or the other, whatever the limits say."""

    def call(x):
        kernels.takes = lambda *_, **__: kernel
        return rival.call(x)

    return Rival(call)


def ratios(part, size, alpha, dtype, options):
    """Yield the kernel's time over the other's, batch by batch."""
    how = {"dtype": dtype, "device": options.device, "most": 0.0}
    layer = KINDS[part](*size, alpha, **how, **({"plane": False} if part == "W1" else {}))["inline"]
    kernels = dispatch.kernels_for(torch.device(options.device))
    ways = {"kernel": forced(layer, kernels, True), "written": forced(layer, kernels, False)}
    inputs = size[1] * (1 if part == "W1" else alpha)
    for batch in BATCHES:
        x = torch.randn(batch, inputs, device=options.device).to(dtype)
        times, _ = race(ways, x, seconds=options.time)
        yield round(times["kernel"].median / times["written"].median, 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--time", type=float, default=0.3, help="seconds for each batch, about")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    begin, found = time.perf_counter(), {}
    print(f"{'':40}" + "".join(f"{batch:>7}" for batch in BATCHES))
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for dtype, part, size, alpha in product(dtypes, KINDS, SIZES[options.device], (2, 4, 8)):
        name = f"{part} {size[0]}x{size[1]}, alpha {alpha}, {str(dtype).removeprefix('torch.')}"
        found[name] = list(ratios(part, size, alpha, dtype, options))
        print(f"{name:40}" + "".join(f"{one:>7.2f}" for one in found[name]), flush=True)
    about = made(options.device) | {
        "threads": torch.get_num_threads(),
        "minutes": round((time.perf_counter() - begin) / 60, 1),
        "batches": BATCHES,
        "kernel over written out": found,
    }
    if options.to:
        options.to.write_text(json.dumps(about) + "\n", "utf-8")
    print(json.dumps(about))


if __name__ == "__main__":
    main()
