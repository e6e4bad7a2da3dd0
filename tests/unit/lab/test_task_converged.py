"""The paper's criterion: when a network has converged, and what it had at the split."""

from dataclasses import replace
from math import isnan, nan

import pytest
from fake_results import invented

from fissile.lab.compute import TrialResult, compute
from fissile.lab.results import load
from fissile.lab.store import Provenance, Run, Store
from fissile.lab.studies import CRITERION, STUDIES
from fissile.lab.task import Patience, Plateau, limit, patience_of, plateau, stopped
from fissile.lab.trends import WarmedUp
from fissile.lab.trial import Arm, Boolean, Features, Images, Trial

TASK = Boolean(clauses=3, train=256, test=128)


def test_a_flat_curve_has_converged_after_four_rounds():
    assert plateau([0.5, 0.8, 0.9, 0.9, 0.9, 0.9], warm_up=1) is None
    assert plateau([0.5, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9], warm_up=1) == Plateau(0.9, 7, rising=False)


def test_a_rise_of_a_tenth_of_a_point_starts_the_count_anew():
    flat = [0.5] + [0.9] * 4
    assert plateau([*flat, 0.9009, 0.9009], warm_up=1) == Plateau(0.9009, 6, rising=False)
    assert plateau([*flat, 0.9011, 0.9011], warm_up=1) is None


def test_rounds_are_means_of_twenty_five_epochs():
    curve = [0.5] * 30 + [0.7, 0.8, 0.9, 0.8, 0.8] * 25
    assert plateau(curve[:154], warm_up=30) is None
    assert plateau(curve, warm_up=30) == Plateau(pytest.approx(0.8), 155, rising=False)


def test_a_network_that_keeps_rising_is_stopped():
    curve = [0.01 * epoch for epoch in range(60)]
    assert plateau(curve, warm_up=1) == Plateau(curve[40], limit(1), rising=True)


def test_patience_is_counted_in_rounds():
    curve = [0.5, 0.8, 0.9, 0.9, 0.9]
    assert plateau(curve, warm_up=1, patience=Patience(flat=1)) == Plateau(0.9, 4, rising=False)
    rising = [0.1 * epoch for epoch in range(1, 5)]
    stops = Plateau(pytest.approx(0.4), 4, rising=True)
    assert plateau(rising, warm_up=1, patience=Patience(flat=1, most=3)) == stops


def test_no_warm_up_counts_single_epochs():
    assert plateau([0.3, 0.9, 0.9, 0.9, 0.9, 0.9], warm_up=0) == Plateau(0.9, 6, rising=False)


@pytest.mark.parametrize(
    "trials",
    [
        [Trial(TASK, h, warm_up=2, fine_tune=2, arm=Arm("converged")) for h in (2, 8)],
        [
            Trial(Features("generated"), h, warm_up=1, fine_tune=1, arm=Arm("converged"))
            for h in (3, 6)
        ],
    ],
    ids=["Boolean", "features"],
)
def test_company_and_its_patience_do_not_matter(trials):
    together = compute(trials)
    for trial, found in zip(trials, together, strict=True):
        alone = compute([trial])[0].measures
        assert found.measures == pytest.approx(alone, abs=1e-6)
        warm = compute([replace(trial, arm=Arm())])[0].measures
        assert alone["warm"] == pytest.approx(warm["warm"], abs=1e-6)
        assert alone["nonzeros"] == warm["nonzeros"]
        assert alone["epochs"] >= 5 * trial.warm_up
        assert not alone["rising"] or alone["epochs"] == limit(trial.warm_up)


@pytest.mark.slow
def test_networks_behind_a_backbone_converge_too():
    images = Images("generated-images", projection=4)
    one = Trial(images, 2, warm_up=1, fine_tune=1, arm=Arm("converged"))
    found, dense = (compute([trial])[0].measures for trial in (one, replace(one, arm=Arm())))
    assert found["warm"] == dense["warm"]
    assert found["nonzeros"] == dense["nonzeros"]
    assert 3 <= found["epochs"] <= limit(1, patience_of(images)) == 7
    assert found["diverged"] == 0


def test_a_network_that_diverges_keeps_its_best_round():
    assert stopped([0.2, 0.5, 0.9, 0.7, nan, nan], warm_up=2) == Plateau(0.8, 4, rising=False)
    assert stopped([0.2, nan], warm_up=2) == Plateau(0.2, 1, rising=False)  # not a whole round
    assert isnan(stopped([nan, nan], warm_up=2).accuracy)


def test_small_rises_one_after_the_other_count_as_flat():
    curve = [0.5, *(0.8 + 0.0009 * number for number in range(9))]
    assert plateau(curve, warm_up=1) == Plateau(pytest.approx(0.8036), 6, rising=False)


def converged(shares):
    """A table of converged networks with these shares of their accuracy at the split."""
    held = dict(zip((4, 8, 16), shares, strict=True))
    return invented(
        lambda arm, c, h: {"accuracy": 0.9, "warm": 0.9 * held[h]},
        arms=["converged"],
        cells=[(8, h) for h in held],
        trials=1,
        noise=0,
    )


def test_the_claim_holds_where_every_cell_was_warm_enough():
    verdict = WarmedUp(0.95)(converged((0.96, 0.99, 1.0)))
    assert verdict.status == "holds"
    assert "0.960 to 1.000" in verdict.numbers


def test_the_claim_fails_where_one_cell_was_not_and_says_which():
    verdict = WarmedUp(0.95)(converged((0.96, 0.90, 1.0)))
    assert verdict.status == "fails"
    assert "below 0.95 in 1 of 3 cells; lowest at neurons = 8" in verdict.numbers


def test_a_network_that_diverged_in_the_warm_up_has_nothing():
    frame = converged((0.96, 0.99, 1.0))
    frame.loc[1, "warm"] = nan
    assert "below 0.95 in 1 of 3 cells; lowest at neurons = 8" in WarmedUp(0.95)(frame).numbers
    frame["accuracy"] = frame["warm"] = 0.0
    assert WarmedUp(0.95)(frame).status == "fails"


def test_some_converged_networks_prove_nothing_yet(tmp_path):
    study = STUDIES["capacity"]
    works, more = study.works("quick"), study.converged("quick")
    outcomes = [
        TrialResult(work, {"accuracy": 0.9, "warm": 0.9, "nonzeros": 9.0, "capacity": 1.0}, 1.0)
        for work in [*works, *more[:2]]
    ]
    with Store(tmp_path) as store:
        store.add(outcomes, Provenance.here("cpu"))
        results = load(store, Run("capacity", "quick", None, {}, "fissile run capacity"))
    (claim, verdict), *_ = reversed(results.verdicts)
    assert results.complete
    assert claim == CRITERION
    assert verdict.status == "not significant"
    assert verdict.numbers.startswith("so far (2 of 4 trials) holds")


def test_without_converged_networks_there_is_no_verdict():
    frame = invented(lambda arm, c, h: {"accuracy": 0.9}, arms=["dense"], cells=[(8, 8)])
    assert WarmedUp(0.95)(frame).status == "no data"


def test_how_long_others_are_tuned_does_not_matter():
    study = STUDIES["capacity"]
    usual = {one.key for one in study.converged("paper")}
    assert {one.key for one in study.converged("paper", {"fine_tune": 99})} == usual
    assert usual.isdisjoint(one.key for one in study.converged("paper", {"warm_up": 24}))


def test_the_smallest_scale_has_no_converged_network_and_the_others_have():
    for study in STUDIES.values():
        assert study.converged("smoke") == []
        if CRITERION in study.claims and study.id != "timing":  # which splits early at scale quick
            assert study.converged("quick")


def test_every_study_that_trains_networks_has_the_claim():
    without = {study.id for study in STUDIES.values() if CRITERION not in study.claims}
    assert {"theory"} <= without
    assert without == {study.id for study in STUDIES.values() if not study.converged("paper")}
    assert CRITERION in STUDIES["deep"].claims
    for name in STUDIES.keys() - without:
        cells = {(one.task, one.neurons, one.depth) for one in STUDIES[name].converged("paper")}
        assert len(cells) == len(STUDIES[name].converged("paper"))
