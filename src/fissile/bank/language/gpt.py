"""A small GPT that reads characters, alone or many of one shape in a stack.

A stack is one :class:`GPT` whose tensors have a leading dimension for the network, as elsewhere in
the bank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fissile._common.random import hash32
from fissile._common.shapes import Float, Int
from fissile.bank.spec import Dynamic, Expand
from fissile.expansion.budget import Allocation
from fissile.expansion.expand import expand, to_masked
from fissile.expansion.optimizer import Moments
from fissile.layers import weight_of

_Tokens = Int[Tensor, "*networks texts characters"]
_States = Float[Tensor, "*networks positions width"]


@dataclass(frozen=True)
class Shape:
    """A GPT's sizes; with ``place="head"``, ``neurons`` are those of a bottleneck before the end.

    >>> Shape(characters=65, neurons=16).ffn
    16
    """

    characters: int
    neurons: int
    place: Literal["ffn", "head"] = "ffn"
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    beside: int = 64  # neurons of the feed-forward networks where the head is split

    @property
    def ffn(self) -> int:
        """The hidden neurons of each feed-forward network."""
        return self.neurons if self.place == "ffn" else self.beside


def _pair(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside what goes past it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))
        self.mix = nn.Linear(shape.width, 3 * shape.width)
        self.join = nn.Linear(shape.width, shape.width)
        self.ffn = _pair(shape.width, shape.ffn, shape.width)

    def forward(self, x: _States, texts: int) -> _States:
        x = x + _linear(
            self.join, self._attention(_linear(self.mix, _norm(self.norms[0], x)), texts)
        )
        return x + _through(self.ffn, _norm(self.norms[1], x))

    def _attention(self, mixed: _States, texts: int) -> _States:
        parts = mixed.unflatten(-1, (3, self.heads, -1)).unflatten(-4, (texts, -1))
        # (3, *networks, texts, heads, characters, width of a head)
        parts = parts.movedim(-3, 0).transpose(-3, -2)
        q, k, v = (one.flatten(0, -4) for one in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return seen.transpose(-3, -2).flatten(-2).reshape(*mixed.shape[:-1], -1)


class GPT(nn.Module):
    """A language model of characters, alone or many in a stack.

    >>> GPT(Shape(characters=65, neurons=16))(torch.zeros(2, 10, dtype=torch.long)).shape
    torch.Size([20, 65])
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.characters = nn.Parameter(0.02 * torch.randn(shape.characters, shape.width))
        self.positions = nn.Parameter(0.02 * torch.randn(shape.context, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head: nn.Module = (
            nn.Linear(shape.width, shape.characters)
            if shape.place == "ffn"
            else _pair(shape.width, shape.neurons, shape.characters)
        )

    def forward(self, tokens: _Tokens) -> Float[Tensor, "*networks positions characters"]:
        """Return the logits of every next character, the positions of all texts in a row."""
        texts, length = tokens.shape[-2:]
        number = torch.arange(self.characters.shape[-2], device=tokens.device)
        # A product, as a lookup would add up its gradient in an order of its own on a GPU.
        which = (tokens.flatten(-2).unsqueeze(-1) == number).to(self.characters.dtype)
        x = (which @ self.characters).unflatten(-2, (texts, length))
        x = (x + self.positions[..., :length, :].unsqueeze(-3)).flatten(-3, -2)
        for block in self.blocks:
            x = block(x, texts)
        return _through(self.head, _norm(self.norm, x))

    def split(self, arm: Expand | Dynamic, allocation: str | Allocation, seeds: Tensor,
              adam: Moments) -> None:  # fmt: skip
        """Split what is to be split in place, and carry Adam's moments along."""
        for number, (holder, name) in enumerate(self.pairs()):
            wide = expand(
                getattr(holder, name), arm.alpha, arm.split, seed=hash32(seeds, number),
                allocation=allocation, optimizer=adam,
            )  # fmt: skip
            if isinstance(arm, Dynamic):
                wide = to_masked(wide, optimizer=adam)
            setattr(holder, name, wide)

    def pairs(self) -> list[tuple[nn.Module, str]]:
        """Return which module holds each pair of layers that is split, and its name there."""
        if isinstance(self.head, nn.Linear):
            return [(block, "ffn") for block in self.blocks]
        return [(self, "head")]


def _linear(layer: nn.Module, x: _States) -> _States:
    out = x @ weight_of(layer).mT
    return out if layer.bias is None else out + layer.bias.unsqueeze(-2)  # type: ignore[operator]


def _through(module: nn.Module, x: _States) -> _States:
    if not isinstance(module, nn.Sequential):
        return _linear(module, x)
    first, _, second = module
    return _linear(second, _linear(first, x).relu())


def _norm(norm: nn.Module, x: _States) -> _States:
    assert isinstance(norm, nn.LayerNorm)
    plain = functional.layer_norm(x, x.shape[-1:], eps=norm.eps)
    return plain * norm.weight.unsqueeze(-2) + norm.bias.unsqueeze(-2)
