"""The figures of cluster.md, from benchmarks/results/cluster.json.

    python docs/scripts/cluster.py && python docs/scripts/include.py

Writes cluster-*.md into docs/parts; the same results give the same bytes.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS, RESULTS = ROOT / "docs" / "parts", ROOT / "benchmarks" / "results"


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


FILES = {"speed": speed}


if __name__ == "__main__":
    for name, make in FILES.items():
        (PARTS / f"cluster-{name}.md").write_text(make(), "utf-8")
