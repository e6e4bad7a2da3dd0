"""The demo as a newcomer runs it, at a small scale."""

import re
import signal
import subprocess
import sys
import time

import pytest

from fissile import demo
from fissile.lab.case_study import PAPER, CaseStudy, Outcome, run


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


def test_trials_are_repeatable_and_keep_the_budget():
    study = CaseStudy(train=500, test=200, warm_up=2, fine_tune=2, trials=2)
    one, other = run(study), run(study)
    assert [[o.accuracy for o in trial] for trial in one] == [
        [o.accuracy for o in trial] for trial in other
    ]
    assert {o.nonzeros for trial in one for o in trial} == {264}
    assert [o.arm for o in one[1]] == ["dense", "random", "clause"]
    assert {o.trial for o in one[1]} == {1}


def test_ctrl_c_ends_the_demo_in_one_line(tmp_path):
    command = [sys.executable, "-m", "fissile.demo", "--epochs", "1000000", "--out", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        assert running.stdout.readline()  # it says what it is about to do
        time.sleep(3)
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert b"Stopped" in out
    assert b"Traceback" not in out


def test_bad_options_are_refused(capsys):
    with pytest.raises(SystemExit):
        demo.main(["--trials", "0"])
    assert "at least 1" in capsys.readouterr().err
