"""The dense network that is as good, read off a curve; and the checks that use it."""

import numpy as np
import pandas
import pytest

from fissile.lab.claims import Alike
from fissile.lab.stats import ratios
from fissile.lab.trends import Best, Equivalent, Flatter, Reaches

WIDTHS = (4, 8, 16, 32, 64)


def curve(weights):
    return 20 * np.log2(weights / 400)


def table(multiple, noise=0.0, trials=10, widths=WIDTHS):
    """Dense networks on a curve, and an arm as good as ``multiple`` times its weights."""
    rng = np.random.default_rng(0)
    rows = []
    for trial in range(trials):
        for width in widths:
            for arm, times in (("dense", 1.0), ("random-4", multiple)):
                accuracy = curve(times * 100.0 * width) + noise * rng.normal()
                rows.append((arm, width, 100.0 * width, trial, accuracy))
    names = ["arm", "neurons", "nonzeros", "trial", "accuracy"]
    return pandas.DataFrame(rows, columns=names)


@pytest.mark.parametrize("multiple", [0.7, 1.0, 1.3, 1.9])
def test_the_multiple_is_read_off_the_dense_curve(multiple):
    found = ratios(table(multiple), "random-4").set_index("neurons")
    inner = found.loc[[8, 16, 32]]
    assert inner["ratio"].to_numpy() == pytest.approx(multiple)
    assert inner["low"].to_numpy() == pytest.approx(multiple)


def test_better_than_every_dense_network_is_more_than_can_be_said():
    last = ratios(table(1.3), "random-4").iloc[-1]
    assert (last["ratio"], last["bound"]) == (np.inf, 1.0)


def test_the_interval_covers_the_truth_and_shrinks_with_trials():
    few, many = (ratios(table(1.3, 1.0, trials), "random-4") for trials in (4, 64))
    wide, narrow = ((one["high"] - one["low"])[:4].mean() for one in (few, many))
    assert narrow < wide
    assert ((many["low"] <= 1.35) & (many["high"] >= 1.25))[:4].all()


def test_a_dip_in_the_dense_curve_does_not_break_it():
    frame = table(1.5)
    frame.loc[(frame["arm"] == "dense") & (frame["neurons"] == 16), "accuracy"] -= 25
    found = ratios(frame, "random-4").set_index("neurons")["ratio"]
    assert found[4] == pytest.approx(1.5)
    # Sixteen are now worse than eight: what eight expanded ones reach, only more than sixteen do.
    assert 2 < found[8] < 4


def test_the_smallest_dense_network_that_is_as_good_counts():
    frame = table(1.0)
    frame.loc[(frame["arm"] == "dense") & (frame["neurons"] == 8), "accuracy"] += 50
    found = ratios(frame, "random-4").set_index("neurons")["ratio"]
    assert found[16] < 0.5  # eight are better than sixteen


def test_nothing_to_compare_is_an_empty_table():
    frame = table(1.5)
    assert len(ratios(frame[frame["arm"] == "dense"], "random-4")) == 0


def test_equivalent_holds_fails_and_doubts():
    assert Equivalent("random-4", 1.2)(table(1.3, 0.05)).status == "holds"
    assert Equivalent("random-4", 1.2)(table(1.1, 0.05)).status == "fails"
    assert Equivalent("random-4", 1.2)(table(1.2, 1.0)).status == "not significant"
    assert Equivalent("random-4", 1.2, at=16)(table(1.3)).numbers.startswith("16 neurons: 1.30 (")
    assert Equivalent("gram-4", 1.2)(table(1.3)).status == "no data"


def test_the_widest_network_proves_nothing_by_being_the_best():
    # With no larger dense network to compare with, 1.05 looks like 100.
    at_most = Equivalent("random-4", 1.2, at=64)(table(1.05))
    assert at_most.status == "no data"
    assert Equivalent("random-4", 0.9, at=64)(table(1.05)).status == "holds"
    assert "over 1.00" in Equivalent("random-4", 0.9, at=64)(table(1.05)).numbers


def test_two_trials_prove_nothing():
    few = table(1.3, trials=2)
    assert len(ratios(few, "random-4")) == 0
    assert Equivalent("random-4", 1.2)(few).status == "no data"
    assert Reaches("random-4", 1.0)(few).status == "no data"


def test_alike_needs_every_interval_within_the_margin():
    def judged(apart, noise=0.1, trials=10):
        rng = np.random.default_rng(1)
        rows = [
            (arm, width, trial, 70 + apart * (arm == "gram-4") + noise * rng.normal())
            for arm in ("gram-4", "random-4")
            for width in (4, 8)
            for trial in range(trials)
        ]
        frame = pandas.DataFrame(rows, columns=["arm", "neurons", "trial", "accuracy"])
        return Alike("gram-4", "random-4", within=1.0)(frame).status

    assert judged(0.2) == "holds"
    assert judged(2.0) == judged(-2.0) == "fails"
    assert judged(0.9, noise=2.0) == "not significant"
    assert judged(0.0, trials=2) == "no data"  # two trials tell nothing of being level


def gains(gain, noise, trials=10):
    rng = np.random.default_rng(3)
    rows = [
        (arm, width, trial, base + noise * rng.normal())
        for width, factor in ((4, 1.0), (8, 0.2))
        for trial in range(trials)
        for arm, base in (("dense", 30.0), ("random-4", 30.0 * (1 + factor * gain)))
    ]
    return pandas.DataFrame(rows, columns=["arm", "neurons", "trial", "accuracy"])


def test_reaches_needs_an_interval_beyond_in_some_cell():
    check = Reaches("random-4", least=100.0)
    assert check(gains(1.2, 0.5)).status == "holds"
    assert check(gains(0.5, 0.5)).status == "fails"
    assert check(gains(1.0, 3.0)).status == "not significant"
    assert "most: 120 %" in check(gains(1.2, 0.0)).numbers
    only = gains(1.2, 0.5)
    assert check(only[only["arm"] == "random-4"]).status == "no data"


def test_one_broken_dense_network_does_not_double_the_mean():
    frame = gains(0.0, 0.1)
    frame.loc[(frame["arm"] == "dense") & (frame["trial"] == 0), "accuracy"] = 0.6
    assert Reaches("random-4", least=100.0)(frame).status == "fails"


def searched(skip=None):
    rows = [
        ("dynamic-2", every, fraction, width, trial, 20.0 * width - 5 * (every == 50) + trial)
        for every in (50, 200)
        for fraction in (0.1, 0.3)
        for width in (1, 2, 3)
        for trial in range(3)
        if (every, fraction, width) != skip
    ]
    names = ["arm", "every", "fraction", "neurons", "trial", "accuracy"]
    frame = pandas.DataFrame(rows, columns=names)
    frame.loc[frame["fraction"] == 0.3, "accuracy"] += 1
    return frame


def test_best_is_the_highest_mean_of_all_settings():
    def judged(every, fraction, frame):
        return Best("accuracy", {"every": every, "fraction": fraction}, "dynamic-2")(frame).status

    assert judged(200, 0.3, searched()) == "holds"
    assert judged(50, 0.3, searched()) == "fails"
    assert judged(99, 0.3, searched()) == "no data"
    # A setting that was not tried where it is hard has a higher mean, and is no better for it.
    assert judged(50, 0.1, searched(skip=(50, 0.1, 1))) == "fails"
    alone = searched()
    alone = alone[(alone["every"] == 200) & (alone["fraction"] == 0.3)]
    assert judged(200, 0.3, alone) == "no data"


def test_flatter_compares_two_slopes():
    def frame(slope):
        rng = np.random.default_rng(2)
        rows = [
            ("random-4", neurons, classes, classes / neurons, trial,
             10 + (slope if classes == 4 * neurons else -1.0) * neurons + 0.1 * rng.normal())
            for neurons in (10, 15, 20)
            for classes in {40, 4 * neurons + (neurons == 10)}
            for trial in range(5)
        ]  # fmt: skip
        names = ["arm", "neurons", "classes", "load", "trial", "improvement"]
        return pandas.DataFrame(rows, columns=names)

    check = Flatter("improvement", "random-4", "neurons", {"load": 4.0}, {"classes": 40})
    assert check(frame(-0.2)).status == "holds"
    assert check(frame(-3.0)).status == "fails"
    assert check(frame(-1.0)).status == "not significant"
    assert check(frame(-0.2).iloc[:2]).status == "no data"
