"""The commands ``fissile try`` and ``fissile fit``: which network suits some features; make it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fissile._common.errors import FissileError, needs, printable
from fissile._common.files import atomic_write
from fissile._common.progress import aligned, duration

TRY = "Examples: fissile try features.npz · fissile try table.csv --label kind"
FIT = "Example: fissile fit features.npz --nonzeros 20000 --to model.safetensors"
File = Annotated[
    str,
    typer.Argument(
        help="Features as .npz, .safetensors or .parquet, a .csv with a column of labels, or a "
        "data set's name."
    ),
]
Label = Annotated[str, typer.Option(help="The column of labels, in a table.")]


def try_file(
    file: File,
    label: Label = "label",
    samples: Annotated[
        int, typer.Option(min=50, help="Train on at most so many samples.")
    ] = 10_000,
    to: Annotated[Path | None, typer.Option(help="The page; by default try-NAME.html.")] = None,
) -> None:
    """Compare dense, split and recommended networks on some features, and say which to use."""
    from fissile.lab import try_file as trying

    since = time.perf_counter()
    data = trying.samples_of(file, label)
    found = trying.tried(data, samples)
    best = trying.chosen(found)
    rows: list[tuple[str, ...]] = [("non-zeros", "dense width", *trying.ARMS, "use", "test")]
    for one in best:
        known = {t.arm: f"{t.accuracy:.1%}" for t in found if t.width == one.width}
        cells = [known.get(arm, "") for arm in trying.ARMS]
        rows.append((f"{one.nonzeros:,}", f"{one.width}", *cells, one.arm, f"{one.test:.1%}"))
    lines = aligned(rows, right=range(5))
    lines += [
        "",
        f"Accuracy on {len(found[0].right):,} held-out training samples, by which the choice is "
        "made: the simplest that no other is clearly above (two standard errors). The test "
        f"samples ({len(data.y_test):,}) were used for the last column alone. Alpha is "
        f"{trying.ALPHA}; equal epochs; biases count.",
    ]
    text = printable("\n".join(lines))
    typer.echo(text)
    for one in best:
        command, python = trying.told(one, file, label)
        typer.echo(f"\n{one.nonzeros:,} non-zeros, {one.arm}:\n  {printable(command)}\n  {python}")
    target = to or Path(f"try-{Path(file).stem}.html")
    with atomic_write(target, "w") as page:
        page.write(trying.page(found, file, text, label))
    typer.echo(f"\nThe curves are in {target}; {duration(time.perf_counter() - since)}.")


def fit(
    file: File,
    to: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
    nonzeros: Annotated[int | None, typer.Option(min=1, help="The budget, for the recipe.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Or neurons before the split.")] = None,
    alpha: Annotated[int, typer.Option(min=1, help="Children of a neuron; 1 is dense.")] = 4,
    label: Label = "label",
) -> None:
    """Train a classifier on some features, and save it."""
    needs("sklearn", "sklearn")
    from fissile.lab.try_file import BATCH, TRIES, samples_of
    from fissile.sklearn import FissileClassifier

    if (nonzeros is None) == (hidden is None):
        raise FissileError(
            "give --nonzeros for the recipe, or --hidden for a split or dense network"
        )
    data = samples_of(file, label)
    options: dict[str, Any] = {"hidden": hidden, "alpha": alpha, "recipe": "paper"}
    if nonzeros is not None:
        options = {"nonzeros": nonzeros, "batch": BATCH, "tries": TRIES}
    made = FissileClassifier(**options, random_state=0)
    made.fit(data.x, data.y)
    made.save(to)
    score = made.score(data.x_test, data.y_test)
    typer.echo(f"{to}: {made.nonzeros_:,} non-zeros, {score:.1%} of the test samples right.")
