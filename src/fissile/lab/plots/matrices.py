"""First layers and their Gram matrices as pictures: a row for each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fissile._common.random import seeded
from fissile.lab.plots.heat import diverging
from fissile.lab.plots.style import look
from fissile.lab.study import Matrices
from fissile.measure import gram, gram_clusters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.gridspec import SubplotSpec

__all__ = ["matrices", "pictured"]

Array = NDArray[Any]

_TITLES = {
    "gram": "Gram matrix $W_1^{\\top} W_1$",
    "clustered": "Gram matrix by cluster",
    "w1": "First layer $W_1$",
}
_ACROSS = 4.1  # how many squares are as wide as the page
_LINE: dict[str, Any] = {"color": "black", "linewidth": 0.4}
_POINTS = (190, 90)  # about the size of a picture of a first layer: crosses must fit its cells


@dataclass(frozen=True)
class _Picture:
    """A matrix, and before which columns, and before which rows, a new group begins."""

    values: Array
    columns: Sequence[int]
    rows: Sequence[int]


def pictured(panel: Matrices, pictures: Mapping[str, Array]) -> list[str]:
    """Return the arms that there is something to show of."""
    return [arm for arm in panel.arms if arm in pictures and np.isfinite(pictures[arm]).any()]


def matrices(place: SubplotSpec, panel: Matrices, pictures: Mapping[str, Array]) -> None:
    """Draw the matrices of every arm, each column with one scale of colours for all arms."""
    arms = pictured(panel, pictures)
    widths = [_ACROSS - len(panel.shows) + 1 if show == "w1" else 1 for show in panel.shows]
    axes = place.subgridspec(len(arms), len(widths), width_ratios=widths).subplots(squeeze=False)
    parents = len(pictures["dense"]) if "dense" in pictures else 0
    for column, show, wide in zip(axes.T, panel.shows, widths, strict=True):
        _column(column, [_picture(show, pictures[arm], panel.size, parents) for arm in arms], wide)
        column[0].set_title(_TITLES[show])
        column[-1].set_xlabel("Literals by cluster" if show == "clustered" else "Literal")
        for one in column:
            if show == "clustered":  # the places there are not the literals' numbers
                one.set(xticks=[], yticks=[])
            elif show == "w1":
                one.set_ylabel("Neuron")
    axes[-1, 0].figure.align_xlabels(axes[-1])
    for row, arm in zip(axes, arms, strict=True):
        row[0].set_ylabel(look(arm).label)


def _picture(show: str, weight: Array, size: int, parents: int) -> _Picture:
    known = torch.from_numpy(np.nan_to_num(weight.astype(np.float64)))
    inputs = weight.shape[1]
    clauses = range(size, inputs, size)
    if show == "w1":
        siblings = len(weight) // parents if parents else 1
        families = range(siblings, len(weight), siblings) if siblings > 1 else ()
        return _Picture(weight, clauses, families)
    values = gram(known).numpy()
    if show == "gram":
        return _Picture(values, clauses, clauses)
    # The draw that measured the recovery of clauses in trial 0, and so the same clusters.
    order, edges = _in_blocks(gram_clusters(known, max(inputs // size, 1), seeded(0)).numpy())
    return _Picture(values[np.ix_(order, order)], edges, edges)


def _in_blocks(labels: Array) -> tuple[Array, list[int]]:
    """Return the inputs cluster by cluster, in the order they come in, and where one begins."""
    middle = {label: np.flatnonzero(labels == label).mean() for label in np.unique(labels)}
    clusters = sorted(middle, key=lambda label: middle[label])
    blocks = [np.flatnonzero(labels == label) for label in clusters]
    return np.concatenate(blocks), np.cumsum([len(block) for block in blocks])[:-1].tolist()


def _column(column: Sequence[Axes], pictures: Sequence[_Picture], wide: float) -> None:
    from matplotlib.ticker import MaxNLocator

    # A single giant weight must not pale all the others.
    every = np.concatenate([one.values[np.isfinite(one.values)] for one in pictures])
    limit = float(np.quantile(np.abs(every), 0.99)) or 1.0
    for axes, one in zip(column, pictures, strict=True):
        image = axes.imshow(
            one.values, cmap=diverging(), vmin=-limit, vmax=limit, aspect="auto",
            interpolation="nearest",
        )  # fmt: skip
        rows, columns = one.values.shape
        axes.vlines(np.array(one.columns) - 0.5, -0.5, rows - 0.5, **_LINE)
        axes.hlines(np.array(one.rows) - 0.5, -0.5, columns - 0.5, **_LINE)
        _crosses(axes, one.values)
        axes.spines[:].set_visible(True)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    figure = column[0].figure
    bar = figure.colorbar(
        image, ax=list(column), location="bottom", extend="both", extendfrac=0.04,
        fraction=0.025, pad=0.02, aspect=20 * wide, ticks=MaxNLocator(4, symmetric=True),
    )  # fmt: skip
    bar.outline.set_linewidth(0.4)


def _crosses(axes: Axes, values: Array) -> None:
    """Mark the weights that do not exist."""
    rows, columns = np.nonzero(np.isnan(values))
    cell = min(_POINTS[0] / values.shape[1], _POINTS[1] / values.shape[0])
    axes.scatter(
        columns, rows, s=(0.5 * cell) ** 2, c="black", marker="x", linewidths=min(0.7, cell / 8)
    )
