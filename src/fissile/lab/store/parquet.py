"""Finished trials in a Parquet file, to be kept beside code, published, and taken over by a store.

>>> with open("codes.parquet", "wb") as file:
...     write(file, store, run, [work.key for work in works])
>>> Store("here").take(TrialsFile("codes.parquet"))
31
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from fissile._common.errors import FileError
from fissile._common.files import open_regular
from fissile.lab.store import Run, Store, run_of
from fissile.lab.store.database import undamaged
from fissile.lab.trial import from_spec

_COLUMNS = ("key", "kind", "spec", "measures", "arrays", "provenance", "seconds", "finished")
_BINARY, _NUMBER = "arrays", "seconds"
_ROWS = 1_000  # read in one go
_ABOUT, _MAGIC = b"fissile", b"PAR1"


def write(file: IO[bytes], store: Store, run: Run | None, keys: Sequence[str]) -> None:
    """Write the trials that are stored under these keys, and the run that they belong to.

    The same trials come to the same bytes, whenever they are written.
    """
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    kinds = {_BINARY: pyarrow.binary(), _NUMBER: pyarrow.float64()}
    fields = [(name, kinds.get(name, pyarrow.string())) for name in _COLUMNS]
    about = {_ABOUT: json.dumps([run.asked, run.command] if run else [])}
    found = {row[0]: row for row in store.stored(keys)}
    rows = [found[key] for key in keys if key in found]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in _COLUMNS]
    table = pyarrow.table(columns, schema=pyarrow.schema(fields, metadata=about))
    parquet.write_table(table, file, compression="zstd")


class TrialsFile:
    """Trials in a file, as :func:`write` leaves them: see :meth:`Store.take`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = Path(path)

    def stored(self) -> Iterator[tuple[Any, ...]]:
        """Yield every trial as its row of the database, if its key is that of its settings."""
        from pyarrow import parquet

        with self._open() as held, undamaged(self.file, "the table"):
            for batch in parquet.ParquetFile(held).iter_batches(_ROWS, columns=list(_COLUMNS)):
                for row in batch.to_pylist():
                    if from_spec(row["kind"], json.loads(row["spec"])).key != row["key"]:
                        raise FileError(
                            f"{self.file}: the key of the trial {row['key']} is not that of its "
                            "settings: another version of fissile wrote it; write it again"
                        )
                    yield tuple(row[name] for name in _COLUMNS)

    def runs(self) -> list[Run]:
        """Return the run that the trials belong to, begun when the first of them was finished."""
        from pyarrow import parquet

        with self._open() as held, undamaged(self.file, "the run"):
            foreign = held.read(len(_MAGIC)) != _MAGIC
            table = None if foreign else parquet.ParquetFile(held)
            if table is None or _ABOUT not in (table.schema_arrow.metadata or {}):
                raise FileError(
                    f"{self.file} is no file of trials; give one that `fissile results RUN "
                    "--format trials --to FILE` wrote, or the folder of a store"
                )
            told = json.loads(table.schema_arrow.metadata[_ABOUT])
            times = table.read(["finished"]).column(0).to_pylist()
            return [run_of(told[0], told[1], min(times))] if told and times else []

    def _open(self) -> Any:
        with undamaged(self.file, "the file"):
            return open_regular(self.file)
