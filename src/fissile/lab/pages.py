"""Pages and tables that people open: made from a template, and written whole or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from fissile._common.errors import FileError, needs
from fissile._common.files import move_finished
from fissile._common.progress import duration
from fissile.lab.claims import Status
from fissile.lab.frame import labelled
from fissile.lab.results import shown

#: A verdict must be told apart without colour, on paper and by those who see none.
SYMBOLS: dict[Status, str] = {
    "holds": "✓",
    "not significant": "○",
    "fails": "✗",
    "not tested here": "□",
    "no data": "–",
}


@contextmanager
def whole_folder(folder: Path, what: str) -> Iterator[Path]:
    """Yield an empty folder whose files replace those of ``folder`` at the end, or none does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=folder, prefix=".unfinished-", ignore_cleanup_errors=True
        ) as beside:
            yield Path(beside)
            move_finished(Path(beside), folder, last="index.html")
    except OSError as error:
        raise FileError(
            f"could not write {what} to {folder}: {error.strerror or error}; free some space "
            "or give another folder"
        ) from None


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write a table in full precision, with nothing where a number is NaN."""
    import pandas

    pandas.DataFrame(rows).to_csv(path, index=False, lineterminator="\n")


def rendered(template: str, **values: object) -> str:
    """Return a page from a template beside this module, by its name."""
    needs("jinja2", "lab")
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = resources.files("fissile.lab")
    jinja = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
    )
    jinja.filters |= {
        "labelled": labelled, "duration": duration, "upper_first": upper_first, "shown": shown
    }  # fmt: skip
    return jinja.get_template(template).render(symbols=SYMBOLS, **values)


def upper_first(text: str) -> str:
    """Return a text that begins with a capital: ``upper_first("the table")``."""
    return text[:1].upper() + text[1:]
