"""What will-it-help.md says of foretelling, of capacity, of guided splits and of times.

    python docs/scripts/foretell.py && python docs/scripts/include.py

Writes foretell.md and diagnose-times.md into docs/parts, from benchmarks/results.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS, RESULTS = ROOT / "docs" / "parts", ROOT / "benchmarks" / "results"


def read(name="foretell"):
    """Return a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def times():
    """Say how long each way takes."""
    found = read("diagnose")
    seconds = {name: one["clock"] for name, one in found["seconds"].items()}
    again = f"{1000 * seconds['the same call again']:.0f} ms"
    return (
        "On 10,000 samples of 500 features and 50 classes `diagnose` took "
        f"{seconds['diagnose']:.1f} s, `fissile try` {seconds['try']:.0f} s, and an experiment "
        f"{found['ratio']:.2f} times the bare loop over as many steps; the same call again, from "
        f"the store, {again}. ({found['machine']}, beside other work: a load of "
        f"{found['load']:.1f}; {found['threads']} thread for torch; {found['date']}, commit "
        f"{found['commit']}; `{found['command']}`)\n"
    )


def signed(value):
    """Return a number of points with its sign."""
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", "−")


def text():
    """Return the tables, and a sentence before each."""
    found = read()
    about, summary = found["about"], found["summary"]
    names = list(dict.fromkeys(point["set"] for point in summary["points"]))
    seeds = 1 + max(cell["seed"] for cell in found["cells"])
    widths = sorted({point["neurons"] for point in summary["points"]})
    does = "do" if summary["foretells"] else "do not"
    lines = [
        f"On {len(names)} data sets ({', '.join(names)}), {len(widths)} widths from {widths[0]} to "
        f"{widths[-1]} neurons and {seeds} seeds, measures before the split **{does} foretell the "
        "gain** well enough to print one. A straight line through all other data sets foretold "
        "each set's gain from the random split (alpha 4) this well; the criterion, set before the "
        "first run, was an R² of 0.5 and 80 % right with load and capacity together:",
        "",
        "| from | R² | right about a gain above one point | error, points |",
        "|---|---|---|---|",
    ]
    for name, one in summary["left_out"].items():
        r2 = f"{one['r2']:.2f}".replace("-", "−")
        lines.append(f"| {name} | {r2} | {one['right']:.0%} | {one['error']:.1f} |")
    lines += ["", "The gains themselves, in points of test accuracy:", ""]
    lines += ["| neurons | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    gains = {(p["set"], p["neurons"]): p["gain"] for p in summary["points"]}
    for width in widths:
        row = " | ".join(signed(gains[name, width]) for name in names)
        lines.append(f"| {width} | {row} |")
    for key, what in (("capacity", "class means"), ("capacity_atoms", "atoms of a dictionary")):
        one = summary["interference"][key]
        p = "below 0.001" if one["p"] < 0.001 else f"{one['p']:.3f}"
        slope = f"{one['slope']:.1f}".replace("-", "−")
        lines += [
            "",
            f"With {what} as features, total capacity is {one['fold']:.2f} times that of the dense "
            f"network (higher in {one['rises']:.0%} of the pairs). Gains against the logarithm of "
            f"that ratio: slope {slope} points, R² {one['r2']:.2f}, p {p}.",
        ]
    lines += [
        "",
        "Splits that keep the inputs of a feature together, and the Gram split, against the "
        "random one, in points (mean over widths and seeds; 95 % interval as if all cells were "
        "independent, which those of one data set are not quite):",
        "",
        "| data | split | over random | 95 % |",
        "|---|---|---|---|",
    ]
    for one in summary["guided"]:
        ends = f"{signed(one['low'])} to {signed(one['high'])}"
        lines.append(f"| {one['set']} | {one['split']} | {signed(one['over_random'])} | {ends} |")
    lines += [
        "",
        f"({about['machine']}, {about['date']}, commit {about['commit']}; "
        "`python benchmarks/foretell.py`)",
        "",
    ]
    return "\n".join(lines)


FILES = {"foretell": text, "diagnose-times": times}

if __name__ == "__main__":
    for name, make in FILES.items():
        (PARTS / f"{name}.md").write_text(make(), "utf-8")
