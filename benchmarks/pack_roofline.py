"""What bounds a packed layer on an H200: memory, logic or the matrix units.

    python benchmarks/pack_roofline.py          # needs Triton, no GPU; half a minute

The kernel of every case is compiled for the chip as pack.py would launch it, and the instructions
of its inner loop are counted. Each kind has a pipe of its own, and none can be faster than its
instructions take when it never waits: that is its floor. The slowest of the three is what a perfect
overlap would leave; kernels that overlap less take up to their sum. Memory is what a large copy
reached in benchmarks/results/pack-h200.json, the measured time beside it is from there too.

Writes docs/pack-roofline.md; the last line is one JSON object.
"""

import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fissile.packed.gpu.owned import owned_kernel
from fissile.packed.gpu.tiles import owned_tiles

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "pack-h200.json"
TO = ROOT / "docs" / "pack-roofline.md"

SCHEDULERS = 132 * 4
CLOCK = 1.98e9  # the highest of the chip, by its data sheet
#: Cycles of a scheduler for an instruction of a warp: 16 lanes of logic, and for m16n8k16 products
#: what ncu showed on average in this kernel with alpha 8. That is no peak rate: the floor of the
#: products is one of this kernel, not of the chip.
LOGIC, PRODUCT = 2.0, 7.1
SIZES = [(4096, 4096), (14336, 4096), (28672, 8192)]
ALPHAS, BATCHES = (2, 4, 8), (1, 16)
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
    """Count the instructions of the longest loop, by their names."""
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
            loops.append(Counter(re.sub(r"^@!?U?P\w+\s+", "", op).split()[0] for op in inside))
    return max(loops, key=lambda loop: sum(loop.values()))


def floors(h, d, alpha, batch, rate):
    """Return the microseconds that each pipe takes at the least."""
    cubin, tiles = compiled(h, d, alpha, batch)
    loop = inner_loop(cubin)
    weights = tiles.rows * tiles.run * tiles.deep  # of a program, in one turn of the loop
    turns = h * d / weights * tiles.warps / SCHEDULERS  # of a warp, for each scheduler
    logic = sum(n for op, n in loop.items() if op.split(".")[0] in ("LOP3", "SHF", "PRMT", "SEL"))
    products = sum(n for op, n in loop.items() if op.startswith("HMMA"))
    return {
        "memory": 1e6 * 2 * h * d / rate,
        "logic": 1e6 * turns * logic * LOGIC / CLOCK,
        "products": 1e6 * turns * products * PRODUCT / CLOCK,
    }


def measured():
    """Return the H200's results by size, alpha, batch and rival, and the rate of a copy."""
    result = json.loads(RESULTS.read_text("utf-8"))
    rows = {
        (row["size"], row["alpha"], row["batch"], row["rival"]): row
        for row in result["rows"]
        if row["part"] == "W1" and row["dtype"] == "float16"
    }
    return rows, result["copy_bytes_per_second"]


def main():
    rows, rate = measured()
    names = ["size", "alpha", "batch", "memory", "logic", "products", "packed took", "dense took"]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    found = {}
    for h, d in SIZES:
        for alpha in ALPHAS:
            for batch in BATCHES:
                least = floors(h, d, alpha, batch, rate)
                case = f"{h}x{d}", alpha, batch
                took = [rows[(*case, rival)]["replayed"] for rival in ("inline", "dense")]
                cells = [
                    *map(str, case),
                    *(f"{value:.1f} µs" for value in (*least.values(), *took)),
                ]
                lines.append("| " + " | ".join(cells) + " |")
                found[", ".join(map(str, case))] = {k: round(v, 1) for k, v in least.items()}
    print("\n".join(lines))
    TO.write_text("\n".join(lines) + "\n", "utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
