"""Expansion in the middle of a Lightning run, with checkpoints from before and after it.

Works with ``pytorch_lightning`` and with ``lightning.pytorch``, on one device and with the ``ddp``
strategy.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from fissile._common.errors import FileError, FissileError, needs
from fissile.expansion.optimizer import Moments, check_optimizer
from fissile.expansion.structure import rebuild, recipe_of
from fissile.integrations.parallel import check_same
from fissile.integrations.scheduled_expansion import ScheduledExpansion, check_places, describe
from fissile.layers import SparseLayer

if TYPE_CHECKING:
    from pytorch_lightning import Callback as _Callback
    from pytorch_lightning import LightningModule, Trainer
else:

    def _callbacks() -> tuple[type, ...]:
        """Return the base class of the Lightning in use: there are two, which share nothing."""
        names = [name for name in ("lightning", "pytorch_lightning") if find_spec(name)]
        if not names:
            needs("pytorch_lightning", "lightning")
        # Nothing imported yet does not tell which it will be, so a callback is then one of both.
        chosen = [name for name in names if name in sys.modules] or names
        modules = {"lightning": "lightning.pytorch"}
        return tuple(import_module(modules.get(name, name)).Callback for name in chosen)

    _Callback = type("_Callback", _callbacks(), {})

__all__ = ["ExpandAt", "load"]

_KEY = "fissile"
_Module = TypeVar("_Module", bound=nn.Module)
_AVERAGING = {"StochasticWeightAveraging", "WeightAveraging"}


class ExpandAt(ScheduledExpansion, _Callback):
    """Expands the module at the start of an epoch, or before a step, and trains on.

    >>> trainer = Trainer(max_epochs=20, callbacks=[ExpandAt(alpha=2, epoch=10)])
    >>> trainer.fit(Module(), loader)
    >>> trainer.fit(Module(), loader, ckpt_path="last.ckpt")  # from before or after the expansion

    Optimizers and schedulers continue; ``fissile/nonzeros``, ``fissile/neurons`` and so on are
    logged. A run resumes from any of its checkpoints with a fresh dense module. A run that cannot
    come to its expansion is refused, and so are callbacks that average weights.

    ``split``, ``where``, ``seed`` and ``budget`` are those of :func:`fissile.expand`.

    Args:
        alpha: children per neuron.
        epoch: the epoch to begin with the expansion, counted from 0; or give ``step``.
        step: how many optimizer steps come before it (``trainer.global_step``).
    """

    #: Whether the expansion lies behind.
    expanded = False

    @property
    def state_key(self) -> str:
        return f"ExpandAt(epoch={self.epoch}, step={self.step})"

    def state_dict(self) -> dict[str, Any]:
        return {"expanded": self.expanded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.expanded = bool(state_dict["expanded"])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the module write its recipe into checkpoints, and rebuild itself from one."""
        if not any(isinstance(layer, SparseLayer) for layer in pl_module.modules()):
            self.expanded = False  # a callback may serve a second run with a fresh module
        if stage == "fit":
            _check_strategy(trainer.strategy)
            if not self.expanded:
                _check_callbacks(trainer)
        # A callback hears of a checkpoint only after the weights were loaded, the module before.
        # The hooks stay, because a checkpoint may be asked for after the run.
        pl_module.on_save_checkpoint = partial(_to_checkpoint, pl_module)  # type: ignore[method-assign]
        pl_module.on_load_checkpoint = partial(_from_checkpoint, pl_module)  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what cannot be expanded or carried now, not in the middle of the run."""
        if self.expanded:
            return
        if self._is_past(trainer):
            raise FissileError(
                f"{self._when()} is over in this checkpoint, but the module is not expanded; "
                "expand later, or resume from an earlier checkpoint"
            )
        if self._is_beyond(trainer) and not _is_short(trainer):
            raise FissileError(
                f"training ends before {self._when()} begins (max_epochs={trainer.max_epochs}, "
                f"max_steps={trainer.max_steps}); expand earlier"
            )
        check_places(pl_module, self.alpha, self.where)
        _check_optimizers(trainer.optimizers, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so where a run was cut short of its expansion."""
        if not self.expanded:
            how = "under fast_dev_run " if _is_short(trainer) else ""
            message = f"training ended {how}before {self._when()}, and nothing was expanded"
            warnings.warn(message, stacklevel=2)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Expand when the time has come."""
        # Not at the start of the epoch: a run resumed between two epochs is not told of that.
        if self.expanded or self._since(trainer.current_epoch, trainer.global_step) < 0:
            return
        _without_redirection(pl_module)
        with _as_one(trainer.optimizers) as optimizer:
            self._expand(pl_module, optimizer)
        self.expanded = True
        if type(trainer.strategy).__name__ == "DDPStrategy":
            _wrap_again(trainer.strategy, pl_module)
        numbers = {f"fissile/{name}": number for name, number in describe(pl_module).items()}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)

    def _is_past(self, trainer: Trainer) -> bool:
        """Return whether a resumed run has left its moment behind."""
        batches = trainer.fit_loop.epoch_loop.batch_progress
        inside = batches.current.ready > 0 and not batches.is_last_batch
        return self._since(trainer.current_epoch + inside, trainer.global_step) > 0

    def _is_beyond(self, trainer: Trainer) -> bool:
        """Return whether the run has no such epoch or step; -1 and None stand for no end."""
        most = trainer.max_epochs if self.step is None else trainer.max_steps
        return most is not None and most >= 0 and self._since(most, most) <= 0


def _is_short(trainer: Any) -> bool:
    return bool(trainer.fast_dev_run)  # of which the class itself does not tell


def _check_callbacks(trainer: Any) -> None:
    """Refuse callbacks that average the weights of before with those of after."""
    for callback in trainer.callbacks:
        if _AVERAGING.intersection(kind.__name__ for kind in type(callback).__mro__):
            raise FissileError(
                f"{type(callback).__name__} averages weights, which have other shapes after the "
                "expansion; expand the module before the run, or average in a run after it"
            )


def _check_strategy(strategy: Any) -> None:
    kind = type(strategy).__name__
    if kind == "SingleDeviceStrategy":
        return
    if kind != "DDPStrategy":
        raise FissileError(
            f"ExpandAt cannot expand under {kind}, only on a single device and under DDPStrategy; "
            "expand the module before the run instead"
        )
    if strategy._start_method != "popen":
        raise FissileError(
            'ExpandAt needs strategy="ddp": processes that were spawned or forked hand their '
            "weights back to the dense module they came from"
        )


def _without_redirection(module: nn.Module) -> None:
    """Take the module's own forward off it, which Lightning's DDP moves aside and leaves there."""
    if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
        del module.forward


def _wrap_again(strategy: Any, module: nn.Module) -> None:
    """Replace a DistributedDataParallel, which knows only the parameters it was made with."""
    check_same(module)
    strategy.model = module
    strategy.configure_ddp()


def _check_optimizers(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    for optimizer in optimizers:
        check_optimizer(optimizer, module)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = [id(parameter) for group in groups for parameter in group["params"]]
    if len(set(held)) < len(held):
        raise FissileError(
            "two optimizers hold the same parameter, and ExpandAt could carry it for only one; "
            "give each its own parameters"
        )


@contextmanager
def _as_one(optimizers: Sequence[Optimizer]) -> Iterator[Moments | None]:
    """Let several optimizers be carried as one that has all their groups and states."""
    if not optimizers:
        yield None
        return
    # The very groups, so that each optimizer gets its new parameters.
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    state = {p: values for optimizer in optimizers for p, values in optimizer.state.items()}
    moments = Moments(groups, state)
    yield moments
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.state.clear()
        optimizer.state.update({p: moments.state[p] for p in held if p in moments.state})


# --- checkpoints


def load(cls: type[_Module], path: str | os.PathLike[str], **settings: Any) -> _Module:
    """Load a module, expanded or not, from a checkpoint that was written with :class:`ExpandAt`.

    >>> module = load(Module, "last.ckpt")

    Unlike ``Module.load_from_checkpoint``, it expands the module before its weights are loaded.
    Nothing but tensors and plain values is read from the file.

    Args:
        cls: the LightningModule.
        path: the checkpoint.
        settings: for ``load_from_checkpoint`` and for the module, besides its hyperparameters.
    """

    class Rebuilt(cls):  # type: ignore[misc, valid-type]
        def __new__(_, *args: Any, **hyperparameters: Any) -> Any:
            """Make a module of the class itself, which expands before its weights are loaded."""
            module: Any = cls(*args, **hyperparameters)
            module.on_load_checkpoint = partial(_from_checkpoint, module)
            return module

    if settings.pop("weights_only", None) not in (None, True):
        raise FissileError("load runs nothing that a checkpoint says; leave weights_only out")
    try:
        module: Any = Rebuilt.load_from_checkpoint(path, **settings, weights_only=True)
    except FissileError:
        raise
    except Exception:
        _check_file(path)
        raise  # the file is as it should be, so it is the module's own error
    del module.on_load_checkpoint
    return module  # type: ignore[no-any-return]


def _check_file(path: str | os.PathLike[str]) -> None:
    """Refuse a file that is no checkpoint of tensors and plain values."""
    if not os.path.isfile(path):
        return
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FileError(f"{path}: {_reason(error)}") from None
    for key in ("pytorch-lightning_version", "state_dict"):
        if not isinstance(checkpoint, dict) or key not in checkpoint:
            raise FileError(f"{path}: not a checkpoint of Lightning: it has no {key!r}")


def _reason(error: Exception) -> str:
    """Say in a line why torch does not read a file."""
    if foreign := re.search(r"GLOBAL (\S+)", str(error)):
        return (
            f"it holds a {foreign[1]}, and nothing but tensors and plain values is read; keep "
            "hyperparameters plain (a path as a str), or leave them out of save_hyperparameters"
        )
    return f"not a checkpoint of Lightning, or torn ({type(error).__name__})"


def _to_checkpoint(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Write the module's recipe beside its weights, then call its own ``on_save_checkpoint``."""
    checkpoint[_KEY] = recipe_of(module)
    type(module).on_save_checkpoint(module, checkpoint)


def _from_checkpoint(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Rebuild the module before its weights are loaded, then call its ``on_load_checkpoint``."""
    _rebuild(module, checkpoint)
    type(module).on_load_checkpoint(module, checkpoint)


def _rebuild(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Give a dense module the structure of the checkpoint, if that says what it is."""
    if _KEY not in checkpoint:
        return
    recipe = checkpoint[_KEY]
    rebuild(module, recipe)
    if recipe_of(module)["layers"].keys() - recipe["layers"].keys():
        raise FissileError(
            "the checkpoint is from before the expansion, and the module is expanded already; "
            "load it into a fresh dense module"
        )
