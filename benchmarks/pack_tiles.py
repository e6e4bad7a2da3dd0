"""How long a packed layer takes as one of many, in the tiles that packed/gpu chooses for it.

    python benchmarks/pack_tiles.py --to benchmarks/results/pack-rule-h200.json    # seconds

Weights are many copies of a layer, read one after another by a CUDA graph, so that none is in the
cache and launching costs next to nothing: a layer inside a large network. That is harder on packed
layers than pack.py, whose times contain what a single replay of a graph takes in any case. Every
layer is first checked against float64. The last line is one JSON object.
"""

import argparse
import json
from itertools import product
from pathlib import Path

import torch
from about import made, needs_gpu

from fissile.packed.gpu import partitioned_tiles
from fissile.packed.gpu.launch import partitioned_linear

SIZES = [(4096, 4096), (14336, 4096), (28672, 8192)]
BITS, BATCHES = (3, 2, 1), (1, 4, 8, 16)
#: The same layer so many times over, in bytes.
READ = 3e9


def layer(h, d, batch):
    return [torch.randn(n, d, device="cuda").half() for n in (batch, h)]


def check(h, d, batch, bits):
    """Let no layer be timed that computes something else."""
    x, weight = layer(h, d, batch)
    found = partitioned_linear(x, weight, None, None, 2**bits, "none")
    owner = weight.view(torch.int16) & (2**bits - 1)
    for child in range(2**bits):
        wanted = x.double() @ (weight.double() * (owner == child)).T
        if not (found[:, child :: 2**bits].double() - wanted).norm() < 2e-3 * wanted.norm():
            raise SystemExit(f"{h}x{d}, {2**bits}, {batch}: child {child} is wrong")


def microseconds(call, copies):
    """Return what a call takes, of as many as there are copies in one graph: the median of five."""
    call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            call(copy)
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / copies)
    return sorted(times)[2]


def timed(d, batch, bits, weights):
    """Return the dense layer's time before and after, and the packed layer's with its tiles."""
    x, copies = layer(1, d, batch)[0], len(weights)
    tiles = partitioned_tiles(batch, len(weights[0]), d, bits, 2, False)

    def dense(i):
        return torch.nn.functional.linear(x, weights[i])

    def packed(i):
        return partitioned_linear(x, weights[i], None, None, 2**bits, "none")

    first, time, again = (round(microseconds(call, copies), 2) for call in (dense, packed, dense))
    return {"dense": [first, again], "tiles": [(time, tiles)]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    needs_gpu()
    cases = {}
    for h, d in SIZES:
        weights = [layer(h, d, 1)[1] for _ in range(min(32, max(6, int(READ / (2 * h * d)))))]
        for bits, batch in product(BITS, BATCHES):
            check(min(h, 4096), d, batch, bits)  # more would heat the GPU
            name = f"{h}x{d}, {2**bits}, {batch}"
            cases[name] = timed(d, batch, bits, weights)
            print(f"{name}: {cases[name]}", flush=True)
    about = made("cuda")
    if options.to:
        options.to.write_text(json.dumps(about | {"cases": cases}) + "\n", "utf-8")
    ratios = {
        name: round(case["tiles"][0][0] / min(case["dense"]), 3) for name, case in cases.items()
    }
    print(json.dumps(about | {"over dense": ratios}))


if __name__ == "__main__":
    main()
