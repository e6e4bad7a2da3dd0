"""What bounds a packed layer on an H200: memory, or the instructions of its inner loop.

    python benchmarks/pack_roofline.py      # needs PyTorch for CUDA, no GPU; half a minute

The kernel of every case is compiled for the chip as it would be launched, and the instructions of
its inner loop are counted. Products on the matrix units and the logic that decodes weights for them
overlap little: benchmarks/pack_overlap.cu shows that beside other instructions a product takes a
scheduler at least five cycles, a sparse one eight, and each other instruction at least one.
Programs come in whole numbers, so a multiprocessor that gets one more than the average is waited
for. Memory is what a large copy reached in pack-h200.json; what layers took is from
pack-rule-h200.json, where each is one of many in a CUDA graph.

Writes docs/parts/pack-roofline.md; the last line is one JSON object.
"""

import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fissile.packed.gpu import few, nvrtc
from fissile.packed.gpu.partitioned import owned_kernel
from fissile.packed.gpu.tiles import owned_tiles

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TO = ROOT / "docs" / "parts" / "pack-roofline.md"

PROCESSORS, SCHEDULERS = 132, 4
#: As measured: cycles of a scheduler for an m16n8k16 product, a sparse m16n8k32 one, and any other
#: instruction of a warp beside them; for products without others; and the clock meanwhile
#: (benchmarks/results/2026-11-16-pack-overlap-h200.txt and -pack-cycles-h200.txt).
PRODUCT, SPARSE, OTHER, ALONE, SPARSE_ALONE, CLOCK = 5.0, 8.0, 1.0, 6.1, 8.2, 1.78e9
SIZES = [(4096, 4096), (14336, 4096), (28672, 8192)]
ALPHAS, BATCHES = (4, 8), (1, 4, 8, 16)
WARP = 32


def compiled(h, d, alpha, batch):
    """Return a kernel's machine code, and how a program is cut."""
    bits = (alpha - 1).bit_length()
    tiles = owned_tiles(batch, h, d, bits, 2, False)
    rows, run, samples, twice, deep, warps, stages = tiles
    known = {
        "D": d, "ALPHA": alpha, "BITS": bits, "PLANE": False, "BIAS": True, "ACTIVATION": "none",
        "ASSEMBLY": True, "BH": rows, "BD": run, "BB": samples, "TWICE": twice, "DEEP": deep,
    }  # fmt: skip
    names = list(owned_kernel.arg_names)
    kinds = {name: "*fp16" for name in names if name.endswith("_")} | {"B": "i32", "H": "i32"}
    source = ASTSource(
        owned_kernel,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in known.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in kinds if n != "B"},
    )
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=GPUTarget("cuda", 90, WARP), options=options)
    return built.asm["cubin"], tiles


def inner_loop(cubin):
    """Count the instructions of the longest loop up to its last product, by their names."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run(
            [os.fspath(tool), "--dump-sass", path], capture_output=True, text=True, check=True
        ).stdout
    code = [(int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", text)]
    loops = []
    for at, line in code:
        back = re.search(r"BRA.*0x([0-9a-f]+)", line)
        if back and int(back[1], 16) < at:
            inside = [op for here, op in code if int(back[1], 16) <= here <= at]
            names = [re.sub(r"^@!?U?P\w+\s+", "", op).split()[0] for op in inside]
            last = max((i for i, name in enumerate(names) if name.startswith("HMMA")), default=-1)
            loops.append(Counter(names[: last + 1]))
    return max(loops, key=lambda loop: sum(loop.values()))


def cycles(loop):
    """Return what a turn of a loop takes a scheduler at the least."""
    sparse = sum(n for op, n in loop.items() if op.startswith("HMMA.SP"))
    products = sum(n for op, n in loop.items() if op.startswith("HMMA")) - sparse
    others = sum(loop.values()) - products - sparse
    together = PRODUCT * products + SPARSE * sparse + OTHER * others
    return max(together, ALONE * products + SPARSE_ALONE * sparse)


def floors(h, d, alpha, batch, rate):
    """Return the microseconds that memory and instructions take at the least."""
    if alpha > 4 and batch <= 8:  # a turn is 16 parents
        program = few.program_for(batch)
        macros = few.constants(program, d, alpha, True, "none", torch.float16)
        turn = cycles(inner_loop(nvrtc.compiled(few.source(program), (9, 0), macros)))
        each, most = 16 * turn, -(-h // 16 // PROCESSORS)
    else:
        cubin, tiles = compiled(h, d, alpha, batch)
        turns = d / (tiles.run * tiles.deep)  # of the loop, for each warp of a program
        each = turns * tiles.warps * cycles(inner_loop(cubin))
        most = -(-h // tiles.rows // PROCESSORS)  # programs on one multiprocessor
    return {
        "memory": 1e6 * 2 * h * d / rate,
        "instructions": 1e6 * most * each / SCHEDULERS / CLOCK,
    }


def measured(name):
    return json.loads((RESULTS / name).read_text("utf-8"))


def dense_of(cases, h, d, batch):
    """Return the dense layer's least time: it was timed beside every alpha, and is the same one."""
    return min(time for alpha in (2, 4, 8) for time in cases[f"{h}x{d}, {alpha}, {batch}"]["dense"])


NAMES = ("size", "alpha", "batch", "memory", "instructions", "packed took", "dense took", "ratio")


def main():
    if torch.version.cuda is None:
        raise SystemExit("this needs PyTorch for CUDA, for its compiler; it needs no GPU")
    rate = measured("pack-h200.json")["copy_bytes_per_second"]
    cases = measured("pack-rule-h200.json")["cases"]
    lines = ["| " + " | ".join(NAMES) + " |", "|---" * len(NAMES) + "|"]
    found = {}
    for (h, d), alpha, batch in product(SIZES, ALPHAS, BATCHES):
        least = floors(h, d, alpha, batch, rate)
        name = f"{h}x{d}, {alpha}, {batch}"
        took, dense = cases[name]["tiles"][0][0], dense_of(cases, h, d, batch)
        cells = [*name.split(", "), *(f"{v:.1f} µs" for v in (*least.values(), took, dense))]
        lines.append("| " + " | ".join([*cells, f"{took / dense:.2f}"]) + " |")
        found[name] = {k: round(v, 1) for k, v in least.items()} | {"took": took, "dense": dense}
    print("\n".join(lines))
    TO.write_text("\n".join(lines) + "\n", "utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
