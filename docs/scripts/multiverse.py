"""Write what docs/multiverse.md says, from a store of its run, and from the results at paper scale.

    fissile multiverse --out multiverse-lab     # the Boolean studies at scale quick
    python docs/scripts/multiverse.py multiverse-lab
    python docs/scripts/include.py

Without a store, only readings that need no trials of their own are written anew: results/trials
has the trials of the default reading at the paper's scale, with every measure.
"""

import shutil
import sys
import tempfile
from math import isnan
from pathlib import Path

from fissile.lab import multiverse
from fissile.lab.readings import QUESTIONS
from fissile.lab.store import Store
from fissile.lab.store.parquet import TrialsFile
from fissile.lab.studies import STUDIES

ROOT = Path(__file__).parents[2]
PARTS, RESULTS = ROOT / "docs" / "parts", ROOT / "results"


def publish(store):
    """Take the published trials of Boolean studies into a store."""
    for study in STUDIES.values():
        path = RESULTS / "trials" / f"{study.id}.parquet"
        if path.exists() and study.data("paper") is None and study.id != "theory":
            store.take(TrialsFile(path))


def markdown(head, rows):
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def of_claims(claims):
    """Return what became of each claim, a row for each."""
    rows = []
    for one in claims.to_dict("records"):
        apart = f"{one['share_apart']:.0%} of {one['apart']}" if one["apart"] else ""
        share = f"{one['share']:.0%} of {one['readings']}"
        row = [share + " †", ""] if one["breaks"] else [share, apart]
        decides = "none" if one["decides"] == "none" else f"`{one['decides'].split(':')[0]}`:"
        decides += one["decides"].partition(":")[2]
        rows.append([one["study"], one["claim"], one["kind"], one["default"], *row, decides])
    head = ["study", "claim", "", "default", "holds in", "apart", "decided by"]
    return markdown(head, rows)


def of_tables(tables):
    """Return the distance of each table, a row for each."""
    rows = [
        [
            f"{one['study']}: {one['table']}",
            one["unit"],
            "–" if isnan(one["default"]) else f"{one['default']:.1f}",
            f"{one['distance']:.1f}",
            f"`{one['reading']}`",
            one["readings"],
        ]
        for one in multiverse.nearest_tables(tables).to_dict("records")
    ]
    return markdown(["table", "unit", "default", "nearest", "its reading", "readings"], rows)


def of_questions():
    """Return the questions and their options, a row for each option."""
    rows = [
        [question.asks if not number else "", f"`{question.name}={option.name}`", option.source]
        for question in QUESTIONS.values()
        for number, option in enumerate(question.options)
    ]
    return markdown(["question", "option", "its source"], rows)


def kinds(claims):
    """Return how many claims are of each kind."""
    counts = ((kind, (claims["kind"] == kind).sum()) for kind in multiverse.KINDS)
    return ", ".join(f"{count} {kind}" for kind, count in counts)


def keep(name, store):
    """Write what became of claims and tables under the readings of a store."""
    runs = sorted(store.runs(), key=lambda run: list(STUDIES).index(run.study))
    found = multiverse.gathered(store, runs)
    claims = multiverse.summary(found.verdicts)
    of_both = f"{len(claims)} claims, {found.verdicts['reading'].nunique()} readings"
    text = f"{of_both}: {kinds(claims)}. {multiverse.counted(found.verdicts)}\n\n"
    tables = of_tables(found.tables) if len(found.tables) else ""
    (PARTS / f"multiverse-{name}.md").write_text(text + of_claims(claims), "utf-8")
    (PARTS / f"multiverse-{name}-tables.md").write_text(tables, "utf-8")
    page = multiverse.write(found, RESULTS / "multiverse" / name)
    shutil.copy(page.with_suffix(".svg"), PARTS / f"multiverse-{name}.svg")


if __name__ == "__main__":
    (PARTS / "multiverse-questions.md").write_text(of_questions(), "utf-8")
    with tempfile.TemporaryDirectory() as folder, Store(folder) as store:
        publish(store)
        keep("paper", store)
    if len(sys.argv) > 1:
        with Store(sys.argv[1], create=False) as store:
            keep("quick", store)
