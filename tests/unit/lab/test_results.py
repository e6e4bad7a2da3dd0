"""Runs by name: their names, which one is shown, what each is, and two of them side by side."""

import csv
import re

import pytest

from fissile import FissileError
from fissile.cli.common import print_status
from fissile.lab import compare, report
from fissile.lab.claims import counts
from fissile.lab.compute import TrialResult
from fissile.lab.results import load, matching, nearest, shown, values
from fissile.lab.stats import interval
from fissile.lab.store import Provenance, Run, Store
from fissile.lab.studies import STUDIES, find

pytestmark = pytest.mark.slow  # together: make quick leaves them out

MADE_BY = Provenance("0.1.0", "", "2.11.0", "a processor, 2 cores", "3.11.2")


def noted(store, study="codes", scale="smoke", trials=None, day=1, value=None, **changes):
    """Note a run; with ``value``, which gives a trial's accuracy, all of its trials too."""
    run = Run(study, scale, trials, changes, "fissile", f"2031-01-{day:02}T00:00:00+00:00")
    store.note_run(run)
    if value is not None:
        works = STUDIES[study].works(scale, trials, changes)
        found = [
            TrialResult(one, {"accuracy": value(one), "nonzeros": 264.0}, seconds=0.5)
            for one in works
        ]
        store.add(found, MADE_BY)
    return next(one for one in store.runs() if one.asked == run.asked)


def half(work):
    return 0.5 + 0.01 * work.number


def names(runs):
    return [run.name for run in runs]


# --- names


def test_names_stay_when_a_run_is_made_again(tmp_path):
    with Store(tmp_path) as store:
        noted(store, day=1)
        noted(store, "theory", day=2)
        noted(store, day=3, clauses=16)
        assert names(store.runs()) == ["codes-2", "theory-1", "codes-1"]
        assert noted(store, day=4).name == "codes-1"
        assert names(store.runs()) == ["codes-1", "codes-2", "theory-1"]
        assert load(store, Run("codes", "smoke", None, {}, "")).run.name == "codes-1"
        assert shown(store.runs()[1]) == "codes-2 (smoke, clauses=16)"


def test_a_store_that_is_taken_over_keeps_names_here(tmp_path):
    with Store(tmp_path / "here") as here, Store(tmp_path / "there") as there:
        noted(here, day=5)
        noted(there, day=1, clauses=16)
        noted(there, day=2)
        here.take(there)
        assert {run.name: run.told for run in here.runs()} == {
            "codes-1": {}, "codes-2": {"clauses": 16},
        }  # fmt: skip


# --- which one is shown


def test_the_run_nearest_to_the_paper_is_shown_and_nothing_newer_hides_it(tmp_path):
    with Store(tmp_path) as store:
        noted(store, scale="quick", day=1, value=half)
        noted(store, scale="smoke", day=2, value=half)
        noted(store, scale="quick", day=3, value=half, clauses=16)
        noted(store, scale="quick", trials=1, day=4)
        noted(store, scale="paper", day=5)  # without a single result
        (run,) = nearest(store, ["codes"])
        assert run.name == "codes-1"
        found = load(store, run)
        assert sorted(names(found.others)) == ["codes-2", "codes-3", "codes-4", "codes-5"]


def test_a_run_is_chosen_by_name_scale_or_setting(tmp_path):
    with Store(tmp_path) as store:
        noted(store, scale="quick", day=1, value=half)
        noted(store, scale="smoke", day=2, value=half)
        noted(store, scale="quick", day=3, value=half, clauses=16)
        noted(store, "theory", day=4)
        assert names(nearest(store, ["codes-2", "theory"])) == ["codes-2", "theory-1"]
        assert names(nearest(store, ["codes"], "smoke")) == ["codes-2"]
        assert names(nearest(store, ["codes"], changes={"clauses": 16})) == ["codes-3"]
        assert names(nearest(store, [], "quick", {"clauses": 16})) == ["codes-3"]
        assert nearest(store, ["codes"], changes={"clauses": 9}) == []
        assert names(matching(store, ["codes"])) == ["codes-3", "codes-2", "codes-1"]
        assert names(matching(store, ["codes-1"], "smoke")) == []
        with pytest.raises(FissileError, match="fissile compare codes-3 codes-1"):
            nearest(store, ["codes-1", "codes-3"])


@pytest.mark.parametrize(
    ("word", "meant"), [("code", "codes"), ("capcity", "capacity"), ("frontie", "frontier")]
)
def test_an_unknown_study_is_answered_with_what_was_meant(word, meant):
    with pytest.raises(FissileError, match=f"no study '{word}'; did you mean .*{meant}"):
        find([word])
    with pytest.raises(FissileError, match="there is no study 'xyz'; there are codes"):
        find(["xyz"])


# --- what a run is


def test_a_part_of_the_grid_is_the_papers_and_other_cells_are_not(tmp_path):
    with Store(tmp_path) as store:
        part, narrow = noted(store, "capacity", "quick"), noted(store, "fashionmnist", neurons=8)
        assert load(store, part).apart == ""
        assert load(store, narrow).apart.startswith("neurons = 8, ")  # the smoke scale has less
        same = load(store, noted(store, "capacity", "paper", lr=0.001))
        assert (same.apart, same.changed) == ("", {})
        other = load(store, noted(store, "interference", "paper", clauses=16))
        assert (other.apart, other.changed) == ("clauses = 16", {"clauses": 16})


def test_a_narrowed_axis_leaves_its_claims_untested(tmp_path):
    with Store(tmp_path) as store:
        run = noted(store, "fashionmnist", "paper", 3, value=half, data="generated", neurons=8)
        found = load(store, run)
    assert found.apart == ""  # the cell is the paper's, and its numbers may stand beside
    assert found.changed == {"neurons": 8}
    paper = [verdict.status for claim, verdict in found.verdicts if not claim.own]
    assert set(paper) == {"not tested here"}


def test_values_of_settings():
    found = values(STUDIES["codes"].works("smoke"))
    assert (found["neurons"], found["lr"], found["split"]) == (
        {8}, {0.001}, {"dense", "clause", "random"},
    )  # fmt: skip


def test_means_have_a_row_for_every_cell_and_arm(tmp_path):
    with Store(tmp_path) as store:
        found = load(store, noted(store, "capacity", value=half))
        nothing = load(store, noted(store, "cosine", "paper"))
    assert found.along == ["literals"]  # the number of clauses says no more
    table = found.means()["accuracy"]
    assert list(table["arm"]) == ["dense", "clause-4", "random-4"] * 2
    assert table["mean"].tolist() == pytest.approx([50.5] * 6)
    assert table["error"].tolist() == pytest.approx([0.5] * 6)
    assert nothing.means() == {}


def test_the_count_of_verdicts_is_the_same_wherever_it_is_printed(tmp_path):
    with Store(tmp_path / "store") as store:
        noted(store, "fashionmnist", "quick", value=half, data="generated")
        found = load(store, store.runs()[0])
        page = report.write(store, tmp_path / "report").read_text("utf-8")
    count = counts(verdict for _, verdict in found.verdicts)
    assert sum(count.values()) == len(found.study.claims)
    assert count["not significant"] > 0
    heads = re.findall(r": (\d+)</summary>", (tmp_path / "report" / "claims.md").read_text())
    assert sorted(map(int, heads)) == sorted(filter(None, count.values()))
    boxes = re.findall(r"<li><b>(\d+)</b>", page)
    assert list(map(int, boxes)) == list(count.values())


def test_status_counts_what_is_stored_and_reads_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with Store(tmp_path) as store:
        noted(store, "capacity", trials=3, value=half)
        noted(store, "capacity", trials=5)
        noted(store, "theory")
        for study in STUDIES.values():
            asked, keys = study.keys("smoke")
            assert sorted(keys) == sorted(work.key for work in study.works("smoke"))
            assert asked == len(study.works("smoke"))
        store._db.execute("UPDATE trials SET measures = 'none', provenance = 'nobody'")
        print_status(store, store.runs())
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [row for row in rows if row and row[0][-1].isdigit()]
    told = {row[0]: (row[-5:-2], row[-2:]) for row in rows}
    assert told["capacity-1"] == (["18", "of", "18"], ["9.0", "s"])
    assert told["capacity-2"] == (["18", "of", "30"], ["9.0", "s"])
    assert told["theory-1"][0][0] == "0"


# --- side by side


@pytest.fixture
def three(tmp_path):
    """The same trials three times: the second two points above, the third in one cell alone."""
    gains = {(0, "dense"): 0.01, (1, "dense"): 0.02, (2, "dense"): 0.06}
    with Store(tmp_path / "store") as store:
        runs = [
            noted(store, "capacity", trials=3, value=half),
            noted(
                store, "capacity", trials=3, lr=0.01,
                value=lambda work: half(work) + gains.get((work.number, work.arm.name), 0.02),
            ),
            noted(store, "capacity", trials=2, clauses=3, value=lambda work: half(work) - 0.01),
        ]  # fmt: skip
        yield [load(store, run) for run in runs]


def test_settings_that_differ_and_no_others(three):
    assert compare.settings(three[:2]) == [("lr", "0.001", "0.01")]
    assert compare.settings(three) == [
        ("clauses", "3, 8", "3, 8", "3"),
        ("lr", "0.001", "0.01", "0.001"),
        ("trials", "3", "3", "2"),
    ]
    assert compare.settings([three[0], three[0]]) == []


def test_trials_pair_by_cell_arm_and_number(three):
    table = compare.differences(three[:2])
    assert list(table["cell"]) == ["literals = 12", "literals = 32"] * 3
    assert set(table["pairs"]) == {3}
    dense = table[table["arm"] == "dense"].iloc[0]
    assert dense["first"] == pytest.approx(51)
    assert dense["mean"] == pytest.approx(54)
    assert dense["difference"] == pytest.approx(3)
    assert (dense["low"], dense["high"]) == pytest.approx(interval([1, 2, 6]))
    random = table[table["arm"] == "random-4"].iloc[0]
    assert (random["low"], random["high"]) == pytest.approx((2, 2))


def test_cells_that_one_run_lacks_are_left_out_and_two_pairs_have_no_interval(three):
    table = compare.differences([three[0], three[2]])
    assert list(table["cell"]) == ["literals = 12"] * 3
    assert set(table["pairs"]) == {2}
    assert table["difference"].tolist() == [0] * 3  # the same trials, which are stored once
    assert table["low"].isna().all()
    assert compare.texts(table)[0][5:] == ("+0", "–", "2")


def test_a_changed_setting_does_not_tell_cells_apart(tmp_path):
    with Store(tmp_path) as store:
        one = load(store, noted(store, value=half))
        other = load(store, noted(store, value=lambda work: half(work) + 0.1, clauses=16))
        table = compare.differences([one, other])
        assert table["difference"].tolist() == pytest.approx([10] * 3)
        nothing = load(store, noted(store, "theory"))
        with pytest.raises(FissileError, match=r"codes-1 and theory-1 have no trials of accuracy"):
            compare.differences([one, nothing])


def test_the_comparison_is_a_page_a_figure_and_numbers(three, tmp_path):
    page = compare.write(three, tmp_path / "page").read_text("utf-8")
    made = {path.name for path in (tmp_path / "page").iterdir()}
    assert made == {"index.html", "compare.svg", "compare.png", "compare.csv"}
    for text in ("capacity-2 (smoke, trials=3, lr=0.01)", "lr = 0.01", "<td>0.001</td>", "+3"):
        assert text in page
    assert "not the paper&#39;s settings" in page
    assert "<script" not in page
    with open(tmp_path / "page" / "compare.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["capacity-2"] * 6 + ["capacity-3"] * 3
    assert float(rows[0]["difference"]) == pytest.approx(3)
    before = (tmp_path / "page" / "compare.svg").read_bytes()
    compare.write(three, tmp_path / "page")
    assert (tmp_path / "page" / "compare.svg").read_bytes() == before
