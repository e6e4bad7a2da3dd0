"""Joining a Ray cluster, or starting one here; either way, nothing is left behind."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fissile._common.errors import FissileError, needs

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
        ray.init(where, log_to_driver=False, logging_level=logging.CRITICAL)
    except (OSError, RuntimeError) as error:
        ray.shutdown()
        raise FissileError(
            f"cannot join the Ray cluster at {where}: {' '.join(str(error).split())}; if it asks "
            "for a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN where it is not in a file"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


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
            try:
                keeper.wait(_ANSWER)
            except subprocess.TimeoutExpired:
                os.killpg(keeper.pid, signal.SIGKILL)
                keeper.wait()


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
