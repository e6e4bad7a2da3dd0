"""Plans of one shape, each with every seed, as one set of tensors.

Networks of a seed lie side by side: they see the same batches, so their first layers are one wide
matrix to the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from fissile.allocation import resolve_allocation
from fissile.budget import keep_largest
from fissile.draw import Draw, seeded
from fissile.errors import FissileError
from fissile.layers import children_of, owner_mask
from fissile.order import hash32, noise
from fissile.pattern import split_pair
from fissile.rewire import rewired
from fissile.shapes import Float, Int
from fissile.sparse.adam import Moments, Rates, adam, unbiased
from fissile.sparse.loss import error
from fissile.sparse.masks import count, sown, within
from fissile.sparse.plan import Plan, Schedule, SplitAt
from fissile.split import resolve_split

__all__ = ["Stack"]

#: The penalty is steered to leave a little more than the budget, which the largest then share.
_MORE, _FIRST_PENALTY = 1.15, 1e-3
_WEIGHTS = ("first", "second", "direct")


class Stack:
    """Networks in training: ``len(plans) * len(seeds)`` of them, those of a seed side by side."""

    def __init__(
        self,
        plans: Sequence[Plan],
        seeds: Sequence[int],
        inputs: int,
        outputs: int,
        steps: int,
        device: torch.device,
    ) -> None:
        self.plans, self.plan = tuple(plans), plans[0]
        self.networks, self.inputs, self.outputs = len(plans) * len(seeds), inputs, outputs
        self.seeds = torch.tensor(list(seeds), device=device)
        self.device, self.steps = device, steps
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.room = self._each(lambda plan: plan.budget - outputs).long()
        self.decay = self._each(lambda plan: plan.decay)
        self.smooth = self._each(lambda plan: plan.smooth)
        self.penalty = self._each(lambda plan: _FIRST_PENALTY * plan.l1)
        self.still = torch.zeros_like(self.decay)
        self.unbias = unbiased(steps).to(device)
        self.rates = self._rates()
        self.listens = any(p.rewire and p.rewire.grow == "gradient" for p in plans)
        if bool((self.room < 1).any()):
            least = min(plan.budget for plan in plans)
            raise FissileError(
                f"a budget of {least} is too small: {outputs} outputs have a bias each, and there "
                f"must be at least one weight; give at least {outputs + 1}"
            )
        self._make()

    # --- first weights

    def _make(self) -> None:
        d, h, c = self.inputs, self.plan.hidden, self.outputs
        self.weights: dict[str, Tensor] = {}
        if h:
            self.weights["first"] = self._drawn(0, h, d) / d**0.5
            if self.plan.bias:
                self.weights["bias"] = self._drawn(1, h) / d**0.5
            self.weights["second"] = self._drawn(2, c, h) / h**0.5
        if self.plan.direct:
            self.weights["direct"] = torch.zeros(self.networks, c, d, device=self.device)
        self.weights["out"] = torch.zeros(self.networks, c, device=self.device)
        self.masks = {
            name: torch.ones_like(self.weights[name], dtype=torch.bool)
            for name in _WEIGHTS
            if name in self.weights
        }
        for erdos_renyi in (False, True):
            self._sow("erdos-renyi" if erdos_renyi else "uniform", erdos_renyi)
        self.moments = {
            name: Moments(torch.zeros_like(one), torch.zeros_like(one))
            for name, one in self.weights.items()
        }
        self._hear()

    def _sow(self, start: str, erdos_renyi: bool) -> None:
        mine = self._each(lambda plan: plan.start == start).bool().view(-1, 1, 1)
        if not bool(mine.any()):
            return
        drawn = {
            name: self._noise(3 + layer, *mask.shape[1:])
            for layer, (name, mask) in enumerate(self.masks.items())
        }
        room = (self.room - self.plan.hidden * self.plan.bias).clamp(min=0)
        for name, mask in sown(drawn, room, erdos_renyi=erdos_renyi).items():
            # As if the neuron had always had so few inputs.
            fewer = mask / mask.float().mean((-2, -1), keepdim=True).sqrt().clamp(min=1e-6)
            self.weights[name] = torch.where(mine, self.weights[name] * fewer, self.weights[name])
            self.masks[name] = torch.where(mine, mask, self.masks[name])

    def _hear(self) -> None:
        self.gradients = (
            {name: torch.zeros_like(self.weights[name]) for name in self.masks}
            if self.listens
            else {}
        )

    def _each(self, value: Callable[[Plan], float]) -> Float[Tensor, " networks"]:
        """Return a number of every plan, for every network."""
        found = torch.tensor([float(value(plan)) for plan in self.plans], device=self.device)
        return found.repeat(len(self.seeds))

    def _noise(self, stream: int, *shape: int) -> Float[Tensor, "networks ..."]:
        """Draw uniform numbers below 1, the same for all plans of a seed."""
        drawn = noise(hash32(self.seeds, stream), 0, *shape).float()
        return drawn.repeat_interleave(len(self.plans), 0)

    def _drawn(self, stream: int, *shape: int) -> Float[Tensor, "networks ..."]:
        return 2 * self._noise(stream, *shape) - 1

    def _rates(self) -> Float[Tensor, "steps networks"]:
        courses = [_course(p.lr, p.schedule, p.splits, self.steps) for p in self.plans]
        return torch.stack(courses, 1).to(self.device).repeat(1, len(self.seeds))

    # --- a step

    def logits(
        self, x: Float[Tensor, "seeds samples inputs"]
    ) -> tuple[Float[Tensor, "networks outputs samples"], Tensor | None]:
        """Return logits, and what the hidden layer says; samples may be shared by all seeds."""
        found, said = self.weights["out"].unsqueeze(-1), None
        if "first" in self.weights:
            said = self._seen(self.weights["first"], x, self.weights.get("bias"))
            said = said.relu() if self.plan.activation == "relu" else said
            found = torch.baddbmm(found, self.weights["second"], said)
        if "direct" in self.weights:
            found = found + self._seen(self.weights["direct"], x)
        return found, said

    def _seen(
        self, weight: Tensor, x: Tensor, bias: Tensor | None = None
    ) -> Float[Tensor, "networks rows samples"]:
        """Multiply weights with samples, all networks of a seed at once."""
        wide = weight.reshape(len(x), -1, self.inputs)
        if bias is None:
            return (wide @ x.mT).view(self.networks, weight.shape[1], -1)
        found = torch.baddbmm(bias.reshape(len(x), -1, 1), wide, x.mT)
        return found.view(self.networks, weight.shape[1], -1)

    @torch.no_grad()
    def train(
        self,
        x: Float[Tensor, "seeds batch inputs"],
        targets: Float[Tensor, "seeds outputs batch"],
        weights: Float[Tensor, "seeds batch"] | None = None,
    ) -> None:
        """Make a step on a batch of every seed, whose samples may count differently."""
        if self.plan.dropout:
            x = functional.dropout(x, self.plan.dropout)
        found, said = self.logits(x)
        off = error(found, targets, self.smooth)
        if weights is not None:
            off = off * weights.repeat_interleave(len(self.plans), 0).unsqueeze(1)
        gradients = {"out": off.sum(-1)}
        if said is not None:
            gradients["second"] = off @ said.mT
            back = self.weights["second"].mT @ off
            if self.plan.activation == "relu":
                back = torch.ops.aten.threshold_backward(back, said, 0)
            if self.plan.bias:
                gradients["bias"] = back.sum(-1)
            gradients["first"] = self._gathered(back, x)
        if "direct" in self.weights:
            gradients["direct"] = self._gathered(off, x)
        self._update(gradients)

    def _gathered(self, error: Tensor, x: Tensor) -> Float[Tensor, "networks rows inputs"]:
        return (error.reshape(len(x), -1, x.shape[1]) @ x).view(self.networks, -1, self.inputs)

    def _update(self, gradients: dict[str, Tensor]) -> None:
        lr, unbias = (one.index_select(0, self.step)[0] for one in (self.rates, self.unbias))
        self.step += 1
        for name, weight in self.weights.items():
            decay = self.decay if name in self.masks else self.still  # biases do not decay
            rates = Rates(lr, decay, self.penalty, unbias)
            penalised = self.plan.l1 and name == "direct"
            mask = self.masks.get(name)
            adam(weight, gradients[name], self.moments[name], mask, rates, l1=penalised)
        for name, heard in self.gradients.items():
            heard.copy_(gradients[name])

    # --- what happens on the way

    @torch.no_grad()
    def tick(self, share: float, before: float) -> bool:
        """Do what is due since an earlier share of the training; tell whether shapes changed."""
        due = [split for split in self.plan.splits if before < split.at <= share]
        for split in due:
            self._split(split)
        if share <= 0:
            return bool(due)
        if self.plan.l1:
            self._steer(share)
        self._prune(share, before)
        self._rewire(share)
        return bool(due)

    def _prune(self, share: float, before: float) -> None:
        left = [plan.prune.left(share, before) if plan.prune else None for plan in self.plans]
        if all(one is None for one in left):
            return
        surplus = torch.tensor([one or 0.0 for one in left], device=self.device)
        due = torch.tensor([one is not None for one in left], device=self.device)
        due = due.repeat(len(self.seeds)).view(-1, 1, 1)
        whole = sum(mask[0].numel() for mask in self.masks.values())
        room = self.room + ((whole - self.room) * surplus.repeat(len(self.seeds))).long()
        kept = within(self._saliency(), room, bias=self.plan.bias)
        self._put({name: torch.where(due, kept[name], mask) for name, mask in self.masks.items()})

    def _saliency(self) -> dict[str, Tensor]:
        second = self._each(lambda p: bool(p.prune) and p.prune.saliency == "second-order").bool()  # type: ignore[union-attr]
        found = {}
        for name, mask in self.masks.items():
            size = self.weights[name].abs() * mask
            root = self.moments[name].square.sqrt()
            found[name] = torch.where(second.view(-1, 1, 1), size * root, size)
        return found

    def _rewire(self, share: float) -> None:
        moves = self._each(partial(_moving, share=share))
        if not bool((moves > 0).any()):
            return
        heard = self._each(lambda p: bool(p.rewire) and p.rewire.grow == "gradient").bool()  # type: ignore[union-attr]
        after = {}
        for layer, (name, mask) in enumerate(self.masks.items()):
            score = self._noise(8 + 8 * int(self.step) + layer, *mask.shape[1:])
            if self.listens:
                score = torch.where(heard.view(-1, 1, 1), self.gradients[name].abs(), score)
            number = (moves * mask.sum((-2, -1))).long()
            after[name] = rewired(self.weights[name], mask, score, number)
        self._put(after)

    def _steer(self, share: float) -> None:
        """Steer the penalty so that about the budget is left; then cut to it, and refit."""
        if share < 0.5:
            there = torch.count_nonzero(self.weights["direct"], (-2, -1))
            self.penalty *= (there / (_MORE * self.room)).clamp(0.5, 4.0).sqrt()
        elif bool((self.penalty > 0).any()):
            self.penalty.zero_()
            size = self.weights["direct"].abs().flatten(1)
            kept = keep_largest(size, self.room) & (size > 0)
            self._put({"direct": kept.view_as(self.weights["direct"])})

    def _split(self, split: SplitAt) -> None:
        first, second, alpha = self.weights["first"], self.weights["second"], split.alpha
        draw, deal = self._draw(), resolve_split(split.split)
        if split.allocation is None:
            owner = deal.deal(first, alpha, draw)
            kept = {"first": owner_mask(owner, alpha) & children_of(self.masks["first"], alpha, -2)}
            kept["second"] = children_of(self.masks["second"], alpha, -1)
        else:
            squares = self.moments["first"].square, self.moments["second"].square
            pattern = split_pair(
                first, second, alpha, deal, draw,
                extra=(alpha - 1) * first.shape[1] * self.plan.bias,
                allocation=resolve_allocation(split.allocation), squares=squares,
            )  # fmt: skip
            kept = {"first": pattern.first_mask(), "second": pattern.second}
        for name, axis in (("first", -2), ("bias", -1), ("second", -1)):
            if name in self.weights:
                self._copy(name, axis, alpha, kept.get(name))
        self.weights["second"] *= split.scale
        self.masks |= {name: mask.clone() for name, mask in kept.items()}
        self._hear()

    def _draw(self) -> Draw:
        """Return the draw of every seed, the one :func:`fissile.expand` has, for all its plans."""
        draw = seeded(self.seeds)

        def drawn(networks: int, *shape: int) -> Tensor:
            once = draw(networks // len(self.plans), *shape).to(self.device)
            return once.repeat_interleave(len(self.plans), 0)

        return drawn

    def _copy(self, name: str, axis: int, alpha: int, mask: Tensor | None) -> None:
        """Give every child its parent's numbers, where it keeps them."""
        old = self.weights[name], *self.moments[name]
        new = [children_of(one, alpha, axis) * (1 if mask is None else mask) for one in old]
        self.weights[name], self.moments[name] = new[0], Moments(*new[1:])

    def _put(self, masks: dict[str, Tensor]) -> None:
        """Take other masks; whatever comes or goes is zero, and so are its moments."""
        for name, mask in masks.items():
            moved = mask != self.masks[name]
            self.masks[name].copy_(mask)
            for tensor in (self.weights[name], *self.moments[name]):
                tensor.masked_fill_(moved, 0)

    # --- what came of it

    @torch.no_grad()
    def accuracy(
        self, x: Float[Tensor, "samples inputs"], y: Int[Tensor, " samples"]
    ) -> Float[Tensor, "seeds plans"]:
        """Return every network's share of right answers."""
        widest = max(one.shape[1] for one in self.weights.values())
        part = max(1, (1 << 27) // (self.networks * widest))
        right = torch.zeros(self.networks, dtype=torch.long, device=self.device)
        for begin in range(0, len(x), part):
            some = x[begin : begin + part].unsqueeze(0)
            right += (_guess(self.logits(some)[0]) == y[begin : begin + part]).sum(-1)
        return (right.double() / len(x)).view(len(self.seeds), -1)

    def nonzeros(self) -> Int[Tensor, "seeds plans"]:
        """Count everything that a network needs, the outputs' biases too."""
        if "first" not in self.weights or any(plan.prune for plan in self.plans):
            found = count(self.masks, bias=self.plan.bias)
        else:  # nobody looked whether neurons are alive: all biases count
            found = count(self.masks, bias=False) + self.plan.bias * self.weights["first"].shape[1]
        return (found + self.outputs).view(len(self.seeds), -1)


@cache
def _course(
    lr: float, schedule: Schedule, splits: tuple[SplitAt, ...], steps: int
) -> Float[Tensor, " steps"]:
    """Return the rate of every step; few plans of a study have one of their own."""
    plan = Plan(1, 1, lr=lr, schedule=schedule, splits=splits)
    return torch.tensor([plan.rate(step / steps) for step in range(steps)])


def _guess(logits: Float[Tensor, "networks outputs samples"]) -> Int[Tensor, "networks samples"]:
    return (logits.squeeze(1) > 0).long() if logits.shape[1] == 1 else logits.argmax(1)


def _moving(plan: Plan, share: float) -> float:
    """Return which share of a layer's weights moves now."""
    if plan.rewire is None or share >= plan.rewire.until:
        return 0.0
    # While others are still to go, what has just come would be the first of them.
    if (plan.prune and share < plan.prune.end) or any(share < one.at for one in plan.splits):
        return 0.0
    return plan.rewire.fraction * (1 + math.cos(math.pi * share / plan.rewire.until)) / 2
