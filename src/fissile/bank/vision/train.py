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
from typing import TYPE_CHECKING, Literal

import torch
from torch.optim import Adam

from fissile._common.errors import FissileError, whole
from fissile.bank.loop import Recipe, penalty, task_loss
from fissile.bank.spec import Arm, Dense, Expand
from fissile.bank.vision.convnet import SHRINKS, ConvNet, Images, image_order, scaled, taken
from fissile.expansion.budget import nonzeros
from fissile.expansion.expand import expand

if TYPE_CHECKING:
    from fissile.bank.vision.graphs import Graphs

Enough = Callable[[Sequence[float]], bool]
Precision = Literal["auto", "float32", "bfloat16"]
#: Networks at once on a GPU, which a batch of one does not fill: 3, 4 and 5 train 105,608, 112,634
#: and 116,415 images/s on an H200.
SIDE_BY_SIDE = 5
#: Test images that are classified at once.
_MANY = 500


@dataclass(frozen=True)
class Network:
    """A network to train; the seed decides its weights, the order of its batches and its splits."""

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

    A network that diverged is what it was after its last finite epoch; NaN follows in its curves.
    """

    accuracy: list[float]  # on the test set after each epoch, those of the warm-up included
    loss: list[float]  # the mean task loss of each epoch, no penalties
    nonzeros: int  # weights of the head that exist
    diverged: bool
    model: ConvNet  # on the CPU


def train(
    networks: Sequence[Network], data: Images, arms: Mapping[str, Arm], *,
    recipe: Recipe | None = None, warm_up: int = 25, fine_tune: int = 25, mirror: bool = False,
    enough: Enough | None = None, device: torch.device | str = "cpu",
    side_by_side: int | None = None, progress: Callable[[float], None] | None = None,
    on_trained: Callable[[int, str, Trained], None] | None = None, precision: Precision = "auto",
) -> list[dict[str, Trained]]:  # fmt: skip
    """Warm every network up once, branch it into every arm, and fine-tune those on equal batches.

    >>> trained = train([Network(256, 20, seed=0)], images, {"dense": Dense(), "fpe": Expand(2)})
    >>> trained[0]["fpe"].accuracy[-1]

    A result depends on the network's seed, not on its company. Backbone and head learn on in each
    arm; L1 is on the head's W1, L2 on all parameters. On ``"cuda"`` every step is one CUDA graph.

    Args:
        mirror: half of the training images are mirrored, drawn anew for each epoch.
        enough: told an arm's accuracies after each epoch; it ends early where this returns True.
        progress: told the share that is done, 0 to 1, after every epoch.
        on_trained: told the network's place, the arm and what became of it, as soon as it is done.
        precision: ``"auto"`` is bfloat16 with float32 weights on a GPU, float32 elsewhere.
    """
    recipe = recipe or Recipe()
    place = torch.device(device)
    _check(networks, data, arms, recipe, warm_up, fine_tune)
    together = side_by_side or (SIDE_BY_SIDE if place.type == "cuda" else 1)
    whole("side_by_side", together, least=1)
    classes, until = data.classes, warm_up + fine_tune
    results: list[dict[str, Trained]] = [{} for _ in networks]
    total, done = max(1, len(networks) * (warm_up + fine_tune * len(arms))), 0
    waiting, ready = deque(enumerate(networks)), deque[Job]()
    active: deque[tuple[Job, Iterator[None]]] = deque()
    with torch.cuda.device(place) if place.type == "cuda" else nullcontext():
        engine = _engine(data, recipe, place, precision, together, mirror=mirror)
        try:
            while waiting or ready or active:
                while (waiting or ready) and len(active) < together:
                    if not ready:
                        ready.append(Job.begin(*waiting.popleft(), classes, recipe, warm_up))
                    job = ready.popleft()
                    active.append((job, iter(()) if job.done else engine.train(job)))
                # A step of each in turn: on a GPU this only launches it.
                job, steps = active.popleft()
                before = job.epoch
                if next(steps, "done") is None:
                    active.append((job, steps))
                elif job.arm is None:
                    ready.extend(job.branch(*arm, until, recipe, enough) for arm in arms.items())
                else:
                    if job.diverged:  # in the warm-up, perhaps: its curves get their full length
                        job.diverge()
                    results[job.number][job.arm] = job.trained()
                    if on_trained is not None:
                        on_trained(job.number, job.arm, results[job.number][job.arm])
                done += job.epoch - before
                if progress is not None and job.epoch > before:
                    progress(done / total)
        finally:
            if place.type == "cuda":  # after Ctrl-C, nothing may be freed while it is in use
                torch.cuda.synchronize()
    return [{name: result[name] for name in arms} for result in results]


def _engine(
    data: Images, recipe: Recipe, device: torch.device, precision: str, together: int, *,
    mirror: bool,
) -> Loop | Graphs:  # fmt: skip
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
    networks: Sequence[Network], data: Images, arms: Mapping[str, Arm], recipe: Recipe,
    warm_up: int, fine_tune: int,
) -> None:  # fmt: skip
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
    enough: Enough | None = None

    @classmethod
    def begin(cls, number: int, network: Network, classes: int, recipe: Recipe, until: int) -> Job:
        """Return a network that is still to be warmed up."""
        seed = network.seed
        model = ConvNet(network.projection, network.neurons, classes, seed=seed)
        return cls(number, None, seed, model, make_adam(model, recipe), epoch=0, until=until)

    @property
    def done(self) -> bool:
        return self.diverged or self.epoch >= self.until

    def record(self, accuracy: float, loss: float) -> None:
        """Record an epoch: test accuracy, and mean loss over the training samples."""
        self.accuracy.append(accuracy)
        self.loss.append(loss)
        self.epoch += 1
        if self.enough is not None and self.enough(self.accuracy):
            self.until = self.epoch

    def diverge(self) -> None:
        """Leave a network that has diverged as it is: it is done."""
        rest = [float("nan")] * (self.until - self.epoch)
        self.accuracy, self.loss = self.accuracy + rest, self.loss + rest
        self.epoch, self.diverged = self.until, True

    def branch(
        self, name: str, arm: Arm, until: int, recipe: Recipe, enough: Enough | None = None
    ) -> Job:
        """Return a copy of this network as the arm makes it; this one stays as it is."""
        model, adam = copy.deepcopy((self.model, self.adam))
        if isinstance(arm, Expand) and not self.diverged:
            how = {"seed": self.seed, "budget": arm.budget, "optimizer": adam}
            model.head = expand(model.head, arm.alpha, arm.split, **how)  # type: ignore[arg-type]
            if arm.moments == "fresh":
                adam = make_adam(model, recipe)
        return replace(
            self, arm=name, model=model, adam=adam, until=until, enough=enough,
            accuracy=list(self.accuracy), loss=list(self.loss),
        )  # fmt: skip

    def trained(self) -> Trained:
        existing = nonzeros(self.model.head).weights
        return Trained(self.accuracy, self.loss, existing, self.diverged, self.model)


def make_adam(model: ConvNet, recipe: Recipe) -> Adam:
    """Return the recipe's Adam; its L2 term is exactly this coupled weight decay."""
    return Adam(model.parameters(), recipe.lr, weight_decay=2 * recipe.l2)


class Loop:
    """Trains jobs with an ordinary loop."""

    def __init__(
        self, images: Images, recipe: Recipe, device: torch.device, *, mirror: bool = False
    ) -> None:
        self.recipe, self.device, self.mirror = recipe, device, mirror
        self.x, self.y = images.x.to(device), images.y.to(device)
        self.x_test, self.y_test = images.x_test.to(device), images.y_test.to(device)
        self.scale = [part.to(device) for part in images.scale()]

    def train(self, job: Job) -> Iterator[None]:
        """Train a job until it is done; an epoch that was not finite is taken back."""
        model, adam = job.model, job.adam
        _move(job, self.device)
        # Adam takes L2 as its decay; what is left of the recipe's penalty is the head's own.
        rest = replace(self.recipe, l2=0)
        while not job.done:
            before = copy.deepcopy((model.state_dict(), adam.state_dict()))
            mean = torch.zeros((), device=self.device)
            model.train()
            order = image_order(job.seed, job.epoch, len(self.y), mirror=self.mirror)
            for rows in order.to(self.device).split(self.recipe.batch):
                x, y = taken(self.x, self.y, rows)
                loss = task_loss(model(scaled(x, *self.scale)), y)
                adam.zero_grad()
                (loss + penalty(model.head, rest)).backward()
                adam.step()
                mean += loss.detach() * len(rows) / len(self.y)
                yield
            if all(bool(t.isfinite().all()) for t in (mean, *model.parameters(), *model.buffers())):
                job.record(self._accuracy(model), float(mean))
            else:
                model.load_state_dict(before[0])
                adam.load_state_dict(before[1])
                job.diverge()
        _move(job, torch.device("cpu"))

    @torch.no_grad()
    def _accuracy(self, model: ConvNet) -> float:
        model.eval()
        right = 0
        for x, y in zip(self.x_test.split(_MANY), self.y_test.split(_MANY), strict=True):
            right += int((model(scaled(x, *self.scale)).argmax(1) == y).sum())
        return right / len(self.y_test)


def _move(job: Job, device: torch.device) -> None:
    job.model.to(device)
    for state in job.adam.state.values():
        state.update({k: v.to(device) for k, v in state.items() if k != "step"})
