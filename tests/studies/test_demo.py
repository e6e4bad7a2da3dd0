"""The demo as a newcomer runs it, at a small scale."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from fake_results import invented

from fissile.cli import demo


def test_the_demo_prints_a_table_a_verdict_and_draws(tmp_path, capsys):
    demo.main(trials=2, epochs=1, to=tmp_path)
    out = capsys.readouterr().out
    for word in ("dense", "random", "clause", "78.7", "88.7", "99.4", "264", "in the paper"):
        assert word in out
    picture = (tmp_path / "codes.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ((0.7, 0.8, 0.9), "As in the paper"),
        ((0.8, 0.7, 0.9), "Not as in the paper: .* as random-2, dense, clause-2"),
        ((0.7, 0.9, 0.8), "Not as in the paper: .* as dense, clause-2, random-2"),
    ],
)
def test_the_verdict_is_plain(accuracies, verdict):
    means = dict(zip(("dense", "random-2", "clause-2"), accuracies, strict=True))
    frame = invented(lambda arm, c, h: {"accuracy": means[arm]}, arms=means, cells=[(8, 8)])
    assert re.match(verdict, demo.verdict(frame))


def test_trials_are_repeatable_and_keep_the_budget():
    one, other = demo.trained(2, 2), demo.trained(2, 2)
    assert one.frame.equals(other.frame)
    assert set(one.frame["nonzeros"]) == {264}
    assert list(one.frame["arm"]) == ["dense", "clause-2", "random-2"] * 2


def test_ctrl_c_ends_the_demo_in_one_line(tmp_path):
    command = [sys.executable, "-m", "fissile.cli.demo", "--epochs", "1000000", "--to", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        assert running.stdout.readline()  # it says what it is about to do
        time.sleep(3)
        running.send_signal(signal.SIGINT)
        try:
            out, _ = running.communicate(timeout=60)
        finally:
            running.kill()  # one that does not stop is not waited for
    assert running.returncode == 130
    assert b"Stopped" in out
    assert b"Traceback" not in out


def test_bad_options_are_refused():
    command = [sys.executable, "-m", "fissile.cli.demo", "--trials", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--trials" in done.stderr


@pytest.mark.parametrize("missing", ["rich", "numba"])
@pytest.mark.parametrize("module", ["fissile.cli.demo", "fissile.cli"])
def test_a_missing_package_is_one_clear_line(module, missing, tmp_path):
    # Python imports this file before anything else; to it, the package is not installed.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        f"util.find_spec = lambda name, *rest: None if name == {missing!r} else find(name, *rest)\n"
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", module],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 1
    assert re.fullmatch(
        rf"error: this needs {missing}: \S+ -m pip install .*\[lab\]'\n", done.stderr
    )
