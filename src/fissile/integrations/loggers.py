"""Where a training run writes its numbers, and the numbers that describe an expansion.

>>> logger = Several(TensorBoard("runs/wide"), WandB(project="fissile"))
>>> logger.log(step, loss=0.3, **describe(wide))
>>> logger.close()

Anything with ``log`` and ``close`` is a :class:`Logger`; no training code here needs more.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fissile._common.errors import FissileError, needs
from fissile._common.shapes import Bool
from fissile.expansion.budget import nonzeros
from fissile.expansion.structure import pairs_in
from fissile.layers import SparseLayer

__all__ = ["Logger", "MLflow", "Several", "TensorBoard", "WandB", "describe"]


@runtime_checkable
class Logger(Protocol):
    """Takes numbers as a run goes on."""

    def log(self, step: int, /, **numbers: float) -> None:
        """Write down numbers, each under its name, at a step."""

    def close(self) -> None:
        """Finish writing."""


class TensorBoard:
    """Writes event files for TensorBoard into a folder.

    >>> logger = TensorBoard("runs/wide")
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        needs("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(os.fspath(folder))

    def log(self, step: int, /, **numbers: float) -> None:
        """Write one scalar for each number."""
        for name, number in numbers.items():
            self._writer.add_scalar(name, float(number), step)

    def close(self) -> None:
        """Write out what is waiting and close the file."""
        self._writer.close()


class WandB:
    """Logs to Weights & Biases; the settings are those of ``wandb.init``.

    >>> logger = WandB(project="fissile", mode="offline")
    """

    def __init__(self, **settings: Any) -> None:
        _installed("wandb")
        import wandb

        self._run: Any = wandb.init(**settings)

    def log(self, step: int, /, **numbers: float) -> None:
        """Log all numbers at once."""
        self._run.log({name: float(number) for name, number in numbers.items()}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """Logs to MLflow; the settings are those of ``mlflow.start_run``.

    >>> logger = MLflow(run_name="wide")
    """

    def __init__(self, **settings: Any) -> None:
        _installed("mlflow")
        import mlflow

        self._mlflow: Any = mlflow
        self._run: Any = mlflow.start_run(**settings)

    def log(self, step: int, /, **numbers: float) -> None:
        """Log all numbers at once, to this run whichever is active now."""
        values = {name: float(number) for name, number in numbers.items()}
        self._mlflow.log_metrics(values, step=step, run_id=self._run.info.run_id)

    def close(self) -> None:
        """End this run, and leave alone another that is active now."""
        active, mine = self._mlflow.active_run(), self._run.info.run_id
        if active is not None and active.info.run_id == mine:
            self._mlflow.end_run()
        else:
            self._mlflow.MlflowClient().set_terminated(mine)


class Several:
    """Passes everything on to several loggers.

    >>> logger = Several(TensorBoard("runs"), WandB(project="fissile"))
    """

    def __init__(self, *loggers: Logger) -> None:
        for logger in loggers:
            if not isinstance(logger, Logger):
                raise FissileError(
                    f"{logger!r} is not a logger: it needs log(step, **numbers) and close()"
                )
        self.loggers = loggers

    def log(self, step: int, /, **numbers: float) -> None:
        """Log the numbers everywhere."""
        for logger in self.loggers:
            logger.log(step, **numbers)

    def close(self) -> None:
        """Close them all, also where one of them fails; its error is raised afterwards."""
        with ExitStack() as stack:
            for logger in reversed(self.loggers):
                stack.callback(logger.close)


def describe(model: nn.Module) -> dict[str, float]:
    """Describe a model's expansion in numbers to log.

    >>> describe(fissile.expand(fissile.MLP([32, 8, 1]), 2))
    {'nonzeros': 264, 'neurons': 16, 'dead': 0.0, 'density/layers.0': ..., 'density/layers.2': ...}

    ``nonzeros`` counts the weights of the whole model and is all there is to say of a dense one.
    ``neurons`` counts the children, ``dead`` is the share of them without inputs or without
    outputs, ``density`` the share of an expanded layer's weights that exist. Where
    layers do not know which of them belong together (put there by hand, or from an older file)
    ``neurons`` and ``dead`` are left out.
    """
    numbers: dict[str, float] = {"nonzeros": nonzeros(model).weights}
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLayer)}
    alive = [
        _alive([layers[name] for name in pair.firsts], layers[pair.second])
        for pair in pairs_in(model) or ()
    ]
    if alive:
        children = torch.cat(alive)
        numbers["neurons"] = children.numel()
        numbers["dead"] = 1 - int(children.sum()) / children.numel()
    for name, layer in layers.items():
        numbers[f"density/{name or '(model)'}"] = layer.nonzeros() / layer.pattern().numel()
    return numbers


def _alive(firsts: list[SparseLayer], second: SparseLayer) -> Bool[Tensor, " children"]:
    """Mark the children that have an input through one of the firsts, and an output."""
    children = second.inputs  # a layer that makes gate and up in one has two rows for each
    inputs = [first.pattern().flatten(1).any(1).view(-1, children) for first in firsts]
    outputs = second.pattern().transpose(0, 1).flatten(1).any(1)
    return (torch.cat(inputs).any(0) & outputs).cpu()


def _installed(package: str) -> None:
    """Ask for a package that is no extra of fissile's."""
    if importlib.util.find_spec(package) is None:
        raise FissileError(f"this needs {package}: pip install {package}")
