"""The command `fissile play`, as a user starts and ends it."""

import os
import signal
import subprocess
import time
import urllib.request

import pytest
from command import FISSILE, QUIET, called


def test_help_has_examples_and_a_bad_port_is_one_line():
    told = called("play", "--help").stdout
    assert "fissile play --port 9000 --no-browser" in told
    assert "port" in called("play", "--port", "70000", code=2).stderr


def test_an_address_that_is_not_ours_is_one_clear_error():
    told = called("play", "--host", "192.0.2.1", "--port", "0", "--no-browser", code=1).stderr
    assert "warning: --host 192.0.2.1 lets other machines connect" in told
    assert "error: cannot listen at 192.0.2.1" in told


@pytest.mark.slow
def test_it_serves_until_ctrl_c(tmp_path):
    environment = os.environ | QUIET | {"XDG_STATE_HOME": str(tmp_path)}
    command = [FISSILE, "play", "--port", "0", "--no-browser"]
    playing = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        address = playing.stdout.readline().rpartition(" ")[2].strip()
        assert address.startswith("http://127.0.0.1:")
        end = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(address, timeout=5) as page:
                    assert b"fissile play" in page.read()
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.05)
        playing.send_signal(signal.SIGINT)
        _, told = playing.communicate(timeout=30)
    finally:
        playing.kill()
    assert playing.returncode == 130
    assert told == "Stopped.\n"
