"""What the page can set, and what it refuses."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fissile._common.errors import FissileError
from fissile.bank import Dense, Expand
from fissile.lab.readings import NAMED
from fissile.play.settings import (
    NUMBERS,
    PRESETS,
    SECONDS,
    Settings,
    controls,
    readings,
)


@pytest.mark.parametrize("one", controls(), ids=lambda one: one["name"])
def test_every_default_is_within_its_bounds(one):
    assert Settings.read({one["name"]: one["default"]}) == Settings()


BAD = [
    {"clauses": "1"}, {"clauses": "33"}, {"clauses": "8.5"}, {"clauses": "-8"}, {"clauses": ""},
    {"clauses": "1_0"}, {"clauses": "٨"}, {"clauses": "9" * 5000}, {"clauses": 8},
    {"clauses": "NaN"}, {"clauses": "0x10"}, {"clauses": " 8"},
    {"l1": "nan"}, {"l1": "inf"}, {"l1": "1e999"}, {"l1": "-1"}, {"l1": "1"},
    {"splits": ""}, {"splits": "clause,clause"}, {"splits": "dense"}, {"splits": "__class__"},
    {"splits": "clause,random,gram,n:m"}, {"task": "cifar100"}, {"task": "../etc/passwd"},
    {"clauses": None}, {"task": "digits"}, {"clauses": "32", "size": "6"},
    {"splits": "n:m", "alpha": "7"}, {"samples": "100000", "trials": "20"},
    {"warm_up": "400", "fine_tune": "400", "samples": "40000", "neurons": "32", "trials": "20"},
    {"nothing": "1"}, {"__init__": "1"}, {1: "1"}, "clauses", None, [], 3,
]  # fmt: skip


@pytest.mark.parametrize("words", BAD, ids=lambda words: repr(words)[:40])
def test_what_is_out_of_bounds_is_refused_in_one_line(words):
    with pytest.raises(FissileError) as error:
        Settings.read(words)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 5300


@given(st.dictionaries(st.sampled_from([one["name"] for one in controls()]), st.text(max_size=12)))
def test_any_text_makes_settings_or_an_error(words):
    try:
        made = Settings.read(words)
    except FissileError:
        return
    assert Settings.read(made.changed()) == made
    assert made.numbers <= NUMBERS
    assert made.seconds <= SECONDS


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_presets_survive_the_address(preset):
    assert Settings.read(preset.settings.changed()) == preset.settings
    assert preset.about.endswith(".")
    json.dumps(preset.settings.changed())


def test_names_of_presets_differ():
    assert len({preset.name for preset in PRESETS}) == len(PRESETS)


def test_readings_are_those_of_the_lab():
    assert readings().keys() == NAMED.keys()
    for changes in readings().values():
        Settings.read(changes)


def test_arms_are_the_banks():
    arms = Settings(splits=("random", "n:m"), alpha=4, moments="fresh").arms()
    assert isinstance(arms["dense"], Dense)
    assert [arm.moments for arm in arms.values() if isinstance(arm, Expand)] == ["fresh", "fresh"]
    assert repr(arms["n:m-4"].split) == "Structured(n=2, m=8)"
