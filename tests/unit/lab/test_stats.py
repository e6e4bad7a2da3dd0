"""Statistics against scipy and against numbers worked out by hand."""

from math import isnan, sqrt

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fissile._common.errors import FissileError
from fissile.lab.stats import compare, fold_change, holm, line, summary

VALUES = arrays.arrays(
    float, st.integers(3, 12), elements=st.floats(-1e3, 1e3).map(lambda v: round(v, 3))
)


def test_a_summary_by_hand():
    found = summary([1.0, 2.0, 6.0])
    assert found.mean == 3
    assert found.error == pytest.approx(sqrt(7 / 3))  # variance (4 + 1 + 9) / 2 = 7
    assert found.count == 3


def test_summaries_leave_out_what_is_not_there():
    assert summary([1.0, np.nan, 3.0]) == summary([1.0, 3.0])
    one, none = summary([5.0]), summary([])
    assert (one.mean, one.count) == (5.0, 1)
    assert isnan(one.error)
    assert isnan(none.mean)


@given(VALUES, st.integers(0, 2**31))
def test_the_paired_test_is_scipys(values, seed):
    others = values + np.random.default_rng(seed).normal(size=len(values))
    assert compare(values, others).p == pytest.approx(
        scipy.stats.ttest_rel(values, others).pvalue, rel=1e-6, abs=1e-12
    )


def test_a_paired_test_by_hand():
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t = 2 sqrt(3) with 2 degrees.
    found = compare([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    t = 2 * sqrt(3)
    assert found.difference == 2
    assert found.p == pytest.approx(1 - t / sqrt(2 + t * t))  # the t distribution with 2 degrees
    assert not found.significant


def test_pairing_sees_what_a_test_of_two_groups_does_not():
    base = np.array([0.0, 10.0, 20.0, 30.0])
    better = base + np.array([1.0, 1.1, 0.9, 1.0])
    assert compare(better, base).significant
    assert scipy.stats.ttest_ind(better, base).pvalue > 0.05


def test_tests_without_spread_or_without_trials():
    assert compare([1.0, 2.0, 4.0], [1.0, 2.0, 4.0]).p == 1
    assert isnan(compare([1.0, 2.0], [1.0, 2.1]).p)  # two trials prove nothing, whatever they say
    assert compare([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]).p == 0
    assert isnan(compare([2.0, 3.0], [1.0, 2.0]).p)  # two trials may agree by chance
    assert isnan(compare([1.0], [2.0]).p)
    assert not compare([1.0], [2.0]).significant
    assert compare([1.0, np.nan, 4.0], [0.0, 1.0, 2.0]).difference == 1.5
    with pytest.raises(FissileError, match="as many trials"):
        compare([1.0, 2.0], [1.0])


def test_holm_by_hand():
    # 0.01 x 3; 0.03 x 2; 0.04 x 1 would be less than the one before, and is not.
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    missing = holm([np.nan, 0.02])  # what was not tested is not counted
    assert isnan(missing[0])
    assert missing[1] == 0.02


@given(VALUES, st.integers(0, 2**31))
def test_lines_are_scipys(x, seed):
    y = np.random.default_rng(seed).normal(size=len(x))
    found = line(x, y)
    if np.ptp(x) == 0:
        assert isnan(found.slope)
        return
    expected = scipy.stats.linregress(x, y)
    assert found.slope == pytest.approx(expected.slope)
    assert found.r2 == pytest.approx(expected.rvalue**2)
    assert found.p == pytest.approx(expected.pvalue)


def test_lines_that_say_nothing():
    assert isnan(line([0, 1], [0, 1]).p)  # two points lie on any line
    assert line([0, 1, 2], [3, 3, 3]).slope == 0
    assert isnan(line([1, 1, 1], [1, 2, 3]).slope)
    assert line([0, 1, np.nan, 2], [1, 3, 9, 5]).r2 == pytest.approx(1)


def test_fold_changes():
    assert fold_change([2.0, 3.0], [1.0, 6.0]).tolist() == [2.0, 0.5]
    assert isnan(fold_change([2.0], [0.0])[0])
