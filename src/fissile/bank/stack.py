"""Networks of one shape as one module: every tensor has a leading dimension for the network.

Of Adam a stack keeps the moments alone; the engines do the steps, because every network has its own
learning rate. Splitting a stack is ``fissile.expand`` on its module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fissile._common.shapes import Bool, Float, Int
from fissile.bank.spec import Arm, Data, Dense, DropConnect, Dynamic, Expand, Spec
from fissile.expansion.expand import dropconnect, expand, to_masked
from fissile.expansion.optimizer import Moments
from fissile.layers import PartitionedLinear, SparseLinear, gathered, spread
from fissile.layers.mlp import MLP, chain, first_hidden

#: What a recipe has for every network.
HYPER = ("lr", "l1", "l2", "orthogonal")


def stacked_modules(modules: Sequence[nn.Module]) -> nn.Module:
    """Return one module for many of the same structure, with stacked parameters and buffers."""
    states = [dict(tensors_of(module)) for module in modules]
    merged = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return rebuilt(modules[0], merged)


def module_at(module: nn.Module, index: int) -> nn.Module:
    """Return one network of a stacked module as an ordinary module of its own."""
    return rebuilt(module, {name: tensor[index].clone() for name, tensor in tensors_of(module)})


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer with its name."""
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()
    yield from module.named_buffers()


def rebuilt(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
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


@dataclass
class Stack:
    """Some networks of a bank that have the same shape and have seen equally many epochs."""

    module: nn.Module
    adam: Moments
    members: Int[Tensor, " networks"]  # their numbers in the bank
    seeds: Int[Tensor, " networks"]
    hyper: dict[str, Float[Tensor, " networks"]]  # by the names in HYPER
    data: tuple[Data, ...]
    which: Int[Tensor, " networks"]  # the data set of each
    batch: int
    epoch: int
    arm: Arm
    alive: Bool[Tensor, " networks"]  # False once a network has diverged
    steps: int = 0  # since the arm began: dynamic masks count them

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
        """Return a stack around a stacked module, with fresh moments."""
        dtype = next(module.parameters()).dtype
        recipes = [spec.recipe for spec in specs]
        data = list({spec.data.key(): spec.data for spec in specs}.values())
        number = {part.key(): i for i, part in enumerate(data)}
        return cls(
            module=module,
            adam=fresh_adam(module, len(specs)),
            members=torch.tensor(members),
            seeds=torch.tensor([spec.seed for spec in specs]),
            hyper={
                name: torch.tensor([getattr(recipe, name) for recipe in recipes], dtype=dtype)
                for name in HYPER
            },
            data=tuple(data),
            which=torch.tensor([number[spec.data.key()] for spec in specs]),
            batch=recipes[0].batch,
            epoch=0,
            arm=Dense(),
            alive=torch.ones(len(members), dtype=torch.bool),
        )

    def key(self) -> Hashable:
        """Return what two stacks must share to be one."""
        structure = tuple(
            (name, tuple(tensor.shape[1:]), tensor.dtype)
            for name, tensor in tensors_of(self.module)
        )
        kinds = tuple(_kind(module) for module in self.module.modules())
        dynamic = replace(self.arm, split=None) if isinstance(self.arm, Dynamic) else None  # type: ignore[arg-type]
        orthogonal = bool((self.hyper["orthogonal"] != 0).any())
        shapes = self.data[0].shapes()
        return structure, kinds, shapes, self.batch, self.epoch, self.steps, dynamic, orthogonal

    def select(self, rows: Sequence[int] | Tensor) -> Stack:
        """Return some of the networks as a stack of their own."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        return replace(
            self._with({name: tensor[rows].clone() for name, tensor in self.tensors().items()}),
            members=self.members[rows],
            seeds=self.seeds[rows],
            hyper={name: values[rows] for name, values in self.hyper.items()},
            which=self.which[rows],
            alive=self.alive[rows],
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return all that training changes, by name: parameters, buffers, and Adam's state."""
        return dict(tensors_of(self.module)) | {
            f"{name}:{key}": value
            for name, parameter in self.module.named_parameters()
            for key, value in self.adam.state[parameter].items()
        }

    def _with(self, tensors: dict[str, Tensor]) -> Stack:
        """Return a stack like this one around other tensors."""
        module = rebuilt(self.module, tensors)
        adam = Moments.of(module.parameters())
        for name, parameter in module.named_parameters():
            keys = self.adam.state[self.module.get_parameter(name)]
            adam.state[parameter] = {key: tensors[f"{name}:{key}"] for key in keys}
        return replace(self, module=module, adam=adam)

    def branch(self, arm: Arm, members: Tensor) -> Stack:
        """Return the networks again, as the given arm makes them; these here stay as they are."""
        new = self.select(range(len(self)))
        new.members = members
        if not isinstance(arm, Dense):  # which goes on as it is, moving masks included
            new.arm, new.steps = arm, 0
        module, adam, seeds = new.module, new.adam, new.seeds
        if isinstance(arm, Expand):
            how = arm.alpha, arm.split
            module = expand(module, *how, seed=seeds, budget=arm.budget, optimizer=adam)
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

    def try_epoch(self, train: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Train an epoch with a function that returns accuracies and losses; return both.

        A network that diverges goes back to its last finished epoch and stays there. If the
        function raises (Ctrl-C, no memory), all of them go back.
        """
        saved = {name: tensor.clone() for name, tensor in self.tensors().items()}
        steps = self.steps
        try:
            accuracy, loss = train()
            alive = self.alive & torch.isfinite(loss) & self._finite()
            self.restore(saved, ~alive)
        except BaseException:
            self.restore(saved, torch.ones_like(self.alive))
            self.steps = steps
            raise
        self.alive, self.epoch = alive, self.epoch + 1
        return accuracy.masked_fill(~alive, torch.nan), loss.masked_fill(~alive, torch.nan)

    @torch.no_grad()
    def _finite(self) -> Bool[Tensor, " networks"]:
        checks = [torch.isfinite(p).flatten(1).all(1) for p in self.module.parameters()]
        return torch.stack(checks).all(0).cpu()

    @torch.no_grad()
    def restore(self, saved: dict[str, Tensor], rows: Tensor) -> None:
        """Take back earlier :meth:`tensors` of some networks; rows is a mask."""
        for name, tensor in self.tensors().items():
            tensor[rows] = saved[name][rows]


def fresh_adam(module: nn.Module, networks: int) -> Moments:
    """Return zero moments and a step count for every network."""
    adam = Moments.of(module.parameters())
    for parameter in module.parameters():
        adam.state[parameter] = {"step": torch.zeros(networks, device=parameter.device)} | {
            key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")
        }
    return adam


def concatenated(stacks: Sequence[Stack]) -> Stack:
    """Join stacks with the same key into one."""
    if len(stacks) == 1:
        return stacks[0]
    parts = [stack.tensors() for stack in stacks]
    data, which = joined_data(stacks)
    return replace(
        stacks[0]._with({name: torch.cat([part[name] for part in parts]) for name in parts[0]}),
        members=torch.cat([stack.members for stack in stacks]),
        seeds=torch.cat([stack.seeds for stack in stacks]),
        hyper={name: torch.cat([stack.hyper[name] for stack in stacks]) for name in HYPER},
        data=data,
        which=which,
        alive=torch.cat([stack.alive for stack in stacks]),
    )


def joined_data(stacks: Sequence[Stack]) -> tuple[tuple[Data, ...], Int[Tensor, " networks"]]:
    """Return the data sets of all stacks, each once, and which of them each network has."""
    sets = {data.key(): data for stack in stacks for data in stack.data}
    number = {key: i for i, key in enumerate(sets)}
    which = [
        torch.tensor([number[data.key()] for data in stack.data])[stack.which.cpu()]
        for stack in stacks
    ]
    return tuple(sets.values()), torch.cat(which)


# --- layers as plain matrices, which the fast engines work on


class WideLayer(NamedTuple):
    """One linear layer of every network, and the LayerNorm behind it, as plain matrices."""

    #: weight, bias, scale and shift, as far as they exist: the values and Adam's two moments.
    states: dict[str, list[Tensor]]
    mask: Bool[Tensor, "networks outputs inputs"] | None = None  # None: every weight exists


def linear_layers(module: nn.Module) -> list[nn.Linear | SparseLinear]:
    """Return the linear layers of a network, from the input on."""
    return [m for m in module.modules() if isinstance(m, nn.Linear | SparseLinear)]


class Stage(NamedTuple):
    """What stands behind a linear layer."""

    norm: nn.LayerNorm | None = None
    relu: bool = False


def stages(module: nn.Module) -> list[Stage] | None:
    """Return the LayerNorm and ReLU behind each linear layer; None if anything else is there."""
    behind: list[Stage] = []
    for layer in (link.module for link in chain(module)):
        if isinstance(layer, nn.Linear | SparseLinear):
            behind.append(Stage())
        elif type(layer) is nn.LayerNorm and behind[-1] == Stage():
            behind[-1] = Stage(layer)
        elif type(layer) is nn.ReLU:
            behind[-1] = behind[-1]._replace(relu=True)
        else:
            return None
    return behind


def first_index(module: nn.Module) -> int:
    """Return which linear layer the paper calls W1."""
    return linear_layers(module).index(first_hidden(module))  # type: ignore[arg-type]


@torch.no_grad()
def read(stack: Stack) -> list[WideLayer]:
    """Return the layers of a stack as matrices."""
    layers = []
    for layer, stage in zip(linear_layers(stack.module), stages(stack.module) or [], strict=True):
        states = {name: _states(stack, p) for name, p in _parameters(layer, stage).items()}
        if isinstance(layer, PartitionedLinear):
            states["weight"] = [spread(x, layer.owner, layer.alpha) for x in states["weight"]]
        states["weight"] = [tensor.contiguous() for tensor in states["weight"]]
        mask = layer.pattern() if isinstance(layer, SparseLinear) else None
        layers.append(WideLayer(states, mask))
    return layers


@torch.no_grad()
def write(stack: Stack, layers: list[WideLayer]) -> None:
    """Copy the matrices back into the stack."""
    behind = stages(stack.module) or []
    for layer, stage, wide in zip(linear_layers(stack.module), behind, layers, strict=True):
        for name, parameter in _parameters(layer, stage).items():
            for target, tensor in zip(_states(stack, parameter), wide.states[name], strict=True):
                values = tensor.to(target.device)
                if name == "weight" and isinstance(layer, PartitionedLinear):
                    values = gathered(values, layer.owner, layer.alpha)
                if target.is_cpu:  # PyTorch would wait for threads that are not at work
                    np.copyto(target.numpy(), values.numpy())
                else:
                    target.copy_(values)


def _parameters(layer: nn.Linear | SparseLinear, stage: Stage) -> dict[str, Tensor]:
    parameters = {"weight": layer.weight, "bias": layer.bias}
    if stage.norm is not None:
        parameters |= {"scale": stage.norm.weight, "shift": stage.norm.bias}
    return {name: parameter for name, parameter in parameters.items() if parameter is not None}


def _states(stack: Stack, parameter: Tensor) -> list[Tensor]:
    state = stack.adam.state[parameter]
    return [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]
