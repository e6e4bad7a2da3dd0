"""Claims: the trials that a process computes, told to other processes by locks on one file."""

from __future__ import annotations

import errno
import os
import sys
import weakref
from pathlib import Path
from typing import ClassVar

if sys.platform != "win32":
    import fcntl


class Flight:
    """The trials that this process computes in a folder: for each, one byte of a file is locked.

    The kernel drops the locks of a process that dies, but also those of one that closes the file
    anywhere: hence one open file for all stores on the folder.
    """

    _all: ClassVar[weakref.WeakValueDictionary[Path, Flight]] = weakref.WeakValueDictionary()

    def __init__(self, file: Path) -> None:
        self._handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        self._taken: set[str] = set()
        weakref.finalize(self, os.close, self._handle)

    @classmethod
    def over(cls, file: Path) -> Flight:
        """Return the one that all stores of this process share."""
        found = cls._all.get(file) or cls(file)
        return cls._all.setdefault(file, found)

    def take(self, key: str) -> bool:
        """Claim a trial, and return whether nobody else has."""
        if key in self._taken or not self._lock(key):
            return False
        self._taken.add(key)
        return True

    def drop(self, key: str) -> None:
        """Give up a claim."""
        self._taken.remove(key)
        self._lock(key, drop=True)

    def _lock(self, key: str, *, drop: bool = False) -> bool:
        if sys.platform != "win32":
            how = fcntl.LOCK_UN if drop else fcntl.LOCK_EX | fcntl.LOCK_NB
            try:  # 60 bits of the key: an offset has 63
                fcntl.lockf(self._handle, how, 1, int(key[:15], 16))
            except OSError as error:
                # On a file system without locks all go ahead: the first result stays anyway.
                return error.errno not in (errno.EACCES, errno.EAGAIN)
        return True
