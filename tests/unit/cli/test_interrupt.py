"""Ctrl-C at any moment: one line, exit code 130, no traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_stores import posix

import fissile_command

KILL = "os.kill(os.getpid(), signal.SIGINT); time.sleep(20)"
HEAD = "import os, signal, time\n"
#: Stand-ins for the package, which presses Ctrl-C at some moment of a command.
MOMENTS = {
    "the import of the package": (KILL, ""),
    "the import, while it cleans up": (f"""
try:
    {KILL}
finally:
    time.sleep(20)
""", ""),
    "the imports of the command": ("", KILL),
    "the command": ("", f"""
def main(ready):
    ready()
    try:
        {KILL}
    except KeyboardInterrupt:
        raise SystemExit(130)
"""),
    "what the first one has begun": ("", f"""
def main(ready):
    ready()
    try:
        {KILL}
    finally:
        {KILL}
"""),
    "the end": ("", """
import atexit
def main(ready):
    ready()
    atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(20)))
"""),
}  # fmt: skip


@posix
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_the_command_with_a_line_at_most(tmp_path, moment):
    package, command = MOMENTS[moment]
    (tmp_path / "fissile" / "cli").mkdir(parents=True)
    (tmp_path / "fissile" / "__init__.py").write_text(HEAD + package)
    (tmp_path / "fissile" / "cli" / "__init__.py").touch()
    (tmp_path / "fissile" / "cli" / "__main__.py").write_text(HEAD + command)
    path = os.pathsep.join([str(tmp_path), str(Path(fissile_command.__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import fissile_command; fissile_command.main()"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=15,
    )
    assert done.returncode == 130
    assert done.stderr == ("" if moment == "the command" else "Stopped.\n")
    assert done.stdout == ""


@posix
def test_processes_of_a_pool_never_see_ctrl_c():
    from fissile.lab.batching import _deaf_to_ctrl_c

    ask = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with _deaf_to_ctrl_c():
        said = subprocess.run([sys.executable, "-S", "-c", ask], capture_output=True, text=True)
    assert said.stdout == "True\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
