"""What studies share: arms, grids of settings, and the tables of the paper."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources

from fissile.lab.study import Lines, Published, Scale
from fissile.lab.trial import Arm, Boolean, Task, Trial

DENSE = Arm()


def both(*alphas: int) -> tuple[Arm, ...]:
    """Return the arms of the Boolean studies: dense, and both splits at each alpha."""
    return DENSE, *(Arm(split, alpha) for alpha in alphas for split in ("clause", "random"))


def gram(alpha: int) -> tuple[Arm, ...]:
    """Return the arms of the studies without known features: dense, Gram and random."""
    return DENSE, Arm("gram", alpha), Arm("random", alpha)


def names(arms: tuple[Arm, ...]) -> tuple[str, ...]:
    """Return what tables call the arms."""
    return tuple(arm.name for arm in arms)


#: The paper leaves open how many samples there are, and its text and its algorithm A2 differ on the
#: false ones. This reading follows the rules of docs/fidelity.md: A2 as printed, and the fewest
#: samples with which the warm-up comes within 95 % of convergence.
READING = Boolean(train=50_000, negatives="literal", others="matched")
#: Enough to see that everything runs.
TINY = replace(READING, train=256, test=128)


def grid(
    trials: int,
    cells: Iterable[tuple[int, int]],
    *,
    task: Boolean = READING,
    epochs: int = 25,
    embedded: bool = False,
    pictures: bool = False,
) -> Scale:
    """Return a scale with these numbers of clauses and neurons, embeddings as wide as inputs."""
    settings = (
        Trial(
            replace(task, clauses=clauses),
            neurons,
            task.size * clauses if embedded else None,
            warm_up=epochs,
            fine_tune=epochs,
            pictures=pictures,
        )
        for clauses, neurons in cells
    )
    return Scale(trials, tuple(settings))


def cross(axis: Sequence[int]) -> list[tuple[int, int]]:
    """Return the cells of two sweeps: 8 clauses with all widths, all clauses with 8 neurons."""
    return [(8, neurons) for neurons in axis] + [(clauses, 8) for clauses in axis if clauses != 8]


def sweep(
    trials: int,
    tasks: Iterable[Task],
    widths: Sequence[int],
    epochs: int = 25,
    depths: Sequence[int] = (2,),
) -> Scale:
    """Return a scale of every task with every width and depth; deep networks have LayerNorm."""
    cells = (
        Trial(task, n, warm_up=epochs, fine_tune=epochs, depth=depth, layer_norm=depth > 2)
        for depth in depths
        for task in tasks
        for n in widths
    )
    return Scale(trials, tuple(cells))


def gains(arms: tuple[Arm, ...], along: str = "neurons") -> tuple[tuple[Lines, ...], ...]:
    """Return the panels of Figures 4 and 5: what splits gain, per parameter, and in all."""
    split = names(arms[1:])
    return (
        (
            Lines(along, "improvement", split, stars=split, baseline=0.0),
            Lines(along, "per_parameter", names(arms)),
            Lines(along, "accuracy", names(arms)),
        ),
    )


@cache
def _tables() -> dict[str, tuple[Published, ...]]:
    """Return the tables of the paper by study, as ``tables.md`` has them."""
    tables: dict[str, tuple[Published, ...]] = {}
    text = resources.files("fissile.lab.studies").joinpath("tables.md").read_text("utf-8")
    for section in text.split("\n## ")[1:]:
        heading, title, *lines = filter(None, section.splitlines())
        study, _, about = heading.partition(": ")
        measure, *settings = about.split(", ")
        where = {name: int(value) for name, value in (each.split(" = ") for each in settings)}
        (along, *arms), _, *rows = ([c.strip() for c in line.split("|")[1:-1]] for line in lines)
        values = {int(row[0]): dict(zip(arms, map(_number, row[1:]), strict=True)) for row in rows}
        # Ours are shown with the digits that all numbers of the table have.
        digits = min(map(len, re.findall(r"\.(\d+)", " ".join(lines))))
        table = Published(title, measure, along, values, where, digits)
        tables[study] = (*tables.get(study, ()), table)
    return tables


def published(study: str) -> tuple[Published, ...]:
    """Return the tables of the paper that a study is held to: ``published("capacity")``."""
    return _tables()[study]


def _number(text: str) -> tuple[float, float] | float:
    """Return a mean, with its spread if the paper gives one: ``1.896 ± 0.377``."""
    mean, _, spread = text.partition(" ± ")
    return (float(mean), float(spread)) if spread else float(mean)


def boolean(
    cells: Callable[[Sequence[int]], Iterable[tuple[int, int]]],
    axis: Sequence[int],
    *,
    trials: int = 5,
    few: Sequence[int] = (4, 8, 16, 32),
    tiny: Sequence[int] = (4, 8),
    task: Boolean = READING,
    embedded: bool = False,
) -> dict[str, Scale]:
    """Return the scales of a Boolean study, whose cells depend on the places of an axis."""
    return {
        "smoke": grid(2, cells(tiny), task=TINY, epochs=2, embedded=embedded),
        "quick": grid(3, cells(few), task=task, embedded=embedded),
        "paper": grid(trials, cells(axis), task=task, embedded=embedded),
    }
