"""Looking a data set over: its files, their checksums, its samples, classes and labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fissile._common.errors import FissileError
from fissile.data.catalogue import Entry, Found, find, load, load_texts
from fissile.data.download import checksum
from fissile.data.sets import Labelled
from fissile.data.text import Texts


@dataclass(frozen=True)
class Report:
    """What a data set was found to be; `problems` is empty if all is well."""

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
        files = tuple((path, path.stat().st_size) for path in found.files())
        _check_sums(found, facts, problems)
        read = load_texts if found.entry.read_texts is not None else load
        _check_contents(found.entry, read(name, data), facts, problems)
    except (FissileError, OSError) as error:
        problems.append(str(error))
    return Report(name, found.path, files, tuple(facts), tuple(problems))


def _check_sums(found: Found, facts: list[str], problems: list[str]) -> None:
    published = {Path(remote.to).name: remote.md5 for remote in found.entry.urls}
    for path in found.files():
        if (md5 := published.get(path.name)) is None:
            continue
        if checksum(path) == md5:
            facts.append(f"{path.name} has the md5 of its source")
        elif found.entry.fingerprint:  # packed anew, as Debian does; the contents decide
            facts.append(f"{path.name} is packed anew, its md5 is not the source's")
        else:
            problems.append(f"{path}: its md5 is not {md5}; delete it and get it again")


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
    counts = np.bincount(read.y, minlength=read.classes)
    each = " to ".join(f"{count:,}" for count in sorted({counts.min(), counts.max()}))
    facts.append(f"{read.classes} classes, {each} training samples each")
    for kind, y in (("training", read.y), ("test", read.y_test)):
        if known.shape == (1,):
            continue  # a rare character need not be in the last tenth of a text
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
