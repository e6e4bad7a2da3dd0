"""What a random sparse network covers, and how often its clauses collide: exact, bounded, sampled.

A formula of `literals / size` disjoint clauses is read by `neurons` dense parents. Each parent
becomes `alpha` children, and each child sees `literals // alpha` literals of its own, drawn without
regard to the clauses or to the other children. The number of weights stays what it was.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from itertools import pairwise
from math import ceil, comb, exp, log, log1p, sqrt

import torch
from torch import Tensor

from fissile._common.errors import FissileError, whole
from fissile._common.shapes import Bool

__all__ = ["RandomSparse", "Simulation", "Width", "required_width"]

_DIGITS = 400  # below the smallest float, so that no cancellation can reach a returned value
_CHUNK = 4_000_000  # weights drawn at once by a simulation: about 50 MB at its peak


@dataclass(frozen=True)
class Simulation:
    """Estimates from sampled networks, each with its standard error.

    >>> RandomSparse(literals=32, neurons=16).simulate(trials=100).trials
    100
    """

    trials: int
    coverage: float
    coverage_error: float
    collisions: float
    collisions_error: float


@dataclass(frozen=True)
class Width:
    """Dense neurons needed: by the exact coverage, by its union bound, by the paper's formula.

    >>> Width(exact=1, bound=1, approx=7.6).exact
    1
    """

    exact: int
    bound: int
    approx: float


@dataclass(frozen=True)
class RandomSparse:
    """A network whose children each see a random `1 / alpha` of the literals.

    >>> net = RandomSparse(literals=32, size=4, neurons=64, alpha=2)
    >>> net.clauses, net.degree, net.children
    (8, 16, 128)
    >>> round(net.coverage, 4), round(net.coverage_bound, 4), round(net.coverage_approx, 4)
    (0.9897, 0.9896, 0.9973)
    >>> round(net.collision_ratio, 6), net.collision_ratio_approx
    (0.002447, 0.0078125)
    """

    literals: int
    size: int = 4
    neurons: int = 8
    alpha: int = 2

    def __post_init__(self) -> None:
        for name in ("literals", "size", "neurons", "alpha"):
            whole(name, getattr(self, name), least=1)
        if self.literals % self.size:
            raise FissileError(
                f"{self.literals} literals do not divide into clauses of {self.size}; "
                "give a multiple of size"
            )
        if self.alpha > self.literals:
            raise FissileError(
                f"alpha={self.alpha} leaves a child none of {self.literals} literals; "
                "give an alpha of at most literals"
            )

    @property
    def clauses(self) -> int:
        """How many clauses the formula has."""
        return self.literals // self.size

    @property
    def degree(self) -> int:
        """How many literals each child sees."""
        return self.literals // self.alpha

    @property
    def children(self) -> int:
        """How many sparse neurons there are."""
        return self.alpha * self.neurons

    def covers(self, clauses: int = 1) -> float:
        """The probability that one child sees every literal of `clauses` given clauses.

        >>> RandomSparse(literals=8, size=4, alpha=2).covers()  # one support in C(8, 4)
        0.014285714285714285
        """
        whole("clauses", clauses, least=0)
        if clauses > self.clauses:
            raise FissileError(
                f"the formula has {self.clauses} clauses, not {clauses}; ask for fewer, "
                "or give more literals"
            )
        return self._supports(clauses) / self._supports(0)

    @property
    def coverage(self) -> float:
        """The probability that every clause is covered by some child."""
        return max(0.0, float(1 - _missed(self)))  # the last digit may leave a negative zero

    @property
    def coverage_bound(self) -> float:
        """The union bound below `coverage`; less than zero where it says nothing."""
        return float(1 - _missed_bound(self))

    @property
    def coverage_approx(self) -> float:
        """The paper's approximation of `coverage_bound`."""
        return 1 - self.clauses * exp(-self.neurons / self.alpha ** (self.size - 1))

    @property
    def collisions_dense(self) -> int:
        """How many (parent, pair of clauses) there are: a dense neuron covers them all."""
        return self.neurons * comb(self.clauses, 2)

    @property
    def collisions(self) -> float:
        """The expected number of (child, pair of clauses) where the child covers both."""
        # A single clause has no pairs, and so no probability of covering one.
        return self.collisions_dense * self.collision_ratio if self.clauses > 1 else 0.0

    @property
    def collision_ratio(self) -> float:
        """Expected collisions after expansion over those before it."""
        return self.alpha * self.covers(2)

    @property
    def collision_ratio_approx(self) -> float:
        """What `collision_ratio` tends to as the literals grow."""
        # Of many literals, a child sees each with probability 1 / alpha.
        return self.alpha * float(self.alpha) ** (-2 * self.size)

    def simulate(self, trials: int = 1000, *, seed: int = 0) -> Simulation:
        """Draw `trials` networks and count what they cover.

        >>> net = RandomSparse(literals=32, neurons=16)
        >>> seen = net.simulate(trials=400, seed=1)
        >>> abs(seen.collisions - net.collisions) < 4 * seen.collisions_error
        True
        """
        whole("trials", trials, least=2)
        whole("seed", seed, least=0)
        covered, collisions = map(torch.cat, zip(*_counts(self, trials, seed), strict=True))
        return Simulation(
            trials=trials,
            coverage=covered.double().mean().item(),
            coverage_error=_proportion_error(int(covered.sum()), trials),
            collisions=collisions.mean().item(),
            # One more event than was seen: no finite sample shows that collisions never happen.
            collisions_error=sqrt((collisions.var().item() + 1 / trials) / trials),
        )

    def _supports(self, clauses: int) -> int:
        """How many of a child's possible supports contain the given clauses."""
        fixed = clauses * self.size
        return comb(self.literals - fixed, self.degree - fixed) if fixed <= self.degree else 0


def required_width(eps: float, literals: int, size: int = 4, alpha: int = 2) -> Width:
    """The fewest dense neurons whose children miss any clause with probability at most `eps`.

    >>> required_width(0.01, literals=32, size=4, alpha=2)
    Width(exact=65, bound=65, approx=53.47689382134342)
    """
    net = RandomSparse(literals, size, 1, alpha)
    if isinstance(eps, bool) or not isinstance(eps, float) or not 0 < eps < 1:
        raise FissileError(f"eps={eps!r} is not a probability; give a float between 0 and 1")
    if net.degree < size:
        raise FissileError(
            f"a child sees {net.degree} literals and a clause has {size}, so no width is enough; "
            "lower alpha"
        )
    approx = alpha ** (size - 1) * log(net.clauses / eps)
    if net.degree == literals:  # a dense neuron covers everything
        return Width(1, 1, approx)
    most = ceil(log(net.clauses / eps) / (-alpha * log1p(-net.covers()))) + 1
    bound = _narrowest(net, most, eps, _missed_bound)
    # The union bound errs on the wide side, so the exact width is not beyond it.
    return Width(_narrowest(net, bound, eps, _missed), bound, approx)


def _narrowest(
    net: RandomSparse, most: int, eps: float, missed: Callable[[RandomSparse], Decimal]
) -> int:
    """The least width up to `most` that is good enough; more neurons never miss more."""

    def enough(neurons: int) -> bool:
        return missed(replace(net, neurons=neurons)) <= Decimal(eps)

    return 1 + bisect_left(range(1, most), True, key=enough)


@lru_cache(maxsize=64)
def _missing(net: RandomSparse) -> tuple[int, ...]:
    """For each j, how many of a child's possible supports cover none of j given clauses."""
    row = [net._supports(i) for i in range(net.clauses + 1)]
    missing = []
    # After j differences, entry i counts supports that cover i given clauses and none of j others.
    while row:
        missing.append(row[0])
        row = [without - covering for without, covering in pairwise(row)]
    return tuple(missing)


def _missed(net: RandomSparse) -> Decimal:
    """The probability that some clause is covered by no child, by inclusion and exclusion."""
    total, *missing = _missing(replace(net, neurons=1))
    # The alternating terms grow as 2**clauses before they cancel.
    with localcontext(Context(prec=_DIGITS + net.clauses)):
        terms = (
            (-1) ** j * comb(net.clauses, j + 1) * (Decimal(count) / total) ** net.children
            for j, count in enumerate(missing)
        )
        return sum(terms, Decimal(0))


def _missed_bound(net: RandomSparse) -> Decimal:
    """The sum, over clauses, of the probability that no child covers the clause."""
    total = net._supports(0)
    with localcontext(Context(prec=_DIGITS)):
        return net.clauses * (Decimal(total - net._supports(1)) / total) ** net.children


def _counts(net: RandomSparse, trials: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Whether each network covers every clause, and its collisions, a chunk of trials at a time."""
    generator = torch.Generator().manual_seed(seed)
    chunk = max(1, _CHUNK // (net.children * net.literals))
    for start in range(0, trials, chunk):
        covered = _covered(net, min(chunk, trials - start), generator)
        per_child = covered.sum(-1).double()
        collisions = (per_child * (per_child - 1) / 2).sum(-1)
        yield covered.any(-2).all(-1), collisions


def _covered(
    net: RandomSparse, trials: int, generator: torch.Generator
) -> Bool[Tensor, "trials children clauses"]:
    """Which child covers which clause in freshly drawn networks."""
    noise = torch.rand(trials, net.children, net.literals, generator=generator)
    sees = torch.zeros(noise.shape, dtype=torch.bool)
    sees.scatter_(-1, noise.topk(net.degree, sorted=False).indices, True)
    return sees.view(trials, net.children, net.clauses, net.size).all(-1)


def _proportion_error(successes: int, trials: int) -> float:
    """Agresti and Coull's standard error, which is not zero when all trials agree."""
    share = (successes + 2) / (trials + 4)
    return sqrt(share * (1 - share) / (trials + 4))
