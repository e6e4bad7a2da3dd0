"""The demo as a newcomer runs it, at a small scale."""

import os
import re
import signal

import pytest

from fissile import demo
from fissile.lab.case_study import PAPER, CaseStudy, Outcome, run_trial


def test_the_demo_prints_a_table_a_verdict_and_draws(tmp_path, capsys):
    assert demo.main(["--trials", "2", "--epochs", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for word in ("dense", "random", "clause", "78.7", "88.7", "99.4", "264", "in the paper"):
        assert word in out
    picture = (tmp_path / "codes.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


def outcome(arm, accuracy):
    return Outcome(arm, 0, accuracy, 264, 1.0, 0.0, 0.0, None)


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ((0.7, 0.8, 0.9), "As in the paper"),
        ((0.8, 0.7, 0.9), "Not as in the paper: from worst to best .* random, dense, clause"),
        ((0.7, 0.9, 0.8), "Not as in the paper: from worst to best .* dense, clause, random"),
    ],
)
def test_the_verdict_is_plain(accuracies, verdict):
    trial = [outcome(arm, a) for arm, a in zip(PAPER, accuracies, strict=True)]
    assert pytest.approx(accuracies) == [o.accuracy for o in trial]
    assert re.match(verdict, demo._verdict([trial]))


def test_a_trial_is_paired_repeatable_and_keeps_the_budget():
    study = CaseStudy(train=500, test=200, warm_up=2, fine_tune=2)
    one, other = run_trial(study, 3), run_trial(study, 3)
    assert [o.accuracy for o in one] == [o.accuracy for o in other]
    assert {o.nonzeros for o in one} == {264}
    assert [o.arm for o in one] == ["dense", "random", "clause"]


@pytest.mark.parametrize(("finished", "code"), [(0, 1), (2, 0)])
def test_ctrl_c_shows_what_is_finished(tmp_path, monkeypatch, capsys, finished, code):
    def impatient(study, trial, on_epoch):
        if trial == finished:
            os.kill(os.getpid(), signal.SIGINT)
        return run_trial(study, trial, on_epoch)

    monkeypatch.setattr(demo, "run_trial", impatient)
    out = ["--out", str(tmp_path)]
    assert demo.main(["--trials", "5", "--epochs", "1", *out]) == code
    assert f"showing the {finished} finished trials" in capsys.readouterr().out
    assert (tmp_path / "codes.png").exists() == bool(finished)


def test_bad_options_are_refused(capsys):
    with pytest.raises(SystemExit):
        demo.main(["--trials", "0"])
    assert "at least 1" in capsys.readouterr().err
