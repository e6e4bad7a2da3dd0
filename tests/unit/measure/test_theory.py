from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, product
from math import comb, exp, isclose, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fissile._common.errors import FissileError
from fissile.measure.theory import RandomSparse, required_width

TINY = [(4, 2, 2, 2), (6, 2, 2, 2), (6, 3, 3, 1), (6, 2, 1, 2), (8, 4, 2, 2), (6, 2, 1, 4)]
NETS = [(32, 4, 16, 2), (32, 4, 64, 2), (24, 3, 8, 2), (24, 2, 10, 3), (30, 5, 4, 1), (20, 2, 3, 6)]


@st.composite
def nets(draw: st.DrawFn) -> RandomSparse:
    size, clauses = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    alpha = draw(st.integers(1, min(6, size * clauses)))
    return RandomSparse(size * clauses, size, draw(st.integers(1, 40)), alpha)


def covered_sets(net: RandomSparse) -> list[frozenset[int]]:
    """The clauses covered by each support a child may draw, one entry a support."""
    clauses = [set(range(c * net.size, (c + 1) * net.size)) for c in range(net.clauses)]
    return [
        frozenset(c for c, clause in enumerate(clauses) if clause <= set(support))
        for support in combinations(range(net.literals), net.degree)
    ]


def networks(net: RandomSparse) -> Iterator[tuple[frozenset[int], ...]]:
    return product(covered_sets(net), repeat=net.children)


def brute_coverage(net: RandomSparse) -> Fraction:
    """Step child by child through the distribution of the set of clauses covered so far."""
    supports = covered_sets(net)
    state = {frozenset[int](): Fraction(1)}
    for _ in range(net.children):
        following: dict[frozenset[int], Fraction] = {}
        for seen, mass in state.items():
            for more in supports:
                union = seen | more
                following[union] = following.get(union, Fraction(0)) + mass / len(supports)
        state = following
    return state.get(frozenset(range(net.clauses)), Fraction(0))


@pytest.mark.parametrize("shape", TINY)
def test_covers_counts_the_supports(shape: tuple[int, int, int, int]) -> None:
    net = RandomSparse(*shape)
    supports = covered_sets(net)
    for j in range(net.clauses + 1):
        share = Fraction(sum(set(range(j)) <= s for s in supports), len(supports))
        assert net.covers(j) == float(share)


@pytest.mark.parametrize("shape", [(4, 2, 1, 2), (6, 2, 1, 2), (6, 3, 1, 2), (4, 2, 2, 2)])
def test_coverage_and_collisions_over_every_network(shape: tuple[int, int, int, int]) -> None:
    net = RandomSparse(*shape)
    every = list(networks(net))
    whole = sum(len(frozenset().union(*children)) == net.clauses for children in every)
    pairs = sum(comb(len(child), 2) for children in every for child in children)
    assert isclose(net.coverage, whole / len(every), rel_tol=1e-15)
    assert isclose(net.collisions, pairs / len(every), rel_tol=1e-15)


@pytest.mark.parametrize(
    "shape", [*TINY, (8, 2, 6, 2), (9, 3, 20, 2), (10, 2, 5, 1), (12, 3, 9, 2)]
)
def test_coverage_is_exact(shape: tuple[int, int, int, int]) -> None:
    net = RandomSparse(*shape)
    assert isclose(net.coverage, float(brute_coverage(net)), rel_tol=1e-15)


def test_clauses_of_one_child_are_not_independent() -> None:
    # Two children of degree 3 over three pairs cover two pairs at most.
    assert RandomSparse(6, 2, 1, 2).coverage == 0
    assert RandomSparse(6, 2, 1, 2).covers() > 0


def test_coverage_keeps_its_digits_where_the_terms_cancel() -> None:
    # The alternating terms reach 6e8 here, so that in floats nothing would be left of 2e-8.
    net = RandomSparse(128, 4, 64, 4)
    p = [Fraction(comb(128 - 4 * i, 32 - 4 * i), comb(128, 32)) if i <= 8 else 0 for i in range(33)]
    q = [sum((-1) ** i * comb(j, i) * p[i] for i in range(j + 1)) for j in range(33)]
    exact = sum((-1) ** j * comb(32, j) * q[j] ** 256 for j in range(33))
    assert net.coverage == float(exact)
    assert 1e-8 < net.coverage < 1e-7


@given(nets())
@settings(deadline=None)
def test_union_bound_is_below_and_everything_is_a_probability(net: RandomSparse) -> None:
    assert net.coverage_bound <= net.coverage
    assert 0 <= net.coverage <= 1
    assert 0 <= net.covers() <= 1
    p = Fraction(
        net.degree >= net.size and comb(net.literals - net.size, net.literals - net.degree)
    )
    p /= comb(net.literals, net.degree)
    assert net.coverage_bound == float(1 - net.clauses * (1 - p) ** net.children)


@given(nets())
@settings(deadline=None)
def test_expansion_keeps_the_weights_and_never_adds_collisions(net: RandomSparse) -> None:
    assert net.children * net.degree <= net.neurons * net.literals
    assert net.collisions <= net.collisions_dense
    if net.clauses > 1 and net.collisions_dense:
        assert isclose(net.collisions / net.collisions_dense, net.collision_ratio)


def test_dense_covers_and_collides_everywhere() -> None:
    net = RandomSparse(32, 4, neurons=8, alpha=1)
    assert net.coverage == net.covers() == net.collision_ratio == 1
    assert net.collisions == net.collisions_dense == 8 * comb(8, 2)


def test_one_clause_has_no_collisions() -> None:
    net = RandomSparse(4, 4, neurons=8, alpha=1)
    assert net.collisions == net.collisions_dense == 0
    with pytest.raises(FissileError, match="1 clauses, not 2"):
        _ = net.collision_ratio


@pytest.mark.parametrize(("size", "alpha"), [(2, 2), (3, 4), (4, 2)])
def test_approximations_close_in_as_literals_grow(size: int, alpha: int) -> None:
    errors = []
    for clauses in (100, 1_000, 10_000):
        net = RandomSparse(size * clauses, size, 8, alpha)
        errors.append(abs(net.covers() * alpha**size - 1))
        assert abs(net.collision_ratio / net.collision_ratio_approx - 1) < 8 * size**2 / clauses
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert errors[2] < 1e-3


def test_approximations_are_the_papers() -> None:
    net = RandomSparse(32, 4, 16, 2)
    assert net.collision_ratio_approx == 2**-7
    assert net.coverage_approx == 1 - 8 * exp(-16 / 2**3)
    assert required_width(0.01, 32).approx == pytest.approx(2**3 * log(8 / 0.01))


@pytest.mark.parametrize("shape", NETS)
@pytest.mark.parametrize("seed", [0, 1])
def test_simulation_is_within_its_own_errors(shape: tuple[int, int, int, int], seed: int) -> None:
    net = RandomSparse(*shape)
    seen = net.simulate(2000, seed=seed)
    assert abs(seen.coverage - net.coverage) < 4 * seen.coverage_error
    assert abs(seen.collisions - net.collisions) < 4 * seen.collisions_error


def test_simulation_tells_a_wrong_answer() -> None:
    # The errors are narrow enough to reject a neighbouring width.
    net = RandomSparse(32, 4, 32, 2)
    seen = net.simulate(4000, seed=3)
    assert 0.1 < net.coverage < 0.9
    wider = RandomSparse(32, 4, 40, 2)
    assert abs(seen.coverage - wider.coverage) > 4 * seen.coverage_error
    assert abs(seen.collisions - wider.collisions) > 4 * seen.collisions_error


def test_simulation_errors_have_the_right_size() -> None:
    net = RandomSparse(24, 3, 8, 2)
    runs = [net.simulate(200, seed=seed) for seed in range(60)]
    for name in ("coverage", "collisions"):
        scores = [
            (getattr(run, name) - getattr(net, name)) / getattr(run, f"{name}_error")
            for run in runs
        ]
        assert 0.6 < sum(z * z for z in scores) / len(scores) < 1.6


def test_simulation_is_seeded_and_never_certain() -> None:
    net = RandomSparse(30, 5, 4, 1)
    assert net.simulate(50, seed=4) == net.simulate(50, seed=4)
    sparse = RandomSparse(32, 4, 16, 2)
    assert sparse.simulate(50, seed=4) != sparse.simulate(50, seed=5)
    seen = net.simulate(50)
    assert seen.coverage == 1
    assert seen.coverage_error > 0
    assert seen.collisions_error > 0


def test_simulation_does_not_depend_on_where_chunks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    net = RandomSparse(32, 4, 16, 2)
    whole = net.simulate(100, seed=2)
    monkeypatch.setattr("fissile.measure.theory._CHUNK", 7 * net.children * net.literals)
    assert net.simulate(100, seed=2) == whole  # fifteen chunks, the last one short


@given(
    st.integers(1, 4),
    st.integers(1, 10),
    st.integers(1, 4),
    st.floats(1e-6, 0.9),
)
@settings(deadline=None, max_examples=30)
def test_required_width_is_the_least(size: int, clauses: int, alpha: int, eps: float) -> None:
    if size * clauses // alpha < size:
        return
    need = required_width(eps, size * clauses, size, alpha)

    def net(neurons: int) -> RandomSparse:
        return RandomSparse(size * clauses, size, neurons, alpha)

    # The tolerance is for 1 - eps, which is rounded where eps is not.
    assert net(need.exact).coverage >= 1 - eps - 1e-15
    assert net(need.bound).coverage_bound >= 1 - eps - 1e-15
    assert need.exact == 1 or net(need.exact - 1).coverage < 1 - eps + 1e-15
    assert need.bound == 1 or net(need.bound - 1).coverage_bound < 1 - eps + 1e-15
    assert need.exact <= need.bound


def test_required_width_may_be_less_than_the_bound_asks() -> None:
    need = required_width(0.9, 128, 4, 4)
    assert need.exact < need.bound
    assert RandomSparse(128, 4, need.exact, 4).coverage >= 0.1
    assert RandomSparse(128, 4, need.exact - 1, 4).coverage < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 0}, "alpha=0 is not a whole number of at least 1"),
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"alpha": True}, "alpha=True"),
        ({"alpha": 33}, "alpha=33 leaves a child none"),
        ({"literals": 30}, "30 literals do not divide into clauses of 4"),
        ({"literals": 0}, "literals=0"),
        ({"size": -4}, "size=-4"),
        ({"neurons": 0}, "neurons=0"),
        ({"neurons": 2.0}, "neurons=2.0"),
    ],
)
def test_bad_networks(changes: dict[str, object], message: str) -> None:
    with pytest.raises(FissileError, match=message):
        RandomSparse(**({"literals": 32} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("eps", [0, 1, 0.0, 1.0, -0.1, 1.5, float("nan"), True, "0.1"])
def test_bad_tolerances(eps: object) -> None:
    with pytest.raises(FissileError, match="not a probability"):
        required_width(eps, 32)  # type: ignore[arg-type]


def test_other_bad_input() -> None:
    net = RandomSparse(32)
    with pytest.raises(FissileError, match="8 clauses, not 9"):
        net.covers(9)
    with pytest.raises(FissileError, match="clauses=-1"):
        net.covers(-1)
    with pytest.raises(FissileError, match="trials=1 "):
        net.simulate(1)
    with pytest.raises(FissileError, match="seed=-1"):
        net.simulate(10, seed=-1)
    with pytest.raises(FissileError, match="no width is enough"):
        required_width(0.1, 32, 4, 16)
