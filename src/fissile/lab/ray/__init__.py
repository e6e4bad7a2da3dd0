"""The lab on a Ray cluster: the same trials, into the same store, under the same keys.

>>> with cluster(works, address="10.0.0.1:6379") as lanes:
...     run(works, store, lanes=lanes)

Workers need an installed fissile of the driver's version and nothing else: trials and data sets
come to them, results go back, and only the driver sees the store.

The modules, each of which imports only those before it: task (what a worker does), keeper (a
cluster of our own), connect, workers (an executor), crew (the lanes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fissile.lab.batching import Lanes
from fissile.lab.ray.connect import connected
from fissile.lab.ray.pool import PATIENCE, Crew
from fissile.lab.trial import Work

__all__ = ["cluster"]


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
