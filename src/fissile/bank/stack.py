"""Networks of one shape as one module: every tensor has a leading dimension for the network.

A stack is an ordinary ``fissile.MLP``, dense or expanded, whose parameters are stacked. Of
Adam it keeps the moments alone; the engines do the steps, because every network has its own
learning rate. Splitting a stack is ``fissile.expand`` on that module.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fissile._common.shapes import Bool, Float, Int
from fissile.bank.spec import Arm, Data, Dense, DropConnect, Dynamic, Expand, Spec
from fissile.expansion.expand import dropconnect, expand, to_masked
from fissile.expansion.optimizer import Moments
from fissile.layers import DropConnectLinear, PartitionedLinear, SparseLinear, gathered, spread
from fissile.layers.mlp import MLP, first_hidden

__all__ = [
    "Stack", "Stage", "WideLayer", "concatenated", "first_index", "linear_layers", "module_at",
    "read", "stacked_modules", "stages", "write",
]  # fmt: skip

_MOMENTS = ("exp_avg", "exp_avg_sq")
Vectors = tuple[Float[Tensor, "networks outputs"], ...]


def stacked_modules(modules: Sequence[nn.Module]) -> nn.Module:
    """Make one module of many of the same structure, with stacked parameters and buffers."""
    states = [dict(_tensors(module)) for module in modules]
    merged = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return _rebuilt(modules[0], merged)


def module_at(module: nn.Module, index: int) -> nn.Module:
    """Take one network out of a stacked module, as an ordinary module of its own."""
    return _rebuilt(module, {name: tensor[index].clone() for name, tensor in _tensors(module)})


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()
    yield from module.named_buffers()


def _rebuilt(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Copy a module's structure around other tensors, without copying its own."""
    memo: dict[int, object] = {}
    for name, parameter in module.named_parameters():
        memo[id(parameter)] = nn.Parameter(tensors[name], parameter.requires_grad)
    for name, buffer in module.named_buffers():
        memo[id(buffer)] = tensors[name]
    return copy.deepcopy(module, memo)


def _kind(module: nn.Module) -> Hashable:
    """Return what a module does besides its tensors: an activation's slope, a norm's epsilon."""
    if next(module.children(), None) is None and next(module.parameters(), None) is None:
        return repr(module)
    return type(module).__name__, getattr(module, "eps", None)


@dataclass(frozen=True)
class Dials:
    """The recipe's values for every network of a stack."""

    lr: Float[Tensor, " networks"]
    l1: Float[Tensor, " networks"]
    l2: Float[Tensor, " networks"]
    orthogonal: Float[Tensor, " networks"]

    def at(self, rows: Tensor) -> Dials:
        """Return the values of some of the networks."""
        return Dials(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass
class Stack:
    """Some networks of a bank that have the same shape and have seen equally many epochs."""

    module: nn.Module
    adam: Moments
    members: Int[Tensor, " networks"]  # their numbers in the bank
    seeds: Int[Tensor, " networks"]
    dials: Dials
    data: tuple[Data, ...]
    which: Int[Tensor, " networks"]  # the data set of each
    batch: int
    epoch: int
    arm: Arm
    steps: int = 0  # since the arm began: dynamic masks count them
    alive: Tensor = None  # type: ignore[assignment]  # False once a network has diverged

    def __post_init__(self) -> None:
        if self.alive is None:
            self.alive = torch.ones(len(self.members), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.members)

    @classmethod
    def of(cls, specs: Sequence[Spec], members: Sequence[int], dtype: torch.dtype) -> Stack:
        """Build networks of one shape with the weights their seeds give them."""
        modules = []
        with torch.random.fork_rng(devices=[]):
            for spec in specs:
                # torch.manual_seed would ask every device.
                torch.default_generator.manual_seed(spec.seed)
                how = {"embedding": spec.embedding, "layer_norm": spec.layer_norm}
                modules.append(MLP(spec.sizes, activation=spec.activation, **how))  # type: ignore[arg-type]
        return cls.around(stacked_modules(modules).to(dtype), specs, members)

    @classmethod
    def around(cls, module: nn.Module, specs: Sequence[Spec], members: Sequence[int]) -> Stack:
        """Make a stack of a stacked module, with fresh moments."""
        dtype = next(module.parameters()).dtype
        recipes = [spec.recipe for spec in specs]
        data = list({spec.data.key(): spec.data for spec in specs}.values())
        number = {one.key(): i for i, one in enumerate(data)}
        dials = ([getattr(r, name) for r in recipes] for name in Dials.__dataclass_fields__)
        return cls(
            module=module,
            adam=fresh_adam(module, len(specs)),
            members=torch.tensor(members),
            seeds=torch.tensor([spec.seed for spec in specs]),
            dials=Dials(*(torch.tensor(values, dtype=dtype) for values in dials)),
            data=tuple(data),
            which=torch.tensor([number[spec.data.key()] for spec in specs]),
            batch=recipes[0].batch,
            epoch=0,
            arm=Dense(),
        )

    def key(self) -> Hashable:
        """Return what two stacks must share to be one."""
        structure = tuple(
            (name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in _tensors(self.module)
        )
        kinds = tuple(_kind(module) for module in self.module.modules())
        dynamic = replace(self.arm, split=None) if isinstance(self.arm, Dynamic) else None  # type: ignore[arg-type]
        orthogonal = bool((self.dials.orthogonal != 0).any())
        shapes = self.data[0].shapes()
        return structure, kinds, shapes, self.batch, self.epoch, self.steps, dynamic, orthogonal

    def select(self, rows: Sequence[int] | Tensor) -> Stack:
        """Return some of the networks as a stack of their own."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        tensors = {name: tensor[rows].clone() for name, tensor in _tensors(self.module)}
        module = _rebuilt(self.module, tensors)
        adam = Moments.of(module.parameters())
        for new, old in zip(module.parameters(), self.module.parameters(), strict=True):
            adam.state[new] = {k: v[rows].clone() for k, v in self.adam.state[old].items()}
        return replace(
            self,
            module=module,
            adam=adam,
            members=self.members[rows],
            seeds=self.seeds[rows],
            dials=self.dials.at(rows),
            which=self.which[rows],
            alive=self.alive[rows],
        )

    def branch(self, arm: Arm, members: Tensor) -> Stack:
        """Return the networks again, as the given arm makes them; these here stay as they are."""
        new = self.select(torch.arange(len(self)))
        new.members = members
        if not isinstance(arm, Dense):  # which goes on as it is, moving masks included
            new.arm, new.steps = arm, 0
        module, adam, seeds = new.module, new.adam, new.seeds
        if isinstance(arm, Expand):
            module = expand(
                module, arm.alpha, arm.split, seed=seeds, budget=arm.budget, optimizer=adam
            )
        elif isinstance(arm, DropConnect):
            module = dropconnect(module, arm.alpha, seed=seeds, optimizer=adam)
        elif isinstance(arm, Dynamic):
            module = expand(module, arm.alpha, arm.split, seed=seeds, optimizer=adam)
            module = to_masked(module, optimizer=adam)
        new.module = module
        if isinstance(arm, Expand) and arm.moments == "fresh":
            new.adam = fresh_adam(module, len(new))
        return new

    def to(self, device: torch.device) -> None:
        """Move networks and moments to a device, in place."""
        self.module.to(device)
        for state in self.adam.state.values():
            for key, value in state.items():
                state[key] = value.to(device)

    def snapshot(self) -> Snapshot:
        """Copy everything that training changes."""
        tensors = {name: tensor.clone() for name, tensor in _tensors(self.module)}
        moments = [
            {key: value.clone() for key, value in self.adam.state[parameter].items()}
            for parameter in self.module.parameters()
        ]
        return Snapshot(tensors, moments, self.epoch, self.steps)

    @torch.no_grad()
    def restore(self, saved: Snapshot, rows: Tensor | None = None) -> None:
        """Go back to a snapshot, all networks or (rows: a mask) some of them."""
        if rows is None:
            rows = torch.ones(len(self), dtype=torch.bool)
            self.epoch, self.steps = saved.epoch, saved.steps
        for name, tensor in _tensors(self.module):
            tensor[rows] = saved.tensors[name][rows]
        for parameter, state in zip(self.module.parameters(), saved.moments, strict=True):
            for key, value in state.items():
                self.adam.state[parameter][key][rows] = value[rows]


@dataclass(frozen=True)
class Snapshot:
    """A stack's weights and moments at the end of an epoch."""

    tensors: dict[str, Tensor]
    moments: list[dict[str, Tensor]]
    epoch: int
    steps: int


def fresh_adam(module: nn.Module, networks: int) -> Moments:
    """Return zero moments and a step count for every network."""
    adam = Moments.of(module.parameters())
    for parameter in module.parameters():
        adam.state[parameter] = {"step": torch.zeros(networks, device=parameter.device)} | {
            key: torch.zeros_like(parameter) for key in _MOMENTS
        }
    return adam


def concatenated(stacks: Sequence[Stack]) -> Stack:
    """Join stacks with the same key into one."""
    first = stacks[0]
    if len(stacks) == 1:
        return first
    parts = [dict(_tensors(stack.module)) for stack in stacks]
    module = _rebuilt(
        first.module, {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
    )
    adam = Moments.of(module.parameters())
    olds = zip(*(stack.module.parameters() for stack in stacks), strict=True)
    for new, old in zip(module.parameters(), olds, strict=True):
        states = [stack.adam.state[p] for stack, p in zip(stacks, old, strict=True)]
        adam.state[new] = {key: torch.cat([state[key] for state in states]) for key in states[0]}
    data = list({one.key(): one for stack in stacks for one in stack.data}.values())
    number = {one.key(): i for i, one in enumerate(data)}
    which = [torch.tensor([number[o.key()] for o in stack.data])[stack.which] for stack in stacks]
    dials = {
        name: torch.cat([getattr(stack.dials, name) for stack in stacks])
        for name in Dials.__dataclass_fields__
    }
    return replace(
        first,
        module=module,
        adam=adam,
        members=torch.cat([stack.members for stack in stacks]),
        seeds=torch.cat([stack.seeds for stack in stacks]),
        dials=Dials(**dials),
        data=tuple(data),
        which=torch.cat(which),
        alive=torch.cat([stack.alive for stack in stacks]),
    )


# --- layers as plain matrices, which the fast engines work on


@dataclass(frozen=True)
class WideLayer:
    """One linear layer of every network: its values and both of Adam's moments, as matrices."""

    weight: tuple[Float[Tensor, "networks outputs inputs"], ...]
    bias: tuple[Float[Tensor, "networks outputs"], ...] | None
    mask: Bool[Tensor, "networks outputs inputs"] | None  # None: every weight exists
    norm: tuple[Vectors, Vectors] | None = None  # scale and shift of a LayerNorm behind it


def linear_layers(module: nn.Module) -> list[nn.Linear | SparseLinear]:
    """Return the linear layers of a network, from the input on."""
    return [m for m in module.modules() if isinstance(m, nn.Linear | SparseLinear)]


@dataclass
class Stage:
    """What stands behind a linear layer."""

    norm: nn.LayerNorm | None = None
    relu: bool = False


def stages(module: nn.Module) -> list[Stage] | None:
    """Return the LayerNorm and ReLU behind each linear layer; None if anything else is there."""
    layers = module.get_submodule("layers")._modules.values()
    behind = [Stage()] if getattr(module, "embedding", None) is not None else []
    for layer in layers:
        if isinstance(layer, DropConnectLinear):
            return None
        if isinstance(layer, nn.Linear | SparseLinear):
            behind.append(Stage())
        elif type(layer) is nn.LayerNorm and behind[-1] == Stage():
            behind[-1].norm = layer
        elif type(layer) is nn.ReLU:
            behind[-1].relu = True
        else:
            return None
    return behind


def first_index(module: nn.Module) -> int:
    """Return which linear layer the paper calls W1."""
    return linear_layers(module).index(first_hidden(module))  # type: ignore[arg-type]


@torch.no_grad()
def read(stack: Stack) -> list[WideLayer]:
    """Write the layers of a stack out as matrices."""
    layers = []
    behind = stages(stack.module) or []
    for layer, stage in zip(linear_layers(stack.module), behind, strict=True):
        weight = _states(stack, layer.weight)
        if isinstance(layer, PartitionedLinear):
            weight = [spread(tensor, layer.owner, layer.alpha) for tensor in weight]
        bias = None if layer.bias is None else tuple(_states(stack, layer.bias))
        mask = layer.pattern() if isinstance(layer, SparseLinear) else None
        matrices = tuple(tensor.contiguous() for tensor in weight)
        layers.append(WideLayer(matrices, bias, mask, _vectors(stack, stage.norm)))
    return layers


@torch.no_grad()
def write(stack: Stack, layers: list[WideLayer]) -> None:
    """Take the matrices back into the stack."""
    behind = stages(stack.module) or []
    for layer, stage, wide in zip(linear_layers(stack.module), behind, layers, strict=True):
        for target, tensor in zip(_states(stack, layer.weight), wide.weight, strict=True):
            matrix = tensor.to(target.device)
            if isinstance(layer, PartitionedLinear):
                matrix = gathered(matrix, layer.owner, layer.alpha)
            target.copy_(matrix)
        if layer.bias is not None and wide.bias is not None:
            for target, tensor in zip(_states(stack, layer.bias), wide.bias, strict=True):
                target.copy_(tensor)
        held = _vectors(stack, stage.norm)
        if held is not None and wide.norm is not None:
            for targets, tensors in zip(held, wide.norm, strict=True):
                for target, tensor in zip(targets, tensors, strict=True):
                    target.copy_(tensor)


def _vectors(stack: Stack, norm: nn.LayerNorm | None) -> tuple[Vectors, Vectors] | None:
    """Return the scale and the shift of a LayerNorm, each with its moments."""
    if norm is None:
        return None
    return tuple(_states(stack, norm.weight)), tuple(_states(stack, norm.bias))


def _states(stack: Stack, parameter: Tensor) -> list[Tensor]:
    state = stack.adam.state[parameter]
    return [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]
