"""What stays as it is, however the source is laid out.

Public names, commands, the keys of trials, files and the weights of seeded runs are compared with
``pins.json``. Whoever changes one of them on purpose writes that file anew, and reads in its diff
what changed::

    python tests/unit/test_pins.py
"""

import base64
import hashlib
import importlib
import inspect
import json
import tempfile
import zlib
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import fissile
from fissile.bank import Bank, Data, Dense, DropConnect, Dynamic, Expand, Spec
from fissile.cli.__main__ import main
from fissile.lab.studies import STUDIES

sparse = importlib.import_module("fissile.bank.sparse")
vision = importlib.import_module("fissile.bank.vision")

STORED = Path(__file__).with_name("pins.json")
PUBLIC = (
    "fissile", "fissile.bank", "fissile.data", "fissile.measure", "fissile.measure.theory",
    "fissile.sklearn", "fissile.integrations.lightning", "fissile.integrations.transformers",
    "fissile.integrations.parallel", "fissile.integrations.export",
)  # fmt: skip


@cache
def stored():
    return json.loads(STORED.read_text())


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def numbers(*shape):
    """Weights that every processor makes alike: short fractions, no two of one magnitude."""
    count = torch.Size(shape).numel()
    assert count < 997
    return ((torch.arange(count) * 619 % 997 - 498.25) / 512).view(shape)


def filled(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(numbers(*parameter.shape))
    return model


def mlp(*sizes, **settings):
    return filled(fissile.MLP(sizes, **settings))


# ---- names -------------------------------------------------------------------------------------


def parameters_of(thing):
    """Name what a function or a class takes; nothing is said of anything else."""
    made = thing.__init__ if inspect.isclass(thing) else thing
    return list(inspect.signature(made).parameters) if inspect.isfunction(made) else None


def public(module):
    found = importlib.import_module(module)
    return {name: parameters_of(getattr(found, name)) for name in sorted(found.__all__)}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_and_what_they_take(module):
    assert public(module) == stored()["names"][module]


# ---- commands ----------------------------------------------------------------------------------


def commands():
    """Look at every command but ``plan``: its first line of help, and what it takes."""
    typer = importlib.import_module("typer.main")
    with mock.patch.object(typer.Typer, "__call__", autospec=True) as call:
        main()
    return described("fissile", typer.get_command(call.call_args.args[0]))


def described(name, command):
    found = {
        "help": command.help.strip().splitlines()[0],
        "takes": {" ".join(one.opts + one.secondary_opts): option(one) for one in command.params},
    }
    inner = getattr(command, "commands", {})
    parts = [described(f"{name} {key}", one) for key, one in inner.items() if key != "plan"]
    return {name: found} | {key: value for part in parts for key, value in part.items()}


def option(one):
    default = str(one.default) if isinstance(one.default, str | int | float | Path) else None
    return [one.name, one.required, one.nargs, getattr(one, "multiple", False), default]


def test_commands_and_their_options():
    assert commands() == stored()["commands"]


# ---- keys --------------------------------------------------------------------------------------


def keys(study, scale):
    """Return how many trials a study has at a scale, and a hash of their keys, without its data."""
    found = sorted(work.key for work in STUDIES[study].everything(scale))
    return [len(found), sha256("\n".join(found).encode())]


def all_keys():
    return {study: {scale: keys(study, scale) for scale in ("smoke", "paper")} for study in STUDIES}


def one_of_every_kind():
    """Return the key of one trial of every kind of work, task and arm, so that a change is seen."""
    found = {}
    for study in STUDIES.values():
        for work in study.everything("paper"):
            task, arm = type(getattr(work, "task", None)).__name__, getattr(work, "arm", None)
            how = getattr(work, "method", "") if arm is None else arm.name
            found.setdefault(" ".join((work.kind, task, how)).strip(), work.key)
    return found


def test_every_study_has_the_trials_it_had():
    assert all_keys() == stored()["keys"]


def test_one_trial_of_every_kind_has_the_key_it_had():
    assert one_of_every_kind() == stored()["kinds"]


# ---- files -------------------------------------------------------------------------------------


@cache
def models():
    """Make a model of every kind that a file can hold, by exact arithmetic."""
    wide = fissile.expand(mlp(8, 4, 3), 2)
    filters = filled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)))
    return {
        "dense": mlp(8, 4, 3),
        "expanded": wide,
        "masked": fissile.to_masked(wide),
        "deep": fissile.expand(mlp(8, 4, 6, 4, 3, embedding=8, layer_norm=True), 2),
        "dropconnect": fissile.dropconnect(mlp(8, 4, 3), 2),
        "filters": fissile.expand(filters, 2),
        "packed": fissile.pack(wide),
        "packed half": fissile.pack(wide, dtype=torch.float16),
        "packed plane": fissile.pack(wide, layout="plane"),
        "packed filters": fissile.pack(fissile.expand(filters, 2)),
    }


def file_of(thing):
    """Save a model, or a classifier, and return the file's bytes as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        thing.save(path) if hasattr(thing, "save") else fissile.save(thing, path)
        return base64.b85encode(path.read_bytes()).decode()


def header_and_tensors(text):
    """Return what a safetensors file says of itself, and the bytes after that."""
    data = base64.b85decode(text)
    begin = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:begin]), data[begin:]


@pytest.mark.parametrize("kind", models())
def test_files_are_written_to_the_byte(kind):
    text, before = file_of(models()[kind]), stored()["files"][kind]
    (header, tensors), (old_header, old_tensors) = map(header_and_tensors, (text, before))
    if kind.startswith("packed") and "ng" in zlib.ZLIB_RUNTIME_VERSION:
        # Packed files deflate their recipe, which zlib-ng does in other bytes of the same meaning.
        del header["__metadata__"], old_header["__metadata__"]
        text = before
    assert (header, tensors) == (old_header, old_tensors)
    assert text == before


@pytest.mark.parametrize("kind", models())
def test_files_written_before_are_read(kind, tmp_path):
    made, path = models()[kind], tmp_path / "model.safetensors"
    path.write_bytes(base64.b85decode(stored()["files"][kind]))
    dense = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    read = fissile.load(path, dense if "filters" in kind else None)
    assert [type(one) for one in read.modules()] == [type(one) for one in made.modules()]
    before, after = made.state_dict(), read.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


SAMPLES = numbers(40, 6).numpy()
LABELS = np.array(["no", "yes", "maybe"])[np.arange(40) % 3]
CLASSIFIERS = {
    "paper": {"hidden": 4, "alpha": 2},
    "best": {"nonzeros": 30, "tries": 1},
}


def classifier(recipe):
    make = importlib.import_module("fissile.sklearn").FissileClassifier
    short = make(**CLASSIFIERS[recipe], recipe=recipe, warm_up=2, fine_tune=2, random_state=0)
    return short.fit(SAMPLES, LABELS)


def outline(text):
    """Describe a classifier's file without what was learned."""
    header, _ = header_and_tensors(text)
    metadata = {key: json.loads(value) for key, value in header.pop("__metadata__").items()}
    note = metadata["fissile.sklearn"]
    note["loss"] = len(note["loss"])
    return {"tensors": header, "metadata": metadata}


def classifier_pins(recipe):
    made = classifier(recipe)
    text = file_of(made)
    return {"file": text, "outline": outline(text), "says": made.decision_function(SAMPLES[:3])}


@pytest.mark.parametrize("recipe", CLASSIFIERS)
def test_classifiers_are_written_as_they_were(recipe):
    assert outline(file_of(classifier(recipe))) == stored()["classifiers"][recipe]["outline"]


@pytest.mark.parametrize("recipe", CLASSIFIERS)
def test_classifiers_written_before_are_read(recipe, tmp_path):
    before, path = stored()["classifiers"][recipe], tmp_path / "classifier.safetensors"
    path.write_bytes(base64.b85decode(before["file"]))
    read = importlib.import_module("fissile.sklearn").FissileClassifier.load(path)
    np.testing.assert_allclose(read.decision_function(SAMPLES[:3]), before["says"], rtol=1e-6)
    assert read.get_params() == classifier(recipe).get_params()


# ---- weights -----------------------------------------------------------------------------------

SPLITS = {
    "random": fissile.Random(),
    "gram": fissile.Gram(6),
    "groups": fissile.Groups([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
    "blocks": fissile.Blocks(2),
    "overlapping": fissile.Overlapping(),
}


def tensors(model):
    return {key: value.tolist() for key, value in model.state_dict().items()}


def expansions():
    """Return owners, masks and weights; all are exact, since an expansion only deals and copies."""
    found, model = {}, mlp(12, 3, 2)
    for alpha in (2, 3):
        for name, split in (SPLITS | {"N:M": fissile.Structured(2, 2 * alpha)}).items():
            found[f"{name} {alpha}"] = tensors(fissile.expand(model, alpha, split, seed=5))
    for name in ("layer", "erdos-renyi"):
        found[name] = tensors(fissile.expand(model, 2, allocation=name, seed=5))
    found["all"] = tensors(fissile.expand(model, 2, budget="all", seed=5))
    found["dropconnect"] = tensors(fissile.dropconnect(model, 2, seed=5))
    return found


def test_expansions_are_the_same():
    found, before = expansions(), stored()["expansions"]
    assert found.keys() == before.keys()
    for name, one in found.items():
        assert one == before[name], name


def digest(*weights):
    """Return a few numbers that stand for weights: how many, their sizes summed up, and eight."""
    flat = torch.cat([one.detach().double().flatten() for one in weights])
    at = torch.linspace(0, len(flat) - 1, 8).long()
    return [len(flat), int(flat.count_nonzero()), float(flat.abs().sum()), *flat[at].tolist()]


def boolean(engine):
    """Train a bank on the Boolean task."""
    train, test = fissile.data.dnf_task(clauses=3, size=4, train=200, test=50, seed=1)
    bank = Bank([Spec([12, 4, 1], Data(train.x, train.y, test.x, test.y), seed=2)], engine=engine)
    bank.train(until=2)
    arms = {"dense": Dense(), "split": Expand(2), "groups": Expand(3, fissile.Blocks(4))}
    arms |= {"dropconnect": DropConnect(2), "dynamic": Dynamic(2, every=3)}
    branched = bank.branch(arms)
    branched.train(until=4)
    found = {"task": digest(train.x, test.x)}
    for number, name in enumerate(arms):
        found[name] = digest(*branched.take(number)[0].parameters(), branched.accuracy[number])
    return found


def budgeted():
    """Train sparse networks by plans of several kinds."""
    x = numbers(60, 8)
    y = torch.arange(60) % 3
    plans = [
        sparse.Plan(63, 5, splits=(sparse.SplitAt(2),)),
        sparse.Plan(60, 8, direct=True, prune=sparse.Prune(saliency="second-order")),
        sparse.Plan(60, 12, start="erdos-renyi", rewire=sparse.Rewire(grow="gradient")),
        sparse.Plan(20, direct=True, l1=True),
    ]
    found = sparse.train(plans, [0, 1], x, y, outputs=3, epochs=4, batch=20)
    return {
        f"{places} {name}": digest(stack.weights[name] * stack.masks.get(name, 1))
        for stack, places in found
        for name in stack.weights
    }


def convolutional():
    """Train a convolutional network for two epochs."""
    x = (torch.arange(18 * 8 * 8 * 3) * 619 % 251).to(torch.uint8).view(18, 8, 8, 3)
    y = torch.arange(18) % 3
    arms = {"dense": Dense(), "split": Expand(2)}
    images = vision.Images(x[:12], y[:12], x[12:], y[12:])
    network = vision.Network(projection=6, neurons=4, seed=3)
    [found] = vision.train([network], images, arms, warm_up=1, fine_tune=1, mirror=True)
    return {
        name: digest(*one.model.head.parameters(), torch.tensor(one.loss))
        for name, one in found.items()
    }


RUNS = {
    "bank": lambda: boolean("auto"),
    "plain bank": lambda: boolean("plain"),
    "sparse": budgeted,
    "vision": convolutional,
}


@pytest.mark.parametrize("run", RUNS)
def test_seeded_runs_come_to_the_same_weights(run):
    found, before = RUNS[run](), stored()["runs"][run]
    assert found.keys() == before.keys()
    for name, one in found.items():
        # Processors round differently.
        torch.testing.assert_close(one, before[name], rtol=1e-5, atol=1e-6, msg=name)


# ---- writing them anew -------------------------------------------------------------------------


def write():
    torch.set_num_threads(1)
    pins = {
        "names": {module: public(module) for module in PUBLIC},
        "commands": commands(),
        "keys": all_keys(),
        "kinds": one_of_every_kind(),
        "files": {kind: file_of(model) for kind, model in models().items()},
        "classifiers": {recipe: classifier_pins(recipe) for recipe in CLASSIFIERS},
        "expansions": expansions(),
        "runs": {name: run() for name, run in RUNS.items()},
    }
    lines = json.dumps(pins, indent=1, default=lambda array: array.tolist())
    STORED.write_text(lines + "\n")


if __name__ == "__main__":
    write()
