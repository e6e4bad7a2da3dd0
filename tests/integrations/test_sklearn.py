import importlib
import os
import pickle
import re
import stat
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from classifier_data import blobs, rewrite
from scipy.special import softmax
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import (
    GridSearchCV,
    StratifiedKFold,
    cross_val_score,
    train_test_split,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import fissile
from fissile import FileError, FissileError
from fissile.bank import Data
from fissile.bank.loop import Recipe
from fissile.sklearn import FissileClassifier
from fissile.sklearn.two_phase import Task, make

#: Most tests train for too few epochs, which they know.
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
QUICK = {
    "hidden": 6, "alpha": 2, "recipe": "paper", "warm_up": 2, "fine_tune": 2, "lr": 1e-2,
    "random_state": 0,
}  # fmt: skip


@parametrize_with_checks([FissileClassifier()])
def test_scikit_learn_accepts_it(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    return train_test_split(x / 16, y, random_state=0, stratify=y)


def quick(**options):
    return FissileClassifier(**{**QUICK, **options})


# --- the budget


@pytest.mark.parametrize("budget", [500, 1000, 2000, 5000])
def test_the_budget_is_used_up_and_never_passed(digits, budget):
    x, _, y, _ = digits
    found = FissileClassifier(budget, recipe="paper", warm_up=1, fine_tune=1).fit(x[:200], y[:200])
    by_hand = sum(int((p != 0).sum()) for p in fissile.to_dense(found.model_).parameters())
    one_more = found.nonzeros_ + 64 + 1 + 10  # another neuron's inputs, bias and outputs
    assert by_hand <= found.nonzeros_ <= budget < one_more
    assert found.model_.layers[0].out_features == 4 * found.hidden_
    assert found.nonzeros_ == found.hidden_ * (64 + 1 + 10) + 10


def test_two_classes_take_one_output():
    found = quick(nonzeros=101, hidden=None).fit(*blobs(2))
    assert (found.hidden_, found.nonzeros_) == (10, 101)


def test_the_budget_is_kept_at_every_call_of_partial_fit():
    x, y = blobs()
    stream = quick(nonzeros=150, hidden=None, warm_up=2)
    counts, widths = [], []
    for _ in range(4):
        stream.partial_fit(x, y, classes=[0, 1, 2])
        counts.append(stream.nonzeros_)
        widths.append(stream.model_.layers[0].out_features)
    assert counts == [147] * 4
    assert widths == [12, 12, 24, 24]


def test_no_more_children_than_features():
    x, y = blobs(2, n_features=3, n_informative=3, n_redundant=0)
    found = quick(alpha=8).fit(x, y)
    assert found.alpha_ == 3
    assert found.nonzeros_ == 6 * (3 + 1 + 1) + 1


# --- learning


def test_it_learns(digits):
    x, x_test, y, y_test = digits
    found = FissileClassifier(2000, recipe="paper", lr=5e-3, random_state=0).fit(x, y)
    assert found.score(x_test, y_test) > 0.94
    assert len(found.loss_curve_) == found.n_iter_ == 50
    assert found.loss_curve_[-1] < 0.1 < found.loss_curve_[0]


def test_a_random_state_decides_everything():
    x, y = blobs()
    for weight in (None, "balanced"):
        one, same, other = (
            quick(class_weight=weight, random_state=s).fit(x, y).predict_proba(x) for s in (0, 0, 1)
        )
        assert np.array_equal(one, same)
        assert not np.allclose(one, other)


def test_fitting_leaves_the_random_numbers_of_torch_alone():
    before = torch.random.get_rng_state()
    quick(restarts=2, n_jobs=2).fit(*blobs())
    assert torch.equal(before, torch.random.get_rng_state())


def test_threads_and_printing_change_nothing(capsys):
    x, y = blobs()
    alone = quick(restarts=3).fit(x, y)
    assert capsys.readouterr().out == ""
    for options in ({"n_jobs": 2}, {"verbose": 1}):
        found = quick(restarts=3, **options).fit(x, y)
        assert np.array_equal(alone.predict_proba(x), found.predict_proba(x))
    assert len(re.findall(r"fine-tuning epoch 2: loss \d", capsys.readouterr().out)) == 3


def test_of_several_networks_the_best_is_kept():
    x, y = blobs()
    several = quick(restarts=4, fine_tune=4).fit(x, y)
    seeds = np.random.RandomState(0).randint(2**31 - 1, size=4)
    task = Task((8, 6, 3), Data(torch.tensor(x).float(), y, x[:1], y[:1]), Recipe(lr=1e-2))
    ends = []
    for seed in seeds.tolist():
        trainer = make(task, seed)
        trainer.train(2)
        trainer.split(2, fissile.Random())
        ends.append(trainer.train(4)[-1].loss)
    assert several.loss_curve_[-1] == min(ends) < max(ends)


def test_early_stopping_returns_to_the_best_epoch():
    x, y = blobs(samples=300, flip_y=0.3)
    found = quick(
        early_stopping=True, warm_up=20, fine_tune=40, patience=3, validation_fraction=0.3
    )
    found.fit(x, y)
    assert found.n_iter_ == len(found.validation_scores_) < 60
    rows = np.random.RandomState(0)
    rows.randint(2**31 - 1, size=1)
    held_out = fissile.data.Labelled(x, y, x[:1], y[:1]).held_out(0.3, rows.randint(2**31 - 1))
    best = max(found.validation_scores_[-4:])
    assert found.score(held_out.x_test, held_out.y_test) == pytest.approx(best)


def test_the_loop_with_weights_agrees_with_the_bank():
    x, y = blobs(samples=100)
    data = Data(torch.tensor(x).float(), y, torch.tensor(x).float(), y)
    task = Task((8, 6, 3), data, Recipe(lr=1e-2))
    plain, weighted = make(task, 5), make(task._replace(weights=torch.ones(3)), 5)
    for one, other in zip(plain.train(2), weighted.train(2), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.score == pytest.approx(other.score)
    plain.split(2, fissile.Random())
    weighted.split(2, fissile.Random())
    losses = [[epoch.loss for epoch in trainer.train(3)] for trainer in (plain, weighted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert torch.equal(*(t.take().module.layers[0].owner for t in (plain, weighted)))


def test_class_weights_shift_the_answers():
    x, y = blobs(2, weights=[0.9], class_sep=0.3, samples=400)
    rare = [
        quick(class_weight=weight, warm_up=8, fine_tune=8).fit(x, y).predict(x).mean()
        for weight in ({0: 10.0, 1: 1.0}, None, "balanced", {0: 1.0, 1: 100.0})
    ]
    assert rare[0] <= rare[1] < rare[2] < rare[3]


# --- in scikit-learn's company


def test_it_works_in_pipelines_and_searches():
    x, y = blobs()
    names = np.array(["no", "perhaps", "yes"])[y]
    pipeline = make_pipeline(StandardScaler(), quick(hidden=None, fine_tune=6, warm_up=6))
    grid = {"fissileclassifier__nonzeros": [40, 200], "fissileclassifier__split": ["gram"]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(x, names)
    assert search.best_score_ > 0.6
    assert set(search.predict(x)) == set(names)
    assert cross_val_score(clone(pipeline), x, names, cv=2).shape == (2,)


def test_a_pickled_copy_predicts_the_same_and_learns_the_same():
    x, y = blobs()
    for weight in (None, {0: 1.0, 1: 2.0, 2: 1.0}):
        found = quick(class_weight=weight).fit(x, y)
        copied = pickle.loads(pickle.dumps(found))
        assert np.array_equal(found.predict_proba(x), copied.predict_proba(x))
        answers = [each.partial_fit(x, y).predict_proba(x) for each in (found, copied)]
        assert np.array_equal(*answers)
        assert found.n_iter_ == 5


def test_parts_of_the_data_teach_too(digits):
    x, x_test, y, y_test = digits
    stream = FissileClassifier(2000, lr=5e-3, warm_up=10, random_state=0)
    for _ in range(8):
        for part in range(3):
            stream.partial_fit(x[part::3], y[part::3], classes=np.arange(10))
    assert stream.n_iter_ == 24
    assert stream.score(x_test, y_test) > 0.9


# --- files


@pytest.mark.parametrize("kind", [np.int64, "U1", object, bool])
def test_a_file_brings_the_classifier_back(tmp_path, kind):
    x, y = blobs(2)
    labels = y.astype(kind) if kind in (np.int64, bool) else np.array(["a", "Ω"], kind)[y]
    found = quick(early_stopping=True, split="gram").fit(x, labels)
    found.save(tmp_path / "c.safetensors")
    back = FissileClassifier.load(tmp_path / "c.safetensors")
    assert np.array_equal(found.predict_proba(x), back.predict_proba(x))
    assert back.predict(x).dtype == labels.dtype
    assert np.array_equal(found.predict(x), back.predict(x))
    assert back.get_params() == found.get_params()
    fitted = ("nonzeros_", "hidden_", "alpha_", "n_iter_", "loss_curve_", "validation_scores_")
    assert all(getattr(back, name) == getattr(found, name) for name in fitted)
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]
    assert fissile.nonzeros(fissile.load(tmp_path / "c.safetensors")).all == found.nonzeros_


def test_a_loaded_classifier_learns_on(tmp_path):
    x, y = blobs()
    quick().fit(x, y).save(tmp_path / "c")
    back = FissileClassifier.load(tmp_path / "c")
    before = back.predict_proba(x)
    back.partial_fit(x, y)
    assert not np.allclose(before, back.predict_proba(x))
    assert back.n_iter_ == 5


def test_names_of_features_are_kept(tmp_path):
    pandas = pytest.importorskip("pandas")
    x, y = blobs()
    table = pandas.DataFrame(x, columns=[f"f{i}" for i in range(8)])
    quick().fit(table, y).save(tmp_path / "c")
    back = FissileClassifier.load(tmp_path / "c")
    assert back.feature_names_in_.tolist() == list(table.columns)
    with pytest.raises(ValueError, match="feature names"):
        back.predict(table[table.columns[::-1]])


@pytest.mark.parametrize(
    "change",
    [
        lambda note: note.pop("classes"),
        lambda note: note.update(version=2),
        lambda note: note.update(loss=7),
        lambda note: note.update(names=["one"]),
        lambda note: note["parameters"].update(__class__="x"),
        lambda note: note["classes"].update(values=[0, 1]),
        lambda note: note["classes"].update(values=[2, 1, 0]),
        lambda note: note["classes"].update(values=[0, 1, "x"]),
        lambda note: note["classes"].update(values=[[0], [1], [2]]),
        lambda note: note["classes"].update(dtype="U999999999"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change):
    path = tmp_path / "c"
    quick().fit(*blobs()).save(path)
    rewrite(path, change)
    with pytest.raises(fissile.FileError):
        FissileClassifier.load(path)


def test_other_files_are_refused(tmp_path):
    fissile.save(fissile.MLP([4, 3, 1]), tmp_path / "network")
    with pytest.raises(fissile.FileError, match=r"no classifier; read it with fissile\.load"):
        FissileClassifier.load(tmp_path / "network")
    with pytest.raises(fissile.FileError, match="could not write"):
        quick().fit(*blobs()).save(tmp_path / "nowhere" / "c")
    with pytest.raises(NotFittedError):
        quick().save(tmp_path / "c")


# --- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonzeros": 14, "hidden": None}, "one hidden neuron takes 15 parameters; give at least"),
        ({"nonzeros": 100}, "nonzeros=100 and hidden=6 both decide the width"),
        ({"nonzeros": 0.5, "hidden": None}, "nonzeros=0.5 is not a whole number"),
        ({"hidden": 0}, "hidden=0 is not a whole number of at least 1"),
        ({"alpha": 0}, "alpha=0"),
        ({"split": "slices"}, "unknown split 'slices'"),
        ({"warm_up": -1}, "warm_up=-1"),
        ({"batch": 0}, "batch=0"),
        ({"lr": -1.0}, "lr=-1.0 must be 0 or more"),
        ({"restarts": 0}, "restarts=0"),
        ({"early_stopping": True, "patience": 0}, "patience=0"),
        ({"early_stopping": True, "validation_fraction": 2.0}, "validation_fraction=2.0"),
        ({"device": "nowhere"}, "cannot train on 'nowhere'"),
    ],
)
def test_an_error_says_what_to_do(options, message):
    with pytest.raises(fissile.FissileError, match=re.escape(message)):
        quick(**options).fit(*blobs())


def test_partial_fit_wants_to_know_the_classes():
    x, y = blobs()
    with pytest.raises(fissile.FissileError, match="must be given all classes"):
        quick().partial_fit(x, y)
    stream = quick().partial_fit(x[y < 2], y[y < 2], classes=[0, 1])
    with pytest.raises(
        fissile.FissileError, match=r"y holds \[2\], which the classes \[0, 1\] lack"
    ):
        stream.partial_fit(x, y)
    with pytest.raises(fissile.FissileError, match=r"now \[0, 1, 2\], and were \[0, 1\]"):
        stream.partial_fit(x[y < 2], y[y < 2], classes=[0, 1, 2])
    for options in ({"early_stopping": True}, {"class_weight": "balanced"}):
        assert not hasattr(quick(**options), "partial_fit")


@pytest.mark.parametrize("weight", [None, "balanced"])
def test_a_network_that_diverges_is_kept_at_its_last_finite_epoch(weight):
    x, y = blobs()
    with pytest.warns(ConvergenceWarning, match="standardize the features"):
        found = quick(class_weight=weight, lr=1e30).fit(x, y)
    assert np.isfinite(found.decision_function(x)).all()
    assert found.n_iter_ < 4


def test_a_loss_that_still_falls_is_warned_of():
    x, y = blobs()
    with pytest.warns(ConvergenceWarning, match="the loss still fell, from .* may not have conv"):
        quick().fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick(warm_up=100, fine_tune=900).fit(x, y)


@pytest.mark.parametrize("load", [load_iris, load_wine])
def test_small_data_are_learned_with_the_defaults(load):
    x, y = load(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), FissileClassifier(random_state=0))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = cross_val_score(pipeline, x, y, cv=folds).mean()
    linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    assert ours >= cross_val_score(linear, x, y, cv=folds).mean() - 0.01


def test_epochs_are_more_where_steps_are_few():
    x, y = blobs(samples=130)  # two steps an epoch
    assert FissileClassifier(random_state=0).fit(x, y).n_iter_ == 500
    assert FissileClassifier(warm_up=2, random_state=0).fit(x, y).n_iter_ == 252
    assert FissileClassifier(batch=5, random_state=0).fit(x, y).n_iter_ == 50


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(fissile.FissileError, match=r"pip install .*\[sklearn\]'"):
        importlib.reload(sys.modules["fissile.sklearn"])


def test_the_rival_s_solver_finds_what_scikit_learn_finds(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    rivals = importlib.import_module("sklearn_rivals")
    X, y = load_digits(return_X_y=True)
    X, y, penalty = X[:300].astype(np.float32) / 16, y[:300], 0.02
    ours = rivals.Logistic(X, y, 10)
    weight = ours.descended(penalty, ours.nothing(), 1500).numpy()
    slopes = weight[:-1] / ours.scale.numpy()[:, None]
    intercepts = weight[-1] - ours.shift.numpy() @ slopes
    theirs = LogisticRegression(
        l1_ratio=1, solver="saga", C=1 / (len(y) * penalty), tol=1e-5, max_iter=5000
    ).fit(X, y)

    def objective(slopes, intercepts):
        logits = X.astype(np.float64) @ slopes + intercepts
        return log_loss(y, softmax(logits, 1)) + penalty * np.abs(slopes).sum()

    best = objective(theirs.coef_.T, theirs.intercept_)
    assert objective(slopes, intercepts) == pytest.approx(best, rel=1e-4)
    assert np.count_nonzero(slopes) == pytest.approx(np.count_nonzero(theirs.coef_), abs=3)


# --- files and weights


def test_a_saved_classifier_is_a_file_like_any_other(tmp_path, monkeypatch):
    x, y = blobs()
    found, path = quick().fit(x, y), tmp_path / "c"
    before = os.umask(0o022)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda mask: pytest.fail("os.umask is not thread-safe"))
            found.save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    old = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)  # which a save must call
    with pytest.raises(FileError, match=r"could not write .*: No space left"):
        found.save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_one_long_label_is_neither_written_nor_read(tmp_path):
    x, y = blobs(2)
    found = quick().fit(x, np.array(["a", "b"])[y])
    found.save(tmp_path / "c")
    names = [f"{k:04}" for k in range(9000)]
    rewrite(tmp_path / "c", lambda note: note["classes"].update(values=[*names, "z" * 10**4]))
    with pytest.raises(FileError, match="far longer than the others; shorten it"):
        FissileClassifier.load(tmp_path / "c")
    found.classes_ = np.array([*names, "z" * 10**4])
    with pytest.raises(FileError, match="far longer than the others; shorten it"):
        found.save(tmp_path / "d")


def test_a_changed_note_is_noticed(tmp_path):
    x, y = blobs(2)
    quick().fit(x, np.array(["no", "yes"])[y]).save(tmp_path / "c")
    data = (tmp_path / "c").read_bytes()
    (tmp_path / "c").write_bytes(data.replace(b"yes", b"yet"))
    with pytest.raises(FileError, match="note is damaged: its checksum differs"):
        FissileClassifier.load(tmp_path / "c")


@pytest.mark.parametrize("weight", [{0: np.nan}, {0: np.inf}, {0: -1.0}, {0: 0.0, 1: 0.0, 2: 0.0}])
def test_weights_that_nothing_can_be_learned_by_are_refused(weight):
    x, y = blobs()
    with pytest.raises(FissileError, match=r"class_weight comes to .*; give finite weights"):
        quick(class_weight=weight).fit(x, y)
