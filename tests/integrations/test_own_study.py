"""Studies in files outside the package, through the command line."""

import json
import re
import shutil
import sys
import time

import numpy as np
import pytest
from command import called, spawned
from own_studies import TOY, written

from fissile.lab import classifier, source, studies
from fissile.lab.store import Store
from fissile.lab.study import SCALES


@pytest.fixture(autouse=True)
def nothing_is_given(monkeypatch):
    """As in a new process: no file was named yet."""
    monkeypatch.setattr(studies, "GIVEN", given := {})
    monkeypatch.setattr("fissile.lab.results.GIVEN", given)
    monkeypatch.setattr(source, "_MODULES", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    classifier._from_files.cache_clear()


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A study's file and a store with two runs of it."""
    folder = tmp_path_factory.mktemp("toy")
    path = written(folder)
    run = ("run", path, "--scale", "smoke", "--out", folder / "lab")
    called(*run)
    called(*run, "--set", "width=2", "--trials", "4")
    return path, folder / "lab"


def line_of(path, text):
    """Return the number of the only line with a text."""
    lines = path.read_text().splitlines()
    (found,) = (number for number, line in enumerate(lines, 1) if text in line)
    return found


# --- as ours


def test_it_runs_resumes_and_ends_with_means_and_verdicts(tmp_path):
    path = written(tmp_path)
    run = ("run", path, "--scale", "smoke", "--out", tmp_path / "lab")
    out = called(*run).stdout
    assert "12 trials computed" in out
    assert re.search(r"^ +1 +2\.\d+ ± 0\.0\d+ +1\.\d+ ± 0\.0\d+ *$", out, re.M)
    assert re.search(r"Sparse is lower\. +holds +2 of 2 cells significantly lower", out)
    assert re.search(r"There are rows\. +holds +12 rows", out)
    assert "0 trials computed, 12 found" in called(*run).stdout
    assert "0 trials computed, 6 found" in called(*run, "--only", "width=2").stdout
    assert "4 trials computed, 12 found" in called(*run, "--trials", "4").stdout


def test_it_is_listed_exported_reported_planned_and_compared(toy, tmp_path):
    path, lab = toy
    where = ("--out", lab)
    status = called("status", path, *where).stdout
    assert re.search(r"toy-2 +smoke +4 +width=2 .* 8 of 8", status)
    assert re.search(r"toy-1 +smoke .* 12 of 12", status)
    rows = json.loads(called("results", path, "--format", "json", *where).stdout)
    assert {(row["arm"], row["width"]) for row in rows} == {
        (arm, width) for arm in ("dense", "sparse") for width in (1, 2)
    }
    table = called("results", path, "toy-2", "--format", "table", *where).stdout
    assert "toy-2 (smoke, trials=4, width=2)" in table
    assert "With width = 2" not in table  # a part of the grid
    out = called("report", path, "--to", tmp_path, *where).stdout
    assert "Not shown: toy-2 (smoke, trials=4, width=2)" in out
    page = (tmp_path / "index.html").read_text()
    for text in ("<h1>A toy</h1>", "Sparse is lower.", "Figure 1", "12 rows", "data:image/svg"):
        assert text in page
    assert "Expand Neurons" not in page
    assert "dense" in (tmp_path / "figures" / "toy.csv").read_text()
    told = called("compare", path, "toy-1", "toy-2", "--measure", "loss", *where).stdout
    assert "loss: differences from toy-1, by paired trials" in told
    assert "All 6 on" in called("plan", path, "--scale", "smoke", "--trials", "5", *where).stdout


def test_it_stands_beside_ours_in_one_store(toy, tmp_path):
    path, lab = toy
    shutil.copytree(lab, tmp_path / "lab")
    where = ("--out", tmp_path / "lab")
    both = called("run", "theory", path, "--scale", "smoke", *where).stdout
    assert "theory-1" in both
    assert "toy-1" in both
    called("report", *where)
    page = (tmp_path / "lab" / "report" / "index.html").read_text()
    assert "Coverage stays, collisions go" in page
    assert "A toy" in page
    studies.GIVEN.clear()
    assert "toy-1 cannot be shown" in called("report", *where).stdout


def test_processes_compute_it(tmp_path):
    path = written(tmp_path)
    spawned("run", path, "--scale", "smoke", "--out", tmp_path / "two", "--jobs", 2)
    called("run", path, "--scale", "smoke", "--out", tmp_path / "one")
    one, two = (called("results", path, "--out", tmp_path / name).stdout for name in ("one", "two"))
    assert one == two


# --- a store that somebody hands over


def test_no_file_runs_because_a_store_names_it(tmp_path):
    mark = tmp_path / "ran"
    ran = f"import pathlib\nimport torch\npathlib.Path({str(mark)!r}).touch()\n"
    path = written(tmp_path, ("import torch\n", ran))
    called("run", path, "--scale", "smoke", "--out", tmp_path / "lab")
    mark.unlink()
    studies.GIVEN.clear()
    source._MODULES.clear()
    where = ("--out", tmp_path / "lab")
    told = f"toy-1 cannot be shown: its study is in a file, .* Made by: fissile run .*{path.name}"
    status = called("status", *where).stdout
    assert re.match(told, status)
    assert "scale" not in status.partition("Made by")[0]  # there is no table of nothing
    assert re.search(told, called("results", "toy-1", *where, code=1).stderr)
    assert re.search(told, called("compare", "toy-1", "toy-1", *where, code=1).stderr)
    err = called("report", *where, code=1).stderr
    assert "give the files of the studies of toy-1" in err
    assert "there is no study 'toy'" in called("run", "toy", *where, code=1).stderr
    assert not mark.exists()
    assert "12 rows" in called("results", path, "--format", "table", *where).stdout
    assert mark.exists()


def test_a_run_whose_trials_the_file_has_no_more_says_so(tmp_path):
    path = written(tmp_path)
    where = ("--out", tmp_path / "lab")
    called("run", path, "--scale", "smoke", *where)
    written(tmp_path, ("width=(1, 2)", "width=(1, 3)"))
    assert "toy.py has other trials now" in called("status", path, *where).stdout
    assert "6 trials computed, 6 found" in called("run", path, "--scale", "smoke", *where).stdout
    assert "has other trials now" in called("results", path, "toy-1", *where, code=1).stderr
    table = called("results", path, "--format", "table", *where).stdout
    assert table.startswith("toy-2 (smoke)")
    written(tmp_path)  # as it was
    assert called("results", path, "--format", "table", *where).stdout.startswith("toy-1")
    assert "there is no file" in called("report", tmp_path / "gone.py", *where, code=1).stderr


# --- what decides a trial's key


@pytest.mark.parametrize(
    ("old", "new", "again"),
    [
        ("# nothing", "# a comment\n", False),
        ('"A toy"', '"Another title"', False),
        ('"Sparse is lower."', '"It is lower."', False),
        ('f"{len(frame)} rows"', "str(len(frame))", False),
        ("FACTOR = 2.0", "FACTOR = 3.0", True),
        ("FACTOR * width", "FACTOR + width", True),
        ("\n\ndef scaled", "\n\ntorch.set_flush_denormal(False)\n\n\ndef scaled", True),
    ],
)
def test_an_edit_computes_again_only_what_comes_to_other_numbers(tmp_path, old, new, again):
    """What the function uses counts, and comments, claims and titles do not."""
    path = written(tmp_path, text=f"{TOY}# nothing")
    run = ("run", path, "--scale", "smoke", "--trials", "1", "--out", tmp_path / "lab")
    called(*run)
    written(tmp_path, (old, new), text=f"{TOY}# nothing")
    assert f"{4 if again else 0} trials computed" in called(*run).stdout


def test_a_module_beside_the_file_counts(tmp_path):
    path = written(tmp_path, ("FACTOR = 2.0", "from toy_helper import FACTOR"))
    (tmp_path / "toy_helper.py").write_text("FACTOR = 2.0\n")
    run = ("run", path, "--scale", "smoke", "--trials", "1", "--out", tmp_path / "lab")
    assert "4 trials computed" in called(*run).stdout
    (tmp_path / "toy_helper.py").write_text("FACTOR = 3.0\n")
    assert "4 trials computed" in spawned(*run).stdout


# --- mistakes


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("def scaled(width):", "def scaled(width:", "'(' was never closed"),
        ("import torch\n", "import torch\ntorch.nothing\n", "has no attribute 'nothing'"),
        ("STUDY =", "STUDIES =", "it has no STUDY = Study(...)"),
        ('id="toy"', 'id="codes"', "codes is a study of fissile; give yours another id"),
        ('id="toy"', 'id="../toy"', "use small letters, digits and single hyphens"),
        ('{"smoke":', '{"tiny":', "'tiny' is no scale; scales are smoke, quick, paper"),
        ('("dense", "sparse")),),)', '("dense", "spare")),),)', "no trial has the arm 'spare'"),
        ('Lines("width"', 'Lines("breadth"', "no trial has the column 'breadth', which Lines"),
        ('Beats("sparse"', 'Beats("sparser"', "no trial has the arm 'sparser', which Beats names"),
        ('"loss", ("width",)', '"loss", ("depth",)', "no trial has the column 'depth'"),
        ("width=(1, 2)", "width=(1, [2])", "width=[2] is no setting; give numbers or words"),
        ("Scale(3, trials_of(trial, ", "Scale(3, trials_of(trail, ", "name 'trail' is not defined"),
    ],
)  # fmt: skip
def test_mistakes_name_the_file_and_its_line(tmp_path, old, new, told):
    path = written(tmp_path, (old, new))
    err = called("run", path, "--scale", "smoke", "--out", tmp_path / "lab", code=1).stderr
    assert len(err.strip().splitlines()) == 1
    where, _, message = err.removeprefix("error: ").partition(": ")
    assert told in message
    if "no STUDY" in told:
        assert where == str(path)
    else:
        assert where == f"{path}, line {line_of(path, new.strip().splitlines()[-1])}"
    assert not (tmp_path / "lab").exists()


@pytest.mark.parametrize(
    ("old", "new", "line", "told"),
    [
        ('return Verdict("holds", f"', 'raise KeyError(f"', None, "cannot be judged: KeyError"),
        ("return Verdict(", "return (", "There are rows.", "its check returned ("),
    ],
)  # fmt: skip
def test_a_claim_that_raises_leaves_the_trials(tmp_path, old, new, line, told):
    path = written(tmp_path, (old, new))
    run = ("run", path, "--scale", "smoke", "--out", tmp_path / "lab")
    done = called(*run, code=1)
    assert f"toy.py, line {line_of(path, line or new)}: " in done.stderr
    assert told in done.stderr
    assert "12 trials computed" in done.stdout
    written(tmp_path)
    assert "0 trials computed, 12 found" in called(*run).stdout


@pytest.mark.parametrize(
    ("new", "told"),
    [
        ("if seed == 2: return 1 / 0\n    return {", "seed 2: ZeroDivisionError: division by zero"),
        ("if seed == 2: return None\n    return {", "it returned None; return a dict"),
        ('if seed == 2: return {"width": 1}\n    return {', "'width' is a setting; give"),
        (
            'if seed == 2: return {"loss": float("nan")}\n    return {',
            "'loss' is nan; return finite numbers",
        ),
    ],
)
def test_a_trial_that_fails_leaves_the_others(tmp_path, new, told):
    path = written(tmp_path, ("return {", new))
    done = called("run", path, "--scale", "smoke", "--out", tmp_path / "lab", code=1)
    assert done.stderr.count(told) == 4  # once for each arm and width
    assert done.stderr.count("trial with arm='sparse', width=2") == 1
    if "Zero" in told:
        assert f"toy.py, line {line_of(path, '1 / 0')}" in done.stderr
    with Store(tmp_path / "lab") as store:
        assert store.count() == 8


def test_two_files_with_one_id_are_told_apart(tmp_path):
    one, two = written(tmp_path / "a"), written(tmp_path / "b")
    err = called("run", one, two, "--scale", "smoke", "--out", tmp_path / "lab", code=1).stderr
    assert "both have the id toy" in err


# --- the reader's own features


FEATURES = (
    TOY[: TOY.index('"""A claim')]
    + '''"""Do Gram splits help on my features?"""

from fissile.lab.claims import Beats, Claim
from fissile.lab.study import Scale, Study
from fissile.lab.trial import Arm, Features, Trial

MINE = Features("my-features", inputs=12, classes=3)

STUDY = Study(
    id="mine",
    title="Mine",
    artefact="a question",
    about="My features.",
    arms=(Arm(), Arm("random", 2)),
    scales={
        "smoke": Scale(2, (Trial(MINE, 4, warm_up=2, fine_tune=2),)),
        "paper": Scale(9, (Trial(MINE, 4, warm_up=2, fine_tune=2),)),
    },
    claims=(Claim("Splits help.", "I think", Beats("random-2")),),
)
'''
)


def features(path, inputs=12, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    y, y_test = (np.arange(rows) % classes for rows in (60, 30))
    means = rng.standard_normal((classes, inputs))
    x, x_test = (
        (means[labels] + rng.standard_normal((len(labels), inputs))).astype(np.float32)
        for labels in (y, y_test)
    )
    np.savez(path, x_train=x, y_train=y, x_test=x_test, y_test=y_test)


def test_features_of_the_readers_own(tmp_path):
    path = written(tmp_path, name="mine.py", text=FEATURES)
    run = ("run", path, "--scale", "smoke", "--out", tmp_path / "lab")
    assert "my-features is not here: looked for my-features.npz" in called(*run, code=1).stderr
    features(tmp_path / "my-features.npz")
    out = called(*run).stdout
    assert "4 trials computed" in out  # and none that converges: that is the paper's criterion
    assert "not what" not in out
    assert "0 trials computed" in called(*run).stdout
    other = tmp_path / "elsewhere"
    other.mkdir()
    features(other / "my-features.npz", seed=1)
    classifier._from_files.cache_clear()
    assert "4 trials computed" in called(*run, "--data", other).stdout  # other arrays, other keys
    features(other / "my-features.npz", inputs=11)
    classifier._from_files.cache_clear()
    err = called(*run, "--data", other, code=1).stderr
    assert "holds 3 classes of samples of shape (11,), and my-features has 3 of (12,)" in err


def test_features_have_a_name_of_their_own(tmp_path):
    path = written(tmp_path, ('"my-features"', '"cifar100"'), name="mine.py", text=FEATURES)
    err = called("run", path, "--out", tmp_path / "lab", code=1).stderr
    assert re.search(r"mine\.py, line 7: cifar100 is a data set that fissile knows", err)


# --- the template


def test_the_template_runs_at_once(tmp_path):
    path = tmp_path / "Do_splits help.py"
    assert "--scale smoke" in called("new-study", path).stdout
    begin = time.monotonic()
    out = called("run", path, "--scale", "smoke", "--out", tmp_path / "lab").stdout
    assert "8 trials computed" in out
    assert "Random splits beat the dense network" in out
    assert time.monotonic() - begin < 200  # seconds, however busy the machine
    called("report", path, "--out", tmp_path / "lab")
    assert (tmp_path / "lab" / "report" / "figures" / "do-splits-help.png").exists()
    (study,) = studies.find([str(path)])
    assert set(study.scales) == set(SCALES)
    before = path.read_bytes()
    assert "is there already" in called("new-study", path, code=1).stderr
    assert path.read_bytes() == before
    for name in ("codes.py", "study.txt", "_.py"):
        err = called("new-study", tmp_path / name, code=1).stderr
        assert "is no name for a study's file" in err
