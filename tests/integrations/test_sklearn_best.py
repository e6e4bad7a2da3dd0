import itertools
import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from classifier_data import blobs, rewrite
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import fissile
from fissile.bank.sparse import module_of, train
from fissile.bank.sparse.plan import recommended_plans
from fissile.sklearn import FissileClassifier, search
from fissile.sklearn.search import PlanSearch, budget_for, can_hold_out, plans_for, scale_of
from fissile.sklearn.two_phase import width

#: Most tests train for too few epochs, which they know.
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
QUICK = {"nonzeros": 60, "tries": 2, "warm_up": 2, "fine_tune": 2, "random_state": 0}


@parametrize_with_checks([FissileClassifier(200, tries=2, warm_up=4, fine_tune=4)])
def test_scikit_learn_accepts_it(estimator, check):
    check(estimator)


def quick(**options):
    return FissileClassifier(**{**QUICK, **options})


# --- the budget


@settings(max_examples=40, deadline=None)
@given(
    inputs=st.integers(1, 12),
    classes=st.integers(2, 5),
    samples=st.integers(5, 90),
    more=st.integers(1, 150),
    tries=st.sampled_from([1, 2]),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_the_budget_is_never_passed(inputs, classes, samples, more, tries, epochs, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(samples, inputs)), np.arange(samples) % classes
    budget = more + (1 if classes == 2 else classes)
    found = FissileClassifier(
        budget, tries=tries, warm_up=0, fine_tune=epochs, batch=16, random_state=seed
    ).fit(x, y)
    by_hand = sum(int((p != 0).sum()) for p in fissile.to_dense(found.model_).parameters())
    assert by_hand <= found.nonzeros_ == fissile.nonzeros(found.model_).all <= budget
    assert found.hidden_ == found.model_.neurons <= found.plan_.hidden
    assert np.isfinite(found.decision_function(x)).all()


@pytest.mark.parametrize("budget", [100, 500, 2000])
def test_a_budget_is_used_up_where_there_is_enough_to_spend_it_on(budget):
    x, y = load_digits(return_X_y=True)
    found = quick(nonzeros=budget, tries=1).fit(x, y)
    assert 0.98 * budget <= found.nonzeros_ <= budget


def test_a_width_stands_for_the_budget_of_the_dense_network():
    found = quick(nonzeros=None, hidden=6, recipe="best").fit(*blobs())
    assert found.plan_.budget == 6 * (8 + 1) + 3 * (6 + 1)


def test_two_classes_take_one_output():
    x, y = blobs(2)
    found = quick(warm_up=10).fit(x, np.array(["no", "yes"])[y])
    assert found.model_.outputs == 1
    assert found.decision_function(x).shape == (200,)
    assert found.score(x, np.array(["no", "yes"])[y]) > 0.8


# --- learning


def test_it_learns():
    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, random_state=0, stratify=y)
    best = FissileClassifier(1000, tries=1, random_state=0).fit(x, y)
    papers = FissileClassifier(1000, recipe="paper", lr=5e-3, random_state=0).fit(x / 16, y)
    assert best.score(x_test, y_test) > 0.95
    assert best.score(x_test, y_test) >= papers.score(x_test / 16, y_test)
    assert (best.n_iter_, best.alpha_, best.validation_scores_) == (50, 1, None)


def test_the_network_is_the_plan_s_trained_on_all_samples():
    x, y = blobs(samples=100)
    found = quick().fit(x, y)
    x32 = x.astype(np.float32)
    [seed] = np.random.RandomState(0).randint(2**31 - 1, size=1).tolist()
    scale = float(x32.std(dtype=np.float64))
    [(stack, _)] = train(
        [found.plan_], [seed], torch.tensor(x32 / scale), torch.tensor(y), outputs=3, epochs=4
    )
    again = module_of(stack, 0, scale)(torch.tensor(x32)).detach()
    assert np.allclose(found.decision_function(x), again, atol=1e-4)
    loss = torch.nn.functional.cross_entropy(again, torch.tensor(y))
    assert found.loss_curve_ == [pytest.approx(float(loss), rel=1e-4)]


def test_the_best_plan_is_taken_and_of_equals_the_earlier(monkeypatch):
    scores = iter([0.3, 0.7, 0.7, 0.1])
    monkeypatch.setattr(PlanSearch, "_score", lambda *_: next(scores))
    found = quick(tries=4).fit(*blobs())
    plans = plans_for(60, 8, 3, tries=4, steps=12)
    assert found.tried_ == list(zip(plans, [0.3, 0.7, 0.7, 0.1], strict=False))
    assert found.plan_ == plans[1]


@pytest.mark.parametrize("budget", [20, 60])
def test_where_steps_are_few_high_rates_come_first(budget):
    usual = recommended_plans(budget, 8, 3)
    assert plans_for(budget, 8, 3, tries=6, steps=3000) == usual
    hasty = plans_for(budget, 8, 3, tries=6, steps=2999)
    assert sorted(hasty, key=repr) == sorted(usual, key=repr)
    assert [plan.lr for plan in hasty] == sorted((plan.lr for plan in usual), reverse=True)


@pytest.mark.parametrize(("fewest", "tried"), [(1, 3), (9, 5), (500, 6)])
def test_plans_are_tried_for_half_the_epochs_and_for_some_steps(monkeypatch, fewest, tried):
    asked, real = [], search.train

    def noted(*arguments, epochs, **options):
        asked.append(epochs)
        return real(*arguments, epochs=epochs, **options)

    monkeypatch.setattr(search, "train", noted)
    monkeypatch.setattr(search, "STEPS", fewest)  # 180 samples to try on: two steps an epoch
    for scores, taken in (([0.5, 0.6], 1), ([0.6, 0.6], 0), ([0.6, 0.5], 0)):
        left = iter(scores)
        monkeypatch.setattr(PlanSearch, "_score", lambda *_, left=left: next(left))
        found = quick(warm_up=3, fine_tune=3).fit(*blobs())
        assert found.plan_ == plans_for(60, 8, 3, tries=2, steps=18)[taken]
        assert [score for _, score in found.tried_] == scores
    assert asked == [tried, 6] * 3


def test_few_steps_are_warned_of_and_are_not_the_default():
    x, y = blobs(samples=130)
    with pytest.warns(ConvergenceWarning, match="trained for 8 steps, fewer than 500, so train"):
        quick(tries=1).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quick(tries=1, warm_up=None, fine_tune=None).fit(x, y).n_iter_ == 250


def test_plans_are_judged_on_samples_that_they_have_not_seen(monkeypatch):
    trained, judged = [], []
    real = PlanSearch._trained, PlanSearch._score

    def note_trained(self, plans, seeds, x, *rest, **options):
        trained.append(x)
        return real[0](self, plans, seeds, x, *rest, **options)

    def note_judged(self, module, x, y):
        judged.append((x, y))
        return real[1](self, module, x, y)

    monkeypatch.setattr(PlanSearch, "_trained", note_trained)
    monkeypatch.setattr(PlanSearch, "_score", note_judged)
    x, y = blobs()
    quick(validation_fraction=0.25).fit(x, y)
    assert [len(one) for one in trained] == [150, 200]
    assert all(np.bincount(y).min() >= 16 for _, y in judged)
    rows = {row.tobytes() for row in trained[0]}
    assert not any(row.tobytes() in rows for row in judged[0][0])


def test_of_several_networks_the_one_with_the_smallest_loss_is_kept():
    x, y = blobs()
    several = quick(tries=1, restarts=4).fit(x, y)
    seeds = np.random.RandomState(0).randint(2**31 - 1, size=4).tolist()
    best = PlanSearch([several.plan_], 3, epochs=4, batch=64)
    ends = [best.run(x.astype(np.float32), y, [seed], 0).loss for seed in seeds]
    assert several.loss_curve_ == [pytest.approx(min(ends), rel=1e-3)]
    assert min(ends) < 0.999 * ends[0]


@pytest.mark.parametrize("factor", [1000.0, 1024.0, 1e-6])
def test_the_size_of_features_does_not_matter(factor):
    x, y = blobs(samples=150)
    one, other = (quick(warm_up=6).fit(f * x, y) for f in (1.0, factor))
    assert np.array_equal(one.predict(x), other.predict(factor * x))
    assert np.allclose(one.decision_function(x), other.decision_function(factor * x), atol=1e-3)


def test_what_cannot_be_divided_by_is_left_alone():
    rng = np.random.default_rng(0)
    x = rng.normal(5, 3, (50, 4)).astype(np.float32)
    assert scale_of(x) == pytest.approx(x.std(), rel=1e-5)
    assert scale_of(np.zeros((3, 2), np.float32)) == 1
    assert scale_of(np.full((7, 3), 0.1, np.float32)) == pytest.approx(0.1)
    for size in (1e-40, 1e38):
        y = np.arange(50) % 2
        found = quick(tries=1).fit(size * (x / 20), y)
        assert np.isfinite(found.decision_function(size * (x / 20))).all()


def test_a_random_state_decides_everything():
    x, y = blobs()
    for weight in (None, "balanced"):
        fits = []
        for state in (0, 0, 1):
            torch.rand(3)  # dropout must not notice
            fits.append(quick(class_weight=weight, tries=6, random_state=state).fit(x, y))
        one, same, other = fits
        assert one.tried_ == same.tried_
        assert np.array_equal(one.predict_proba(x), same.predict_proba(x))
        assert not np.allclose(one.predict_proba(x), other.predict_proba(x))


def test_fitting_leaves_the_random_numbers_of_torch_alone():
    before = torch.random.get_rng_state()
    quick(tries=6).fit(*blobs())
    assert torch.equal(before, torch.random.get_rng_state())


def test_class_weights_shift_the_answers():
    x, y = blobs(2, weights=[0.9], class_sep=0.3, samples=400)
    rare = [
        quick(class_weight=weight, warm_up=8).fit(x, y).predict(x).mean()
        for weight in ({0: 10.0, 1: 1.0}, None, "balanced", {0: 1.0, 1: 100.0})
    ]
    assert rare[0] <= rare[1] < rare[2] < rare[3]


def test_class_weights_count_among_what_is_held_out():
    x, y = blobs(2, samples=100)
    always = torch.nn.Sequential(torch.nn.Linear(8, 1)).requires_grad_(False)
    always[0].weight.zero_()
    always[0].bias.fill_(1.0)
    plain, weighted = (
        PlanSearch([], 1, 1, 1, weights=weights)._score(always, x, y)
        for weights in (None, np.array([1.0, 3.0]))
    )
    assert plain == pytest.approx(y.mean())
    assert weighted == pytest.approx(3 * y.mean() / (1 + 2 * y.mean()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_trains_what_a_processor_trains():
    x, y = blobs()
    before = torch.cuda.get_rng_state()
    here, there, again = (
        quick(tries=6, warm_up=8, device=device).fit(x, y) for device in ("cpu", "cuda", "cuda")
    )
    assert {one.device.type for one in there.model_.parameters()} == {"cpu"}
    assert there.nonzeros_ <= 60
    assert abs(here.score(x, y) - there.score(x, y)) < 0.1
    assert there.tried_ == again.tried_
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_too_few_samples_are_all_learned_from():
    x, y = blobs(2, samples=100)
    few = np.r_[np.flatnonzero(y == 0), np.flatnonzero(y == 1)[:9]]
    found = quick().fit(x[few], y[few])
    assert found.tried_ == []
    assert [found.plan_] == plans_for(60, 8, 1, tries=1, steps=12)
    assert len(quick(validation_fraction=0.2).fit(x[few], y[few]).tried_) == 2
    assert not can_hold_out(np.array([0, 1, 1, 1]), 0.9)


def test_printing_changes_nothing(capsys):
    x, y = blobs()
    silent = quick().fit(x, y)
    assert capsys.readouterr().out == ""
    loud = quick(verbose=1).fit(x, y)
    said = capsys.readouterr().out
    assert np.array_equal(silent.predict_proba(x), loud.predict_proba(x))
    assert re.search(r"all plans, epoch 4 of 4\nheld-out accuracies: 0\.\d+, 0\.\d+\nplan \d", said)


# --- which recipe


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({}, True),
        ({"nonzeros": None, "hidden": 4}, False),
        ({"nonzeros": None}, False),
        ({"early_stopping": True}, False),
        ({"recipe": "paper"}, False),
        ({"nonzeros": None, "hidden": 4, "recipe": "best"}, True),
    ],
)
def test_a_budget_asks_for_the_best(options, best):
    options = options if best else {"tries": 6, **options}
    found = quick(**options).fit(*blobs(samples=60))
    assert (found.plan_ is not None, bool(found.tried_)) == (best, best)
    assert isinstance(found.model_, fissile.MLP) is not best


def test_partial_fit_is_the_paper_s():
    x, y = blobs()
    stream = quick(warm_up=1, nonzeros=150)
    for _ in range(2):
        stream.partial_fit(x, y, classes=[0, 1, 2])
    assert stream.nonzeros_ == 147
    assert stream.plan_ is None
    assert isinstance(stream.model_.layers[0], fissile.PartitionedLinear)
    found = quick(nonzeros=150).fit(x, y)
    assert not hasattr(found, "partial_fit")
    with pytest.raises(AttributeError) as raised:
        found.partial_fit(x, y)
    assert 'fit again with all samples, or with recipe="paper"' in str(raised.value.__cause__)
    found.set_params(recipe="paper", tries=6).fit(x, y).partial_fit(x, y)
    assert found.plan_ is None


def test_it_works_in_pipelines_and_searches():
    x, y = blobs()
    pipeline = make_pipeline(StandardScaler(), quick(warm_up=8))
    grid = GridSearchCV(pipeline, {"fissileclassifier__nonzeros": [4, 200]}, cv=2).fit(x, y)
    assert grid.best_params_ == {"fissileclassifier__nonzeros": 200}
    assert grid.best_score_ > 0.65


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", 4), ("alpha", 2), ("split", "gram"), ("split", fissile.Random()), ("lr", 1e-2),
        ("l1", 0.0), ("l2", 1e-3), ("patience", 3), ("n_jobs", 2),
    ],
)  # fmt: skip
def test_what_only_the_paper_s_recipe_uses_is_refused(name, value):
    message = f'only recipe="paper" uses {name}={value!r}, and this is recipe="best"'
    for options in ({}, {"recipe": "best"}):
        with pytest.raises(fissile.FissileError, match=re.escape(message)):
            quick(**options, **{name: value}).fit(*blobs())
    quick(recipe="paper", tries=6, **{name: value}).fit(*blobs())


def test_what_only_the_best_recipe_uses_is_refused():
    x, y = blobs()
    message = re.escape('only recipe="best" uses tries=2, and this is recipe="paper"; leave tries')
    with pytest.raises(fissile.FissileError, match=message):
        quick(recipe="paper").fit(x, y)


@pytest.mark.parametrize("recipe", ["best", "paper"])
def test_the_largest_sensible_budget_is_named(recipe):
    x, y = blobs(n_features=4, n_informative=4, n_redundant=0)
    most = (1 << 14) * (4 + 1 + 3) + 3
    for nonzeros in (10**9, most + 1):
        with pytest.raises(fissile.FissileError, match=f"nonzeros={nonzeros} .* at most {most}$"):
            FissileClassifier(nonzeros, recipe=recipe).fit(x, y)
    with pytest.raises(fissile.FissileError, match=r"hidden=1000000000 .* at most 16384$"):
        FissileClassifier(hidden=10**9, recipe=recipe).fit(x, y)
    assert budget_for(most, None, 4, 3) == budget_for(None, 1 << 14, 4, 3) == most
    assert width(most, None, 4, 3) == width(None, 1 << 14, 4, 3) == 1 << 14


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonzeros": 3}, "the biases of the outputs take 3, and there must be a weight; give at"),
        ({"nonzeros": 0.5}, "nonzeros=0.5 is not a whole number"),
        ({"hidden": 6}, "nonzeros=60 and hidden=6 both decide the width"),
        ({"nonzeros": None, "recipe": "best"}, 'recipe="best" spends a budget; give one'),
        ({"nonzeros": None, "hidden": 0, "recipe": "best"}, "hidden=0 is not a whole number"),
        ({"recipe": "best", "early_stopping": True}, 'recipe="best" knows no early_stopping'),
        ({"recipe": "worst"}, "unknown recipe 'worst'"),
        ({"tries": 0}, "tries=0 is not a whole number of at least 1"),
        ({"tries": 7}, "tries=7 is more than there are plans; give 1 to 6"),
        ({"warm_up": 0, "fine_tune": 0}, "let warm_up + fine_tune be 1"),
        ({"fine_tune": -1}, "fine_tune=-1"),
        ({"batch": 0}, "batch=0"),
        ({"restarts": 0}, "restarts=0"),
        ({"validation_fraction": 2.0}, "validation_fraction=2.0"),
        ({"class_weight": {0: 0.0, 1: 0.0, 2: 0.0}}, "give finite weights"),
        ({"class_weight": {0: float("inf")}}, "give finite weights"),
        ({"class_weight": {0: -1.0}}, "none of them negative"),
        ({"device": "nowhere"}, "cannot train on 'nowhere'"),
    ],
)
def test_an_error_says_what_to_do(options, message):
    with pytest.raises(fissile.FissileError, match=re.escape(message)):
        quick(**options).fit(*blobs())


# --- files


@pytest.fixture(scope="module")
def fitted():
    return quick().fit(*blobs())


def test_a_pickled_copy_predicts_the_same(fitted):
    x, _ = blobs()
    copied = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(fitted.predict_proba(x), copied.predict_proba(x))


@pytest.mark.parametrize("plan", [0, 1], ids=["linear", "beside"])
def test_a_file_brings_the_classifier_back(tmp_path, monkeypatch, plan):
    scores = itertools.cycle([0.5, 0.2 + plan])
    monkeypatch.setattr(PlanSearch, "_score", lambda *_: next(scores))
    x, y = blobs()
    names = np.array(["a", "b", "Ω"])[y]
    found = quick(nonzeros=20).fit(x, names)
    assert (found.hidden_ > 0) == (found.plan_.hidden > 0) == (plan == 1)
    found.save(tmp_path / "c.safetensors")
    back = FissileClassifier.load(tmp_path / "c.safetensors")
    assert np.array_equal(found.predict_proba(x), back.predict_proba(x))
    assert np.array_equal(found.predict(x), back.predict(x))
    assert back.get_params() == found.get_params()
    fitted = (
        "nonzeros_", "hidden_", "alpha_", "n_iter_", "loss_curve_", "validation_scores_", "plan_",
        "tried_",
    )  # fmt: skip
    assert all(getattr(back, name) == getattr(found, name) for name in fitted)
    assert not hasattr(back, "partial_fit")
    assert back.fit(x, names).score(x, names) == pytest.approx(found.score(x, names), abs=0.2)


@pytest.mark.parametrize(
    "change",
    [
        lambda note: note.update(best=None),
        lambda note: note.update(best=7),
        lambda note: note["best"].pop("plan"),
        lambda note: note["best"].update(epochs="x"),
        lambda note: note["best"].update(tried=[1]),
        lambda note: note["best"]["plan"].update(budget=-1),
        lambda note: note["best"]["plan"].update(lr="os.system"),
        lambda note: note["best"]["plan"].update(prune=None),
        lambda note: note["best"]["plan"]["prune"].update(saliency="x"),
        lambda note: note["best"]["plan"]["prune"].update(saliency=[]),
        lambda note: note["classes"].update(values=[0, 1]),
        lambda note: note.update(names=["one"]),
    ],
)
def test_a_damaged_note_is_refused(fitted, tmp_path, change):
    fitted.save(tmp_path / "c")
    rewrite(tmp_path / "c", note=change)
    with pytest.raises(fissile.FileError):
        FissileClassifier.load(tmp_path / "c")


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.pop("second.weight"),
        lambda held: held.pop("hidden.mask"),
        lambda held: held.pop("second.bias"),
        lambda held: held.pop("hidden.bias"),
        lambda held: held.update({"direct.bias": torch.zeros(3)}),
        lambda held: held.update({"second.weight": torch.zeros(3, 1)}),
        lambda held: held.update({"direct.weight": torch.zeros(3)}),
        lambda held: held.update({"direct.weight": torch.zeros(3, 9)}),
        lambda held: held.update({"direct.mask": held["direct.mask"].float()}),
        lambda held: held.update({"direct.mask": torch.ones(2, 2, dtype=torch.bool)}),
        lambda held: held.update(foreign=torch.zeros(1)),
    ],
)
def test_a_damaged_network_is_refused(tmp_path, monkeypatch, change):
    monkeypatch.setattr(PlanSearch, "_score", lambda *_: 0.5)
    quick().fit(*blobs()).save(tmp_path / "c")
    rewrite(tmp_path / "c", tensors=change)
    with pytest.raises(fissile.FileError):
        FissileClassifier.load(tmp_path / "c")


def test_a_paper_s_file_with_another_s_note_is_refused(fitted, tmp_path):
    fitted.save(tmp_path / "best")
    quick(recipe="paper", tries=6, nonzeros=100).fit(*blobs()).save(tmp_path / "paper")
    best = []
    rewrite(tmp_path / "best", note=lambda note: best.append(note["best"]))
    rewrite(tmp_path / "paper", note=lambda note: note.update(best=best[0]))
    with pytest.raises(fissile.FileError, match="of another recipe"):
        FissileClassifier.load(tmp_path / "paper")
