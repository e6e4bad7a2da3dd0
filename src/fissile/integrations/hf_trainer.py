"""The split in the middle of a run of transformers' ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fissile._common.errors import FissileError
from fissile.discovery.module_checks import is_layer
from fissile.expansion.optimizer import check_optimizer
from fissile.integrations.loggers import describe
from fissile.integrations.scheduled_expansion import Ahead, check_places
from fissile.layers import SparseLayer

__all__ = ["ExpandAt"]

_LOGGED = ("nonzeros", "neurons", "dead")
#: What only expanded layers have in a file.
_STRUCTURE = ("owner", "mask", "degree")


class ExpandAt(Ahead, TrainerCallback):
    """Expand the model at the start of an epoch, or before a step, and let training go on.

    >>> trainer = Trainer(bert, args, train_dataset=data, callbacks=[ExpandAt(2, epoch=3)])
    >>> trainer.train()

    Optimizer and schedule continue. ``state.log_history`` records ``fissile/nonzeros`` and
    ``fissile/neurons``. The callbacks that come after this one hear of them with the next log; the
    Trainer puts those of ``report_to`` before it. For TensorBoard, and W&B alike:

    >>> args = TrainingArguments("out", report_to="none")
    >>> Trainer(bert, args, callbacks=[ExpandAt(2, epoch=3), TensorBoardCallback()])

    A checkpoint from before the split resumes as usual; for one from after it load the model first,
    and give the Trainer the same callback, which will not expand it again:

    >>> wide = AutoModelForSequenceClassification.from_pretrained("out/checkpoint-500")
    >>> Trainer(wide, args, train_dataset=data, callbacks=[ExpandAt(2, epoch=3)]).train(
    ...     resume_from_checkpoint="out/checkpoint-500"
    ... )

    With ``load_best_model_at_end`` the best model is the best after the split.

    Args:
        alpha: children per neuron.
        epoch: before which epoch to split, counted from 0, so also: after how many. Data without a
            length has no epochs to count; give ``step``.
        step: before which optimizer step to split, counted the same way.
        split: as in :func:`fissile.expand`, and so are ``where``, ``seed`` and ``budget``.
    """

    _done = False
    _news: Mapping[str, float] = {}
    _watch: RemovableHandle | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Wait for a checkpoint: the Trainer loads one before it says that training begins."""
        self._watch = given["model"].register_load_state_dict_pre_hook(_check_checkpoint)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Refuse what could only fail later; see whether the split is behind us already."""
        if self._watch is not None:
            self._watch.remove()
        if self.epoch is not None:
            _check_counted(given["train_dataloader"])
        past, expanded = self._is_past(state), _is_expanded(given["model"])
        if expanded and not past:
            raise FissileError(
                f"the model is expanded already, and {self._when()} is still to come; take "
                "ExpandAt out of the callbacks or start from the dense model"
            )
        if past and not expanded:
            raise FissileError(
                f"{self._when()} is over in this checkpoint, but the model is not expanded; load "
                "the model with from_pretrained from the checkpoint, or split later"
            )
        if not past:
            _check_alone(args)
            self._check_end(state)
            check_places(given["model"], self.alpha, self.where)
            _check_carried(given["optimizer"], given["model"])
        self._done = past

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Split if this is the epoch."""
        if self.epoch is not None and not self._done and (state.epoch or 0) >= self.epoch:
            self._split_now(state, given["model"], given["optimizer"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Split if this is the step."""
        if self.step is not None and not self._done and state.global_step >= self.step:
            self._split_now(state, given["model"], given["optimizer"])

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Tell the callbacks after this one, such as the progress bar, what the split did."""
        given["logs"].update(self._news)
        self._news = {}

    def _split_now(self, state: TrainerState, model: nn.Module, optimizer: Optimizer) -> None:
        self._expand(model, optimizer)
        self._done = True
        # The best checkpoint so far is of another shape: the Trainer could not load it at the end.
        state.best_metric = state.best_model_checkpoint = state.best_global_step = None
        self._news = _numbers(model)
        now = {"epoch": state.epoch or 0, "step": state.global_step}
        state.log_history.append({**self._news, **now})

    def _is_past(self, state: TrainerState) -> bool:
        if self.step is not None:
            return state.global_step > self.step
        assert self.epoch is not None
        return (state.epoch or 0) > self.epoch

    def _check_end(self, state: TrainerState) -> None:
        if self.step is not None:
            too_late = self.step >= state.max_steps
        else:
            assert self.epoch is not None
            too_late = self.epoch >= state.num_train_epochs
        if too_late:
            raise FissileError(
                f"training ends before {self._when()} begins ({state.max_steps} steps in "
                f"{state.num_train_epochs} epochs); split earlier"
            )


def _check_alone(args: TrainingArguments) -> None:
    """Refuse a wrapped model: what wraps it would go on with the old parameters."""
    if args.world_size > 1 or args.n_gpu > 1 or args.fsdp or args.deepspeed:
        raise FissileError(
            "ExpandAt cannot expand a model that was wrapped for several processes or devices; "
            "train to the split in one process, or call fissile.expand before making the Trainer"
        )


def _check_counted(loader: DataLoader[Any]) -> None:
    """Refuse data without a length, of which the Trainer takes the whole run for one epoch."""
    try:
        len(loader)
    except TypeError:
        raise FissileError(
            "the training data has no length, so the Trainer does not count epochs; give "
            "ExpandAt(step=...) instead"
        ) from None


def _check_checkpoint(
    model: nn.Module, state_dict: Mapping[str, Tensor], prefix: str, *_: Any
) -> None:
    """Say in a sentence what torch says of every tensor, when model and checkpoint do not fit."""
    for name, layer in model.named_modules():
        key = f"{prefix}{name}."
        if isinstance(layer, SparseLayer):
            fits = state_dict.get(f"{key}weight", layer.weight).shape == layer.weight.shape
        else:
            fits = not (is_layer(layer) and any(key + own in state_dict for own in _STRUCTURE))
        if not fits:
            raise FissileError(
                "the checkpoint is from the other side of the split than the model; load the model "
                "with from_pretrained from the checkpoint and make the Trainer with that"
            )


def _is_expanded(model: nn.Module) -> bool:
    return any(isinstance(module, SparseLayer) for module in model.modules())


def _check_carried(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer now rather than in the middle of the run."""
    try:
        check_optimizer(optimizer, model)
    except FissileError as error:
        reason = str(error).partition(";")[0]
        raise FissileError(f"{reason}; choose another optim= in the TrainingArguments") from None


def _numbers(model: nn.Module) -> dict[str, float]:
    found = describe(model)
    return {f"fissile/{name}": found[name] for name in _LOGGED if name in found}
