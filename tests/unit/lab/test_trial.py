"""Trials and their keys, studies and their grids, results as tables."""

import re
from dataclasses import asdict, replace

import pytest
from fake_results import invented

from fissile._common.errors import FissileError
from fissile.bank.loop import Recipe
from fissile.lab.batching import batches
from fissile.lab.frame import cells, pick, tidy
from fissile.lab.results import STUDIES
from fissile.lab.studies import find
from fissile.lab.study import SCALES, check
from fissile.lab.trial import (
    Arm,
    Boolean,
    Contender,
    Features,
    Images,
    Sampling,
    Trial,
    changed,
    from_spec,
)

DIFFERENT = [
    Trial(),
    Trial(Boolean(clauses=9)),
    Trial(Boolean(size=5)),
    Trial(Boolean(train=9_999)),
    Trial(Boolean(test=999)),
    Trial(Boolean(negatives="clause")),
    Trial(Boolean(others="arbitrary")),
    Trial(neurons=9),
    Trial(embedding=8),
    Trial(recipe=Recipe(lr=2e-3)),
    Trial(recipe=Recipe(batch=32)),
    Trial(warm_up=24),
    Trial(fine_tune=24),
    Trial(arm=Arm("random", 2)),
    Trial(arm=Arm("random", 4)),
    Trial(arm=Arm("clause", 2)),
    Trial(arm=Arm("gram", 2, clusters=4)),
    Trial(arm=Arm("random", 2, moments="fresh")),
    Trial(number=1),
    Trial(pictures=True),
    Trial(Features()),
    Trial(Features(), depth=5),
    Trial(Features(), layer_norm=True),
    Trial(Features(classes=4)),
    Trial(Features(validation=True)),
    Trial(Features(fingerprint="0123456789abcdef")),
    Trial(Features("cifar100-clip")),
    Trial(Features("cifar100-clip"), arm=Arm("dynamic", 2)),
    Trial(Features("cifar100-clip"), arm=Arm("dynamic", 2, every=50)),
    Trial(Features("cifar100-clip"), arm=Arm("dynamic", 2, fraction=0.2)),
    Trial(Features("cifar100-clip"), arm=Arm("dynamic", 2, grow="gradient")),
    Trial(Images()),
    Trial(Images(projection=512)),
    Trial(Images(mirror=True)),
    Trial(Features(scaling="unit")),
    Trial(Features(), diagnosed=True),
    Trial(Features(), arm=Arm("means", 2)),
    Trial(Images("generated-images")),
    Sampling(),
    Sampling(number=1),
    Sampling(alpha=4),
]


def test_a_key_hangs_on_everything_that_decides_the_result():
    assert len({work.key for work in DIFFERENT}) == len(DIFFERENT)
    assert Trial(Boolean(clauses=8)).key == Trial().key


def test_keys_are_for_ever():
    # A stored result must be found again by later versions; raise REVISION to break with it.
    assert Trial().key == "d1bfb298af8afdbe6be0dcde19382211"
    assert Trial(Features("cifar100-clip")).key == "8d0ffb53c8883bff822a9e6e032f6f8f"
    assert Trial(Images()).key == "ada34fffd146dfd6ba99979b92f14c1b"
    assert Sampling().key == "466b6d5627f3b240f102216d60ce45ae"


@pytest.mark.parametrize("work", DIFFERENT, ids=lambda work: work.key[:6])
def test_a_trial_comes_back_from_its_stored_form(work):
    assert from_spec(work.kind, asdict(work)) == work


def test_settings_change_wherever_they_live():
    trial = Trial(arm=Arm("random", 2))
    new = changed(trial, {"clauses": 12, "lr": 1, "moments": "fresh", "warm_up": 3})
    assert new == Trial(
        Boolean(clauses=12), recipe=Recipe(lr=1.0), warm_up=3, arm=Arm("random", 2, None, "fresh")
    )
    assert changed(trial, {"embedding": 16}).embedding == 16
    assert changed(replace(trial, embedding=16), {"embedding": None}) == trial


def test_options_of_the_split_leave_the_dense_arm_alone():
    assert changed(Trial(), {"moments": "fresh", "clusters": 4, "alpha": 8}) == Trial()
    random, gram = (Trial(arm=Arm(split, 2)) for split in ("random", "gram"))
    assert changed(random, {"clusters": 4}) == random
    assert changed(gram, {"clusters": 4}).arm.clusters == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trian": 5}, "no setting 'trian' to change; there are batch, clauses"),
        ({"train": "many"}, "train='many' is not a whole number"),
        ({"train": 5e3}, "train=5000.0 is not a whole number"),
        ({"lr": "fast"}, "lr='fast' is not a number"),
        ({"train": 0}, "train=0 is not a whole number of at least 2"),
        ({"neurons": 2.5}, "neurons=2.5 is not a whole number"),
        (
            {"negatives": "both"},
            "negatives='both' is not known; give 'literal' or 'clause' or 'flip'",
        ),
        ({"others": 3}, "others=3 is not a word"),
        ({"moments": "old"}, "moments='old' is not known"),
        ({"fine_tune": 0}, "fine_tune=0"),
        ({"number": 3}, "no setting 'number'"),
        ({"embedding": 0}, "embedding=0"),
    ],
)
def test_bad_changes_are_refused(changes, message):
    with pytest.raises(FissileError, match=message):
        changed(Trial(arm=Arm("random", 2)), changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Features("cifar10"), "data='cifar10' cannot be used here; give one of fashion"),
        (lambda: Features("clinc150"), "cannot be used here"),  # texts are no numbers
        (lambda: Images("fashionmnist"), "give one of cifar100"),  # grey
        (lambda: Features(classes=11), "fashionmnist has 10 classes; classes=11"),
        (lambda: Features(classes=1), "classes=1 cannot be chosen"),
        (lambda: Trial(Features(), arm=Arm("clause", 2)), "only the Boolean task has clauses"),
        (lambda: Trial(depth=3), "for classifiers of features alone"),
        (lambda: Trial(Features(), depth=1), "depth=1"),
        (lambda: Arm("dynamic", 2, every=0), "every=0"),
        (lambda: Arm("dynamic", 2, fraction=0.0), "fraction=0.0 is not a share"),
        (lambda: Arm("dynamic", 2, grow="fast"), "grow='fast' is not known"),
        (lambda: changed(Trial(Features()), {"layer_norm": 1}), "layer_norm=1 is not true or"),
        (lambda: changed(Trial(Features()), {"validation": True}), "no setting 'validation'"),
    ],
)
def test_bad_trials_are_refused(make, message):
    with pytest.raises(FissileError, match=message):
        make()


def test_moves_concern_only_masks_that_move():
    dynamic, random = (Trial(Features(), arm=Arm(split, 2)) for split in ("dynamic", "random"))
    assert changed(dynamic, {"every": 7, "grow": "gradient"}).arm.every == 7
    assert changed(random, {"every": 7, "fraction": 0.5}) == random
    assert dynamic.columns()["every"] == 100
    assert random.columns()["every"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_every_study_has_every_scale_with_dense_beside_each_arm(study, scale):
    works = study.works(scale)
    assert len({work.key for work in works}) == len(works) > 0
    assert len({work.number for work in works}) == study.scales[scale].trials
    assert max(work.number for work in study.works(scale, trials=2)) == 1
    for work in works:
        if isinstance(work, Trial):
            assert work.network() in works


PAPERS = {
    study.id: study
    for study in STUDIES.values()
    if re.search("Figure|table|section|appendix", study.artefact)
}


def test_the_papers_grid():
    paper = {name: study.works("paper") for name, study in PAPERS.items()}
    assert len(paper) > 25
    assert {w.warm_up for w in paper["codes"]} == {w.fine_tune for w in paper["codes"]} == {1000}
    special = ("codes", "theory", "timing")
    others = [w for name, works in paper.items() if name not in special for w in works]
    ours = [w for study in find(["frontier", "ablation"]) for w in study.works("paper")]
    assert {w.epochs for w in ours if isinstance(w, Contender)} == {50}  # as long as others, in all
    assert {(w.warm_up, w.fine_tune) for w in others} == {(25, 25)}
    assert {w.recipe for w in others} == {Recipe(lr=1e-3, batch=64, l1=1e-7, l2=1e-5)}
    assert len(paper["superposition"]) == 8 * 8 * 5 * 5
    literals = [12, 24, 32, 40, 60, 80, 100, 128]
    for name in ("capacity", "cosine"):
        assert sorted({w.task.literals for w in paper[name]}) == literals
    for name, trials in {"capacity": 5, "superposition": 5, "circuits": 10, "codes": 10}.items():
        assert STUDIES[name].scales["paper"].trials == trials
    for name in ("embed-neurons", "embed-clauses"):
        assert len(paper[name]) == 11 * 10 * 3


def test_the_papers_grid_on_real_data():
    paper = {name: study.works("paper") for name, study in PAPERS.items()}
    widths = {name: sorted({w.neurons for w in paper[name]}) for name in paper if name != "theory"}
    assert widths["fashionmnist"] == [3, 4, 6, 8, 10]
    assert widths["cifar100"] == widths["cnn-256"] == widths["dropconnect"]
    assert widths["cifar100"] == [4, 8, 16, 32, 64, 128]
    assert widths["imagenet100"] == [3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    assert widths["imagenet1k"] == [6, 8, 10, 12, 14, 16]
    assert {(w.depth, w.layer_norm) for w in paper["imagenet1k"]} == {(5, True)}
    assert {w.depth for w in paper["deep"]} == {5, 7, 9}
    assert STUDIES["deep"].scales["paper"].trials == 30
    assert {w.task.classes for w in paper["feature-demand"]} == {40, 60, 80, 100}
    assert {w.warm_up + w.fine_tune for w in paper["timing"]} == {50}
    assert {0, 1, 5, 10, 15, 20, 25} <= {w.warm_up for w in paper["timing"]}
    assert {w.task.projection for w in paper["cnn-512"]} == {512}
    # Settings are searched where the test set cannot be seen, and nothing else is.
    searched = {name for name, works in paper.items() for w in works if _validates(w)}
    assert searched == {"dynamic-search"}


def _validates(work):
    return getattr(getattr(work, "task", None), "validation", False)


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_panels_tables_and_claims_name_arms_and_columns_that_there_are(study):
    check(study)
    for published in study.published:
        places = {work.columns()[published.along] for work in study.works("paper")}
        assert set(published.values) <= places


def test_studies_are_found_by_name():
    assert [study.id for study in find(["cosine", "capacity", "cosine"])] == ["cosine", "capacity"]
    assert find(["all"]) == list(STUDIES.values())
    with pytest.raises(FissileError, match="no study 'cosin'; did you mean cosine"):
        find(["cosin"])
    with pytest.raises(FissileError, match="unknown scale 'huge'"):
        STUDIES["codes"].works("huge")
    with pytest.raises(FissileError, match="capacity has no setting 'alpha' to change"):
        STUDIES["capacity"].works("smoke", changes={"alpha": 2})  # its arms are its own
    with pytest.raises(FissileError, match="no clauses to split by"):
        STUDIES["superposition"].works("smoke", changes={"embedding": 8})
    with pytest.raises(FissileError, match="trials=0"):
        STUDIES["codes"].works("smoke", trials=0)


def test_batches_keep_the_arms_of_a_network_together_and_alike():
    works = [
        w for name in ("superposition", "codes", "theory") for w in STUDIES[name].works("quick")
    ]
    parts = batches(works, cost=1.0)
    assert sorted(w.key for part in parts for w in part) == sorted(w.key for w in works)
    assert len(parts) > 3
    for part in parts:
        assert len({work.batch_key() for work in part}) == 1
        arms = {}
        for work in part:
            arms.setdefault(work.network(), []).append(getattr(work, "arm", None))
        assert len({frozenset(each) for each in arms.values()}) == 1
    whole = batches(works, cost=float("inf"))
    assert len(whole) == 3
    assert all(batches(works, cost=0.0))  # one network each, and none without


def test_networks_behind_a_backbone_share_a_batch_only_with_their_recipe():
    works = [Trial(Images(), recipe=Recipe(lr=lr)) for lr in (1e-3, 1e-2)]
    assert len(batches(works, cost=float("inf"))) == 2
    assert len(batches([replace(work, task=Features()) for work in works], float("inf"))) == 1


def test_a_batch_has_work_for_every_core():
    works = STUDIES["cifar100"].works("paper")
    parts = batches(works, cost=0.0, networks=4)
    counts = [len({work.network() for work in part}) for part in parts]
    assert set(counts) == {4}
    assert sorted(w.key for part in parts for w in part) == sorted(w.key for w in works)


def test_the_wide_table_compares_with_the_dense_arm_of_the_same_trial():
    frame = invented(lambda arm, c, h: {"accuracy": 0.5 if arm == "dense" else 0.6, "capacity": h})
    dense, split = (pick(frame, {"neurons": 8}, [arm]) for arm in ("dense", "clause-4"))
    expected = 100 * (split["accuracy"].to_numpy() / dense["accuracy"].to_numpy() - 1)
    assert split["improvement"].to_numpy() == pytest.approx(expected)
    assert (frame[frame["arm"] == "dense"]["capacity_fold"] == 1).all()
    assert frame["per_parameter"].iloc[0] == pytest.approx(frame["accuracy"].iloc[0] / 264)


def test_a_missing_dense_arm_gives_no_gain_rather_than_a_wrong_one():
    frame = invented(lambda arm, c, h: {"accuracy": 0.5}, arms=("clause-4",))
    assert frame["improvement"].isna().all()


def test_the_tidy_table_has_a_row_per_measure():
    frame = invented(lambda arm, c, h: {"accuracy": 0.5, "capacity": 3.0}, trials=2)
    long = tidy(frame)
    assert list(long.columns[-2:]) == ["measure", "value"]
    measures = {"nonzeros", "accuracy", "capacity", "per_parameter", "improvement", "capacity_fold"}
    assert set(long["measure"]) == measures
    assert len(long) == len(frame) * len(measures)


def test_cells_test_the_raw_measure_even_where_a_gain_is_shown():
    frame = invented(lambda arm, c, h: {"accuracy": 0.5 + 0.1 * (arm != "dense")})
    gains, raw = (cells(frame, name, ["neurons"]) for name in ("improvement", "accuracy"))
    assert gains["p"].tolist()[1:3] == raw["p"].tolist()[1:3]
    assert gains["mean"].iloc[1] == pytest.approx(20, abs=1)
