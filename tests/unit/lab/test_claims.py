"""Claims hold when they should, and fail when they are fed results that contradict them."""

import pytest
from fake_results import invented
from scipy.stats import ttest_ind

from fissile._common.errors import FissileError
from fissile.lab.claims import Beats, Claim, Often, Together, Verdict, counts
from fissile.lab.stats import compare
from fissile.lab.trends import Best, Equivalent, Explains, Levels, Near, Trend, WarmedUp

GAIN = {"dense": 0.0, "clause-4": 0.10, "random-4": 0.05}


def rising(arm, clauses, neurons):
    """What the paper says: splits gain, most where neurons are few."""
    gain = GAIN[arm] * 8 / neurons
    return {
        "accuracy": 0.7 + gain,
        "capacity": 4 + 20 * gain,
        "absolute_cosine": 0.3 - gain,
        "cosine": 0.1,
    }


def swapped(arm, clauses, neurons):
    """The opposite: splits lose, most where neurons are few."""
    gain = GAIN[arm] * 8 / neurons
    return {
        "accuracy": 0.7 - gain,
        "capacity": 4 - 10 * gain,
        "absolute_cosine": 0.3 + gain,
        "cosine": 0.1,
    }


def same(arm, clauses, neurons):
    return {"accuracy": 0.7, "capacity": 4.0, "absolute_cosine": 0.3, "cosine": 0.1}


CHECKS = {
    "beats": Beats("clause-4"),
    "lower": Beats("clause-4", measure="absolute_cosine", lower=True),
    "over random": Beats("clause-4", "random-4"),
    "often": Often("random-4"),
    "trend": Trend("improvement", "clause-4", rises=False),
    "explains": Explains("improvement", "capacity_fold", ("clause-4", "random-4")),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_claim_holds_on_results_like_the_papers(check):
    assert check(invented(rising)).status == "holds"


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "explains"])
def test_a_claim_fails_on_falsified_results(name):
    assert CHECKS[name](invented(swapped)).status == "fails"


def test_an_explanation_of_the_wrong_sign_fails():
    check = Explains("improvement", "absolute_cosine_fold", ("clause-4",), rises=True)
    assert check(invented(rising)).status == "fails"
    assert Explains(check.y, check.x, check.arms, rises=False)(invented(rising)).status == "holds"


@pytest.mark.parametrize("name", CHECKS)
def test_a_claim_is_not_significant_where_nothing_differs(name):
    assert CHECKS[name](invented(same, noise=1.0)).status == "not significant"


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_claim_about_arms_that_never_ran_has_no_data(check):
    assert check(invented(rising, arms=("dense",))).status == "no data"


def test_one_significant_exception_breaks_a_claim_unless_it_is_spared():
    def but_one(arm, clauses, neurons):
        return (swapped if neurons == 16 else rising)(arm, clauses, neurons)

    frame = invented(but_one)
    verdict = Beats("clause-4")(frame)
    assert verdict.status == "fails"
    assert "3 of 4 cells significantly higher, 1 significantly lower" in verdict.numbers
    assert "neurons = 16" in verdict.numbers
    assert Together((Beats("clause-4"),), spare=1)(frame).status == "holds"


def test_arms_are_compared_trial_by_trial():
    # The trials differ by far more than the arms do: only pairing sees the gain.
    frame = invented(rising, noise=10.0)
    assert Beats("clause-4", where={"neurons": 8})(frame).status == "holds"
    cell = frame[frame["neurons"] == 8]
    sides = [cell[cell["arm"] == arm]["accuracy"] for arm in ("clause-4", "dense")]
    assert ttest_ind(*sides).pvalue > 0.05


def test_a_comparison_of_more_than_one_cell_is_refused():
    frame = invented(rising, cells=[(8, 4), (16, 4)])
    with pytest.raises(FissileError, match="several clause-4 networks for one trial"):
        Beats("clause-4")(frame)


def test_spared_cells_cannot_carry_a_claim():
    # One cell that shows the opposite is all there is: sparing it would leave nothing.
    frame = invented(swapped, cells=[(8, 8)])
    assert Together((Beats("clause-4"),), spare=1)(frame).status == "not significant"
    assert Beats("clause-4")(frame).status == "fails"


def test_several_comparisons_share_what_is_spared():
    def mixed(arm, clauses, neurons):
        worse = (arm, neurons) in {("clause-4", 4), ("random-4", 4)}
        return (swapped if worse else rising)(arm, clauses, neurons)

    checks = (Beats("clause-4"), Beats("random-4"))
    frame = invented(mixed)
    assert all(Together((one,), spare=1)(frame).status == "holds" for one in checks)
    verdict = Together(checks, spare=1)(frame)
    assert verdict.status == "fails"
    assert "6 of 8 cells significantly higher, 2 significantly lower" in verdict.numbers
    assert Together(checks, spare=2)(frame).status == "holds"


@pytest.mark.parametrize(
    "check",
    [
        Beats("clause-4", measure="absent"),
        Often("clause-4", measure="absent"),
        Trend("absent", "clause-4"),
        Levels("absent", "clause-4", "neurons", beyond=8),
        Explains("improvement", "absent", ("clause-4",)),
        Near("absent", "accuracy", factor=2),
    ],
)
def test_a_measure_that_was_not_taken_is_no_data(check):
    assert check(invented(rising)).status == "no data"


def test_often_counts_cells():
    def half(arm, clauses, neurons):
        return (rising if neurons <= 8 else swapped)(arm, clauses, neurons)

    verdict = Often("clause-4")(invented(half))
    assert verdict.status == "not significant"  # half is not more than half, nor less
    assert verdict.numbers == (
        "better in 2 of 4 cells, significantly in 2; significantly worse in 2"
    )


def saturating(arm, clauses, neurons):
    gain = 0.0 if arm == "dense" else 0.01 * min(clauses, 16)
    return {"accuracy": 0.6 + gain}


def steady(arm, clauses, neurons):
    gain = 0.0 if arm == "dense" else 0.01 * clauses
    return {"accuracy": 0.6 + gain}


def late(arm, clauses, neurons):
    gain = 0.0 if arm == "dense" else 0.01 * max(clauses - 16, 0)
    return {"accuracy": 0.6 + gain}


ALONG_CLAUSES = [(c, 8) for c in (4, 8, 12, 16, 20, 24, 28, 32)]


@pytest.mark.parametrize(
    ("shape", "status"), [(saturating, "holds"), (steady, "not significant"), (late, "fails")]
)
def test_a_plateau_is_a_slope_that_falls(shape, status):
    check = Levels("improvement", "clause-4", "clauses", beyond=16)
    assert check(invented(shape, cells=ALONG_CLAUSES)).status == status


def test_a_trend_can_stop_at_a_point():
    frame = invented(saturating, cells=ALONG_CLAUSES)
    assert Trend("improvement", "clause-4", "clauses", until=16)(frame).status == "holds"
    flat = frame[frame["clauses"] > 16]
    assert Trend("improvement", "clause-4", "clauses")(flat).status == "not significant"


def test_near_by_errors_and_by_factor():
    frame = invented(same)
    frame["simulated"], frame["exact"], frame["error"] = 1.03, 1.0, 0.01
    assert Near("simulated", "exact", error="error")(frame).status == "holds"
    frame["simulated"] = 1.05
    assert Near("simulated", "exact", error="error")(frame).status == "fails"
    assert Near("simulated", "exact", factor=1.1)(frame).status == "holds"
    frame.loc[0, "simulated"] = 0.5
    verdict = Near("simulated", "exact", factor=1.1)(frame)
    assert verdict.status == "fails"
    assert "0.5" in verdict.numbers
    assert Near("absent", "exact", factor=2)(frame).status == "no data"


def test_a_single_trial_proves_nothing():
    assert Beats("clause-4")(invented(rising, trials=1)).status == "not significant"


def judged(check, frame, **changed):
    return Claim("Splits are better.", "nowhere", check).judge(frame, changed)


@pytest.mark.parametrize("trials", [1, 2])
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_fewer_than_three_trials_prove_nothing(check, trials):
    verdict = judged(check, invented(rising, trials=trials, noise=0.001))
    assert verdict.status == "not significant"
    assert "nothing, it takes 3: " in verdict.numbers
    assert judged(check, invented(rising, trials=3, noise=0.001)).status == "holds"


def test_two_falsified_trials_do_not_fail_a_claim_either():
    assert judged(CHECKS["trend"], invented(swapped, trials=2)).status == "not significant"
    assert CHECKS["trend"](invented(swapped, trials=2)).status == "fails"


def test_what_counts_networks_of_its_own_needs_no_three_trials():
    frame = invented(same, trials=1)
    frame["simulated"], frame["exact"], frame["error"] = 1.03, 1.0, 0.01
    assert judged(Near("simulated", "exact", error="error"), frame).status == "holds"


def test_p_values_are_corrected_for_the_cells_of_a_claim():
    def barely(arm, clauses, neurons):
        return {"accuracy": 0.7 + (0.003 if arm == "clause-4" else 0.0)}

    widths = [(8, h) for h in (4, 8, 12, 16, 20, 24, 28, 32)]
    frame = invented(barely, cells=widths, trials=4, noise=1.0)
    alone = []
    for _, neurons in widths:
        cell = frame[frame["neurons"] == neurons]
        sides = [cell[cell["arm"] == arm]["accuracy"] for arm in ("clause-4", "dense")]
        alone.append(compare(*sides))
    significant = sum(one.significant for one in alone)
    lowest = min(one.p for one in alone)
    assert significant > 0
    assert lowest * len(widths) > 0.05  # or the example would not tell
    verdict = Beats("clause-4")(frame)
    assert "0 of 8 cells significantly higher, 0 significantly lower" in verdict.numbers
    one = Beats("clause-4", where={"neurons": widths[[c.p for c in alone].index(lowest)][1]})
    assert "1 of 1 cell significantly" in one(frame).numbers


def test_a_sentence_s_comparisons_are_corrected_together():
    frame = invented(rising, trials=3, noise=2.5)
    checks = (Beats("clause-4"), Beats("random-4"))
    both, *each = (Together(some)(frame).numbers for some in (checks, checks[:1], checks[1:]))
    assert int(both.split()[0]) < sum(int(one.split()[0]) for one in each)


@pytest.mark.parametrize(
    ("check", "changed"),
    [
        (Beats("clause-4"), {"neurons": 16}),
        (Beats("clause-4"), {"clauses": 16}),
        (Trend("accuracy", "random-4", "warm_up"), {"warm_up": 5}),
        (Best("accuracy", {"every": 100}, "clause-4"), {"every": 50}),
        (Together((Beats("clause-4"),)), {"size": 5}),
        (Equivalent("random-4", 1.2), {"classes": 10}),
    ],
)
def test_a_claim_about_a_setting_that_was_changed_was_not_tested(check, changed):
    ((name, value),) = changed.items()
    frame = invented(rising)
    frame["warm_up"], frame["every"] = 5, 50
    verdict = judged(check, frame, **changed)
    assert verdict.status == "not tested here"
    assert verdict.numbers.startswith(f"run with {name}={value}")


def test_other_settings_leave_a_claim_to_its_test():
    assert judged(Beats("clause-4"), invented(rising), lr=0.01).status == "holds"
    frame = invented(same, arms=("converged",), trials=1)
    frame["warm"] = frame["accuracy"]
    assert judged(WarmedUp(0.95), frame, neurons=16).status == "holds"


def test_one_function_counts_verdicts():
    found = counts(Verdict(status, "") for status in ("holds", "fails", "holds"))
    assert found == {
        "holds": 2, "not significant": 0, "fails": 1, "not tested here": 0, "no data": 0,
    }  # fmt: skip
