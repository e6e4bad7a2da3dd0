"""Training convolutional networks: one warm-up each, then every arm, side by side on a GPU.

:class:`Loop` is an ordinary PyTorch loop for any device. On a GPU with Triton,
:class:`fissile.bank.vision.graphs.Graphs` takes its place and must agree with it.
"""

from __future__ import annotations

import copy
import importlib.util
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Adam

from fissile._common.errors import FissileError, whole
from fissile.bank.loop import Recipe, penalty, task_loss
from fissile.bank.spec import Arm, Dense, Expand
from fissile.bank.vision.convnet import SHRINKS, ConvNet, Images, image_order, scaled, taken
from fissile.expansion.budget import nonzeros
from fissile.expansion.expand import expand

__all__ = [
    "SIDE_BY_SIDE",
    "Job",
    "Loop",
    "Network",
    "Outcome",
    "Runner",
    "Trained",
    "make_adam",
    "train",
]

Precision = Literal["auto", "float32", "bfloat16"]
#: Networks at once on a GPU, which a batch of one does not fill: 3, 4 and 5 train 105,608, 112,634
#: and 116,415 images/s on an H200.
SIDE_BY_SIDE = 5
#: Test images that are classified at once.
_MANY = 500


@dataclass(frozen=True)
class Network:
    """A network to train; the seed decides its weights, the order of its batches and its splits.

    >>> Network(projection=256, neurons=20, seed=0)
    """

    projection: int
    neurons: int
    seed: int

    def __post_init__(self) -> None:
        whole("projection", self.projection, least=1)
        whole("neurons", self.neurons, least=1)
        if whole("seed", self.seed, least=0) >= 2**63:
            raise FissileError(f"seed={self.seed} needs more than 63 bits; give a smaller one")


@dataclass(frozen=True)
class Trained:
    """What became of a network in one arm.

    >>> trained = train([Network(256, 20, seed=0)], images, {"dense": Dense()})
    >>> trained[0]["dense"].accuracy[-1]

    A network that diverged is what it was after its last finite epoch; NaN follows in its curves.
    """

    accuracy: list[float]  # on the test set after each epoch, those of the warm-up included
    loss: list[float]  # the mean task loss of each epoch, no penalties
    nonzeros: int  # weights of the head that exist
    diverged: bool
    model: ConvNet  # on the CPU


def train(
    networks: Sequence[Network],
    data: Images,
    arms: Mapping[str, Arm],
    *,
    recipe: Recipe | None = None,
    warm_up: int = 25,
    fine_tune: int = 25,
    mirror: bool = False,
    enough: Callable[[Sequence[float]], bool] | None = None,
    device: torch.device | str = "cpu",
    side_by_side: int | None = None,
    progress: Callable[[float], None] | None = None,
    on_trained: Callable[[int, str, Trained], None] | None = None,
    precision: Precision = "auto",
) -> list[dict[str, Trained]]:
    """Warm every network up once, branch it into every arm, and fine-tune those on equal batches.

    >>> trained = train([Network(256, 20, seed=0)], images, {"dense": Dense(), "fpe": Expand(2)})
    >>> trained[0]["fpe"].accuracy[-1]

    Args:
        networks: what to train; a result depends on the network's seed, not on its company.
        data: the images, normalised as :class:`Images` says.
        arms: ``Dense`` or ``Expand`` by name; backbone and head learn on in each.
        recipe: as for MLPs; L1 is on the head's W1, L2 on all parameters, the backbone's too.
        warm_up: epochs before the split.
        fine_tune: epochs after it.
        mirror: half of the training images are mirrored, drawn anew for each epoch.
        enough: told an arm's accuracies after each epoch; it ends early where this returns True.
        device: on ``"cuda"`` every step is one CUDA graph (needs Triton).
        side_by_side: networks at once on a GPU.
        progress: told the share that is done, 0 to 1, after every epoch.
        on_trained: told the network's place, the arm and what became of it, as soon as it is done.
        precision: ``"auto"`` is bfloat16 with float32 weights on a GPU, float32 elsewhere.
    """
    recipe = recipe or Recipe()
    place = torch.device(device)
    _check(networks, data, arms, recipe, warm_up, fine_tune)
    together = side_by_side or (SIDE_BY_SIDE if place.type == "cuda" else 1)
    whole("side_by_side", together, least=1)
    classes = data.classes

    def fresh(number: int) -> Job:
        network = networks[number]
        model = ConvNet(network.projection, network.neurons, classes, seed=network.seed)
        adam = make_adam(model, recipe)
        return Job(number, None, network.seed, model, adam, epoch=0, until=warm_up)

    results: list[dict[str, Trained]] = [{} for _ in networks]

    def finish(job: Job) -> list[Job]:
        """Take a job that is done; return those that begin where it ends."""
        if job.arm is None:
            until = warm_up + fine_tune
            return [job.branch(name, arm, until, recipe) for name, arm in arms.items()]
        existing = nonzeros(job.model.head).weights
        results[job.number][job.arm] = Trained(
            job.accuracy, job.loss, existing, job.diverged, job.model
        )
        if on_trained is not None:
            on_trained(job.number, job.arm, results[job.number][job.arm])
        return []

    total, done = len(networks) * (warm_up + fine_tune * len(arms)), 0

    def advance(epochs: int) -> None:
        nonlocal done
        done += epochs
        if progress is not None:
            progress(done / max(1, total))

    with torch.cuda.device(place) if place.type == "cuda" else nullcontext():
        engine = _engine(data, recipe, place, precision, together, mirror=mirror)
        try:
            _run(engine, len(networks), fresh, finish, together, advance, enough)
        finally:
            if place.type == "cuda":  # after Ctrl-C, nothing may be freed while it is in use
                torch.cuda.synchronize()
    return [{name: result[name] for name in arms} for result in results]


def _run(
    engine: _Engine,
    networks: int,
    fresh: Callable[[int], Job],
    finish: Callable[[Job], list[Job]],
    together: int,
    advance: Callable[[int], None],
    enough: Callable[[Sequence[float]], bool] | None,
) -> None:
    """Keep up to ``together`` jobs at work, an epoch at a time, until none is left."""
    waiting, ready = deque(range(networks)), deque[Job]()
    active: list[tuple[Job, Runner]] = []
    while waiting or ready or active:
        while (waiting or ready) and len(active) < together:
            job = ready.popleft() if ready else fresh(waiting.popleft())
            if job.diverged and not job.done:  # in the warm-up: there is nothing to go on from
                advance(job.until - job.epoch)
                job.record(None)
            if job.done:
                ready.extendleft(reversed(finish(job)))
            else:
                active.append((job, engine.start(job)))
        for _ in zip_longest(*(runner.steps(job.epoch) for job, runner in active)):
            pass  # a step of each in turn: on a GPU this only launches them
        before = sum(job.epoch for job, _ in active)
        for job, runner in active:
            job.record(runner.outcome())
            if enough is not None and job.arm is not None and enough(job.accuracy):
                job.until = job.epoch
            if job.done:
                runner.close()
                ready.extend(finish(job))
        advance(sum(job.epoch for job, _ in active) - before)
        active = [(job, runner) for job, runner in active if not job.done]


def _engine(
    data: Images,
    recipe: Recipe,
    device: torch.device,
    precision: str,
    together: int,
    *,
    mirror: bool,
) -> _Engine:
    if precision not in ("auto", "float32", "bfloat16"):
        raise FissileError(f"unknown precision {precision!r}; use auto, float32 or bfloat16")
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from fissile.bank.vision.graphs import Graphs

        dtype = torch.float32 if precision == "float32" else torch.bfloat16
        return Graphs(data, recipe, device, dtype, together, mirror=mirror)
    if precision == "bfloat16":
        raise FissileError("bfloat16 needs device='cuda' and Triton; use precision='auto'")
    return Loop(data, recipe, device, mirror=mirror)


def _check(
    networks: Sequence[Network],
    data: Images,
    arms: Mapping[str, Arm],
    recipe: Recipe,
    warm_up: int,
    fine_tune: int,
) -> None:
    """Refuse what would fail in the middle of the training, before it begins."""
    whole("warm_up", warm_up, least=0)
    whole("fine_tune", fine_tune, least=0)
    whole("batch", recipe.batch, least=1)
    for name, arm in arms.items():
        if not isinstance(arm, Dense | Expand):
            raise FissileError(
                f"arm {name!r}: {type(arm).__name__} cannot be trained with a backbone; "
                "use Dense or Expand"
            )
    if not all(isinstance(network, Network) for network in networks):
        raise FissileError("networks must be a list of fissile.bank.vision.Network")
    height, width = data.x.shape[1:3]
    smallest = min(recipe.batch, len(data.y) % recipe.batch or recipe.batch, len(data.y))
    if smallest * height * width == SHRINKS**2:
        raise FissileError(
            "the last batch is a single small image, of which a BatchNorm learns nothing; "
            "use another batch size"
        )


# --- a network on its way


@dataclass(frozen=True)
class Outcome:
    """What an epoch came to."""

    loss: float  # the mean of the task's loss over the training samples
    accuracy: float  # on the test set, after the epoch


class Runner(Protocol):
    """A job at work on a device."""

    def steps(self, epoch: int) -> Iterator[None]:
        """Train one epoch, stopping after each step so that others can go on beside it."""

    def outcome(self) -> Outcome | None:
        """Return what the epoch came to; if it was not finite, go back to its start: None."""

    def close(self) -> None:
        """Bring weights and moments home to the job's model and Adam, on the CPU."""


@dataclass
class Job:
    """A model and its Adam, at home on the CPU, and what is left to do."""

    number: int  # of the network
    arm: str | None  # None for the warm-up
    seed: int
    model: ConvNet
    adam: Adam
    epoch: int
    until: int
    accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    diverged: bool = False

    @property
    def done(self) -> bool:
        """Return whether nothing is left to do."""
        return self.epoch >= self.until

    def record(self, outcome: Outcome | None) -> None:
        """Take an epoch's outcome; a network that diverged stays as it is, and is done."""
        self.diverged = outcome is None
        rest = self.until - self.epoch if outcome is None else 1
        self.accuracy += [float("nan") if outcome is None else outcome.accuracy] * rest
        self.loss += [float("nan") if outcome is None else outcome.loss] * rest
        self.epoch += rest

    def branch(self, name: str, arm: Arm, until: int, recipe: Recipe) -> Job:
        """Return a copy of this network as the arm makes it; this one stays as it is."""
        model, adam = copy.deepcopy((self.model, self.adam))
        if isinstance(arm, Expand) and not self.diverged:
            how = {"seed": self.seed, "budget": arm.budget, "optimizer": adam}
            model.head = expand(model.head, arm.alpha, arm.split, **how)  # type: ignore[arg-type]
            if arm.moments == "fresh":
                adam = make_adam(model, recipe)
        return replace(
            self, arm=name, model=model, adam=adam, until=until,
            accuracy=list(self.accuracy), loss=list(self.loss),
        )  # fmt: skip


def make_adam(model: ConvNet, recipe: Recipe) -> Adam:
    """Return the recipe's Adam; its L2 term is exactly this coupled weight decay."""
    return Adam(model.parameters(), recipe.lr, weight_decay=2 * recipe.l2)


# --- an ordinary loop


class _Engine(Protocol):
    def start(self, job: Job) -> Runner: ...


class Loop:
    """Trains jobs with an ordinary loop.

    >>> runner = Loop(images, Recipe(), torch.device("cpu")).start(job)
    """

    def __init__(
        self, images: Images, recipe: Recipe, device: torch.device, *, mirror: bool = False
    ) -> None:
        self.recipe, self.device, self.mirror = recipe, device, mirror
        self.x, self.y = images.x.to(device), images.y.to(device)
        self.x_test, self.y_test = images.x_test.to(device), images.y_test.to(device)
        self.mean, self.deviation = (part.to(device) for part in images.scale())

    def start(self, job: Job) -> LoopRunner:
        """Bring a job to the device."""
        return LoopRunner(self, job)

    def scaled(self, x: Tensor) -> Tensor:
        """Turn bytes into what a network sees."""
        return scaled(x, self.mean, self.deviation)


class LoopRunner:
    """One job at work."""

    def __init__(self, engine: Loop, job: Job) -> None:
        self.engine, self.job = engine, job
        self.model, self.adam = job.model, job.adam
        self._move(engine.device)
        # Adam takes L2 as its decay; what is left of the recipe's penalty is the head's own.
        self.rest = replace(engine.recipe, l2=0)

    def steps(self, epoch: int) -> Iterator[None]:
        """Train one epoch."""
        engine, recipe = self.engine, self.engine.recipe
        self.before = [tensor.detach().clone() for tensor in self._tensors()]
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
