"""Expansion in the middle of a Lightning run, with checkpoints from before and after it.

>>> trainer = Trainer(max_epochs=20, callbacks=[ExpandAt(alpha=2, epoch=10)])
>>> trainer.fit(module, loader)
>>> trainer.fit(Module(), loader, ckpt_path="last.ckpt")  # goes on, whichever epoch that is from
>>> module = load(Module, "last.ckpt")  # instead of Module.load_from_checkpoint

Works with ``pytorch_lightning`` and with ``lightning.pytorch``, on one device and with the ``ddp``
strategy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.optim import SGD, Optimizer

from fissile.budget import Budget, check_budget
from fissile.choose import Where, choose
from fissile.errors import FileError, FissileError, needs, whole
from fissile.expand import expand
from fissile.integrations.loggers import describe
from fissile.integrations.parallel import check_same
from fissile.layers import SparseLayer
from fissile.optim import check_optimizer
from fissile.pattern import check_alpha
from fissile.recipe import rebuild, recipe_of
from fissile.split import Split, resolve_split
from fissile.surgery.discover import discover

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


class ExpandAt(_Callback):
    """Expands the module at the start of an epoch, or before a step, and trains on.

    >>> Trainer(max_epochs=20, callbacks=[ExpandAt(alpha=2, epoch=10)])

    The optimizers go on with what they have learned, schedulers as well; what the expansion came
    to is logged as ``fissile/nonzeros``, ``fissile/neurons`` and so on. A checkpoint says how the
    module was expanded, so that a run resumes from any of them with a fresh dense module.

    Args:
        alpha: children per neuron.
        epoch: the epoch to begin with the expansion, counted from 0; or give ``step``.
        step: how many optimizer steps come before it (``trainer.global_step``).
        split: who inherits which input.
        where: which places of the module to expand, as for :func:`fissile.expand`.
        seed: of the split's randomness.
        budget: ``"weights"`` or ``"all"``.
    """

    def __init__(
        self,
        alpha: int,
        *,
        epoch: int | None = None,
        step: int | None = None,
        split: str | Split = "random",
        where: Where | None = None,
        seed: int = 0,
        budget: Budget = "weights",
    ) -> None:
        super().__init__()
        if (epoch is None) == (step is None):
            raise FissileError("give ExpandAt either epoch= or step=")
        self.alpha = whole("alpha", alpha, least=1)
        self.epoch = None if epoch is None else whole("epoch", epoch, least=0)
        self.step = None if step is None else whole("step", step, least=0)
        self.split, self.where = resolve_split(split), where
        self.seed, self.budget = whole("seed", seed, least=0), check_budget(budget)
        #: Whether the expansion lies behind.
        self.expanded = False

    @property
    def state_key(self) -> str:
        """Tell several expansions of one run apart."""
        return f"ExpandAt(epoch={self.epoch}, step={self.step})"

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the module's recipe."""
        return {"expanded": self.expanded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a saved run stopped."""
        self.expanded = bool(state_dict["expanded"])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the module write its recipe into checkpoints, and rebuild itself from one."""
        if stage == "fit":
            _check_strategy(trainer.strategy)
        if not any(isinstance(layer, SparseLayer) for layer in pl_module.modules()):
            self.expanded = False  # a callback may serve a second run with a fresh module
        # A callback hears of a checkpoint only after the weights were loaded, the module before.
        # The hooks stay, because a checkpoint may be asked for after the run.
        pl_module.on_save_checkpoint = partial(_save, pl_module)  # type: ignore[method-assign]
        pl_module.on_load_checkpoint = partial(_load, pl_module)  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what cannot be expanded or carried now, not in the middle of the run."""
        if self.expanded:
            return
        for place in choose(discover(pl_module), self.where):
            check_alpha(self.alpha, place.inputs)
        _check_optimizers(trainer.optimizers, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Expand when the time has come."""
        # Not at the start of the epoch: a run resumed between two epochs is not told of that.
        if self.expanded or not self._due(trainer):
            return
        with _as_one(trainer.optimizers) as optimizer:
            expand(
                pl_module,
                self.alpha,
                self.split,
                where=self.where,
                seed=self.seed,
                budget=self.budget,
                optimizer=optimizer,
                inplace=True,
            )
        self.expanded = True
        _wrap_again(trainer.strategy, pl_module)
        numbers = {f"fissile/{name}": number for name, number in describe(pl_module).items()}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)

    def _due(self, trainer: Trainer) -> bool:
        if self.epoch is not None:
            return trainer.current_epoch >= self.epoch
        return self.step is not None and trainer.global_step >= self.step


def load(cls: type[_Module], path: str | os.PathLike[str], **settings: Any) -> _Module:
    """Load a module, expanded or not, from a checkpoint that was written with :class:`ExpandAt`.

    >>> module = load(Module, "last.ckpt")

    Like ``Module.load_from_checkpoint``, which builds a dense module and finds that an expanded
    checkpoint does not fit. Nothing but tensors and plain values is read from the file.

    Args:
        cls: the LightningModule.
        path: the checkpoint.
        settings: for ``load_from_checkpoint`` and for the module, besides its hyperparameters.
    """

    class Rebuilt(cls):  # type: ignore[misc, valid-type]
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            _rebuild(self, checkpoint)
            super().on_load_checkpoint(checkpoint)

    Rebuilt.__name__ = cls.__name__  # torch's errors name it
    try:
        module: Any = Rebuilt.load_from_checkpoint(path, **settings, weights_only=True)
    except (EOFError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise FileError(f"{path}: not a checkpoint of tensors and plain values: {reason}") from None
    module.__class__ = cls
    return module  # type: ignore[no-any-return]


def _save(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    checkpoint[_KEY] = recipe_of(module)
    type(module).on_save_checkpoint(module, checkpoint)


def _load(module: LightningModule, checkpoint: dict[str, Any]) -> None:
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


def _wrap_again(strategy: Any, module: nn.Module) -> None:
    """Replace a DistributedDataParallel, which knows only the parameters it was made with."""
    if type(strategy).__name__ == "DDPStrategy":
        check_same(module)
        strategy.model = module
        strategy.configure_ddp()


def _check_optimizers(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    for optimizer in optimizers:
        check_optimizer(optimizer, module)
    held = [id(p) for one in optimizers for group in one.param_groups for p in group["params"]]
    if len(set(held)) < len(held):
        raise FissileError(
            "two optimizers hold the same parameter, and ExpandAt could carry it for only one; "
            "give each its own parameters"
        )


@contextmanager
def _as_one(optimizers: Sequence[Optimizer]) -> Iterator[Optimizer | None]:
    """Let several optimizers be carried as one that has all their groups and states."""
    if len(optimizers) < 2:
        yield next(iter(optimizers), None)
        return
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    one = SGD([parameter for group in groups for parameter in group["params"]], lr=0.0)
    one.param_groups = groups  # the very groups, so that each optimizer gets its new parameters
    for optimizer in optimizers:
        one.state.update(optimizer.state)
    yield one
    for optimizer in optimizers:
        optimizer.state.clear()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in one.state:
                    optimizer.state[parameter] = one.state[parameter]
