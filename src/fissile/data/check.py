"""Looking a data set over: its files, their checksums, its samples, classes and labels.

>>> check("fashionmnist").problems
()
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FissileError
from fissile.data.catalogue import Found, find, load, load_texts
from fissile.data.download import checksum
from fissile.data.entries import Entry, Remote
from fissile.data.sets import Labelled
from fissile.data.text import Texts

__all__ = ["Report", "check"]


@dataclass(frozen=True)
class Report:
    """What a data set was found to be; `problems` is empty if all is well.

    >>> check("generated").facts
    ('2,000 training and 500 test samples', '20 classes, 100 training samples each', ...)
    """

    name: str
    path: Path | None
    files: tuple[tuple[Path, int], ...] = ()
    facts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def check(name: str, data: Path | None = None) -> Report:
    """Read a data set and compare it with what is known of it; a bad file raises nothing.

    >>> check("cifar100", Path("my-data")).problems
    ('/my-data/cifar-100-python.tar.gz: damaged or not what it claims to be: ...',)
    """
    found = find(name, data)
    if found is None:
        return Report(name, None, problems=(f"{name} is not here; see: fissile data show {name}",))
    facts: list[str] = []
    problems: list[str] = []
    files: tuple[tuple[Path, int], ...] = ()
    try:
        files = _files(found)
        _check_sums(found.entry, files, facts, problems)
        read = load_texts if found.entry.read_texts is not None else load
        _check_contents(found.entry, read(name, data), facts, problems)
    except (FissileError, OSError) as error:
        problems.append(str(error))
    return Report(name, found.path, files, tuple(facts), tuple(problems))


def _files(found: Found) -> tuple[tuple[Path, int], ...]:
    if found.path is None:
        return ()
    if found.path.is_file():
        paths = [found.path]
    else:
        paths = sorted({p for layout in found.entry.files for p in layout.within(found.path)})
    return tuple((path, path.stat().st_size) for path in paths)


def _check_sums(
    known: Entry, files: tuple[tuple[Path, int], ...], facts: list[str], problems: list[str]
) -> None:
    published = {Path(remote.to).name: remote for remote in known.urls if remote.md5}
    for path, _ in files:
        remote: Remote | None = published.get(path.name)
        if remote is None:
            continue
        if checksum(path) == remote.md5:
            facts.append(f"{path.name} has the md5 its source publishes")
        elif known.fingerprint:  # packed anew, as Debian does; the contents decide
            facts.append(f"{path.name} is packed anew, its md5 is not the source's")
        else:
            problems.append(f"{path}: its md5 is not {remote.md5}; delete it and get it again")


def _check_contents(
    known: Entry, read: Labelled | Texts, facts: list[str], problems: list[str]
) -> None:
    train, test = len(read.y), len(read.y_test)
    facts.append(f"{train:,} training and {test:,} test samples")
    for kind, have, want in (("training", train, known.train), ("test", test, known.test)):
        if want is not None and have != want:
            problems.append(f"it has {have:,} {kind} samples, not {want:,}; get it again")
    if read.classes != known.classes:
        problems.append(f"it has {read.classes} classes, not {known.classes}; get it again")
    facts.append(f"{read.classes} classes, {_spread(read.y, read.classes)} training samples each")
    for kind, y in (("training", read.y), ("test", read.y_test)):
        if empty := int(np.count_nonzero(np.bincount(y, minlength=read.classes) == 0)):
            problems.append(f"{empty} classes have no {kind} samples; get it again")
    fingerprint = read.fingerprint()
    facts.append(f"fingerprint {fingerprint}")
    if known.fingerprint and fingerprint != known.fingerprint:
        problems.append(
            f"its contents are not the source's: the fingerprint is {fingerprint}, not "
            f"{known.fingerprint}; get it again"
        )
    if isinstance(read, Labelled) and read.encoder:
        facts.append(f"encoder: {read.encoder}")


def _spread(y: NDArray[np.int64], classes: int) -> str:
    counts = np.bincount(y, minlength=classes)
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
