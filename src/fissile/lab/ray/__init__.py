"""The lab on a Ray cluster: the same trials, into the same store, under the same keys.

>>> with cluster(works, address="10.0.0.1:6379") as lanes:
...     run(works, store, lanes=lanes)

Workers need an installed fissile of the driver's version and nothing else: trials and data sets
come to them, results go back, and only the driver sees the store.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil, floor, inf
from textwrap import shorten
from typing import Any, NamedTuple

from fissile._common.errors import FissileError, needs
from fissile.lab.batching import BATCH, PROCESS, Halt, Lane, Lanes, default_jobs, side_by_side
from fissile.lab.ray.workers import CORES, Depot, Workers
from fissile.lab.trial import Work

__all__ = [
    "PATIENCE",
    "Crew",
    "Home",
    "Node",
    "Shares",
    "answers",
    "cluster",
    "connected",
    "nodes_of",
    "shares_of",
]

_log = logging.getLogger("fissile")

#: Seconds that a cluster may be without workers: a machine that is started on demand takes minutes.
PATIENCE = 300.0
_LOOK = 2.0  # seconds between looks at the cluster
_POLL = 0.2  # seconds of sleep while nobody is there
_SILENCE = 20.0  # seconds that it may be silent
_ROOM = 8 << 30  # bytes of a GPU, until one has told how many it has
_CONTEXT = 512 << 20  # bytes that a process takes on a GPU before it has seen a network
_ANSWER = 10.0  # seconds for a cluster to answer, or to end
_CLIENT = "ray://"  # of an address that is reached from outside the cluster
#: Ray sends no usage statistics, and leaves what a worker sees of its GPUs alone.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
#: A program that keeps a cluster on this machine until its standard input ends. It leads a group
#: of processes: however the driver dies, the pipe is closed and the whole group ends. Ray alone
#: would leave some behind for a minute after ``kill -9``.
_KEEPER = """
import logging, os, signal, sys
import ray

try:
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL)
    print(ray.get_runtime_context().gcs_address, flush=True)
except (OSError, RuntimeError, ValueError) as error:
    print(f"error: {' '.join(str(error).split())}", flush=True)
sys.stdin.read()
ray.shutdown()
os.killpg(0, signal.SIGKILL)
"""

#: What goes into a batch, in estimated seconds on two cores, of which a worker has one.
_BATCH = {"cuda": BATCH["cuda"], "cpu": BATCH["cpu"] * CORES / 2}


@dataclass(frozen=True)
class Node:
    """What a machine of the cluster has."""

    cpus: int
    gpus: int
    memory: float


@dataclass(frozen=True)
class Shares:
    """How many workers of each kind a cluster has, and what each may take."""

    cpus: int
    gpus: int
    per_gpu: int  # workers that share one
    memory: float  # bytes for a batch on a processor


def nodes_of(told: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Read what ``ray.nodes()`` says of the nodes that are alive.

    >>> nodes_of([{"Alive": True, "Resources": {"CPU": 2.0, "memory": 8e9}}])
    [Node(cpus=2, gpus=0, memory=8000000000.0)]
    """
    alive = [one.get("Resources", {}) for one in told if one["Alive"]]
    return [
        Node(int(one.get("CPU", 0)), int(one.get("GPU", 0)), float(one.get("memory", inf)))
        for one in alive
    ]


def shares_of(nodes: Sequence[Node], works: Sequence[Work], device: str | None) -> Shares:
    """Count the workers that trials may have.

    >>> shares_of([Node(16, 1, 64e9)], works, device=None)

    A GPU has several, each with a core of its own; the other cores work by themselves.
    """
    with_gpu = [node for node in nodes if node.gpus and device != "cpu"]
    jobs = [default_jobs("cuda", works, cores=node.cpus // node.gpus) for node in with_gpu]
    per_gpu = min(jobs, default=1)
    cpus, gpus, memory = 0, 0, inf
    for node in nodes:
        taken = min(node.cpus, per_gpu * node.gpus) if device != "cpu" else 0
        gpus += taken
        own = (
            0 if device == "cuda" else min(node.cpus - taken, int(min(node.memory // PROCESS, 1e6)))
        )
        if own > 0:
            cpus += own
            memory = min(memory, (node.memory - taken * PROCESS) / own - PROCESS)
    return Shares(cpus, gpus, per_gpu, memory)


class Crew:
    """The workers of the cluster that this process is connected to, as lanes.

    >>> with connected() as home:
    ...     run(works, store, lanes=Crew(works, home.address).lanes)

    Where there is none, it waits for so many seconds of patience before it gives up.
    """

    def __init__(
        self,
        works: Sequence[Work],
        home: str = "",
        *,
        device: str | None = None,
        jobs: int | None = None,
        every: float | None = None,
        patience: float = 0.0,
    ) -> None:
        self._works, self._home, self._device, self._jobs = works, home, device, jobs
        depot = Depot()
        self._workers = {kind: Workers(depot) for kind in _BATCH}
        self._lanes = {
            kind: Lane(self._workers[kind], kind, size=size if every is None else every)
            for kind, size in _BATCH.items()
        }
        for lane in self._lanes.values():
            lane.least = lane.size / 8
        self._looked = self._heard = self._manned = time.monotonic()
        self._asked = 0  # workers, of the autoscaler
        self._look()
        try:
            self._gather(patience)
        finally:
            self._ask(0)

    def lanes(self) -> list[Lane]:
        """Return the lanes as the cluster is now, that of the GPUs first."""
        self._look_again()
        now = time.monotonic()
        self._ask(0 if self._slots else self._worth())
        if self._slots:
            self._manned = now
        elif now > self._manned + PATIENCE:
            raise Halt(f"the cluster has had no worker for {PATIENCE:.0f} seconds")
        return list(self._lanes.values())

    def dismiss(self) -> None:
        """Call back every batch that is still out, and every machine that was asked for."""
        for workers in self._workers.values():
            workers.shutdown()
        self._ask(0)

    @property
    def _slots(self) -> int:
        return sum(lane.slots for lane in self._lanes.values())

    def _gather(self, patience: float) -> None:
        """Wait for the first worker, and give up after a while."""
        what = "a GPU" if self._device == "cuda" else "a core"
        begin, waited = time.monotonic(), ""
        if patience and not self._slots:
            _log.warning(
                f"no node of the cluster has {what} for us: waiting for workers ({patience:.0f} s)"
                " ..."
            )
            waited = f", and none came within {patience:.0f} seconds"
        while not self._slots:
            if time.monotonic() >= begin + patience:
                raise FissileError(
                    f"no node of the cluster has {what} for us{waited}; add one that has, or ask "
                    "for another device"
                )
            self._ask(self._worth())
            time.sleep(_POLL)
            self._look_again()

    def _worth(self) -> int:
        """Return how many workers are worth the minutes that they take to come."""
        worth = max(1, ceil(sum(work.cost for work in self._works) / PATIENCE))
        return worth if self._jobs is None else min(worth, self._jobs)

    def _ask(self, workers: int) -> None:
        """Let the cluster's autoscaler, if it has one, start machines for so many workers.

        It keeps them until it is asked for none.
        """
        if workers == self._asked or (self._home and not answers(self._home)):
            return
        self._asked = workers
        with suppress(Exception):  # it is a favour
            from ray.autoscaler.sdk import request_resources

            worker = {"CPU": CORES, "GPU": 1} if self._device == "cuda" else {"CPU": CORES}
            request_resources(bundles=workers * [worker])

    def _look_again(self) -> None:
        """Look at the cluster, if that is some time ago and it answers."""
        now = time.monotonic()
        if now > self._looked + _LOOK:
            self._looked = now
            if not self._home or answers(self._home):
                self._heard = now
                self._look()
            elif now > self._heard + _SILENCE:
                raise Halt(f"the cluster at {self._home} does not answer any more")

    def _look(self) -> None:
        nodes = _nodes()
        shares = shares_of(nodes, self._works, self._device)
        cuda, cpu = self._lanes["cuda"], self._lanes["cpu"]
        most = inf if self._jobs is None else self._jobs
        cuda.gone, cpu.gone = not shares.gpus, not shares.cpus
        cuda.slots = int(min(_ahead(shares.gpus), most))
        cpu.slots = int(min(_ahead(shares.cpus), most - cuda.slots))
        cpu.memory = shares.memory
        cuda.memory = (self._workers["cuda"].room or _ROOM) / shares.per_gpu - _CONTEXT
        cuda.networks = side_by_side(self._works, "cuda", workers=max(1, shares.gpus))
        for workers in self._workers.values():
            workers.fit(max((node.memory for node in nodes if node.cpus), default=inf))
        self._workers["cuda"].gpus = floor(1e4 / shares.per_gpu) / 1e4  # as finely as Ray counts


def _ahead(workers: int) -> int:
    """Return how many batches keep workers busy: one lies ready for whoever is done first."""
    return workers + 1 if workers else 0


def _nodes() -> list[Node]:
    import ray

    try:
        return nodes_of(ray.nodes())  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever Ray says where nobody is any more
        raise Halt(f"the cluster does not answer any more ({shorten(str(error), 200)})") from None


# --- joining a cluster, or starting one here; either way, nothing is left behind


class Home(NamedTuple):
    """The cluster that this process is connected to."""

    address: str  # at which it answers for as long as it is there; from outside a cluster, none
    own: bool = False  # it was started here: no other machine will join it


@contextmanager
def connected(address: str | None = None) -> Iterator[Home]:
    """Join the Ray cluster at an address or in ``RAY_ADDRESS``, or start one of our own.

    >>> with connected("10.0.0.1:6379") as home:
    ...     ray.nodes()

    One of our own has this machine's cores and GPUs, and ends with us. Where a program has called
    ``ray.init`` itself, that connection is used, and stays.
    """
    needs("ray", "ray")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    given = address or os.environ.get("RAY_ADDRESS")
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        if address is not None:
            raise FissileError("this process is in a Ray cluster already; leave the address out")
        yield Home(_address())
    elif given and given != "local":
        with _joined(given):
            yield Home(_address())
    else:
        with _own() as own, _joined(own):
            yield Home(_address(), own=True)


def _address() -> str:
    import ray

    client = ray.util.client.ray.is_connected()  # type: ignore[no-untyped-call]
    return "" if client else ray.get_runtime_context().gcs_address


@contextmanager
def _joined(where: str) -> Iterator[None]:
    import ray

    if where != "auto" and not answers(where, _ANSWER):
        raise FissileError(
            f"no Ray cluster answers at {where}; start one with `ray start --head`, or leave the "
            "address out to use this machine's cores"
        )
    try:
        _join(where)
        yield
    finally:
        ray.shutdown()


def _join(where: str) -> None:
    import ray

    try:
        ray.init(where, log_to_driver=False, logging_level=logging.CRITICAL)
    except (OSError, RuntimeError) as error:
        raise FissileError(
            f"cannot join the Ray cluster at {where}: {' '.join(str(error).split())}; if it asks "
            "for a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN where it is not in a file"
        ) from None


@contextmanager
def _own() -> Iterator[str]:
    """Keep a cluster on this machine in a group of processes of its own; yield its address."""
    _lock()
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-c", _KEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is ours to handle
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    with keeper.stdout, keeper.stdin:
        try:
            told = keeper.stdout.readline().strip()
            if not told or told.startswith("error: "):
                why = told.removeprefix("error: ") or "it ended at once"
                raise FissileError(f"cannot start a Ray cluster on this machine: {why}")
            yield told
        finally:
            keeper.stdin.close()
            _end(keeper)


def _lock() -> None:
    """See that a cluster of ours serves nobody else on this machine or its network."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    if "ray" in sys.modules:  # which has read the environment already
        raise FissileError(
            "ray was imported before a cluster of our own could be given a token; call ray.init() "
            "first, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before the import"
        )
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _end(keeper: subprocess.Popen[str]) -> None:
    try:
        keeper.wait(_ANSWER)
    except subprocess.TimeoutExpired:
        os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()


def answers(home: str, patience: float = 1.0) -> bool:
    """Return whether a cluster answers: Ray itself would try for a minute, and end the process.

    >>> answers("127.0.0.1:6379")
    """
    host, _, port = home.removeprefix(_CLIENT).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), patience).close()
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def cluster(
    works: Sequence[Work],
    *,
    address: str | None = None,
    device: str | None = None,
    jobs: int | None = None,
    every: float | None = None,
) -> Iterator[Lanes]:
    """Join a cluster, or start one here, for as long as these trials take (needs ray).

    >>> with cluster(works) as lanes:
    ...     run(works, store, lanes=lanes)

    A cluster that is joined may have no worker yet: its autoscaler is asked for some.

    Args:
        works: the trials; what they are decides how many of them suit a worker.
        address: of the cluster; by default ``RAY_ADDRESS``, else this machine's cores become one.
        device: ``cpu`` or ``cuda``; by default all workers take part.
        jobs: batches in flight at most.
        every: estimated seconds of work on two cores in a batch.
    """
    with connected(address) as home:
        patience = 0.0 if home.own else PATIENCE
        crew = Crew(works, home.address, device=device, jobs=jobs, every=every, patience=patience)
        try:
            yield crew.lanes
        finally:
            crew.dismiss()
