"""The figures of cluster.md, from benchmarks/results/cluster.json and plan.json, and from the plan.

    python docs/scripts/cluster.py && python docs/scripts/include.py

Writes cluster-*.md into docs/parts; the same results and the same model give the same bytes.
"""

import json
from pathlib import Path

from fissile.lab.plan import duration, plan
from fissile.lab.studies import STUDIES

ROOT = Path(__file__).parents[2]
PARTS, RESULTS = ROOT / "docs" / "parts", ROOT / "benchmarks" / "results"
MODEL = ROOT / "src" / "fissile" / "lab" / "measured.json"


def read(name):
    """Return a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def speed():
    """Say what Ray costs."""
    found = read("cluster")
    own, ray = found["seconds"]["local"], found["seconds"]["ray"]
    command = found["command"].partition(" --to")[0]
    return (
        f"The same {found['trials']:,} trials of `superposition` took {own['run']:.1f} s in one "
        f"local run on both cores and {ray['run']:.1f} s on {found['workers']} Ray workers with "
        f"one core each: **{found['ray/local']:.2f}** of the local speed, with the same numbers to "
        f"the last bit. Before that, imports and first compilations took {own['start']:.1f} s, and "
        f"with Ray's own start {ray['start']:.1f} s. ({found['machine']}, {found['date']}, commit "
        f"{found['commit']}; `{command}`)\n"
    )


def beforehand():
    """Return what was said of two runs, and what they took."""
    found = read("plan")
    lines = ["| run | trials | said | from, to | took | took / said |", "|---|---|---|---|---|---|"]
    for one in found["runs"]:
        within = "" if one["within"] else ", outside the range"
        lines.append(
            f"| `{one['run']}` | {one['trials']} | {one['estimate']:.0f} s | {one['low']:.0f} to "
            f"{one['high']:.0f} s | {one['measured']:.0f} s{within} | "
            f"{one['measured / estimate']:.2f} |"
        )
    where = f"{found['machine']}, {found['date']}, commit {found['commit']}"
    return "\n".join([*lines, "", f"({where}; `python benchmarks/plan.py`)"]) + "\n"


def errors():
    """Return how far the model is off, for every kind of worker and of network."""
    lines = [
        "| worker | kind of network | error | measured batches | studies |",
        "|---|---|---|---|---|",
    ]
    for worker in json.loads(MODEL.read_text("utf-8"))["workers"]:
        for name, kind in worker["kinds"].items():
            error = f"{kind['error']:.2f}" if kind["error"] else "unknown"
            found = f"{error} | {kind['batches']} | {kind['studies']}"
            lines.append(f"| {worker['name']} | {name} | {found} |")
    return "\n".join(lines) + "\n"


def share(found, *parts):
    """Return how much of the time goes into some parts."""
    return f"{100 * sum(getattr(found.parts, part) for part in parts) / found.wall:.0f} %"


def imagenet():
    """Return the plan of ImageNet-1k, on a few GPUs and on many."""
    studies = {"imagenet1k": STUDIES["imagenet1k"].works("paper")}
    found = [plan(studies, workers=count, device="cuda") for count in (8, 1000)]
    rows = [
        ("trials", [f"{one.trials:,}" for one in found]),
        ("batches", [f"{one.batches:,}" for one in found]),
        ("time", [duration(one.wall) for one in found]),
        ("GPU-hours", [f"{one.work / 3600:.1f}" for one in found]),
        ("longest batch", [duration(one.longest) for one in found]),
        ("of a GPU's time: training", [share(one, "training") for one in found]),
        ("start-up, data, set-up", [share(one, "start", "data", "set_up") for one in found]),
        ("waiting for the last", [share(one, "waiting") for one in found]),
        ("GPUs with nothing to do", [f"{one.workers - one.busy:,}" for one in found]),
    ]
    lines = ["| | 8 GPUs | 1,000 GPUs |", "|---|---|---|"]
    lines += [f"| {name} | {' | '.join(values)} |" for name, values in rows]
    guessed = sorted({kind for one in found for kind in one.unmeasured})
    if guessed:
        lines += [
            "",
            f"A guess: {', '.join(guessed)} networks were never timed on {found[0].measured_on}.",
        ]
    notes = dict.fromkeys(note for one in found for note in one.notes)
    lines += [f"\n{note}" for note in notes if note.startswith("Never measured")]
    return "\n".join(lines) + "\n"


FILES = {"speed": speed, "beforehand": beforehand, "errors": errors, "imagenet": imagenet}


if __name__ == "__main__":
    for name, make in FILES.items():
        (PARTS / f"cluster-{name}.md").write_text(make(), "utf-8")
