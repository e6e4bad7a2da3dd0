"""The store: finished trials in a folder that may be copied, shared, filled up and killed.

>>> with Store("results") as store:
...     todo = store.claim([work.key for work in works])
...     store.add(compute([work for work in works if work.key in todo]), Provenance.here("cpu"))

A trial is a row of an SQLite database and belongs to whoever finished it first. Any number of
processes may use a folder at once, but none may take an open store along when it forks.

The modules, each of which imports only those before it: advice, provenance, rows, flight, database,
store.
"""

from fissile.lab.store.provenance import Provenance
from fissile.lab.store.rows import Row, Run, Time
from fissile.lab.store.store import Store

__all__ = ["Provenance", "Row", "Run", "Store", "Time"]
