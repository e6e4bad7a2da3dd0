"""What foretell.md says of foretelling, of capacity, of guided splits and of times.

    python docs/scripts/foretell.py && python docs/scripts/include.py

Writes foretell.md from results/tidy and diagnose-times.md from benchmarks/results.
"""

import json
from pathlib import Path

import numpy as np
import pandas

from fissile.lab.stats import interval
from fissile.lab.studies import STUDIES
from fissile.lab.studies.foretell import Foretells

ROOT = Path(__file__).parents[2]
PARTS, RESULTS = ROOT / "docs" / "parts", ROOT / "results" / "tidy"
FROM = {
    "load": "features per neuron",
    "before_means": "capacity of class means",
    "before_atoms": "capacity of a dictionary's atoms",
    "before_rank": "effective rank per neuron",
    "warm": "accuracy at the split (not of diagnose)",
}


def wide(study):
    """Return the table of a study, from its published results."""
    long = pandas.read_parquet(RESULTS / f"{study}.parquet")
    described = [column for column in long.columns if column not in ("measure", "value")]
    return long.pivot_table(index=described, columns="measure", values="value").reset_index()


def times():
    """Say how long each way takes."""
    found = json.loads((ROOT / "benchmarks" / "results" / "diagnose.json").read_text("utf-8"))
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


def short(name):
    """Return a data set's name without that of its encoder."""
    return name.removesuffix("-efficientnet-lite2").removesuffix("-minilm")


def gains(frame, arm, over="dense"):
    """Return how many points an arm is above another, trial by trial, by data set and width."""
    table = frame.pivot_table(
        index=["data", "neurons", "trial"], columns="arm", values="accuracy", sort=False
    )
    return table[arm] - table[over]


def grid(head, rows):
    """Return the lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def foretold():
    """Say how well each measure tells the gain of a data set that was left out."""
    frame = wide("foretell")
    checks = [claim.check for claim in STUDIES["foretell"].claims]
    told = {one.measures: one(frame) for one in checks if isinstance(one, Foretells)}
    does = "do" if told["load", "before_means"].status == "holds" else "do not"
    random = gains(frame, "random-4").groupby(["data", "neurons"]).mean().unstack("data")
    rows = [
        [" and ".join(FROM[name] for name in names), *parts(verdict.numbers)]
        for names, verdict in told.items()
    ]
    sets = list(dict.fromkeys(frame["data"]))
    widths, trials = sorted(set(frame["neurons"])), frame["trial"].nunique()
    return [
        f"On {len(sets)} data sets, {len(widths)} widths from {widths[0]} to {widths[-1]} neurons "
        f"and {trials} trials each, features per neuron and capacity before the split **{does} "
        "foretell the gain** well enough to print one. A straight line through all other data sets "
        "foretold each set's gain from the random split (alpha 4) this well; the criterion, set "
        "before the first run, is an R² of 0.5 with both together:",
        "",
        *grid(["from", "R²", "error, points", "right about a gain above one point"], rows),
        "",
        "The gains themselves, in points of test accuracy:",
        "",
        *grid(
            ["neurons", *map(short, sets)],
            [[str(n), *(signed(random[one][n]) for one in sets)] for n in widths],
        ),
    ]


def parts(numbers):
    """Return the R², the error and the share of cells that a verdict's numbers begin with."""
    r2, rest = numbers.removeprefix("R² = ").split(" over ")
    off, right = rest.split("off by ")[1].split(" points; right in ")
    return [r2.replace("-", "−"), off, right.split(" of")[0]]


def interference():
    """Say whether capacity rises and gains follow."""
    frame, lines = wide("interference-real"), []
    claims = {claim.text: claim.check for claim in STUDIES["interference-real"].claims}
    for kind, what in (("means", "class means"), ("atoms", "atoms of a dictionary")):
        folds = frame[frame["arm"] == "random-4"][f"{kind}_capacity_fold"]
        [check] = [
            check for text, check in claims.items()
            if getattr(check, "x", "") == f"{kind}_capacity_fold"
        ]  # fmt: skip
        lines += [
            "",
            f"With {what} as features, total capacity after the random split is "
            f"{np.exp(np.log(folds).mean()):.2f} times that of the dense network (higher in "
            f"{(folds > 1).mean():.0%} of the pairs). A line through the mean improvements of all "
            f"cells: {check(frame).numbers}.",
        ]
    return lines


def guided():
    """Say what splits come to that features guide, against the random one."""
    frame, rows = wide("guided"), []
    for name in dict.fromkeys(frame["data"]):
        part = frame[frame["data"] == name]
        row = [short(name)]
        for arm in ("gram-4", "means-4", "atoms-4"):
            # The mean over widths of each trial: trials are independent, widths of one are not.
            over = gains(part, arm, "random-4").groupby("trial").mean()
            low, high = interval(over)
            row.append(f"{signed(over.mean())} ({signed(low)} to {signed(high)})")
        rows.append(row)
    return [
        "",
        "Splits that keep the inputs of a feature together, and the Gram split, against the random "
        "one, in points (the mean over all widths, and its 95 % interval over trials):",
        "",
        *grid(["data", "Gram", "guided by class means", "guided by a dictionary"], rows),
    ]


def text():
    """Return the tables, and a sentence before each."""
    command = "`fissile run foretell interference-real guided --scale paper`"
    return "\n".join([*foretold(), *interference(), *guided(), "", f"({command})", ""])


FILES = {"foretell": text, "diagnose-times": times}

if __name__ == "__main__":
    for name, make in FILES.items():
        (PARTS / f"{name}.md").write_text(make(), "utf-8")
