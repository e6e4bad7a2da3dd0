"""Figures fit for a paper; they draw what they are given and know nothing of experiments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from fissile.errors import needs
from fissile.layers import SparseLinear, weight_of
from fissile.measure import gram

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["weights_and_gram"]

_COLOURS = "RdBu_r"


def weights_and_gram(
    models: Mapping[str, nn.Module], groups: Tensor, path: str | Path, *, layer: str = "layers.0"
) -> Path:
    """Draw W1 and its Gram matrix for each model, as in the paper's Figure 1.

    >>> weights_and_gram({"dense": model, "split": wide}, formula.groups, "codes.png")

    Crosses mark weights that do not exist, vertical lines the clauses, horizontal lines the
    children of one parent.
    """
    needs("matplotlib", "demo")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.1 * len(models)), layout="constrained")
    axes = figure.subplots(len(models), 2, squeeze=False, width_ratios=[1, 2])
    for row, (title, model) in zip(axes, models.items(), strict=True):
        module = model.get_submodule(layer)
        weight = weight_of(module).detach()
        siblings = getattr(module, "alpha", 1)
        _matrix(row[0], gram(weight).numpy(), f"{title}: Gram matrix $W_1^T W_1$")
        _matrix(row[1], weight.numpy(), f"{title}: first layer $W_1$")
        if isinstance(module, SparseLinear):
            rows, columns = np.nonzero(~module.pattern().numpy())
            row[1].scatter(columns, rows, marker="x", s=14, c="black", linewidths=0.7)
        edges = _edges(groups)
        row[0].vlines(edges, -0.5, len(groups) - 0.5, color="black", linewidth=0.5)
        row[0].hlines(edges, -0.5, len(groups) - 0.5, color="black", linewidth=0.5)
        row[1].vlines(edges, -0.5, len(weight) - 0.5, color="black", linewidth=0.8)
        parents = np.arange(siblings, len(weight), siblings) - 0.5
        if siblings > 1:
            row[1].hlines(parents, -0.5, len(groups) - 0.5, color="black", linewidth=0.5)
        row[0].set(xlabel="literal", ylabel="literal")
        row[1].set(xlabel="literal", ylabel="neuron")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _matrix(axes: Axes, values: np.ndarray[Any, Any], title: str) -> None:
    """Show a matrix with white at zero, so that sign is colour."""
    limit = float(np.quantile(np.abs(values), 0.99)) or 1.0  # a single giant must not pale the rest
    image = axes.imshow(
        values, cmap=_COLOURS, vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest"
    )
    axes.set_title(title, fontsize=10)
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)


def _edges(groups: Tensor) -> list[float]:
    """Return where one group of inputs ends and the next begins."""
    return [i + 0.5 for i in range(len(groups) - 1) if groups[i] != groups[i + 1]]
