"""Figures as files: SVG for papers and web pages, PNG for everything else."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fissile._common.errors import FileError
from fissile.lab.plots.style import styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["save"]

_DPI = 300
#: Formats, and what must not get into them: a file says the same whenever it is written.
_FORMATS: dict[str, dict[str, Any]] = {
    "svg": {"Date": None},
    "png": {"Software": None},
}


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG; files already there are replaced whole or not at all.

    >>> save(draw(study, frame), Path("figures"), study.id)

    The same figure always becomes the same bytes.
    """
    folder = Path(folder)
    pages = {folder / f"{name}.{kind}": _rendered(figure, kind) for kind in _FORMATS}
    beside = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in pages}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in pages.items():
            beside[path].write_bytes(data)
        for path, temporary in beside.items():
            temporary.replace(path)
    except OSError as error:
        raise FileError(
            f"could not write the figure {name!r} to {folder}: {error.strerror or error}; "
            "make room there, or choose another folder"
        ) from None
    finally:
        _remove(list(beside.values()))
    return list(pages)


def _rendered(figure: Figure, kind: str) -> bytes:
    page = BytesIO()
    with styled():
        figure.savefig(page, format=kind, dpi=_DPI, metadata=_FORMATS[kind])
    return page.getvalue()


def _remove(paths: list[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError:  # the folder is no folder, or not ours: then nothing of ours is in it
            return
