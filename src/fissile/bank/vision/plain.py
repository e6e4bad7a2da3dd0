"""The plain loop over one network, on any device in float32: what the graphs must agree with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fissile.bank.loop import Recipe, penalty, task_loss
from fissile.bank.vision.images import Images, image_order, scaled, taken
from fissile.bank.vision.job import Job, Outcome

__all__ = ["Plain", "PlainRunner"]

#: Test images that are classified at once.
_MANY = 500


class Plain:
    """Trains jobs with an ordinary loop.

    >>> runner = Plain(images, Recipe(), torch.device("cpu")).start(job)
    """

    def __init__(
        self, images: Images, recipe: Recipe, device: torch.device, *, mirror: bool = False
    ) -> None:
        self.recipe, self.device, self.mirror = recipe, device, mirror
        self.x, self.y = images.x.to(device), images.y.to(device)
        self.x_test, self.y_test = images.x_test.to(device), images.y_test.to(device)
        self.mean, self.deviation = (part.to(device) for part in images.scale())

    def start(self, job: Job) -> PlainRunner:
        """Bring a job to the device."""
        return PlainRunner(self, job)

    def scaled(self, x: Tensor) -> Tensor:
        """Turn bytes into what a network sees."""
        return scaled(x, self.mean, self.deviation)


class PlainRunner:
    """One job at work."""

    def __init__(self, engine: Plain, job: Job) -> None:
        self.engine, self.job = engine, job
        self.model, self.adam = job.model, job.adam
        self._move(engine.device)
        # Adam takes L2 as its decay; what is left of the recipe's penalty is the head's own.
        self.rest = replace(engine.recipe, l2=0)

    def steps(self, epoch: int) -> Iterator[None]:
        """Train one epoch."""
        engine, recipe = self.engine, self.engine.recipe
        self.before = self._snapshot()
        self.loss = torch.zeros((), device=engine.device)
        self.model.train()
        order = image_order(self.job.seed, epoch, len(engine.y), mirror=engine.mirror)
        for rows in order.to(engine.device).split(recipe.batch):
            x, y = taken(engine.x, engine.y, rows)
            loss = task_loss(self.model(engine.scaled(x)), y)
            self.adam.zero_grad()
            (loss + penalty(self.model.head, self.rest)).backward()
            self.adam.step()
            self.loss += loss.detach() * len(rows) / len(engine.y)
            yield

    def outcome(self) -> Outcome | None:
        """Return what the epoch came to, or go back to its start."""
        tensors = [self.loss, *self.model.parameters(), *self.model.buffers()]
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            self._restore(self.before)
            return None
        return Outcome(float(self.loss), self._accuracy())

    def close(self) -> None:
        """Bring the job home."""
        self._move(torch.device("cpu"))

    @torch.no_grad()
    def _accuracy(self) -> float:
        engine = self.engine
        self.model.eval()
        right = 0
        for x, y in zip(engine.x_test.split(_MANY), engine.y_test.split(_MANY), strict=True):
            logits = self.model(engine.scaled(x))
            right += int((logits.argmax(1) == y).sum())
        return right / len(engine.y_test)

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        for state in self.adam.state.values():
            state.update({k: v.to(device) for k, v in state.items() if k != "step"})

    def _snapshot(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self._tensors()]

    @torch.no_grad()
    def _restore(self, saved: list[Tensor]) -> None:
        if len(saved) < len(self._tensors()):  # it was Adam's first epoch
            self.adam.state.clear()
        for tensor, before in zip(self._tensors(), saved, strict=True):
            tensor.copy_(before)

    def _tensors(self) -> list[Tensor]:
        states = self.adam.state.values()
        moments = [value for state in states for value in state.values()]
        return [*self.model.parameters(), *self.model.buffers(), *moments]
