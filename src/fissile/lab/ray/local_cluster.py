"""A program that keeps a Ray cluster on this machine until its standard input ends.

It leads a group of processes, which the cluster's all belong to: however the driver that started it
dies, its end of the pipe is closed, and the whole group ends. Ray alone would leave some behind for
a minute after ``kill -9``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Start a cluster, print its address or what went wrong, wait, and end it."""
    import ray

    try:
        ray.init(
            "local", include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL
        )
        print(ray.get_runtime_context().gcs_address, flush=True)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", flush=True)
    sys.stdin.read()
    ray.shutdown()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
