"""How a packed layer is best cut into programs: times every candidate for packed/gpu.

    python benchmarks/pack_tiles.py --to benchmarks/results/pack-tiles-h200.json    # minutes
    python benchmarks/pack_tiles.py --rule --to benchmarks/results/pack-rule-h200.json    # seconds

Weights are many copies of a layer, read one after another by a CUDA graph, so that none is in the
cache and launching costs next to nothing: a layer inside a large network. That is harder on packed
layers than pack.py, whose times contain what a single replay of a graph takes in any case. Every
candidate is first checked against float64. Prints the fastest; the last line is one JSON object.
With --rule, only the tiles that a layer is given without asking are timed.
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import torch
from about import made, needs_gpu

from fissile.packed.gpu import Tiles, partitioned_tiles
from fissile.packed.gpu.launch import partitioned_linear

SIZES = [(4096, 4096), (14336, 4096), (28672, 8192)]
BITS, BATCHES = (3, 2, 1), (1, 4, 8, 16)
#: Bytes of shared memory that let two programs lie on a multiprocessor.
SHARED = 112_000
#: The same layer so many times over, in bytes.
READ = 3e9


def candidates(batch):
    """Yield ways to cut a layer for so many samples."""
    kinds = [(8, True), (16, False)] if batch > 8 else [(8, False)]
    warps = [(16, 2, 2), (16, 4, 4), (16, 8, 8), (32, 2, 2), (32, 4, 4)]  # rows, deep, warps
    warps += [(32, 1, 1), (32, 1, 2), (64, 1, 2), (64, 1, 4), (128, 1, 8)]
    for (samples, twice), (rows, deep, number) in product(kinds, warps):
        for run, stages in product((32, 64, 128, 256), (3, 4, 6)):
            size = (rows + samples * (1 + twice)) * run * deep * 2 * stages
            if SHARED / 8 <= size <= SHARED:
                yield Tiles(rows, run, samples, twice, deep, number, stages)


def layer(h, d, batch):
    return [torch.randn(n, d, device="cuda").half() for n in (batch, h)]


def checked(case, h=512):
    """Compile a candidate, and say what is wrong with it."""
    d, batch, bits, tiles = case
    x, weight = layer(h, d, batch)
    try:
        found = partitioned_linear(x, weight, None, None, 2**bits, "none", tiles).view(
            batch, -1, 2**bits
        )
    except RuntimeError as error:
        return f"{tiles}: {error}"
    owner = weight.view(torch.int16) & (2**bits - 1)
    for child in range(2**bits):
        wanted = x.double() @ (weight.double() * (owner == child)).T
        if not (found[..., child].double() - wanted).norm() < 2e-3 * wanted.norm():
            return f"{tiles}: child {child} is wrong"
    return ""


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


def timed(d, batch, bits, weights, usable):
    """Return the dense layer's time, and the candidates' from the fastest on."""
    x, copies = layer(1, d, batch)[0], len(weights)
    dense = microseconds(lambda i: torch.nn.functional.linear(x, weights[i]), copies)
    found = []
    for tiles in usable:

        def call(i, tiles=tiles):
            return partitioned_linear(x, weights[i], None, None, 2**bits, "none", tiles)

        found.append((round(microseconds(call, copies), 2), tiles))
    again = microseconds(lambda i: torch.nn.functional.linear(x, weights[i]), copies)
    return [round(dense, 2), round(again, 2)], sorted(found)


def refused(jobs):
    """Return the candidates that do not compile or compute something else, and what is wrong."""
    depths = {d for _, d in SIZES}
    work = [(d, b, k, t) for d in depths for b in (8, 16) for k in BITS for t in candidates(b)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        said = pool.map(checked, work)
        return {case: text for case, text in zip(work, said, strict=True) if text}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path)
    parser.add_argument("--rule", action="store_true", help="only what is launched by itself")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    options = parser.parse_args()
    needs_gpu()
    wrong = {} if options.rule else refused(options.jobs)
    print(*wrong.values(), sep="\n")
    cases = {}
    for h, d in SIZES:
        weights = [layer(h, d, 1)[1] for _ in range(min(32, max(6, int(READ / (2 * h * d)))))]
        for bits, batch in product(BITS, BATCHES):
            name, full = f"{h}x{d}, {2**bits}, {batch}", 16 if batch > 8 else 8
            if said := checked((d, batch, bits, None), min(h, 4096)):  # more would heat the GPU
                raise SystemExit(f"{name}: {said}")
            usable = [t for t in candidates(batch) if (d, full, bits, t) not in wrong]
            dense, found = timed(d, batch, bits, weights, [None] if options.rule else usable)
            print(f"{name}: dense {dense}, rule {partitioned_tiles(batch, h, d, bits, 2, False)}")
            for time, tiles in found[:4]:
                print(f"    {time:8.2f} µs, {time / min(dense):.3f} of dense: {tiles}")
            cases[name] = {"dense": dense, "tiles": found}
    about = made("cuda")
    if options.to:
        options.to.write_text(json.dumps(about | {"cases": cases}) + "\n", "utf-8")
    best = {
        name: round(case["tiles"][0][0] / min(case["dense"]), 3) for name, case in cases.items()
    }
    print(json.dumps(about | {"best over dense": best}))


if __name__ == "__main__":
    main()
