"""Run the Python blocks of a page and put what they print beside them.

    python docs/scripts/run.py                    # all pages
    python docs/scripts/run.py docs/tutorial.md   # some

Blocks of one page share their names. A block of `text` right after a block of `python` is what it
prints; this script writes it, and a test holds the page to it. A block is left out only after a
comment `<!-- not run: why -->`. One after `<!-- file: name.py -->` is only written to that file.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?:^<!-- (?:not run: (?P<why>[^\n]+)|file: (?P<file>\S+)) -->\n)?"
    r"^```python\n(?P<code>.*?)^```\n"
    r"(?:\n^```text\n(?P<shown>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True)
class Block:
    """A block of Python, what the page says it prints, and why it is not run, if it is not."""

    code: str
    shown: str | None
    why: str | None
    line: int
    file: str | None = None


def blocks(text):
    """Return the Python blocks of a page, in order."""
    return [
        Block(
            found["code"],
            found["shown"],
            found["why"],
            text.count("\n", 0, found.start()),
            found["file"],
        )
        for found in BLOCK.finditer(text)
    ]


def run(text, page, folder):
    """Run a page's blocks in a folder and return what each prints; None for one left out."""
    names = {"__name__": "__main__"}
    printed = []
    before = os.getcwd()
    os.chdir(folder)
    try:
        for block in blocks(text):
            if block.why is not None:
                printed.append(None)
                continue
            if block.file is not None:
                Path(block.file).write_text(block.code, "utf-8")
                printed.append("")
                continue
            # Blank lines in front, so that a traceback names the line of the page.
            code = compile("\n" * (block.line + 1) + block.code, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, names)
            printed.append(out.getvalue())
    finally:
        os.chdir(before)
    return printed


def alike(shown, printed):
    """Tell whether an output is the shown one: whole numbers exactly, decimals within a tenth.

    >>> alike("264 weights, 83.1 %", "264 weights, 83.4 %")
    True
    """
    if NUMBER.sub("#", _squeezed(shown)) != NUMBER.sub("#", _squeezed(printed)):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(_close(*pair) for pair in pairs)


def _squeezed(text):
    """Leave out what depends on how long a number is: runs of spaces and ends of lines."""
    return re.sub(r"[ \t]+", " ", text).replace(" \n", "\n").strip()


def _close(shown, printed):
    if shown == printed:
        return True
    if "." not in shown:
        return False
    a, b = (float(number.replace(",", "")) for number in (shown, printed))
    return abs(a - b) <= 0.1 * max(abs(a), abs(b), 0.1)


def refreshed(text, printed):
    """Return a page with its shown outputs as they were printed now."""
    outputs = iter(printed)

    def with_output(found):
        out = next(outputs)
        if found["shown"] is None or out is None:
            return found[0]
        start, end = (at - found.start() for at in found.span("shown"))
        return found[0][:start] + out.rstrip() + "\n" + found[0][end:]

    return BLOCK.sub(with_output, text)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or sorted((ROOT / "docs").rglob("*.md"))):
        page = path.read_text("utf-8")
        with tempfile.TemporaryDirectory() as folder:
            path.write_text(refreshed(page, run(page, path, folder)), "utf-8")
