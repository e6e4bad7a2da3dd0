from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch

from fissile._common.errors import FissileError
from fissile.data import Formula, Samples, dnf, dnf_task
from fissile.data.dnf import _NEAR, _POSITIVE, _UNIFORM, _bits, _choose, _kinds

SHAPES = [(1, 2), (1, 4), (2, 2), (2, 3), (3, 2), (2, 4), (5, 2), (8, 4), (9, 3)]
Row = tuple[int, ...]


def plain_formula(row: Row, size: int) -> bool:
    return any(all(row[i : i + size]) for i in range(0, len(row), size))


def plain_sizes(literals: int) -> range:
    return range(literals // 4, literals // 4 + literals // 8 + 1)


def plain_row(rng: random.Random, clauses: int, size: int, kind: int) -> Row:
    """Algorithm A2 for one row, a literal at a time."""
    literals = clauses * size
    s = rng.choice(plain_sizes(literals))
    while True:
        on = set()
        if kind == _UNIFORM:
            on |= set(rng.sample(range(literals), s))
        else:
            c = rng.randrange(clauses)
            block = range(c * size, (c + 1) * size)
            others = [i for i in range(literals) if i not in block]
            on |= set(block) | set(rng.sample(others, max(s - size, 0)))
            if kind == _NEAR:
                on.remove(rng.choice(block))
        row = tuple(int(i in on) for i in range(literals))
        if plain_formula(row, size) == (kind == _POSITIVE):
            return row


def reachable(clauses: int, size: int, kind: int) -> set[Row]:
    """Every row A2 can return for a kind, found by going through all its choices."""
    literals = clauses * size
    found = set()
    for s in plain_sizes(literals):
        if kind == _UNIFORM:
            found |= {frozenset(on) for on in combinations(range(literals), s)}
            continue
        for c in range(clauses):
            block = frozenset(range(c * size, (c + 1) * size))
            others = [i for i in range(literals) if i not in block]
            for extra in combinations(others, max(s - size, 0)):
                whole = block | set(extra)
                found |= {whole} if kind == _POSITIVE else {whole - {i} for i in block}
    rows = {tuple(int(i in on) for i in range(literals)) for on in found}
    return {row for row in rows if plain_formula(row, size) == (kind == _POSITIVE)}


def rows_of(bits: Any) -> list[Row]:
    return [tuple(int(b) for b in row) for row in bits.tolist()]


def drawn(clauses: int, size: int, kind: int, rows: int = 4000, option: Any = "literal") -> Any:
    kinds = np.full(rows, kind)
    return _bits(np.random.default_rng(7), Formula(clauses, size), kinds, (option, "matched"))


def same(a: Samples, b: Samples) -> bool:
    return a.x.equal(b.x) and a.y.equal(b.y) and a.bits.equal(b.bits)


@pytest.mark.parametrize(("clauses", "size"), [(1, 2), (1, 4), (2, 2), (3, 2), (2, 3), (3, 4)])
def test_formula_on_every_assignment(clauses: int, size: int) -> None:
    formula = Formula(clauses, size)
    rows = list(product([0, 1], repeat=formula.literals))
    bits = torch.tensor(rows, dtype=torch.bool)
    satisfied = formula.satisfied(bits)
    assert satisfied.shape == (2**formula.literals, clauses)
    for row, seen in zip(rows, satisfied.tolist(), strict=True):
        assert seen == [all(row[c * size : (c + 1) * size]) for c in range(clauses)]
        assert any(seen) == plain_formula(row, size)
    assert formula.satisfied(bits.view(2, -1, formula.literals)).shape[:2] == (2, len(rows) // 2)
    assert formula.groups.tolist() == [i // size for i in range(formula.literals)]


@pytest.mark.parametrize("others", ["matched", "arbitrary"])
@pytest.mark.parametrize("negatives", ["literal", "clause", "flip"])
@pytest.mark.parametrize(("clauses", "size"), SHAPES)
def test_labels_are_the_formula(clauses: int, size: int, negatives: Any, others: Any) -> None:
    samples = dnf(clauses, size, samples=501, negatives=negatives, others=others)
    assert len(samples) == 501
    assert samples.x.shape == samples.bits.shape == (501, clauses * size)
    assert (samples.x.dtype, samples.y.dtype) == (torch.float32, torch.int64)
    assert samples.y.tolist() == [plain_formula(row, size) for row in rows_of(samples.bits)]
    assert int(samples.y.sum()) == 250


@pytest.mark.parametrize("kind", [_POSITIVE, _NEAR, _UNIFORM])
@pytest.mark.parametrize(
    ("clauses", "size"), [(1, 2), (1, 4), (2, 2), (2, 3), (3, 2), (2, 4), (5, 2)]
)
def test_tiny_formulas_give_exactly_the_rows_of_a2(clauses: int, size: int, kind: int) -> None:
    expected = reachable(clauses, size, kind)
    assert set(rows_of(drawn(clauses, size, kind))) == expected


def test_rows_of_a_tiny_formula_are_equally_likely_where_a2_says_so() -> None:
    # Four pairs: two or three ones among eight literals, and no pair whole.
    counts = Counter(rows_of(drawn(4, 2, _UNIFORM, rows=28_000)))
    for ones in (2, 3):
        part = [count for row, count in counts.items() if sum(row) == ones]
        expected = sum(part) / len(part)
        assert sum(part) == pytest.approx(14_000, abs=5 * (28_000 / 4) ** 0.5)
        chi = sum((count - expected) ** 2 / expected for count in part)
        assert chi < len(part) + 5 * (2 * len(part)) ** 0.5


@pytest.mark.parametrize("samples", [2, 3, 4, 5, 6, 7, 100, 101, 102, 103])
def test_halves_and_parts(samples: int) -> None:
    positive, near, uniform = np.bincount(_kinds(samples), minlength=3)
    assert positive == samples // 2
    assert positive + near + uniform == samples
    assert abs(near - uniform) <= 1


def test_near_misses_are_half_of_the_negatives() -> None:
    # With one clause and no room for more literals, the kinds differ in their number of ones.
    samples = dnf(1, 4, samples=400)
    assert Counter(samples.bits.sum(-1).tolist()) == {4: 200, 3: 100, 1: 100}


def test_a_flip_turns_one_literal_of_every_clause_over() -> None:
    # Two clauses of four, two or three ones: the whole clause loses one, the other gains or loses.
    rows = set(rows_of(drawn(2, 4, _NEAR, option="flip")))
    per_clause = {tuple(sorted((sum(row[:4]), sum(row[4:])))) for row in rows}
    assert per_clause == {(1, 3)}  # two or three ones leave no room for more than the clause
    assert {sum(row) for row in rows_of(drawn(8, 4, _NEAR, option="clause"))} <= set(range(13))
    # Where most literals are off, turning one over switches it on: flips have more ones.
    more, fewer = (drawn(8, 4, _NEAR, option=option).sum(1).mean() for option in ("flip", "clause"))
    assert more > fewer + 3


def test_arbitrary_assignments_have_half_their_literals_on() -> None:
    matched, arbitrary = (
        dnf(8, samples=4_000, others=others) for others in ("matched", "arbitrary")
    )
    most = 8 + 4
    assert int(matched.bits.sum(-1).max()) <= most
    ones = arbitrary.bits.sum(-1)
    assert int(ones[arbitrary.y == 1].max()) <= most
    # Without a whole clause a clause of four has 28 / 15 literals on, on average.
    far = torch.sort(ones[arbitrary.y == 0]).values[-900:].double()
    assert 14 < float(far.mean()) < 17


@pytest.mark.parametrize("clauses", [8, 32])
def test_range_of_ones(clauses: int) -> None:
    sizes = plain_sizes(4 * clauses)
    for kind, less in ((_POSITIVE, 0), (_NEAR, 1), (_UNIFORM, 0)):
        ones = drawn(clauses, 4, kind).sum(-1)
        assert set(ones.tolist()) == {s - less for s in sizes}
        # Redrawn rows keep their count, so that it stays uniform whatever is rejected.
        counts = np.bincount(ones - ones.min())
        expected = len(ones) / len(sizes)
        assert ((counts - expected) ** 2 / expected).sum() < len(sizes) + 5 * (
            2 * len(sizes)
        ) ** 0.5


@pytest.mark.parametrize("kind", [_POSITIVE, _NEAR, _UNIFORM])
@pytest.mark.parametrize(("clauses", "size"), [(8, 4), (6, 3), (8, 2)])
def test_distribution_against_plain_a2(clauses: int, size: int, kind: int) -> None:
    rows = 4000
    rng = random.Random(11)
    plain = np.array([plain_row(rng, clauses, size, kind) for _ in range(rows)])
    fast = drawn(clauses, size, kind, rows=rows).astype(int)

    def most_on(bits: Any) -> Any:
        return bits.reshape(rows, clauses, size).sum(-1).max(-1)

    def touched(bits: Any) -> Any:
        return bits.reshape(rows, clauses, size).any(-1).sum(-1)

    def ones(bits: Any) -> Any:
        return bits.sum(-1)

    for statistic in (ones, most_on, touched):
        a, b = (
            np.bincount(statistic(bits), minlength=clauses * size + 1) for bits in (plain, fast)
        )
        assert (np.abs(a - b) <= 5 * np.sqrt(a + b + 1)).all()
    a, b = plain.mean(0), fast.mean(0)
    assert (np.abs(a - b) <= 5 * np.sqrt((a * (1 - a) + b * (1 - b)) / rows)).all()


def test_clauses_are_picked_evenly() -> None:
    # Eight literals leave no room for extra ones, so that the whole clause is the one picked.
    bits = torch.from_numpy(drawn(2, 4, _POSITIVE, rows=8000))
    counts = Formula(2, 4).satisfied(bits).sum(0).double()
    assert counts.sum() == 8000
    assert ((counts - 4000) ** 2 / 4000).sum() < 15
    wide = Formula(8, 4).satisfied(torch.from_numpy(drawn(8, 4, _POSITIVE, 8000))).sum(0).double()
    assert ((wide - wide.mean()) ** 2 / wide.mean()).sum() < 7 + 5 * 14**0.5


def test_a_near_miss_lacks_each_literal_alike() -> None:
    bits = drawn(1, 4, _NEAR, rows=8000)
    missing = (~bits).sum(0)
    assert missing.sum() == 8000
    assert ((missing - 2000) ** 2 / 2000).sum() < 25


@pytest.mark.parametrize("jitter", [True, False])
def test_values(jitter: bool) -> None:
    samples = dnf(8, 4, samples=2000, jitter=jitter)
    on, off = samples.x[samples.bits], samples.x[~samples.bits]
    if not jitter:
        assert samples.x.equal(samples.bits.float())
        assert samples.bits.equal(dnf(8, 4, samples=2000).bits)
        return
    for values, low in ((on, 3.0), (off, 0.0)):
        assert low <= values.min() < low + 0.01
        assert low + 0.49 < values.max() <= low + 0.5
        assert values.mean().item() == pytest.approx(low + 0.25, abs=0.01)
        assert values.std().item() == pytest.approx(0.5 / 12**0.5, abs=0.01)


def test_seeds() -> None:
    assert same(dnf(samples=100, seed=3), dnf(samples=100, seed=3))
    assert not dnf(samples=100, seed=3).bits.equal(dnf(samples=100, seed=4).bits)


def test_rows_are_shuffled() -> None:
    y = dnf(samples=10_000).y.double()
    assert abs(y[:5000].mean().item() - 0.5) < 0.025
    assert abs((y[1:] * y[:-1]).mean().item() - 0.25) < 0.025


def test_task_draws_train_and_test_apart() -> None:
    train, test = dnf_task(train=200, test=200, seed=5)
    again, other = dnf_task(train=200, test=50, seed=5)
    assert same(train, again)  # the size of the test set does not reach the training set
    assert len(other) == 50
    assert not train.bits.equal(test.bits)
    assert not train.y.equal(test.y)
    agree = (train.bits == test.bits).double().mean().item()
    on = torch.cat([train.bits, test.bits]).double().mean().item()
    assert agree == pytest.approx(on**2 + (1 - on) ** 2, abs=0.03)


def test_clause_option_switches_off_a_literal_of_every_clause() -> None:
    near = drawn(8, 4, _NEAR, option="clause")
    assert not near.reshape(-1, 8, 4).all(-1).any()
    # The clause that was whole keeps three; the others lose what they had one time in four each.
    assert (near.reshape(-1, 8, 4).sum(-1).max(-1) == 3).all()
    assert near.sum(-1).mean() < drawn(8, 4, _NEAR).sum(-1).mean() - 0.5
    bare = drawn(2, 2, _NEAR, option="clause")
    assert set(rows_of(bare)) == {(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)}
    assert dnf(samples=50).bits.shape == dnf(samples=50, negatives="clause").bits.shape


def test_clause_option_leaves_the_other_kinds_alone() -> None:
    for kind in (_POSITIVE, _UNIFORM):
        assert (drawn(8, 4, kind) == drawn(8, 4, kind, option="clause")).all()


class Coarse:
    """A generator whose noise has eight values, so that most rows tie."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def random(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.floor(self.rng.random(shape) * 8).astype(dtype) / 8


def test_ties_do_not_change_how_many_are_on() -> None:
    allowed = np.ones((6000, 6), dtype=bool)
    allowed[:, 0] = False
    counts = np.tile(np.arange(6), 1000)
    chosen = _choose(Coarse(), allowed, counts)  # type: ignore[arg-type]
    assert (chosen.sum(-1) == counts).all()
    assert not chosen[:, 0].any()
    share = chosen[counts == 2].mean(0)[1:]
    assert (np.abs(share - 0.4) < 5 * (0.4 * 0.6 / 1000) ** 0.5).all()


def test_redraws_end() -> None:
    with pytest.raises(FissileError, match="larger clauses, or fewer"):
        dnf(200, 2, samples=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clauses": 0}, "clauses=0 is not a whole number of at least 1"),
        ({"clauses": True}, "clauses=True"),
        ({"clauses": 2.0}, "clauses=2.0"),
        ({"size": 1}, "size=1 is not a whole number of at least 2"),
        ({"samples": 1}, "samples=1 is not a whole number of at least 2"),
        ({"samples": 1e3}, "samples=1000.0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": None}, "seed=None"),
        (
            {"negatives": "both"},
            "negatives='both' is not known; give 'literal', 'clause' or 'flip'",
        ),
        ({"others": "any"}, "others='any' is not known; give 'matched' or 'arbitrary'"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FissileError, match=message):
        dnf(**changes)


def test_bad_task_and_bits() -> None:
    with pytest.raises(FissileError, match="test=0"):
        dnf_task(test=0)
    with pytest.raises(FissileError, match="train=True"):
        dnf_task(train=True)
    with pytest.raises(FissileError, match="end in 8 literals"):
        Formula(2, 4).satisfied(torch.ones(3, 7, dtype=torch.bool))
    with pytest.raises(FissileError, match=r"torch\.float32"):
        Formula(2, 4).satisfied(torch.ones(3, 8))
