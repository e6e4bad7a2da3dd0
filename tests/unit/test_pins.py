"""What stays as it is, however the source is laid out; ``python tests/pins.py`` writes it anew."""

import base64
import importlib
import zlib

import numpy as np
import pins
import pytest
import torch

import fissile

STORED = pins.stored()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_what_is_stored_is_what_is_taken_down():
    assert STORED["names"].keys() == pins.PUBLIC.keys()
    assert STORED["files"].keys() == pins.models().keys()
    assert STORED["classifiers"].keys() == pins.CLASSIFIERS.keys()
    assert STORED["runs"].keys() == pins.RUNS.keys()


# ---- names, commands, keys ---------------------------------------------------------------------


@pytest.mark.parametrize("module", pins.PUBLIC)
def test_public_names_and_what_they_take(module):
    pytest.importorskip(pins.PUBLIC[module])
    assert pins.public(module) == STORED["names"][module]


def test_commands_and_their_options():
    assert pins.commands() == STORED["commands"]


def test_one_trial_of_every_kind_has_the_key_it_had():
    assert STORED["kinds"].items() <= pins.kinds().items()


def test_every_study_has_the_trials_it_had():
    assert STORED["keys"].items() <= pins.all_keys().items()  # a new study may come beside


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORED["files"])
def test_files_are_written_to_the_byte(kind):
    text, before = pins.file_of(pins.models()[kind]), STORED["files"][kind]
    if kind.startswith("packed") and "ng" in zlib.ZLIB_RUNTIME_VERSION:
        # Packed files deflate their recipe, which zlib-ng does in other bytes of the same meaning.
        text, before = pins.header_and_tensors(text)[1], pins.header_and_tensors(before)[1]
    assert text == before


@pytest.mark.parametrize("kind", STORED["files"])
def test_files_written_before_are_read(kind, tmp_path):
    made, path = pins.models()[kind], tmp_path / "model.safetensors"
    path.write_bytes(base64.b85decode(STORED["files"][kind]))
    read = fissile.load(path, pins.filters() if "filters" in kind else None)
    assert [type(one) for one in read.modules()] == [type(one) for one in made.modules()]
    before, after = made.state_dict(), read.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("recipe", pins.CLASSIFIERS)
def test_classifiers_are_written_as_they_were(recipe):
    text = pins.file_of(pins.classifier(recipe))
    assert pins.outline(text) == STORED["classifiers"][recipe]["outline"]


@pytest.mark.parametrize("recipe", pins.CLASSIFIERS)
def test_classifiers_written_before_are_read(recipe, tmp_path):
    before, path = STORED["classifiers"][recipe], tmp_path / "classifier.safetensors"
    path.write_bytes(base64.b85decode(before["file"]))
    read = importlib.import_module("fissile.sklearn").FissileClassifier.load(path)
    np.testing.assert_allclose(read.decision_function(pins.SAMPLES[:3]), before["says"], rtol=1e-6)
    assert read.get_params() == pins.classifier(recipe).get_params()


# ---- weights -----------------------------------------------------------------------------------


def test_expansions_are_the_same():
    found = pins.expansions()
    assert found.keys() == STORED["expansions"].keys()
    for name, one in found.items():
        assert one == STORED["expansions"][name], name


@pytest.mark.parametrize("run", pins.RUNS)
def test_seeded_runs_come_to_the_same_weights(run):
    found, before = pins.RUNS[run](), STORED["runs"][run]
    assert found.keys() == before.keys()
    for name, one in found.items():
        # Processors round differently.
        torch.testing.assert_close(one, before[name], rtol=1e-5, atol=1e-6)
