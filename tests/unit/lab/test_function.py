"""Trials of a user's own function: their keys, settings and errors."""

import json
import pickle
import sys
from dataclasses import asdict

import pytest
from own_studies import written

from fissile import FissileError
from fissile.lab import function, source
from fissile.lab.function import FunctionTrial, trials_of
from fissile.lab.source import code_of, executed
from fissile.lab.studies import find
from fissile.lab.trial import changed, from_spec, numbered, settings


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(function, "_FUNCTIONS", {})
    monkeypatch.setattr(source, "_MODULES", {})
    monkeypatch.setenv("FISSILE_DATA", "")
    return written(tmp_path)


def test_a_trial_for_every_combination(toy):
    made = trials_of(executed(toy).trial, arm=("a", "b"), width=range(2, 4), steps=5)
    assert [one.columns()["width"] for one in made] == [2, 3, 2, 3]
    assert made[0].columns() == {"steps": 5, "width": 2, "arm": "a", "trial": 0}
    assert settings(made[0]) == {"width", "steps"}
    assert trials_of(executed(toy).trial)[0].columns() == {
        "function": "trial", "arm": "trial", "trial": 0,
    }  # fmt: skip


def test_keys_tell_settings_seeds_and_code_apart_and_come_back(toy):
    (one,) = trials_of(executed(toy).trial, width=1)
    others = [changed(one, {"width": 2}), *numbered(one, 3)[1:], *trials_of(executed(toy).trial)]
    assert len({work.key for work in (one, *others)}) == 5
    stored = json.loads(json.dumps(asdict(one)))
    assert "toy.py" not in json.dumps(stored)  # no store holds a path that might be run
    assert from_spec(one.kind, stored) == one
    assert from_spec(one.kind, stored).key == one.key
    with pytest.raises(FissileError, match="width='x' is not a whole number"):
        changed(one, {"width": "x"})


def test_another_process_reads_the_file_and_refuses_one_that_has_changed(toy):
    (one,) = trials_of(executed(toy).trial, width=1, arm="sparse")
    text = pickle.dumps(one)
    function._FUNCTIONS.clear()
    with pytest.raises(FissileError, match="in a file that was not given"):
        function.call(one)  # as one that was read from a store
    assert function.call(pickle.loads(text)) == function.call(one)
    function._FUNCTIONS.clear()
    written(toy.parent, ("FACTOR = 2.0", "FACTOR = 3.0"))
    with pytest.raises(FissileError, match="has changed since this run began"):
        pickle.loads(text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1], {}])
def test_what_is_no_setting_is_refused(value):
    with pytest.raises(FissileError, match="is no setting; give numbers or words"):
        FunctionTrial("trial", "0", (("width", value),))


def test_a_function_stands_in_a_file(toy):
    with pytest.raises(FissileError, match="must be a function of its own in a file"):
        trials_of(lambda settings, seed: {"x": 1})


def test_code_is_what_the_function_uses(tmp_path):
    def code(text):
        (tmp_path / "one.py").write_text(text)
        return code_of(tmp_path / "one.py", "f")

    base = "A = {}\nB = 1\ndef g(): return A\ndef f(): return g()\n"
    assert (
        code(base) == code(f"'''A title.'''\n{base}# a comment\nC = f\n") == code(base + "B = 2\n")
    )
    changes = (
        base.replace("A = {}", "A = {1: 2}"),
        f"{base}A['x'] = 1\n",
        f"{base}A.update(x=1)\n",
        base.replace("B = 1", "from os import *"),
        f"{base}for A in range(3): pass\n",
    )
    assert len({code(text) for text in (base, *changes)}) == 6


def test_a_split_of_ones_own_is_refused_by_its_line(toy, monkeypatch):
    from fissile.expansion import split

    monkeypatch.setattr(split, "_SPLITS", dict(split._SPLITS))
    text = """import fissile
from fissile.lab.study import Scale, Study
from fissile.lab.trial import Arm, Trial


class Mine(fissile.Random):
    pass


fissile.register_split("mine", Mine)
ARMS = (Arm(), Arm("mine", 2))
STUDY = Study("toy", "A toy", "", "", {"smoke": Scale(1, (Trial(),))}, ARMS)
"""
    path = written(toy.parent, text=text)
    with pytest.raises(FissileError, match=r"line 10: the split 'mine' is not one of fissile's"):
        find([str(path)])
    del split._SPLITS["mine"]
    path = written(toy.parent, ('Arm("mine", 2)', 'Arm("mien", 2)'), text=text)
    with pytest.raises(FissileError, match=r"line 11: unknown split 'mien'"):
        find([str(path)])
