"""Joining a Ray cluster, or starting one here; either way, nothing is left behind."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fissile._common.errors import FissileError, needs

_ANSWER = 10.0  # seconds for a cluster to answer
_CLIENT = "ray://"  # of an address that is reached from outside the cluster
#: Ray sends no usage statistics, and leaves what a worker sees of its GPUs alone.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


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
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        if address is not None:
            raise FissileError("this process is in a Ray cluster already; leave the address out")
        yield Home(_address())
        return
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    own = where == "local"
    if own:
        _set_token()
    elif where != "auto" and not answers(where, _ANSWER):
        raise FissileError(
            f"no Ray cluster answers at {where}; start one with `ray start --head`, or leave the "
            "address out to use this machine's cores"
        )
    import ray

    how: dict[str, Any] = {"include_dashboard": False} if own else {}
    try:
        ray.init(where, log_to_driver=False, logging_level=logging.CRITICAL, **how)
    except (OSError, RuntimeError, ValueError) as error:
        ray.shutdown()
        why = " ".join(str(error).split())
        raise FissileError(
            f"cannot start a Ray cluster on this machine: {why}"
            if own
            else f"cannot join the Ray cluster at {where}: {why}; if it asks for a token, set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN where it is not in a file"
        ) from None
    try:
        yield Home(_address(), own)
    finally:
        ray.shutdown()


def _address() -> str:
    import ray

    client = ray.util.client.ray.is_connected()  # type: ignore[no-untyped-call]
    return "" if client else ray.get_runtime_context().gcs_address


def _set_token() -> None:
    """Protect a cluster of ours with a token: others reach it on this machine and its network."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    if "ray" in sys.modules:  # which has read the environment already
        raise FissileError(
            "ray was imported before a cluster of our own could be given a token; call ray.init() "
            "first, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before the import"
        )
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def answers(home: str, patience: float = 1.0) -> bool:
    """Return whether a cluster answers: Ray itself would try for a minute, and end the process."""
    host, _, port = home.removeprefix(_CLIENT).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), patience).close()
    except (OSError, ValueError):
        return False
    return True
