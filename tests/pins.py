"""What stays as it is, however the source is laid out: taken down here, compared by its tests.

Public names, commands, the keys of trials, files and the weights of seeded runs are stored in
``tests/unit/pins.json``. Whoever changes one of them on purpose writes that file anew, and reads in
its diff what has changed::

    python tests/pins.py
"""

import base64
import hashlib
import importlib
import inspect
import json
import re
import tempfile
import warnings
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

import fissile
from fissile.bank import Bank, Data, Dense, DropConnect, Dynamic, Expand, Spec
from fissile.cli.__main__ import main
from fissile.lab.studies import STUDIES

sparse = importlib.import_module("fissile.bank.sparse")
vision = importlib.import_module("fissile.bank.vision")

STORED = Path(__file__).with_name("unit") / "pins.json"
CORE = ("fissile", "fissile.bank", "fissile.data", "fissile.measure", "fissile.measure.theory")
#: The modules that users import, each with the library that it needs.
PUBLIC = dict.fromkeys(CORE, "torch") | {
    "fissile.sklearn": "sklearn",
    "fissile.integrations.lightning": "pytorch_lightning",
    "fissile.integrations.transformers": "transformers",
    "fissile.integrations.parallel": "torch",
    "fissile.integrations.export": "torch",
}


@cache
def stored():
    return json.loads(STORED.read_text())


# ---- names, commands, keys ---------------------------------------------------------------------


def public(module):
    """Return a module's public names, each with what a function or a class of ours takes."""
    found = importlib.import_module(module)
    return {name: parameters(getattr(found, name)) for name in sorted(found.__all__)}


def parameters(thing):
    made = thing.__init__ if inspect.isclass(thing) else thing
    return list(inspect.signature(made).parameters) if inspect.isfunction(made) else None


def commands():
    """Return every command but ``plan``: its first line of help, and what it takes."""
    typer = importlib.import_module("typer.main")
    with mock.patch.object(typer.Typer, "__call__", autospec=True) as call:
        main()
    return described("fissile", typer.get_command(call.call_args.args[0]))


def described(name, command):
    takes = {" ".join(one.opts + one.secondary_opts): option(one) for one in command.params}
    found = {name: {"help": command.help.strip().splitlines()[0], "takes": takes}}
    for key, inner in getattr(command, "commands", {}).items():
        found |= {} if key == "plan" else described(f"{name} {key}", inner)
    return found


def option(one):
    default = str(one.default) if isinstance(one.default, str | int | float | Path) else None
    return [one.name, one.required, one.nargs, getattr(one, "multiple", False), default]


def keys(study, scale):
    """Return how many trials a study has at a scale, and a hash of their keys, without its data."""
    found = sorted(work.key for work in STUDIES[study].everything(scale))
    return [len(found), hashlib.sha256("\n".join(found).encode()).hexdigest()]


def all_keys():
    return {study: {scale: keys(study, scale) for scale in ("smoke", "paper")} for study in STUDIES}


def kinds():
    """Return the key of one trial of every kind of work, of task and of arm or method."""
    found = {}
    for study in STUDIES.values():
        for work in study.everything("paper"):
            task = type(work.task).__name__ if hasattr(work, "task") else "theory"
            how = work.arm.name if hasattr(work, "arm") else getattr(work, "method", "")
            found.setdefault(f"{work.kind} {task} {how}".strip(), work.key)
    return found


# ---- files -------------------------------------------------------------------------------------


def numbers(*shape):
    """Return weights that every processor makes alike: fractions, no two of one magnitude."""
    count = torch.Size(shape).numel()
    assert count < 997
    return ((torch.arange(count) * 619 % 997 - 498.25) / 512).view(shape)


def filled(model):
    for parameter in model.parameters():
        parameter.data = numbers(*parameter.shape)
    return model


def mlp(*sizes, **settings):
    return filled(fissile.MLP(sizes, **settings))


def filters():
    return filled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)))


@cache
def models():
    """Return a model of every kind that a file can hold, made by exact arithmetic."""
    wide, seen = fissile.expand(mlp(8, 4, 3), 2), fissile.expand(filters(), 2)
    normed = mlp(8, 4, 6, 4, 3, embedding=8, layer_norm=True, activation="gelu")
    return {
        "dense": mlp(8, 4, 3),
        "expanded": wide,
        "masked": fissile.to_masked(wide),
        "deep": fissile.expand(normed, 2),
        "dropconnect": fissile.dropconnect(mlp(8, 4, 3), 2),
        "filters": seen,
        "packed": fissile.pack(wide),
        "packed half": fissile.pack(wide, dtype=torch.float16),
        "packed plane": fissile.pack(wide, layout="plane"),
        "packed deep": fissile.pack(fissile.expand(normed, 2)),
        "packed filters": fissile.pack(seen),
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


SAMPLES = numbers(40, 6).numpy()
LABEL_NUMBERS = np.arange(40) % 3
LABELS = np.array(["no", "yes", "maybe"])[LABEL_NUMBERS]
CLASSIFIERS = {"paper": {"hidden": 4, "alpha": 2}, "best": {"nonzeros": 30, "tries": 1}}


def classifier(recipe):
    make = importlib.import_module("fissile.sklearn").FissileClassifier
    short = make(**CLASSIFIERS[recipe], recipe=recipe, warm_up=2, fine_tune=2, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # four epochs are few, as it says
        return short.fit(SAMPLES, LABELS)


def outline(text):
    """Return what a classifier's file is made of, without what was learned."""
    header, _ = header_and_tensors(text)
    metadata = {key: json.loads(value[8:]) for key, value in header.pop("__metadata__").items()}
    metadata["fissile"].pop("crc32")  # of what was learned
    metadata["fissile.sklearn"]["loss"] = len(metadata["fissile.sklearn"]["loss"])
    return {"tensors": header, "metadata": metadata}


def ordered(text):
    """Sort a file's header: two entries of metadata are written in one order or the other."""
    header, tensors = header_and_tensors(text)
    text = json.dumps(header, sort_keys=True)
    data = text.ljust(-(-len(text) // 8) * 8).encode()
    return base64.b85encode(len(data).to_bytes(8, "little") + data + tensors).decode()


def classifiers():
    found = {}
    for recipe, made in {one: classifier(one) for one in CLASSIFIERS}.items():
        text, says = ordered(file_of(made)), made.decision_function(SAMPLES[:3]).tolist()
        found[recipe] = {"file": text, "outline": outline(text), "says": says}
    return found


# ---- weights -----------------------------------------------------------------------------------


def expansions():
    """Return patterns as they are and weights as hashes: an expansion only deals and copies."""
    splits = {"random": fissile.Random(), "gram": fissile.Gram(6), "blocks": fissile.Blocks(2)}
    splits |= {"groups": fissile.Groups([*range(6)] * 2), "overlapping": fissile.Overlapping()}
    found, model = {}, mlp(12, 3, 2)
    for alpha in (2, 3):
        for name, split in (splits | {"N:M": fissile.Structured(2, 2 * alpha)}).items():
            found[f"{name} {alpha}"] = fissile.expand(model, alpha, split, seed=5)
    for name in ("layer", "erdos-renyi"):
        found[name] = fissile.expand(model, 2, allocation=name, seed=5)
    found["budget of all"] = fissile.expand(model, 2, budget="all", seed=5)
    found["dropconnect"] = fissile.dropconnect(model, 2, seed=5)
    return {name: shown(wide.state_dict()) for name, wide in found.items()}


def shown(tensors):
    found = {}
    for key, value in tensors.items():
        if value.is_floating_point():
            found[key] = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]
        elif value.ndim == 2:  # a letter for each weight, a dot where it was removed
            found[key] = ["".join(".0123456789"[int(one) + 1] for one in row) for row in value]
        else:
            found[key] = value.tolist()
    return found


def digest(*weights):
    """Return a few numbers that stand for weights: counts, sums that see their places, and six."""
    flat = torch.cat([one.detach().double().flatten() for one in weights])
    sizes, count = flat.abs(), len(flat)
    sums = [float(sizes.sum()), float(sizes @ torch.arange(count, dtype=torch.double))]
    return [count, int(flat.count_nonzero()), *sums, *flat[:: -(-count // 6)].tolist()]


def boolean(engine):
    """Train a bank on the Boolean task, and every arm that it can branch into."""
    train, test = fissile.data.dnf_task(clauses=3, size=4, train=200, test=50, seed=1)
    bank = Bank([Spec([12, 4, 1], Data(train.x, train.y, test.x, test.y), seed=2)], engine=engine)
    bank.train(until=2)
    arms = {"dense": Dense(), "random": Expand(2), "blocks": Expand(3, fissile.Blocks(4))}
    arms |= {"dropconnect": DropConnect(2), "dynamic": Dynamic(2, every=3)}
    wide = bank.branch(arms)
    wide.train(until=4)
    found = {"task": digest(train.x, test.x)}
    for number, name in enumerate(arms):
        found[name] = digest(*wide.take(number)[0].parameters(), wide.accuracy[number])
    return found


def budgeted():
    """Train sparse networks by plans of every kind."""
    plans = [
        sparse.Plan(63, 5, splits=(sparse.SplitAt(2),), dropout=0.2, smooth=0.1, decay=0.1),
        sparse.Plan(80, 8, direct=True, prune=sparse.Prune(saliency="second-order")),
        sparse.Plan(60, 12, start="erdos-renyi", rewire=sparse.Rewire()),
        sparse.Plan(60, 6, start="uniform", rewire=sparse.Rewire(0.1, "gradient", 0.5)),
        sparse.Plan(20, direct=True, l1=True),
    ]
    y = torch.arange(60) % 3
    found = sparse.train(plans, [0, 1], numbers(60, 8), y, outputs=3, epochs=4, batch=20)
    return {
        f"{places[0]} {name}": digest(weight * stack.masks.get(name, 1))
        for stack, places in found
        for name, weight in stack.weights.items()
    }


def convolutional():
    """Train a convolutional network and look at its head: the backbone rounds too differently."""
    x = (torch.arange(18 * 8 * 8 * 3) * 619 % 251).to(torch.uint8).view(18, 8, 8, 3)
    y, network = torch.arange(18) % 3, vision.Network(projection=6, neurons=4, seed=3)
    images = vision.Images(x[:12], y[:12], x[12:], y[12:])
    arms = {"dense": Dense(), "random": Expand(2)}
    [found] = vision.train([network], images, arms, warm_up=1, fine_tune=1, mirror=True)
    return {name: digest(*one.model.head.parameters()) for name, one in found.items()}


RUNS = {"bank": lambda: boolean("auto"), "plain bank": lambda: boolean("plain")}
RUNS |= {"sparse": budgeted, "vision": convolutional}

if __name__ == "__main__":
    torch.set_num_threads(1)
    pins = {
        "names": {module: public(module) for module in PUBLIC},
        "commands": commands(),
        "keys": all_keys(),
        "kinds": kinds(),
        "files": {kind: file_of(model) for kind, model in models().items()},
        "classifiers": classifiers(),
        "expansions": expansions(),
        "runs": {name: run() for name, run in RUNS.items()},
    }
    text = json.dumps(pins, indent=1, sort_keys=True)
    short = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text)
    assert json.loads(short) == pins
    STORED.write_text(short + "\n")
