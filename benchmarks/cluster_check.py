"""Does Ray come to the numbers of a local run, also if a worker is killed? Compared to the bit.

    python benchmarks/cluster_check.py --scale smoke --trials 1 --samples 1000  # a minute, Linux
    python benchmarks/cluster_check.py --device cuda --to FILE                  # some minutes

The same trials, each time into a store of its own: by a local run; on Ray; on Ray, where a worker
that computes is killed (SIGKILL) midway; on a cluster that is joined, whose workers have their own
environment and find no data; and, with --device cuda, on processors and GPUs together. Features are
generated, and every network is a batch of its own: the seconds, of whole commands, compare no
speeds. The last line is one JSON object; the exit code is 1 if anything is not as it should be.
"""

import argparse
import json
import os
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import torch
from about import made

from fissile._common.cores import cores
from fissile.data.features import write_features
from fissile.data.generated import features
from fissile.lab.store import Store
from fissile.lab.studies import STUDIES

QUIET = {"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1", "RAY_USAGE_STATS_ENABLED": "0"}
#: What would lead to another cluster, or to other data.
UNSET = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "FISSILE_LAB")
ENDING = []  # what is being ended: a second Ctrl-C meanwhile would leave some of it behind
HEAD = (
    sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
    "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats",
)  # fmt: skip
STUDIED = ("dynamic", "cifar100", "single-mask", "capacity")
SHARE = 0.3  # of the trials are stored when a worker is killed
TASK = "fissile_batch"  # what a worker calls itself while it computes


class Trouble(Exception):
    """A run did not come to its end."""


def processes():
    """Return every living process by its id: parent, session, when it began, what it is called."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            name = (folder / "cmdline").read_bytes().decode(errors="replace")
            if words[0] != "Z":
                found[int(folder.name)] = int(words[1]), int(words[3]), words[19], name
    return found


def below(pid):
    """Return the processes that a process has started, and those that they have."""
    everybody, found, new = processes(), {}, {pid}
    while new:
        born = {one: about for one, about in everybody.items() if about[0] in new}
        new = born.keys() - found.keys()
        found |= born
    return found


def has_opened_a_gpu(pid):
    files = map(os.path.realpath, Path(f"/proc/{pid}/fd").iterdir())
    return any(Path(file).match("/dev/nvidia[0-9]*") for file in files)


def end(process, patience=8.0):
    """End a process that leads a session, and whatever it has started."""
    family = below(process.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
    for pid, (_, session, began, _) in processes().items():
        if session == process.pid or (pid in family and family[pid][2] == began):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def started(words, log, **how):
    """Start a process; whatever happens, nothing of it is left afterwards."""
    how |= {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
    with log.open("a") as file:
        process = subprocess.Popen(words, stdout=file, **how)
    try:
        yield process
    finally:
        ENDING.append(process)
        end(process)
        ENDING.remove(process)


class Killer:
    """Kills a worker that computes once so many trials are stored, and sees who comes after it."""

    def __init__(self, at, gpu):
        self.at, self.gpu, self.told = at, gpu, {}
        self.before, self.came, self.computed = set(), set(), set()

    def __call__(self, driver, stored):
        if stored < self.at:
            return
        names = {pid: about[3] for pid, about in below(driver).items()}
        workers = {pid for pid, name in names.items() if name.startswith("ray::")}
        busy = {pid for pid in workers if TASK in names[pid]}
        if not self.told:
            self.before = workers
            any(self.kill(pid, stored) for pid in busy)
            return
        self.came |= workers - self.before
        self.computed |= busy - self.before
        self.told |= {"workers_that_came": len(self.came), "of_them_computed": len(self.computed)}

    def kill(self, pid, stored):
        """Kill a worker if it still computes; where GPUs are asked for, if it has one open."""
        with suppress(OSError):  # it has ended by itself
            if self.gpu and not has_opened_a_gpu(pid):
                return False
            os.kill(pid, signal.SIGSTOP)
            if TASK in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
                self.told = {"stored_at_kill": stored, "killed_had_opened_a_gpu": self.gpu}
            else:
                os.kill(pid, signal.SIGCONT)
        return bool(self.told)


def stored(folder):
    address = f"file:{folder / 'trials.sqlite'}?mode=ro"
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(address, uri=True)) as db:
        return db.execute("SELECT count(*) FROM trials").fetchone()[0]
    return 0  # it is not there yet


def rows_of(folder):
    """Return every trial of a store by its key."""
    with Store(folder, create=False) as store:
        asked = [STUDIES[r.study].works(r.scale, r.trials, r.changes) for r in store.runs()]
        keys = {work.key for works in asked for work in works}
        rows, arrays = store.rows(keys), store.arrays(keys)
    return {row.key: (row.measures, arrays.get(row.key, {})) for row in rows}


def numbers(row):
    """Return what a trial came to, such that only the same bits are equal."""
    measures, arrays = row
    bits = {k: (str(v.dtype), v.shape, v.tobytes()) for k, v in arrays.items()}
    return {name: repr(value) for name, value in measures.items()} | bits


def compared(ours, theirs):
    """Say in how many trials, and first in what, two stores differ."""
    differing, first = 0, None
    for key in sorted(ours.keys() & theirs.keys()):
        one, two = numbers(ours[key]), numbers(theirs[key])
        names = [name for name in sorted(one.keys() | two.keys()) if one.get(name) != two.get(name)]
        differing += bool(names)
        if names and first is None:
            values = [row[0].get(names[0], "array") for row in (ours[key], theirs[key])]
            first = {"key": key, "measures": names, "values of the first": values}
    same = ours.keys() == theirs.keys()
    return {"same_keys": same, "differing_trials": differing, "first_difference": first}


class Check:
    def __init__(self, options, asked, scratch):
        self.options, self.asked, self.scratch, self.local = options, asked, scratch, {}
        self.device = ("--device", options.device)
        data, samples = scratch / "data", options.samples
        data.mkdir()
        made = features(inputs=512, classes=100, train=samples, test=samples // 4)
        write_features(data / "cifar100-clip-vit-b-16.npz", made)
        # The commit in a trial's provenance tells in whose environment it was computed.
        ours = {"FISSILE_DATA": str(data), "FISSILE_COMMIT": "driver", "RAY_TMPDIR": str(scratch)}
        kept = {name: value for name, value in os.environ.items() if name not in UNSET}
        self.env = kept | QUIET | ours

    def run(self, step, *more, env=None, watch=lambda driver, count: None):
        """Run the studies to their end; return what is stored, beside what the local run has."""
        log, folder = self.scratch / f"{step}.log", self.scratch / step
        words = [sys.executable, "-m", "fissile.cli", "run", *self.asked]
        words += ["--out", str(folder), *more]
        begin, first = time.monotonic(), None
        with started(words, log, cwd=self.scratch, env=env or self.env) as driver:
            while driver.poll() is None:
                count, taken = stored(folder), round(time.monotonic() - begin, 1)
                first = taken if count and first is None else first
                if taken > self.options.limit:
                    raise Trouble(f"{count} trials stored after {taken:.0f} s, and no end")
                watch(driver.pid, count)
                time.sleep(0.03)
        text = " ".join(log.read_text(errors="replace").split())
        rows = {} if driver.returncode else rows_of(folder)
        if not rows or f" {len(rows):,} trials computed, 0 found" not in text:
            raise Trouble(f"exit code {driver.returncode}, {len(rows)} trials: ... {text[-600:]}")
        self.local = rows if step == "local" else self.local
        by = Counter(f"{r.provenance.device} ({r.provenance.commit})" for r in rows.values())
        found = {"seconds": taken, "first_stored_after": first, "trials": len(rows), "by": dict(by)}
        return found | compared(self.local, rows)

    def step_local(self):
        return self.run("local", *self.device), True

    def step_ray(self):
        found = self.run("ray", "--on", "ray", *self.device)
        return found, not found["differing_trials"]

    def step_killed(self):
        killer = Killer(max(1, round(SHARE * len(self.local))), self.options.device == "cuda")
        found = self.run("killed", "--on", "ray", *self.device, watch=killer) | killer.told
        return found, bool(killer.told) and not found["differing_trials"]

    def step_joined(self):
        away, log = self.scratch / "away", self.scratch / "cluster.log"
        away.mkdir()
        lock = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        theirs = dict.fromkeys(("FISSILE_DATA", "XDG_CACHE_HOME"), str(away))
        theirs |= {"FISSILE_COMMIT": "worker"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        gpus = torch.cuda.device_count() if self.options.device == "cuda" else 0
        words = [*HEAD, f"--port={port}", f"--num-cpus={min(8, cores())}", f"--num-gpus={gpus}"]
        with started(words, log, cwd=away, env=self.env | lock | theirs) as head:
            until = time.monotonic() + 60
            while "Ray runtime started" not in (text := log.read_text(errors="replace")):
                if head.poll() is not None or time.monotonic() > until:
                    raise Trouble(f"no cluster has started: ... {text[-600:]}")
                time.sleep(0.1)
            where = ("--on", "ray", "--address", f"127.0.0.1:{port}")
            found = self.run("joined", *where, *self.device, env=self.env | lock)
        theirs_alone = all(name.endswith("(worker)") for name in found["by"])
        return found, theirs_alone and not found["differing_trials"]

    def step_mixed(self):
        # A processor rounds otherwise than a GPU: keys must agree, numbers need not.
        found = self.run("mixed", "--on", "ray")
        return found | {"compared": "keys only"}, len(found["by"]) == 2

    def step(self, name):
        try:
            found, good = getattr(self, f"step_{name}")()
            found["good"] = good and found["same_keys"]
        except Trouble as error:
            found = {"error": str(error), "good": False}
        print(f"{name:6} {'good' if found['good'] else 'NOT GOOD'}: {found}", flush=True)
        return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--scale", default="quick")
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--samples", type=int, default=6000, help="of the generated features")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one run")
    parser.add_argument("--to", type=Path, help="a file for the result")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: ENDING or sys.exit(128 + number))
    asked = [*STUDIED, "--scale", options.scale, "--trials", str(options.trials), "--every", "0"]
    steps = ["local", "ray", "killed", "joined"] + ["mixed"] * (options.device == "cuda")
    with tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True) as scratch:
        check = Check(options, asked, Path(scratch))
        found = {name: check.step(name) for name in steps}
    result = made(options.device) | {
        "ray": version("ray"),
        "run": " ".join(asked),
        "good": all(one["good"] for one in found.values()),
        "steps": found,
    }
    if options.to:
        options.to.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    sys.exit(not result["good"])


if __name__ == "__main__":
    main()
