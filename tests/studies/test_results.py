"""The results in the repository are those its claims were judged by, and the pages quote them."""

import csv
import importlib
import json
from pathlib import Path

import pandas
import pytest

from fissile.lab.frame import ARM, tidy
from fissile.lab.report import claims_markdown
from fissile.lab.results import judged, load
from fissile.lab.store import Store
from fissile.lab.store.parquet import TrialsFile
from fissile.lab.studies import STUDIES
from fissile.lab.studies.sparsity import MOVES

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


#: Studies that were run with fewer trials, and those whose results are in the repository. A new
#: study has none at first; those on data that cannot be redistributed never have.
TRIALS = {"cnn-256": 3, "cnn-512": 3}
with open(RESULTS / "claims.csv", newline="") as file:
    SHOWN = {row["study"]: STUDIES[row["study"]] for row in csv.DictReader(file)}


def test_a_study_with_verdicts_has_its_numbers_and_the_other_way_round():
    numbers = {path.stem for path in (RESULTS / "tidy").glob("*.parquet")}
    assert numbers & STUDIES.keys() == SHOWN.keys()
    assert len(SHOWN) > 20


@pytest.mark.parametrize("study", SHOWN)
def test_the_tables_are_those_of_the_trials(study, tmp_path):
    with Store(tmp_path) as store:
        store.take(TrialsFile(RESULTS / "trials" / f"{study}.parquet"))
        (run,) = store.runs()
        frame = tidy(load(store, run).frame)
    assert run.study == study
    assert frame.equals(pandas.read_parquet(RESULTS / "tidy" / f"{study}.parquet"))


@pytest.mark.parametrize("study", SHOWN.values(), ids=SHOWN)
def test_the_claims_follow_from_the_results_in_the_repository(study):
    frame = wide(study.id)
    told = [(row["claim"], row["verdict"], row["numbers"]) for row in claims_of(study.id)]
    verdicts = judged(study, frame, "")
    assert told == [(claim.text, verdict.status, verdict.numbers) for claim, verdict in verdicts]


def test_the_claims_as_markdown_are_those_of_the_table():
    with open(RESULTS / "claims.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert (RESULTS / "claims.md").read_text("utf-8") == claims_markdown(rows)


@pytest.mark.parametrize("study", SHOWN.values(), ids=SHOWN)
def test_there_is_a_figure(study):
    assert (RESULTS / "figures" / f"{study.id}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("study", SHOWN.values(), ids=SHOWN)
def test_the_results_are_whole(study):
    frame = wide(study.id)
    trials = frame[frame["arm"] != "converged"]
    assert len(trials) == len(study.works("paper", TRIALS.get(study.id)))
    assert all(row["trials"] == row["trials_asked"] for row in claims_of(study.id))


def test_features_that_are_not_the_paper_s_are_named_beside_every_number():
    claims = (ROOT / "docs" / "claims-tables.md").read_text()
    page = (RESULTS / "index.html").read_text()
    for name in SHOWN:
        frame = wide(name)
        encoders = set(frame["encoder"]) - {"none"} if "encoder" in frame else set()
        [told] = {row["features"] for row in claims_of(name)}
        assert told == " and ".join(one for one in told.split(" and ") if one in encoders)
        for encoder in encoders:
            assert "not CLIP" in encoder
            assert encoder in told
            assert any(row.startswith(f"| {name} ({told}") for row in claims.splitlines())
            assert f"the networks saw {encoder}" in page
            if STUDIES[name].published:
                assert encoder in (RESULTS / "tables" / f"{name}.md").read_text()


def test_every_network_kept_its_budget():
    for name in SHOWN:
        frame = wide(name)
        if "nonzeros" in frame:
            described = frame.columns[: frame.columns.get_loc("trial") + 1]
            cell = [column for column in described if column not in ARM]
            kept = frame[frame["split"] != "dropconnect"]  # whose weights are all there in the end
            assert (kept.groupby(cell)["nonzeros"].nunique() == 1).all()


@pytest.mark.parametrize(
    ("grow", "arm"), [("random", "dynamic-2"), ("gradient", "dynamic-gradient-2")]
)
def test_masks_move_as_was_best_on_held_out_samples(grow, arm):
    moves, frame = MOVES[grow], wide("dynamic-search")
    assert set(frame["validation"]) == {True}
    means = frame[frame["arm"] == arm].groupby(list(moves))["accuracy"].mean()
    assert means.idxmax() == tuple(moves.values())
    used = wide("dynamic")
    assert set(used["validation"]) == {False}
    moved = used[used["arm"] == arm]
    assert all(set(moved[name]) == {value} for name, value in moves.items())


@pytest.fixture
def script(monkeypatch):
    """Return a script of the docs as a module."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "scripts")
    return importlib.import_module


def test_the_pages_show_the_results_as_they_are(script):
    include = script("include")
    named = set()
    for path in include.pages():
        text = path.read_text("utf-8")
        assert include.filled(text) == text, f"{path.name}: run python docs/scripts/include.py"
        named |= {part[1] for part in include.PART.findall(text)}
    assert "results/claims.md" in named
    assert all((RESULTS / "claims.md").read_text().count(f"| {name}") for name in SHOWN)


def test_the_front_page_s_numbers_are_the_results(script):
    front, readme = script("front"), (ROOT / "README.md").read_text("utf-8")
    for name, make in front.FILES.items():
        there = (ROOT / "docs" / "parts" / name).read_text("utf-8")
        assert make() == there, f"{name}: run python docs/scripts/front.py"
        assert f"docs/parts/{name}" in readme


def test_the_speed_told_beside_the_table_is_that_of_the_benchmark():
    """How many times as fast as JAX at the sizes of real data, on both machines."""
    folder, found = ROOT / "benchmarks" / "results", []
    for name in ("2026-11-20-bank-epyc-2-cores", "2026-11-15-bank-h200"):
        result = json.loads((folder / f"{name}.txt").read_text("utf-8").splitlines()[-1])
        large = [one["jax/bank"] for task, one in result["ratios"].items() if "d=32" not in task]
        found += [round(min(large), 1), round(max(large), 1)]
    assert found == [1.6, 3.4, 0.1, 0.1]
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert "1.6 to 3.4 times as fast as JAX on two cores, and was behind JAX on an H200" in readme
