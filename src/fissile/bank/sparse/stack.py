"""Plans of one shape, each with every seed, as one set of tensors.

Networks of a seed lie side by side: they see the same batches, so their first layers are one wide
matrix to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from fissile._common.errors import FissileError
from fissile._common.random import hash32, noise
from fissile._common.shapes import Bool, Float, Int
from fissile.bank.sparse.plan import Plan, Schedule, SplitAt
from fissile.bank.step import (
    AdamMoments,
    Rates,
    bias_corrections,
    guess,
    logit_gradient,
    masked_adam,
)
from fissile.expansion.budget import keep_largest
from fissile.layers import MaskedLinear

#: Of absolute weights, until it has been steered.
_FIRST_PENALTY = 1e-3
Masks = dict[str, Bool[Tensor, "networks rows columns"]]
#: The bits of infinity: those of every finite positive float are smaller, in the same order.
_INFINITY = 0x7F800000


class SparseStack:
    """Networks in training: ``len(plans) * len(seeds)`` of them, those of a seed side by side.

    >>> [(stack, places)] = train([plan], seeds, x, y, outputs=10)
    >>> stack.accuracy(x_test, y_test)  # (seeds, plans)
    """

    def __init__(
        self, plans: Sequence[Plan], seeds: Sequence[int], inputs: int, outputs: int, steps: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.plans, self.plan = tuple(plans), plans[0]
        self.networks, self.inputs, self.outputs = len(plans) * len(seeds), inputs, outputs
        self.seeds = torch.tensor(list(seeds), device=device)
        self.device, self.steps = device, steps
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        rooms = torch.tensor([plan.budget - outputs for plan in plans], device=device)
        self.room = rooms.repeat(len(seeds))
        self.decay = self.each(lambda plan: plan.decay)
        self.smooth = self.each(lambda plan: plan.smooth)
        self.penalty = self.each(lambda plan: _FIRST_PENALTY * plan.l1)
        self.still = torch.zeros_like(self.decay)
        self.pruned = self.each(lambda plan: plan.prune is not None).bool()
        self.unbias = bias_corrections(steps).to(device)
        courses = [_course(p.lr, p.schedule, p.splits, steps) for p in plans]
        self.rates = torch.stack(courses, 1).to(device).repeat(1, len(seeds))
        self.listens = any(p.rewire and p.rewire.grow == "gradient" for p in plans)
        for plan in plans:
            _check_plan(plan, inputs, outputs)
        self._make()

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
        matrices = {name: w for name, w in self.weights.items() if w.ndim == 3}
        self.masks = {name: torch.ones_like(w, dtype=torch.bool) for name, w in matrices.items()}
        self._sow("uniform")
        self._sow("erdos-renyi")
        zeros = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.moments = {name: AdamMoments(zero, zero.clone()) for name, zero in zeros.items()}
        self.hear()

    def _sow(self, start: str) -> None:
        mine = self.each(lambda plan: plan.start == start).bool().view(-1, 1, 1)
        if not bool(mine.any()):
            return
        sizes = {name: mask.shape[1:] for name, mask in self.masks.items()}
        drawn = {name: self.noise(3 + i, *size) for i, (name, size) in enumerate(sizes.items())}
        room = (self.room - self.plan.hidden * self.plan.bias).clamp(min=0)
        for name, mask in sown(drawn, room, erdos_renyi=start == "erdos-renyi").items():
            # As if the neuron had always had so few inputs.
            fewer = mask / mask.float().mean((-2, -1), keepdim=True).sqrt().clamp(min=1e-6)
            self.weights[name] = torch.where(mine, self.weights[name] * fewer, self.weights[name])
            self.masks[name] = torch.where(mine, mask, self.masks[name])

    def hear(self) -> None:
        """Allocate room for the last gradients, where masks move to large ones."""
        heard = self.masks if self.listens else ()
        self.gradients = {name: torch.zeros_like(self.weights[name]) for name in heard}

    def each(self, value: Callable[[Plan], float]) -> Float[Tensor, " networks"]:
        """Return a number of every plan, for every network."""
        values = torch.tensor([float(value(plan)) for plan in self.plans], device=self.device)
        return values.repeat(len(self.seeds))

    def noise(self, stream: int, *shape: int) -> Float[Tensor, "networks ..."]:
        """Draw uniform numbers below 1, the same for all plans of a seed."""
        drawn = noise(hash32(self.seeds, stream), 0, *shape).float()
        return drawn.repeat_interleave(len(self.plans), 0)

    def _drawn(self, stream: int, *shape: int) -> Float[Tensor, "networks ..."]:
        return 2 * self.noise(stream, *shape) - 1

    def logits(
        self, x: Float[Tensor, "seeds samples inputs"]
    ) -> tuple[Float[Tensor, "networks outputs samples"], Tensor | None]:
        """Return logits, and the hidden activations; samples may be shared by all seeds."""
        logits, hidden = self.weights["out"].unsqueeze(-1), None
        if "first" in self.weights:
            hidden = self._linear(self.weights["first"], x, self.weights.get("bias"))
            hidden = hidden.relu() if self.plan.activation == "relu" else hidden
            logits = torch.baddbmm(logits, self.weights["second"], hidden)
        if "direct" in self.weights:
            logits = logits + self._linear(self.weights["direct"], x)
        return logits, hidden

    def _linear(
        self, weight: Tensor, x: Tensor, bias: Tensor | None = None
    ) -> Float[Tensor, "networks rows samples"]:
        """Multiply weights with samples, all networks of a seed at once."""
        wide = weight.reshape(len(x), -1, self.inputs)
        y = wide @ x.mT if bias is None else torch.baddbmm(bias.reshape(len(x), -1, 1), wide, x.mT)
        return y.view(self.networks, weight.shape[1], -1)

    @torch.no_grad()
    def train(
        self, x: Float[Tensor, "seeds batch inputs"], targets: Float[Tensor, "seeds outputs batch"],
        weights: Float[Tensor, "seeds batch"] | None = None,
    ) -> None:  # fmt: skip
        """Make a step on a batch of every seed, whose samples may count differently."""
        logits, hidden = self.logits(x)
        off = logit_gradient(logits, targets, self.smooth)
        if weights is not None:
            off = off * weights.repeat_interleave(len(self.plans), 0).unsqueeze(1)
        gradients = {"out": off.sum(-1)}
        if hidden is not None:
            gradients["second"] = off @ hidden.mT
            back = self.weights["second"].mT @ off
            if self.plan.activation == "relu":
                back = torch.ops.aten.threshold_backward(back, hidden, 0)
            if self.plan.bias:
                gradients["bias"] = back.sum(-1)
            gradients["first"] = self._gathered(back, x)
        if "direct" in self.weights:
            gradients["direct"] = self._gathered(off, x)
        self._update(gradients)

    def _gathered(self, error: Tensor, x: Tensor) -> Float[Tensor, "networks rows inputs"]:
        return (error.reshape(len(x), -1, x.shape[1]) @ x).view(self.networks, -1, self.inputs)

    def _update(self, gradients: dict[str, Tensor]) -> None:
        lr, unbias = (table.index_select(0, self.step)[0] for table in (self.rates, self.unbias))
        self.step += 1
        step = None if self.step.is_cuda else self.step.float()
        biases = [name for name in self.weights if name not in self.masks]
        for names, decay in ((list(self.masks), self.decay), (biases, self.still)):
            masked_adam(
                [self.weights[name] for name in names], [gradients[name] for name in names],
                [self.moments[name] for name in names], [self.masks.get(name) for name in names],
                Rates(lr, decay, self.penalty, unbias, step),
                l1=self.plan.l1 and names == ["direct"],
            )  # fmt: skip
        for name, heard in self.gradients.items():
            heard.copy_(gradients[name])

    def put(self, masks: dict[str, Tensor]) -> None:
        """Set other masks; weights that come or go are zero, and so are their moments."""
        for name, mask in masks.items():
            moved = mask != self.masks[name]
            self.masks[name].copy_(mask)
            for tensor in (self.weights[name], *self.moments[name]):
                tensor.masked_fill_(moved, 0)

    @torch.no_grad()
    def accuracy(
        self, x: Float[Tensor, "samples inputs"], y: Int[Tensor, " samples"]
    ) -> Float[Tensor, "seeds plans"]:
        """Return every network's share of right answers."""
        widest = max(weight.shape[1] for weight in self.weights.values())
        size = max(1, (1 << 27) // (self.networks * widest))
        right = torch.zeros(self.networks, dtype=torch.long, device=self.device)
        for part, labels in zip(x.split(size), y.split(size), strict=True):
            right += (guess(self.logits(part.unsqueeze(0))[0], 1) == labels).sum(-1)
        return (right.double() / len(x)).view(len(self.seeds), -1)

    def nonzeros(self) -> Int[Tensor, "seeds plans"]:
        """Count everything that a network needs, the outputs' biases too.

        Pruned networks count only live neurons; others count all.
        """
        counts = [mask.sum((-2, -1)) for mask in self.masks.values()]
        if self.plan.bias:
            counts.append((alive(self.masks) | ~self.pruned.unsqueeze(-1)).sum(-1))
        return (torch.stack(counts).sum(0) + self.outputs).view(len(self.seeds), -1)

    @torch.no_grad()
    def finite(self) -> Bool[Tensor, "seeds plans"]:
        """Return which networks have not diverged."""
        sound = [torch.isfinite(weight).flatten(1).all(1) for weight in self.weights.values()]
        return torch.stack(sound).all(0).view(len(self.seeds), -1)


def _check_plan(plan: Plan, inputs: int, outputs: int) -> None:
    """Refuse a plan that would end with more than its budget."""
    if plan.budget <= outputs:
        raise FissileError(
            f"a budget of {plan.budget} is too small: {outputs} outputs have a bias each, and "
            f"there must be at least one weight; give at least {outputs + 1}"
        )
    if plan.prune is not None or plan.l1:
        return
    needed = outputs + plan.hidden * plan.bias + 1
    if plan.start == "dense":
        each = inputs + outputs + plan.bias
        needed = outputs + plan.hidden * each + plan.direct * inputs * outputs
    if needed > plan.budget:
        raise FissileError(
            f"{plan.hidden} hidden neurons from a start that is {plan.start} take {needed} "
            f"parameters, more than the budget of {plan.budget}, and nothing prunes them"
        )


@cache
def _course(
    lr: float, schedule: Schedule, splits: tuple[SplitAt, ...], steps: int
) -> Float[Tensor, " steps"]:
    """Return the rate of every step; few plans of a study have one of their own."""
    plan = Plan(1, 1, lr=lr, schedule=schedule, splits=splits)
    return torch.tensor([plan.rate(step / steps) for step in range(steps)])


# --- which weights exist: counted strictly, kept within a budget, sown at random
#
# Masks come by name: first (hidden x inputs), second (outputs x hidden), direct (outputs x inputs).


def alive(masks: Mapping[str, Tensor]) -> Bool[Tensor, "networks hidden"]:
    """Return which neurons see an input and are seen by an output."""
    return masks["first"].any(-1) & masks["second"].any(-2)


def places_alive(masks: Masks) -> dict[str, Tensor]:
    """Return, for every layer, which places belong to neurons that are alive."""
    places = {name: torch.ones_like(mask) for name, mask in masks.items()}
    if "first" in masks:
        on = alive(masks)
        places |= {"first": on.unsqueeze(-1), "second": on.unsqueeze(-2)}
    return places


def effective(masks: Masks) -> Masks:
    """Remove the weights of neurons that see nothing or that nobody sees."""
    places = places_alive(masks)
    return {name: mask & places[name] for name, mask in masks.items()}


def within(
    scores: Mapping[str, Float[Tensor, "networks rows columns"]], room: Int[Tensor, " networks"], *,
    bias: bool,
) -> Masks:  # fmt: skip
    """Keep what scores highest, over all layers together, as much as there is room for.

    A neuron's bias takes room while it is alive, and its weights go with it when it is not; so what
    fits is not a rank but a threshold, found by bisecting its bits. What scores zero is not kept.
    """
    # A network that has diverged keeps what can still be ranked.
    sound = {name: score.float().nan_to_num(0.0) for name, score in scores.items()}
    keys = {name: score.contiguous().view(torch.int32) for name, score in sound.items()}
    low = torch.full_like(room, -1)  # too much, or never to be asked for: zeros too
    high = torch.full_like(room, _INFINITY)  # nothing always fits
    for _ in range(_INFINITY.bit_length()):
        middle = (low + high + 1) // 2
        fits = _left(_above(keys, middle), bias) <= room
        high = torch.where(fits, middle, high)
        low = torch.where(fits, low, middle)
    return effective(_above(keys, high))


def _left(masks: Masks, bias: bool) -> Int[Tensor, " networks"]:
    """Count what is left of masks without dead neurons, looking at every weight once."""
    total = torch.zeros((), dtype=torch.long)
    if "first" in masks:
        sees, seen = masks["first"].sum(-1), masks["second"].sum(-2)
        total = ((sees + seen + bias) * ((sees > 0) & (seen > 0))).sum(-1)
    if "direct" in masks:
        total = total + masks["direct"].sum((-2, -1))
    return total


def _above(keys: Mapping[str, Tensor], threshold: Int[Tensor, " networks"]) -> Masks:
    cut = threshold.to(torch.int32).view(-1, 1, 1)
    return {name: key > cut for name, key in keys.items()}


def sown(
    noise: Mapping[str, Float[Tensor, "networks rows columns"]], room: Int[Tensor, " networks"], *,
    erdos_renyi: bool,
) -> Masks:  # fmt: skip
    """Draw masks of exactly ``room`` weights, shared among the layers by a rule.

    Uniform gives every layer the same density; Erdos and Renyi's rule gives it weights in
    proportion to its rows and columns. What a layer has no place for goes to the others.
    """
    sizes = torch.tensor([x[0].numel() for x in noise.values()], device=room.device)
    shares = sizes
    if erdos_renyi:
        shares = torch.tensor([sum(x.shape[1:]) for x in noise.values()], device=room.device)
    wanted = torch.minimum((room.unsqueeze(-1) * shares / shares.sum()).long(), sizes)
    for layer in range(len(sizes)):  # in turn, whatever is left over
        left = room - wanted.sum(-1)
        wanted[:, layer] += torch.minimum(left, sizes[layer] - wanted[:, layer])
    return {
        name: keep_largest(x.flatten(1), wanted[:, layer]).view(x.shape)
        for layer, (name, x) in enumerate(noise.items())
    }


# --- a network out of a stack


class SparseNet(nn.Module):
    """Sparse layers side by side: through hidden neurons, directly, or both.

    >>> net = SparseNet(None, None, MaskedLinear(torch.ones(1, 2), torch.tensor([[True, False]])))
    >>> net(torch.tensor([[1.0, 2.0]]))
    tensor([[1.]], grad_fn=...)

    Args:
        hidden: from the inputs to the hidden neurons; with a bias they are ReLUs, without one they
            are linear.
        second: from there to the outputs, with their bias.
        direct: from the inputs to the outputs; the bias is here where nothing is hidden.
    """

    hidden: MaskedLinear | None
    second: MaskedLinear | None
    direct: MaskedLinear | None

    def __init__(
        self, hidden: MaskedLinear | None, second: MaskedLinear | None, direct: MaskedLinear | None
    ) -> None:
        super().__init__()
        if (hidden is None) != (second is None) or (hidden is None and direct is None):
            raise FissileError("a network needs hidden and second, or direct, or all three")
        if hidden is not None and second is not None:
            fits = hidden.out_features == second.in_features
            sizes = hidden.in_features, second.out_features
            if direct is not None:
                fits = fits and sizes == (direct.in_features, direct.out_features)
            if not fits:
                raise FissileError("the layers do not fit each other")
        self.hidden, self.second, self.direct = hidden, second, direct

    @classmethod
    def empty(cls, shapes: Mapping[str, Sequence[int]]) -> SparseNet:
        """Return a network of ReLUs without weights, to be filled, from its weights' shapes.

        >>> SparseNet.empty({"hidden.weight": (16, 64), "second.weight": (10, 16)})
        """
        alone = "hidden.weight" not in shapes
        return cls(
            _empty("hidden", shapes), _empty("second", shapes), _empty("direct", shapes, bias=alone)
        )

    @property
    def inputs(self) -> int:
        """How many features go in."""
        layer = self.hidden or self.direct
        assert layer is not None
        return layer.in_features

    @property
    def outputs(self) -> int:
        """How many logits come out."""
        layer = self.second or self.direct
        assert layer is not None
        return layer.out_features

    @property
    def neurons(self) -> int:
        """How many hidden neurons there are."""
        return 0 if self.hidden is None else self.hidden.out_features

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """Return the logits."""
        parts: list[Tensor] = []
        if self.hidden is not None and self.second is not None:
            hidden = self.hidden(x)
            parts.append(self.second(hidden if self.hidden.bias is None else hidden.relu()))
        if self.direct is not None:
            parts.append(self.direct(x))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


@torch.no_grad()
def module_of(stack: SparseStack, index: int, scale: float = 1.0) -> SparseNet:
    """Return one network of a stack, on the CPU, without its dead neurons.

    >>> [(stack, places)] = train([plan], seeds, x / 255, y, outputs=10)
    >>> module_of(stack, 0, scale=255)(x)  # as it was trained on x / 255

    Networks of a seed lie side by side: ``index`` is the seed's place times the number of plans,
    plus the plan's. Inputs that were divided by ``scale`` are now taken as they are.
    """
    weights = {name: weight[index].cpu() for name, weight in stack.weights.items()}
    masks = {name: mask[index].cpu() for name, mask in stack.masks.items()}
    out, hidden, second = weights["out"], None, None
    if "first" in masks:
        sees, bias = masks["first"].any(-1), weights.get("bias")
        if bias is not None:  # a neuron that sees nothing says the same of everything
            out = out + (weights["second"] * masks["second"])[:, ~sees] @ bias[~sees].relu()
        on = sees & masks["second"].any(-2)
        if bool(on.any()):
            first = _divided(weights["first"][on], scale)
            hidden = MaskedLinear(first, masks["first"][on], None if bias is None else bias[on])
            second = MaskedLinear(weights["second"][:, on], masks["second"][:, on], out)
    direct = None
    if "direct" in masks or hidden is None:
        nothing, bias = torch.zeros(stack.outputs, stack.inputs), out if second is None else None
        weight = _divided(weights.get("direct", nothing), scale)
        direct = MaskedLinear(weight, masks.get("direct", nothing.bool()), bias)
    return SparseNet(hidden, second, direct)


def _divided(weight: Tensor, scale: float) -> Tensor:
    return (weight.double() / scale).to(weight.dtype)


def _empty(
    name: str, shapes: Mapping[str, Sequence[int]], *, bias: bool = True
) -> MaskedLinear | None:
    if f"{name}.weight" not in shapes:
        return None
    shape = shapes[f"{name}.weight"]
    if len(shape) != 2 or min(shape) < 1:
        raise FissileError(f"{name}.weight is no matrix, but of shape {tuple(shape)}")
    weight = torch.zeros(*shape)
    return MaskedLinear(weight, weight.bool(), torch.zeros(shape[0]) if bias else None)
