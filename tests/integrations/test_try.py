"""``fissile try`` and ``fissile fit``: files of every kind, the choice, the page; bad input."""

import re
from html.parser import HTMLParser

import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

import fissile
from fissile.cli.lab import app
from fissile.lab import try_file as trying
from fissile.sklearn import FissileClassifier

RNG = np.random.default_rng(0)
MEANS = RNG.normal(size=(4, 8))
Y = np.arange(500) % 4
X = (MEANS[Y] + RNG.normal(size=(500, 8))).astype(np.float32)


# So few samples are not enough for training to converge.
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(trying, "WIDTHS", (2, 3))
    monkeypatch.setattr(trying, "BUDGETS", (2,))
    monkeypatch.setattr(trying, "EPOCHS", 3)


def table(**columns):
    frame = pandas.DataFrame(X, columns=[f"f{i}" for i in range(8)])
    return frame.assign(label=[f"kind {k}" for k in Y], **columns)


@pytest.fixture
def features(tmp_path):
    path = tmp_path / "f.npz"
    np.savez(path, x_train=X[:400], y_train=Y[:400], x_test=X[400:], y_test=Y[400:])
    return path


def run(*words):
    return CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)


def test_try_prints_a_choice_and_writes_a_page(features, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("try", features)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].split() == [
        "non-zeros",
        "dense",
        "width",
        "dense",
        "split",
        "recipe",
        "use",
        "test",
    ]
    first, second = lines[1].split(), lines[2].split()
    assert first[:2] == ["30", "2"]
    assert second[:2] == ["43", "3"]
    assert len(first) == len(second) + 1  # the recipe is tried at one budget
    page = (tmp_path / "try-f.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert not re.search(r'(src|href)="(?!#)', page)
    assert page.count("<svg") == 1
    HTMLParser().feed(page)
    command = next(line for line in lines if line.startswith("  fissile fit")).split()
    done = run(*command[1:-1], tmp_path / "model.safetensors")
    assert "non-zeros" in done.output
    assert FissileClassifier.load(tmp_path / "model.safetensors").nonzeros_ == 30


@pytest.mark.parametrize("arm", trying.ARMS)
def test_the_lines_of_python_make_what_the_command_makes(arm, features, tmp_path):
    one = trying.Tried(arm, 3, 43, np.ones(4), 1.0)
    command, lines = trying.told(one, str(features))
    x, y = X[:400], Y[:400]
    made = eval(lines, {"FissileClassifier": FissileClassifier, "x": x, "y": y})
    run(*command.split()[1:-1], tmp_path / "m.safetensors")
    other = FissileClassifier.load(tmp_path / "m.safetensors")
    assert made.nonzeros_ == other.nonzeros_ <= 43
    assert np.array_equal(made.decision_function(x), other.decision_function(x))


def test_no_choice_is_made_on_test_samples(features):
    data = trying.samples_of(str(features))
    other = fissile.data.Labelled(data.x, data.y, data.x_test, data.y_test[::-1].copy())
    one, two = trying.tried(data), trying.tried(other)
    assert [t.test for t in one] != [t.test for t in two]
    for a, b in zip(one, two, strict=True):
        assert np.array_equal(a.right, b.right)
    assert [t.arm for t in trying.chosen(one)] == [t.arm for t in trying.chosen(two)]


def test_arms_share_the_warm_up_and_the_budget(features):
    found = trying.tried(trying.samples_of(str(features)))
    dense, split = found[:2]
    assert (dense.arm, split.arm, dense.nonzeros) == ("dense", "split", split.nonzeros)
    assert dense.curve[:3] == split.curve[:3]
    assert len(dense.curve) == 2 * 3 + 1
    assert dense.curve[3] == pytest.approx(dense.curve[2])  # nothing happens to it at the split


@pytest.mark.parametrize(
    ("accuracies", "arm"),
    [((0.5, 0.9, 0.9), "split"), ((0.9, 0.9, 0.9), "dense"), ((0.5, 0.6, 0.99), "recipe")],
)
def test_the_simplest_that_is_not_clearly_beaten_is_chosen(accuracies, arm):
    rows = np.arange(1000) / 1000
    found = [
        trying.Tried(name, 4, 100, (rows < share).astype(float), 0.0)
        for name, share in zip(trying.ARMS, accuracies, strict=True)
    ]
    assert [one.arm for one in trying.chosen(found)] == [arm]
    close = [trying.Tried(n, 4, 100, RNG.random(50), 0.0) for n in trying.ARMS[:2]]
    assert trying.chosen(close)[0].arm == "dense"


def test_files_of_every_kind_hold_the_same(tmp_path, features):
    whole = trying.samples_of(str(features))
    fissile.data.write_features(tmp_path / "f.safetensors", whole)
    split = ["train"] * 400 + ["test"] * 100
    table(split=split).to_csv(tmp_path / "f.csv", index=False)
    table(split=split).to_parquet(tmp_path / "f.parquet")
    for kind in ("safetensors", "csv", "parquet"):
        found = trying.samples_of(str(tmp_path / f"f.{kind}"))
        for name in ("x", "y", "x_test", "y_test"):
            np.testing.assert_allclose(getattr(found, name), getattr(whole, name), rtol=1e-5)
    assert found.names == ("kind 0", "kind 1", "kind 2", "kind 3")
    listed = pandas.DataFrame({"features": [*X], "label": Y, "split": split})
    listed.to_parquet(tmp_path / "listed.parquet")
    assert np.array_equal(trying.samples_of(str(tmp_path / "listed.parquet")).x, whole.x)


def test_a_table_without_a_split_holds_a_fifth_of_every_class_out(tmp_path):
    table().to_csv(tmp_path / "f.csv", index=False)
    found = trying.samples_of(str(tmp_path / "f.csv"))
    assert np.bincount(found.y_test).tolist() == [25] * 4
    renamed = table().rename(columns={"label": "kind"})
    renamed.to_csv(tmp_path / "g.csv", index=False)
    assert trying.samples_of(str(tmp_path / "g.csv"), "kind").classes == 4


def test_a_data_set_by_its_name():
    assert trying.samples_of("generated").inputs == 64


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (table().drop(columns="label"), "has no column 'label', but f0, f1"),
        (table().assign(label="one"), "are of one class"),
        (table().assign(label=[None, *["a", "b"] * 249, "a"]), "1 rows have no label"),
        (
            table().assign(f3=np.where(np.arange(500) == 7, np.nan, 1.0)),
            "the column 'f3' holds NaN",
        ),
        (
            table().assign(f3=np.where(np.arange(500) == 7, np.inf, 1.0)),
            "the column 'f3' holds NaN",
        ),
        (table().assign(f4="red"), "the column 'f4' holds NaN or no numbers"),
        (table(split="train"), "must say train or test, and both must occur"),
        (table(split=["train", "dev"] * 250), "must say train or test"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_bad_tables_are_one_clear_error(frame, message, kind, tmp_path):
    path = tmp_path / f"f.{kind}"
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    with pytest.raises(fissile.FissileError, match=message):
        trying.samples_of(str(path))


@pytest.mark.parametrize("name", ["f.csv", "f.parquet", "f.npz", "f.safetensors", "f.txt"])
def test_files_that_are_none_are_one_clear_error(name, tmp_path):
    (tmp_path / name).write_bytes(b"\xff\x00nothing" * 9)
    with pytest.raises(fissile.FissileError, match=re.escape(name)):
        trying.samples_of(str(tmp_path / name))
    with pytest.raises(fissile.FissileError, match="neither a file nor a data set"):
        trying.samples_of(str(tmp_path / "missing.npz"))


def test_fit_takes_a_budget_or_a_width(features, tmp_path):
    for words in ([], ["--nonzeros", 30, "--hidden", 4]):
        with pytest.raises(fissile.FissileError, match="give --nonzeros for the recipe"):
            run("fit", features, *words, "--to", tmp_path / "m.safetensors")


def test_large_sets_are_tried_on_some_of_their_samples(features):
    found = trying.tried(trying.samples_of(str(features)), most=100)
    assert len(found[0].right) == 20


def test_the_command_names_the_column_of_labels_and_holds_together_in_a_shell():
    one = trying.Tried("dense", 3, 43, np.ones(4), 1.0)
    command, _ = trying.told(one, "my table.csv", "kind of")
    assert command.startswith("fissile fit 'my table.csv' --")
    assert "--label 'kind of'" in command
