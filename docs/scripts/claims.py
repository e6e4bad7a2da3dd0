"""The verdicts on all claims again, from the tables in results/tidy.

    python docs/scripts/claims.py && python docs/scripts/include.py

Writes results/claims.csv and claims.md. What a run was keeps its place there: its features, its
settings and its trials.
"""

import csv
from pathlib import Path

import pandas

from fissile.lab.report import claims_markdown, write_csv
from fissile.lab.results import judged
from fissile.lab.studies import STUDIES

RESULTS = Path(__file__).parents[2] / "results"


def wide(name):
    """Return the table of a study again, from its tidy results."""
    long = pandas.read_parquet(RESULTS / "tidy" / f"{name}.parquet")
    described = [column for column in long.columns if column not in ("measure", "value")]
    return long.pivot_table(index=described, columns="measure", values="value").reset_index()


def judged_again():
    """Return the rows of claims.csv with their verdicts of today."""
    with open(RESULTS / "claims.csv", newline="") as file:
        kept = {row["study"]: row for row in csv.DictReader(file)}
    rows = []
    for name, about in kept.items():
        for claim, verdict in judged(STUDIES[name], wide(name)):
            told = {"claim": claim.text, "source": claim.source}
            told |= {"verdict": verdict.status, "numbers": verdict.numbers}
            about.setdefault("settings", "")
            columns = ("study", *told, "features", "settings", "scale", "trials", "trials_asked")
            rows.append({column: (about | told)[column] for column in columns})
    return rows


if __name__ == "__main__":
    rows = judged_again()
    write_csv(RESULTS / "claims.csv", rows)
    text = claims_markdown(rows)
    (RESULTS / "claims.md").write_text(text, "utf-8", newline="\n")
