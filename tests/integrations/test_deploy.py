"""The files under deploy/: the batch script is run, with nodes that are this machine."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from command import LONG_RUN, called, stored_trials

import fissile

ray = pytest.importorskip("ray")
DEPLOY = Path(__file__).parents[2] / "deploy"
#: What Slurm's commands do, for nodes that are all this machine.
SRUN = '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
SCONTROL = "#!/bin/sh\nhostname; echo another\n"


def running(word):
    """List the processes that have a word on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_the_batch_script_runs_studies_and_stops_in_time(tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    slurm = {"JOB_NODELIST": "a[1-2]", "JOB_NUM_NODES": "2", "CPUS_PER_TASK": "1"}
    lab = tmp_path / "fissile-lab"
    with subprocess.Popen(
        ["bash", DEPLOY / "slurm" / "fissile.sbatch", *LONG_RUN],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
        | {"PATH": path, "FISSILE_RAY_PORT": port},
    ) as job:  # fmt: skip
        while job.poll() is None and stored_trials(lab) < 5:
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)  # a minute before its time is up
        said, _ = job.communicate(timeout=60)
    assert job.returncode == 130, said
    assert "the same command goes on" in said
    assert stored_trials(lab) >= 5
    end = time.monotonic() + 20
    while running(f":{port}") and time.monotonic() < end:
        time.sleep(0.2)
    assert not running(f":{port}")


def test_the_cluster_on_kubernetes_is_one_that_ray_and_fissile_understand():
    _, job = yaml.safe_load_all((DEPLOY / "kubernetes" / "rayjob.yaml").read_text("utf-8"))
    cluster = job["spec"]["rayClusterSpec"]
    image = (DEPLOY / "kubernetes" / "Dockerfile").read_text("utf-8")
    pinned = Path(DEPLOY.parent / "constraints.txt").read_text("utf-8")
    assert f"ray=={cluster['rayVersion']}\n" in pinned
    assert f"FROM rayproject/ray:{cluster['rayVersion']}-py311\n" in image
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == f"fissile:{fissile.__version__}"
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert f"fissile-{fissile.__version__}-py3-none-any.whl" in image
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["fissile", "run"]
    known = set(re.findall(r"--[a-z-]+", called("run", "--help").stdout))
    assert {word for word in words if word.startswith("--")} <= known
