"""Labelled samples of a Boolean formula: an OR of clauses, each the AND of its own literals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.random import Generator, SeedSequence
from numpy.typing import NDArray
from torch import Tensor

from fissile._common.errors import FissileError, whole
from fissile._common.shapes import Bool, Float, Int, brief

Negatives = Literal["literal", "clause", "flip"]
Others = Literal["matched", "arbitrary"]
_Whole = NDArray[np.int64]
_Bits = NDArray[np.bool_]
_False = tuple[Negatives, Others]  # how the two kinds of false rows are made

_POSITIVE, _NEAR, _UNIFORM = 0, 1, 2  # kinds of row; a near miss starts as a positive
_ROUNDS = 1000  # redraws before a formula is given up as one that almost no row falsifies


@dataclass(frozen=True)
class Formula:
    """A monotone formula in which each literal belongs to exactly one clause.

    >>> formula = Formula(clauses=2, size=2)
    >>> formula.groups
    tensor([0, 0, 1, 1])
    >>> formula.satisfied(torch.tensor([[True, True, False, True]]))
    tensor([[ True, False]])
    """

    clauses: int
    size: int = 4

    def __post_init__(self) -> None:
        whole("clauses", self.clauses, least=1)
        # One literal per clause leaves the empty row as the only negative.
        whole("size", self.size, least=2)

    @property
    def literals(self) -> int:
        """Number of literals that the formula reads."""
        return self.clauses * self.size

    @property
    def groups(self) -> Int[Tensor, " literals"]:
        """The clause of each literal."""
        return torch.arange(self.literals) // self.size

    def satisfied(self, bits: Bool[Tensor, "*batch literals"]) -> Bool[Tensor, "*batch clauses"]:
        """Return which clauses have all their literals on; the formula is true where any has."""
        if bits.dtype != torch.bool or bits.shape[-1:] != (self.literals,):
            raise FissileError(
                f"bits are {bits.dtype} of shape {tuple(bits.shape)}; "
                f"give booleans that end in {self.literals} literals"
            )
        return bits.reshape(*bits.shape[:-1], self.clauses, self.size).all(-1)


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs, their labels, and the bits the inputs were made from.

    >>> samples = dnf(clauses=8, size=4, samples=100)
    >>> samples.x.shape, samples.y.shape, samples.bits.dtype
    (torch.Size([100, 32]), torch.Size([100]), torch.bool)
    """

    x: Float[Tensor, "samples literals"]
    y: Int[Tensor, " samples"]
    bits: Bool[Tensor, "samples literals"]

    __repr__ = brief

    def __len__(self) -> int:
        return len(self.y)


def dnf(
    clauses: int = 8,
    size: int = 4,
    *,
    samples: int = 10_000,
    seed: int = 0,
    negatives: Negatives = "literal",
    others: Others = "matched",
    jitter: bool = True,
) -> Samples:
    """Draw samples of a formula, half of them true, in random order.

    >>> samples = dnf(clauses=8, size=4, samples=100)
    >>> samples.x.shape, int(samples.y.sum())
    (torch.Size([100, 32]), 50)

    A true row has a whole clause on and other literals besides. Half of the false rows are near
    misses, the others have literals on at random. `negatives` says what makes a near miss:
    `"literal"` (Algorithm A2) switches off one literal of the clause that was whole, `"clause"`
    (the paper's prose) one literal of every clause, and `"flip"` (the prose taken at its word)
    turns one literal of every clause over, whatever it was. `others` says how many literals the
    rest have on: `"matched"` (A2) as many as a true row, `"arbitrary"` (the prose) each with odds
    of one half. `jitter` moves off to [0, 0.5] and on to [3, 3.5]; without it they are 0 and 1.
    """
    formula = Formula(clauses, size)
    _check(negatives, others, seed, samples=samples)
    return _samples(formula, samples, (negatives, others), jitter, SeedSequence(seed))


def dnf_task(
    clauses: int = 8,
    size: int = 4,
    *,
    train: int = 10_000,
    test: int = 2_000,
    seed: int = 0,
    negatives: Negatives = "literal",
    others: Others = "matched",
    jitter: bool = True,
) -> tuple[Samples, Samples]:
    """Draw training and test samples independently of each other; the options are `dnf`'s.

    >>> train, test = dnf_task(clauses=8, size=4, train=100, test=20)
    >>> train.x.shape, test.x.shape
    (torch.Size([100, 32]), torch.Size([20, 32]))
    """
    formula, false = Formula(clauses, size), (negatives, others)
    _check(negatives, others, seed, train=train, test=test)
    one, two = SeedSequence(seed).spawn(2)
    return _samples(formula, train, false, jitter, one), _samples(formula, test, false, jitter, two)


def _samples(
    formula: Formula, samples: int, false: _False, jitter: bool, seed: SeedSequence
) -> Samples:
    # Bits and jitter have streams of their own: turning jitter off leaves the bits as they were.
    for_bits, for_jitter = map(np.random.default_rng, seed.spawn(2))
    kinds = for_bits.permutation(_kinds(samples))
    bits = _bits(for_bits, formula, kinds, false)
    x = bits.astype(np.float32)
    if jitter:
        x *= 3
        x += 0.5 * for_jitter.random(x.shape, dtype=np.float32)
    y = (kinds == _POSITIVE).astype(np.int64)
    return Samples(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(bits))


def _kinds(samples: int) -> _Whole:
    """Return the kind of each row: half positive, the negatives in two parts of equal size."""
    positive = samples // 2
    near = (samples - positive) // 2
    return np.repeat([_POSITIVE, _NEAR, _UNIFORM], [positive, near, samples - positive - near])


def _bits(rng: Generator, formula: Formula, kinds: _Whole, false: _False) -> _Bits:
    """Draw a row for each kind, again for as long as the formula disagrees with it."""
    least, spread = formula.literals // 4, formula.literals // 8
    ones = rng.integers(least, least + spread, size=len(kinds), endpoint=True)
    bits = np.empty((len(kinds), formula.literals), dtype=np.bool_)
    rows = np.arange(len(kinds))
    for _ in range(_ROUNDS):
        # A redrawn row keeps its number of ones, as in A2. It keeps its kind too, which A2 tosses
        # for again: that would leave fewer rows of the kind that is rejected more often.
        bits[rows] = drawn = _draw(rng, formula, kinds[rows], ones[rows], false)
        true = formula.satisfied(torch.from_numpy(drawn)).any(-1).numpy()
        rows = rows[true != (kinds[rows] == _POSITIVE)]
        if not len(rows):
            return bits
    raise FissileError(
        f"{len(rows)} of {len(kinds)} samples satisfied a clause in each of {_ROUNDS} draws; "
        "give larger clauses, or fewer of them"
    )


def _draw(rng: Generator, formula: Formula, kinds: _Whole, ones: _Whole, false: _False) -> _Bits:
    """Draw each row once."""
    negatives, others = false
    built, near = kinds != _UNIFORM, np.flatnonzero(kinds == _NEAR)
    clause = rng.integers(formula.clauses, size=len(kinds))
    whole = (formula.groups.numpy() == clause[:, None]) & built[:, None]
    extra = np.where(built, np.maximum(ones - formula.size, 0), ones)
    bits: _Bits = whole | _choose(rng, ~whole, extra)
    if negatives == "literal":
        bits[near, clause[near] * formula.size + rng.integers(formula.size, size=len(near))] = False
    else:
        member = rng.integers(formula.size, size=(len(near), formula.clauses))
        places = near[:, None], np.arange(formula.clauses) * formula.size + member
        bits[places] = ~bits[places] if negatives == "flip" else False
    if others == "arbitrary":
        bits[~built] = rng.random((np.count_nonzero(~built), formula.literals), np.float32) < 0.5
    return bits


def _choose(rng: Generator, allowed: _Bits, counts: _Whole) -> _Bits:
    """Switch on exactly `counts` of each row's allowed literals, every choice equally likely."""
    chosen = np.zeros_like(allowed)
    rows = np.flatnonzero(counts)
    while len(rows):
        noise = np.where(allowed[rows], rng.random((len(rows), allowed.shape[1]), np.float32), 2)
        highest = np.take_along_axis(np.sort(noise), counts[rows, None] - 1, axis=1)
        chosen[rows] = below = noise <= highest
        # Equal noise at the cut switches on too many; drawing again favours no literal.
        rows = rows[np.count_nonzero(below, axis=1) != counts[rows]]
    return chosen


def _check(negatives: str, others: str, seed: int, **sizes: int) -> None:
    for name, value in sizes.items():
        whole(name, value, least=2)
    whole("seed", seed, least=0)
    if negatives not in get_args(Negatives):
        raise FissileError(
            f"negatives={negatives!r} is not known; give 'literal', 'clause' or 'flip'"
        )
    if others not in get_args(Others):
        raise FissileError(f"others={others!r} is not known; give 'matched' or 'arbitrary'")
