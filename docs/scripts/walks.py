"""Count the files that a call passes through, into docs/parts/walks.md.

A file counts when one of its functions runs; importing it alone does not count.
"""

import contextlib
import io
import os
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
from torch import nn

import fissile
from fissile.cli import app
from fissile.sklearn import FissileClassifier

DOCS = Path(__file__).parents[1]
SOURCE = Path(fissile.__file__).parent
#: The compiled part of the bank, where a walk through `fissile run` ends; its engine still counts.
KERNEL = ("bank/cpu/layout", "bank/cpu/kernel")


def walk(call):
    """Return the files of fissile whose functions a call runs, in the order of their first use."""
    files = {}

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and str(SOURCE) in code.co_filename:
            files.setdefault(Path(code.co_filename).relative_to(SOURCE).as_posix())

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(files)


def expanding():
    """Return the walk of `expand` on two linear layers."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    return walk(lambda: fissile.expand(model, 2))


def fitting():
    """Return the walk of a classifier's `fit`, without the training itself being long."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(64, 12)).astype(np.float32), draw.integers(2, size=64)
    return walk(lambda: FissileClassifier(nonzeros=60).fit(x, y))


def running():
    """Return the walk of a small study, up to the first file of the kernels."""

    def run():
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            app(["run", "superposition", "--scale", "smoke"], prog_name="fissile")

    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            files = walk(run)
        finally:
            os.chdir(here)
    return files[: next(i for i, file in enumerate(files) if file.startswith(KERNEL))]


WALKS = {
    "`fissile.expand(nn.Sequential(...), 2)`": expanding,
    "`FissileClassifier(nonzeros=60).fit(x, y)`": fitting,
    "`fissile run superposition --scale smoke`, up to the kernel": running,
}


def main():
    """Write the walks as a list each."""
    text = ""
    for title, make in WALKS.items():
        files = make()
        text += f"**{title}** opens {len(files)} files:\n\n"
        text += "".join(f"{i}. `{file}`\n" for i, file in enumerate(files, 1)) + "\n"
    (DOCS / "parts").mkdir(exist_ok=True)
    (DOCS / "parts" / "walks.md").write_text(text.rstrip() + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
