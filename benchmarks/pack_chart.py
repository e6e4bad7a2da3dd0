"""The chart and the tables of packed layers for the documentation, from what pack.py wrote.

    python benchmarks/pack_chart.py             # from results/pack-cpu.json and pack-h200.json
    python benchmarks/pack_chart.py FILE ... --to PATH

Draws docs/parts/pack-speed.svg: the time of a split layer over that of the layer before the split,
by batch size, a row for each machine and dtype and a column for each alpha. Writes
docs/parts/pack-speed.md, which has it for every size, and docs/parts/pack-summary.md, which the
README includes.
"""

import argparse
import json
from io import BytesIO
from pathlib import Path

from fissile.lab.plots.style import BASELINE, FULL, Look, styled
from fissile.packed.timing import DENSE, EXPANDED

ROOT = Path(__file__).parents[1]
TO = ROOT / "docs" / "parts" / "pack-speed.svg"
SIZE = "14336x4096"
DTYPES = ("float32", "float16")  # bfloat16 is as fast as float16

LOOKS = {
    "inline": Look("packed", "#0072B2", "o", "-"),
    EXPANDED: Look("written out, dense", "#D55E00", "s", (0, (4, 1.5))),
    "csr": Look("PyTorch CSR", "#009E73", "^", (0, (1, 1.4)), filled=False),
    "2:4": Look("PyTorch 2:4", "#CC79A7", "v", "-.", filled=False),
}


def panels(paths, size):
    """Return the title and the rows of every row of panels."""
    found = []
    for path in paths:
        result = json.loads(path.read_text("utf-8"))
        mine = [row for row in result["rows"] if (row["part"], row["size"]) == ("W1", size)]
        for dtype in DTYPES:
            rows = [row for row in mine if row["dtype"] == dtype]
            if rows:
                graphs = any("replayed_ratio" in row for row in rows)
                how = ", as CUDA graphs" if graphs else f", {result['threads']} threads"
                found.append((f"{result['machine']}, {dtype}{how}", rows))
    return found


def draw(found, size):
    """Return the figure."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    alphas = sorted({row["alpha"] for _, rows in found for row in rows})
    figure = Figure(figsize=(FULL, 1.75 * len(found) + 0.5), layout="constrained")
    parts = figure.subfigures(len(found), 1, squeeze=False)[:, 0]
    for part, (title, rows) in zip(parts, found, strict=True):
        part.suptitle(title, fontsize=8, style="italic")
        grid = part.subplots(1, len(alphas), sharey=True, squeeze=False)[0]
        for axes, alpha in zip(grid, alphas, strict=True):
            panel(axes, [row for row in rows if row["alpha"] == alpha])
            axes.set_title(f"α = {alpha}")
        height, width = size.split("x")
        grid[0].set_ylabel(f"time over that of\nthe dense {height} × {width}")
    shown = {row["rival"] for _, rows in found for row in rows if "ratio" in row}
    handles = [Line2D([], [], label="dense, before the split", **BASELINE)]
    handles += [
        Line2D([], [], label=look.label, **look.curve)
        for name, look in LOOKS.items()
        if name in shown
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def panel(axes, rows):
    """Draw the rivals' ratios over the batch sizes, both axes logarithmic."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    batches = sorted({row["batch"] for row in rows})
    axes.axhline(1, **BASELINE)
    for name, look in LOOKS.items():
        mine = [row for row in rows if row["rival"] == name and "ratio" in row]
        if mine:
            ratios = [row.get("replayed_ratio", row["ratio"]) for row in mine]
            axes.plot([row["batch"] for row in mine], ratios, **look.curve)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.4, 16)  # CSR on a GPU goes on to the hundreds
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("samples at a time")


def tables(results):
    """Return every result file's ratios as Markdown: a table for W1', W2' and the heads."""
    titles = {
        "W1": "W1', the partitioned layer, over the dense layer before the split",
        "W2": "W2', the masked layer (outputs x parents), over the dense layer before the split",
        "head": "whole classifiers, over the dense classifier before the split",
    }
    lines = []
    for result in results:
        rate = result["copy_bytes_per_second"] / 1e9
        graphs = any("replayed" in row for row in result["rows"])
        how = " Times are of CUDA graphs, without what Python takes to launch." if graphs else ""
        lines += [f"**{result['machine']}**; a large copy moves {rate:,.0f} GB/s.{how}", ""]
        for part, title in titles.items():
            mine = [row for row in result["rows"] if row["part"] == part]
            lines += [f"{title[0].upper()}{title[1:]}:", "", *table(mine), ""] if mine else []
        lines += [f"{note}", ""] if (note := left_out(result)) else []
        lines += [
            f"{result['date']}, commit {result['commit']}, torch {result['torch']}: "
            f"`{result['command']}`",
            "",
        ]
    return "\n".join(lines)


def summary(results):
    """Return the ratios that a reader asks for first, as a list in Markdown."""
    lines = []
    for result in results:
        rows = [row for row in result["rows"] if "ratio" in row]
        first = [row for row in rows if row["part"] == "W1" and row["size"] != "512x512"]
        few = [row for row in first if row["batch"] <= (16 if result["device"] == "cuda" else 1)]
        name = f"**{result['machine']}**, {', '.join(dict.fromkeys(r['dtype'] for r in rows))}"
        most = max(row["batch"] for row in few)
        parts = [
            f"alpha {alpha}{batches_of(few, 'inline', alpha)}: {between(few, 'inline', alpha)} "
            f"(expanded matrix {between(few, EXPANDED, alpha)})"
            for alpha in sorted({row["alpha"] for row in few})
        ]
        samples = "one sample" if most == 1 else f"1 to {most} samples"
        graphs = any("replayed_ratio" in row for row in few)
        how = ", as CUDA graphs" if graphs else ""
        lines.append(f"- {name}, {samples}, first layer{how}: {'; '.join(parts)}.")
        if note := left_out(result):
            lines.append(f"- {note}")
        if graphs:
            # The same run without graphs: what Python takes to launch counts in small layers.
            called = [{k: v for k, v in row.items() if k != "replayed_ratio"} for row in few]
            each = [
                f"{size}: {between([row for row in called if row['size'] == size], 'inline')}"
                for size in dict.fromkeys(row["size"] for row in called)
            ]
            lines.append(
                f"- There, called from Python without graphs, all alphas: {'; '.join(each)}."
            )
        one = [row for row in rows if row["batch"] == 1 and row["size"] != "512x512"]
        second = [row for row in one if row["part"] == "W2"]
        heads = [row for row in one if row["part"] == "head"]
        lines.append(
            f"- There, one sample, second layer{how}: {between(second, 'inline')} (expanded matrix "
            f"{between(second, EXPANDED)}); whole classifiers of the studies: "
            f"{between(heads, 'inline')} ({between(heads, EXPANDED)})."
        )
    return "\n".join(lines) + "\n"


def left_out(result):
    """Return a sentence on packed layers whose times no longer hold, if there are any."""
    rows = [row for row in result["rows"] if "removed" in row.get("why", "")]
    if not rows:
        return ""
    alphas = ", ".join(sorted({f"alpha {row['alpha']}" for row in rows}))
    batches = " and ".join(map(str, sorted({row["batch"] for row in rows})))
    return f"W1' with {alphas} and {batches} samples, from 4096x4096 on, was {rows[0]['why']}."


def batches_of(rows, rival, alpha):
    """Return which batches a range is of, where others of the run have no times."""
    every = {row["batch"] for row in rows}
    timed = {row["batch"] for row in rows if (row["rival"], row["alpha"]) == (rival, alpha)}
    return "" if timed == every else f" with {', '.join(map(str, sorted(timed)))} samples only"


def between(rows, rival, alpha=None):
    """Return the range of a rival's ratios."""
    found = [
        row.get("replayed_ratio", row["ratio"])
        for row in rows
        if row["rival"] == rival and alpha in (None, row["alpha"])
    ]
    return f"{min(found):.2f} to {max(found):.2f}"


def table(rows):
    """Return one row for every layer: the packed one at each batch, the others for one sample."""
    batches = sorted({row["batch"] for row in rows})
    names = ["size", "alpha", "dtype", "dense, 1 sample"]
    names += [f"packed, {batch}" for batch in batches]
    names += ["of copy", "plane, 1", "written out, 1", "CSR, 1", "2:4, 1"]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    cases = dict.fromkeys((row["size"], row["alpha"], row["dtype"]) for row in rows)
    for case in cases:
        mine = {
            (row["rival"], row["batch"]): row
            for row in rows
            if (row["size"], row["alpha"], row["dtype"]) == case
        }
        first = batches[0]
        base = mine[DENSE, first]
        cells = [*map(str, case), f"{base.get('replayed', base['median']):,.1f} µs"]
        cells += [multiple(mine.get(("inline", batch))) for batch in batches]
        cells.append(share(mine["inline", first]))
        cells += [multiple(mine.get((n, first))) for n in ("plane", EXPANDED, "csr", "2:4")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def share(row):
    """Return what of a copy's bytes per second a layer reads, or a dash if it was not timed."""
    if "share" not in row:
        return "–"
    return f"{row['share'] * row['median'] / row.get('replayed', row['median']):.0%}"


def multiple(row):
    """Return a ratio, of CUDA graphs where there are some, or a dash for what was not timed."""
    return f"{row.get('replayed_ratio', row['ratio']):.2f}" if row and "ratio" in row else "–"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", help="by default those two")
    parser.add_argument("--size", default=SIZE, help="of the layer, outputs x inputs")
    parser.add_argument("--to", type=Path, default=TO)
    options = parser.parse_args()
    known = (ROOT / "benchmarks" / "results" / name for name in ("pack-cpu.json", "pack-h200.json"))
    files = options.files or [path for path in known if path.exists()]
    found = panels(files, options.size)
    if not found:
        raise SystemExit(f"no results of W1 {options.size}; run benchmarks/pack.py first")
    page = BytesIO()
    with styled():
        draw(found, options.size).savefig(page, format="svg", metadata={"Date": None})
    options.to.write_bytes(page.getvalue())
    results = [json.loads(path.read_text("utf-8")) for path in files]
    options.to.with_suffix(".md").write_text(tables(results), "utf-8")
    options.to.with_name("pack-summary.md").write_text(summary(results), "utf-8")
    print(f"written to {options.to} and {options.to.with_suffix('.md')}")


if __name__ == "__main__":
    main()
