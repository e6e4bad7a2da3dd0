"""The command line through its real entry point."""

import json
import os
import re
import shutil
from unittest import mock

import pandas
import pytest
from command import called, spawned

import fissile
from fissile.cli.lab import _write
from fissile.lab.run import Tally
from fissile.lab.store import Run, Store
from fissile.lab.studies import STUDIES, find

#: The studies that need no data set.
MADE = [name for name, study in STUDIES.items() if study.data("smoke") is None]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A store with every study that needs no data at the smallest scale, made by the command."""
    folder = tmp_path_factory.mktemp("lab")
    out = called("run", *MADE, "--scale", "smoke", "--out", folder).stdout
    for name in MADE:
        assert name in out
    return folder


def test_what_is_done_is_not_done_again(lab):
    out = called("run", *MADE, "--scale", "smoke", "--out", lab).stdout
    assert "0 trials computed" in out


def test_all_is_all_that_there_is_data_for(lab, tmp_path):
    shutil.copytree(lab, tmp_path / "lab")
    done = called("run", "all", "--scale", "smoke", "--trials", "1", "--out", tmp_path / "lab")
    assert "imagenet1k (needs imagenet1k-clip)" in done.stderr
    assert all(f"{name} (needs" not in done.stderr for name in MADE)
    assert all(name in done.stdout for name in MADE)


def test_only_some_cells(tmp_path):
    some = ("run", "capacity", "--scale", "smoke", "--out", tmp_path, "--only")
    out = called(*some, "literals=12", "--only", "arm=dense,random-4").stdout
    assert "4 trials computed" in out  # two of each; the run is the whole study's all the same
    status = called("status", "--out", tmp_path).stdout
    assert "4 of" in status
    found = called(*some, "literal=12", code=1)
    assert "--only takes KEY=VALUE,..., not 'literal=12'; keys are alpha, arm" in found.stderr
    err = called(*some, "literals=13", code=1).stderr
    assert "no cell with literals=13; literals is one of 12, 32" in err


def test_one_study_ends_with_its_claims(lab):
    out = called("run", "capacity", "--scale", "smoke", "--out", lab).stdout
    assert "The clause-4 split has more feature capacity" in out
    assert "cells significantly higher" in out
    table, _, _ = out.partition("capacity: Splitting raises feature capacity")
    assert "Total feature capacity, mean ± standard error" in table  # before the verdicts
    assert len(re.findall(r"^ +(?:12|32)(?: +[\d.]+ ± [\d.]+){3} *$", table, re.M)) == 4
    assert "not the paper's settings" in table


def test_studies_say_what_they_cost_and_what_is_done(lab):
    bare, full = (called("studies", "--out", out).stdout for out in (lab / "nowhere", lab))
    for name in STUDIES:
        assert name in bare
        assert name in full
    assert "1,664" in bare  # trials of the superposition study at paper scale, 64 that converge
    assert "% done" not in bare
    assert full.count("100 % done") == len(MADE)  # at scale smoke
    assert not (lab / "nowhere").exists()


def test_status_shows_every_run(lab):
    out = called("status", "--out", lab).stdout
    assert out.count("smoke") == len(MADE)
    assert "40 of 40" in out


def test_results_are_tidy_in_every_format(lab, tmp_path):
    text = called("results", "capacity", "--out", lab).stdout
    (tmp_path / "table.csv").write_text(text)
    csv = pandas.read_csv(tmp_path / "table.csv")
    assert {"literals", "neurons", "arm", "trial", "measure", "value"} <= set(csv.columns)
    keys = ["literals", "neurons", "arm", "trial", "measure"]
    assert not csv.duplicated(keys).any()
    rows = json.loads(called("results", "capacity", "--format", "json", "--out", lab).stdout)
    assert len(rows) == len(csv)
    target = tmp_path / "table.parquet"
    called("results", "capacity", "--format", "parquet", "--to", target, "--out", lab)
    parquet = pandas.read_parquet(target)
    pandas.testing.assert_frame_equal(parquet, csv, check_dtype=False)
    piped = spawned("results", "capacity", "--format", "parquet", "--out", lab, text=False).stdout
    assert piped == target.read_bytes()


def test_the_report_is_written(lab, tmp_path):
    out = called("report", "--out", lab, "--to", tmp_path / "report").stdout
    page = (tmp_path / "report" / "index.html").read_text()
    assert str(tmp_path / "report" / "index.html") in out.replace("\n", "")
    for study in (STUDIES[name] for name in MADE):
        assert study.title in page


def test_theory_prints_exact_approximate_and_sampled():
    out = called("theory", "--neurons", 64).stdout
    for number in ("0.9897", "0.9973", "0.9896", "0.002447", "0.007812", "49", "40.6"):
        assert number in out


def test_a_changed_setting_is_another_run(lab, tmp_path):
    shutil.copytree(lab, tmp_path / "lab")  # a store can be copied
    command = ("run", "codes", "theory", "--scale", "smoke", "--out", tmp_path / "lab")
    out = called(*command, "--set", "train=300").stdout
    assert "6 trials computed" in out
    where = ("--out", tmp_path / "lab")
    assert "train=300" in called("status", *where).stdout
    only = called("status", "codes", "--set", "train=300", *where).stdout
    assert "codes-2" in only
    assert "codes-1" not in only
    assert "theory" not in only
    # Nothing that was computed is hidden by what is newer.
    found = {name: called("results", name, *where) for name in ("codes", "codes-1", "codes-2")}
    assert found["codes"].stdout == found["codes-1"].stdout != found["codes-2"].stdout
    assert called("results", "codes", "--set", "train=300", *where).stdout == (
        found["codes-2"].stdout
    )
    assert "Not shown: codes-2 (smoke, train=300)" in found["codes"].stderr
    out = called("report", "codes-2", *where).stdout
    assert "Not shown: codes-1 (smoke); name one to see it." in out
    assert "codes-2" in (tmp_path / "lab" / "report" / "index.html").read_text()
    out = called("compare", "codes-1", "codes-2", *where, "--to", tmp_path / "both").stdout
    assert re.search(r"train +256 +300", out)
    assert "differences from codes-1, by paired trials" in out
    assert (tmp_path / "both" / "index.html").exists()
    assert "takes two runs or more" in called("compare", "codes-1", *where, code=1).stderr


def test_a_setting_may_be_true_or_false(tmp_path):
    """A whole run, since a switch was once read as a word."""
    run = ("run", "cnn-256", "--scale", "smoke", "--only", "arm=dense", "--out", tmp_path)
    with mock.patch("fissile.cli.run.run_trials", return_value=Tally()):
        for word in ("true", "false"):
            called(*run, "--set", f"mirror={word}")
        assert "mirror=7 is not true or false" in called(*run, "--set", "mirror=7", code=1).stderr
    with Store(tmp_path) as store:
        asked = {run.name: run.told for run in store.runs()}
    assert asked == {"cnn-256-1": {"mirror": True}, "cnn-256-2": {"mirror": False}}


def test_the_version():
    assert called("--version").stdout == f"fissile {fissile.__version__}\n"


def test_results_are_readable_on_a_terminal(lab):
    """A table for a reader, rows for a program."""
    table = called("results", "capacity", "--format", "table", "--out", lab).stdout
    assert "capacity-1 (smoke)" in table
    assert "Total feature capacity, mean ± standard error" in table
    assert "The clause-4 split has more feature capacity" in table
    err = called("results", "capacity", "--format", "table", "--to", "x", "--out", lab, code=1)
    assert "--format table is for the terminal" in err.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "nothing"), "there is no study 'nothing'; there are codes"),
        (("run", "codes", "--set", "train"), "--set takes KEY=VALUE"),
        (("run", "codes", "--set", "=3"), "--set takes KEY=VALUE"),
        (("run", "codes", "--set", "trian=3"), "codes has no setting 'trian' to change"),
        (("run", "codes", "theory", "--set", "trian=3"), "codes has no setting 'trian'"),
        (("run", "codes", "--set", "alpha=4"), "codes has no setting 'alpha'"),
        (("run", "codes", "--set", "train=x"), "train='x' is not a whole number"),
        (("run", "codes", "--set", "embedding=8"), "no clauses to split by"),
        (("run", "codes", "--device", "abacus"), "cannot train on 'abacus'"),
        (("status",), "there is no store here"),
        (("report",), "there is no store here"),
        (("results", "codes"), "there is no store here"),
        (
            ("results", "frontier"),
            "frontier stands for several studies, and results are of one: fr",
        ),
        (("run", "code"), "there is no study 'code'; did you mean codes?"),
        (("theory", "--alpha", "0"), "alpha=0"),
        (("theory", "--literals", "30"), "do not divide into clauses"),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(arguments, message, tmp_path):
    where = () if arguments[0] == "theory" else ("--out", tmp_path / "lab")
    err = called(*arguments, *where, code=1).stderr
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "lab").exists()


def test_usage_errors_are_usage_errors():
    assert "Usage" in called("run", code=2).stderr
    assert "huge" in called("run", "codes", "--scale", "huge", code=2).stderr


def test_a_failed_run_exits_with_one(tmp_path):
    # Forty clusters of eight or sixteen inputs cannot be; the dense arms can.
    command = ("run", "embed-neurons", "--scale", "smoke", "--set", "clusters=40")
    done = called(*command, "--out", tmp_path, code=1)
    assert "failed" in done.stderr
    assert "clusters, not 40" in done.stderr


def test_a_store_that_is_no_store_is_refused_and_left_alone(tmp_path):
    (tmp_path / "trials.sqlite").write_text("something else")
    done = called("run", "codes", "--scale", "smoke", "--out", tmp_path, code=1)
    assert "trials.sqlite" in done.stderr
    assert (tmp_path / "trials.sqlite").read_text() == "something else"


def test_a_run_of_another_version_does_not_hide_the_others(tmp_path):
    called("run", "codes", "theory", "--scale", "smoke", "--out", tmp_path / "lab")
    with Store(tmp_path / "lab") as store:
        store.note_run(Run("codes", "smoke", None, {"dropout": 0.5}, "fissile run codes --new"))
        store.note_run(Run("codes", "huge", None, {}, "fissile run codes --scale huge"))
        store.note_run(Run("psychics", "smoke", None, {}, "fissile run psychics"))
    out = called("status", "--out", tmp_path / "lab").stdout
    assert out.count("Made by another version of fissile: ") == 3
    assert "4 of 4" in out  # of theory
    assert "6 of 6" in out  # of codes
    called("report", "--out", tmp_path / "lab")
    assert "Codes appear" in (tmp_path / "lab" / "report" / "index.html").read_text()


def test_results_of_a_study_that_never_ran(lab, tmp_path):
    called("run", "theory", "--scale", "smoke", "--out", tmp_path)
    done = called("results", "codes", "--out", tmp_path, code=1)
    assert "`fissile run codes` first; the store holds theory-1 (smoke)" in done.stderr
    assert "there is no study 'noth'" in called("report", "noth", "--out", tmp_path, code=1).stderr


def test_the_first_hint_takes_two_minutes_at_most():
    """By its trials' costs, about seconds on two cores; imports and figures take ten."""
    hint = re.search(r"Begin with: fissile run ([a-z ]+) &&", called("--help").stdout)[1]
    works = [work for study in find(hint.split()) for work in study.everything("quick")]
    assert sum(work.cost for work in works) < 5


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_every_smoke_scale_takes_seconds(study):
    assert sum(work.cost for work in study.everything("smoke")) < 30


def test_help_has_examples():
    assert "Begin with" in called("--help").stdout
    commands = (
        "run",
        "studies",
        "status",
        "results",
        "report",
        "compare",
        "theory",
        "multiverse",
        "claims",
    )
    for command in commands:
        assert "Example" in called(command, "--help").stdout
    for command in ("run", "report"):
        assert "several at once: frontier or ablation" in called(command, "--help").stdout


def test_a_multiverse_from_the_command_to_the_page(tmp_path):
    words = ("multiverse", "capacity", "--scale", "smoke", "--trials", 3, "--out", tmp_path)
    first = called(*words, "--only", "literals=12")
    assert re.search(r"\d+ readings of capacity: [\d,]+ trials, of which [\d,]+ are", first.stderr)
    assert "Robust: holds in at least 90%" in first.stdout
    page = (tmp_path / "multiverse" / "multiverse.html").read_text()
    assert "Splitting" not in page
    assert "capacity: The random-4 split has more feature capacity" in page
    assert "0 trials computed" in called(*words, "--only", "literals=12").stdout
    called(*words)
    assert "defaults would be others" in called("claims", "--out", tmp_path).stdout
    called("report", "--out", tmp_path)
    assert 'href="multiverse.html"' in (tmp_path / "report" / "index.html").read_text()
    assert (tmp_path / "report" / "multiverse.html").read_text() == (
        tmp_path / "multiverse" / "multiverse.html"
    ).read_text()


def test_claims_of_another_reading_alone_say_what_is_missing(tmp_path):
    words = ("run", "capacity", "--scale", "smoke", "--reading", "prose", "--out", tmp_path)
    called(*words, "--only", "arm=dense")
    shown = called("claims", "--out", tmp_path).stdout
    assert shown.startswith(
        "capacity: whole is no reading; default lacks 12 of 12 trials; "
        "negatives=clause,others=arbitrary lacks 8 of 12 trials.\nNo reading is finished yet"
    )
    called(*words)
    shown = called("claims", "--out", tmp_path).stdout
    whole = "capacity: whole is negatives=clause,others=arbitrary; default lacks 12 of 12 trials."
    assert shown.startswith(whole)
    assert "no data" in shown  # the default's
    assert "nearest" not in shown  # there is no distance


def test_a_run_under_a_reading(tmp_path):
    words = ("capacity", "--scale", "smoke", "--out", tmp_path)
    called("run", *words, "--reading", "negatives=flip,cosine=signed", code=1)
    called("run", *words, "--reading", "negatives=flip")
    assert (
        "flip"
        in called("results", "capacity", "--reading", "negatives=flip", "--out", tmp_path).stdout
    )
    assert (
        "no such results"
        in called("results", *words[:1], "--reading", "prose", "--out", tmp_path, code=1).stderr
    )
    for command in ("run", "plan"):
        wrong = called(command, *words, "--reading", "prosa", code=1).stderr
        assert "there is no reading 'prosa'; give default, prose, tables" in wrong
    wrong = called("multiverse", "theory", "--out", tmp_path, code=1).stderr
    assert "leaves nothing open in theory" in wrong


@pytest.mark.parametrize(
    ("through", "words", "offered"),
    [
        (spawned, "run emb", ["embed-neurons", "embed-clauses"]),
        (called, "run abl", [*(study.id for study in find(["ablation"])), "ablation"]),
    ],
)
def test_completion_offers_the_studies(through, words, offered):
    env = {
        "_FISSILE_COMPLETE": "complete_bash",
        "COMP_WORDS": f"fissile {words}",
        "COMP_CWORD": "2",
    }
    assert through(**env).stdout.split() == offered


@pytest.mark.parametrize("format", ["csv", "json", "parquet"])
def test_a_table_replaces_a_file_whole_or_not_at_all(format, tmp_path, monkeypatch):
    frame, path = pandas.DataFrame({"a": [1, 2]}), tmp_path / "t"
    _write(frame, format, path)
    old = path.read_bytes()
    read = {"csv": pandas.read_csv, "json": pandas.read_json, "parquet": pandas.read_parquet}
    assert read[format](path).equals(frame)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(fissile.FileError, match=r"could not write .*: No space left"):
        _write(pandas.DataFrame({"a": range(100)}), format, path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
