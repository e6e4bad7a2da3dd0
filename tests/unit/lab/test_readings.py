"""Readings: what they change in trials, claims and tables, and that none passes for another."""

from collections import Counter
from dataclasses import replace

import pytest

from fissile._common.errors import FissileError
from fissile.lab.readings import (
    NAMED,
    QUESTIONS,
    around,
    reading,
    text,
    told,
    under,
    within,
)
from fissile.lab.results import load, matching
from fissile.lab.store import Run, Store
from fissile.lab.studies import STUDIES
from fissile.lab.trial import changed

OPEN = [study for study in STUDIES.values() if len(around(study)) > 1]


def cells(study, chosen, scale="paper"):
    return study.works(scale, 1, {"reading": text(chosen)})


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_the_default_reading_is_the_study_itself(study):
    assert cells(study, {}) == study.works("paper", 1)
    assert under(study, "default") == study
    assert around(study)[0] == {}


@pytest.mark.parametrize("study", OPEN, ids=[study.id for study in OPEN])
def test_readings_do_not_collide(study):
    """Each differs from every other, in the keys of its trials or in what it reads of them."""
    seen = Counter()
    for chosen in around(study):
        keys = frozenset(work.key for work in cells(study, chosen))
        read = under(study, text(chosen))
        seen[keys, repr((read.claims, read.published, read.figure)), read.accuracy] += 1
    assert max(seen.values()) == 1


def test_a_reading_is_another_run_of_the_store(tmp_path):
    with Store(tmp_path) as store:
        words = ("default", "negatives=flip", "moments=fresh", "negatives=flip,moments=fresh")
        for one in words:
            changes = {} if one == "default" else {"reading": one}
            store.note_run(Run("capacity", "smoke", None, changes, f"make {one}"))
        assert len(store.runs()) == len(words)
        found = matching(store, ["capacity"], None, {"reading": "moments=fresh"})
        assert [run.changes["reading"] for run in found] == ["moments=fresh"]
        assert "Another reading of the paper: moments=fresh" in load(store, found[0]).note


def test_each_option_changes_what_it_says():
    work = cells(STUDIES["embed-clauses"], reading("embedding=clauses,samples=10000"))[0]
    assert (work.embedding, work.task.train) == (work.task.clauses, 10_000)
    works = cells(STUDIES["embed-neurons"], reading("alpha=4,clusters=1"))
    assert {(w.arm.name, w.arm.clusters) for w in works} == {
        ("dense", None), ("gram-4", 4), ("random-4", None)
    }  # fmt: skip
    assert {w.recipe.l2 for w in cells(STUDIES["cnn-256"], reading("penalties=off"))} == {0.0}
    assert {w.task.scaling for w in cells(STUDIES["cifar100"], reading("scaling=raw"))} == {"raw"}
    assert not QUESTIONS["scaling"].concerns(STUDIES["fashionmnist"])  # its pixels are "raw"


def test_claims_and_tables_follow_the_names_of_arms_and_measures():
    study = under(STUDIES["cosine"], "alpha=2,cosine=signed")
    assert study.published[0].arms == ("dense", "clause-2", "random-2")
    assert study.published[0].measure == "cosine"
    assert {(c.check.arm, c.check.measure) for c in study.claims[:-1]} == {
        ("clause-2", "cosine"), ("random-2", "cosine")
    }  # fmt: skip
    assert under(STUDIES["codes"], "epoch=best").accuracy == "best"


def test_settings_change_a_part_of_a_reading():
    changes = {"reading": "prose", "negatives": "flip"}
    task = STUDIES["codes"].works("quick", 1, changes)[0].task
    assert (task.negatives, task.others) == ("flip", "arbitrary")


def test_the_best_epoch_stands_for_the_accuracy_of_trials_that_have_one():
    from fissile.lab.frame import table

    trial = STUDIES["codes"].works("smoke", 1)[0]
    lone = replace(changed(trial, {"train": 300}))
    held = {trial.key: {"accuracy": 0.5, "best": 0.75, "nonzeros": 1.0}}
    held[lone.key] = {"accuracy": 0.25, "nonzeros": 1.0}
    assert list(table([trial, lone], held, "best")["accuracy"]) == [75.0, 25.0]


def test_what_is_a_studys_own_answer_is_no_part_of_its_reading():
    assert within(STUDIES["embed-neurons"], reading("samples=10000")) == {}
    assert within(STUDIES["codes"], reading("samples=10000,rows=unit")) == {"samples": "10000"}
    assert text(reading("others=arbitrary, negatives=clause")) == text(NAMED["prose"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bogus", "there is no reading 'bogus'; give default, prose, tables"),
        ("colour=red", "there is no reading 'colour=red'"),
        ("samples=7", "samples cannot be '7'; it is one of 10000, 50000, 100000"),
        ("rows=unit", "'rows' does not concern capacity; open there: samples, negatives"),
    ],
)
def test_what_cannot_be_read_is_one_error(words, message):
    with pytest.raises(FissileError, match=message):
        told([STUDIES["capacity"]], words)
