"""The results in the repository are those its claims were judged by, and the README quotes them."""

import csv
from pathlib import Path

import pandas
import pytest

from fissile.lab.studies import STUDIES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def wide(name):
    """The table of a study again, from its tidy results."""
    long = pandas.read_parquet(RESULTS / "tidy" / f"{name}.parquet")
    described = [column for column in long.columns if column not in ("measure", "value")]
    return long.pivot_table(index=described, columns="measure", values="value").reset_index()


def claims_of(name):
    with open(RESULTS / "claims.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if row["study"] == name]


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_the_claims_follow_from_the_results_in_the_repository(study):
    frame = wide(study.id)
    told = [(row["claim"], row["verdict"], row["numbers"]) for row in claims_of(study.id)]
    verdicts = [(claim, claim.check(frame)) for claim in study.claims]
    assert told == [(claim.text, verdict.status, verdict.numbers) for claim, verdict in verdicts]


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_the_results_are_whole(study):
    frame = wide(study.id)
    assert len(frame) == len(study.works("paper"))
    assert all(row["trials"] == row["trials_asked"] for row in claims_of(study.id))
    assert (RESULTS / "figures" / f"{study.id}.pdf").read_bytes().startswith(b"%PDF")
    assert (RESULTS / "figures" / f"{study.id}.png").read_bytes().startswith(b"\x89PNG")


def test_every_network_kept_its_budget():
    for name in STUDIES:
        frame = wide(name)
        if "nonzeros" in frame:
            cell = ["literals", "neurons", "embedding", "trial"]
            assert (frame.groupby(cell)["nonzeros"].nunique() == 1).all()


def test_the_readme_shows_the_claims_as_they_are():
    readme = (ROOT / "README.md").read_text()
    shown = readme.partition("<!-- claims -->\n")[2].partition("<!-- /claims -->")[0]
    assert shown == (RESULTS / "claims.md").read_text()
