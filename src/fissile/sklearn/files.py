"""A classifier as one file: the network as ``fissile.save`` writes it, and a note beside it.

The note, JSON in the metadata, holds the labels and the parameters; nothing is ever unpickled.
``fissile.load`` reads the network of the paper's course from the same file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from torch.optim import Adam

from fissile._common.errors import FileError, needs
from fissile.bank.sparse import SparseNet
from fissile.bank.sparse.plan import Plan, Prune, Saliency
from fissile.expansion.budget import nonzeros
from fissile.io import safetensors
from fissile.io.files import described, load
from fissile.layers import all_weights
from fissile.layers.mlp import MLP
from fissile.packed.files import lengthened, opened
from fissile.sklearn.search import outputs_for

if TYPE_CHECKING:
    from fissile.sklearn.classifier import FissileClassifier

_KEY, _VERSION = "fissile.sklearn", 1
_ROOM = 2**24  # bytes that an array of labels may always take
_NUMBERS = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64",
)  # fmt: skip
#: What the recommended plans differ in, and how they are pruned; the rest is as plans come.
_PLAN = ("budget", "hidden", "direct", "lr", "decay", "dropout", "smooth")
_PRUNE = ("begin", "end", "saliency", "power")
_Classifier = TypeVar("_Classifier", bound="FissileClassifier")


def write(classifier: FissileClassifier, path: str | os.PathLike[str]) -> None:
    """Write a fitted classifier; a file already there is replaced whole or not at all."""
    needs("safetensors", "files")
    tensors, recipe = described(classifier.model_)
    safetensors.write(tensors, recipe, Path(path), **{_KEY: json.dumps(_note(classifier))})


def read(kind: type[_Classifier], path: str | os.PathLike[str]) -> _Classifier:
    """Make a classifier of what a file holds, after checking that it is one."""
    needs("safetensors", "files")
    shapes, text = _header(path)
    try:
        # As large as the file's own tensors, whatever it claims.
        frame = (
            SparseNet.empty(shapes) if {"hidden.weight", "direct.weight"} & set(shapes) else None
        )
    except ValueError as error:
        raise FileError(f"{path}: the network is damaged: {error}") from None
    model = load(path, frame)
    if text is None:
        raise FileError(f"{path}: holds a network but no classifier; read it with fissile.load")
    try:
        classifier = _noted(kind, json.loads(opened(lengthened(text))), model)
    except FileError as error:
        raise FileError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FileError(f"{path}: the classifier's note is damaged: {error}") from None
    classifier.model_ = model.eval()
    classifier._adam = None if classifier.plan_ else Adam(model.parameters())
    classifier.nonzeros_ = nonzeros(model).all
    return classifier


def _header(path: str | os.PathLike[str]) -> tuple[dict[str, list[int]], str | None]:
    """Return the shapes of a file's tensors, and its note if it has one."""
    with safetensors.opened_file(path) as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        return shapes, (file.metadata() or {}).get(_KEY)


def _note(classifier: FissileClassifier) -> dict[str, Any]:
    names = getattr(classifier, "feature_names_in_", None)
    plain = (bool, int, float, str, type(None))
    parameters = classifier.get_params(deep=False)
    return {
        "version": _VERSION,
        "classes": _class_note(classifier.classes_),
        "names": None if names is None else names.tolist(),
        "parameters": {k: v for k, v in parameters.items() if isinstance(v, plain)},
        "seed": classifier._seed,
        "loss": classifier.loss_curve_,
        "scores": classifier.validation_scores_,
        "best": None if classifier.plan_ is None else _best_note(classifier, classifier.plan_),
    }


def _class_note(classes: NDArray[Any]) -> dict[str, Any]:
    kind = {"U": "str", "O": "object"}.get(classes.dtype.kind, classes.dtype.name)
    values = classes.tolist()
    if kind == "object" and not all(isinstance(value, str) for value in values):
        raise FileError("cannot save labels that are neither numbers nor strings; number them")
    if kind not in ("str", "object", *_NUMBERS):
        raise FileError(f"cannot save labels of {classes.dtype}; use numbers or strings")
    if kind == "str":
        _check_width(values)
    return {"dtype": kind, "values": values}


def _noted(kind: type[_Classifier], note: dict[str, Any], model: Any) -> _Classifier:
    """Build the estimator around a network it must fit."""
    if note["version"] != _VERSION:
        raise FileError(
            f"the classifier is of version {note['version']!r} of the format, this is version "
            f"{_VERSION}; update fissile"
        )
    classifier = kind(**note["parameters"])
    classes = _classes(note["classes"])
    inputs, hidden, outputs, alpha = _sizes(model)
    if outputs != outputs_for(len(classes)):
        raise ValueError(f"{len(classes)} classes do not fit {outputs} outputs")
    if (names := note["names"]) is not None:
        if len(names) != inputs or not all(isinstance(name, str) for name in names):
            raise ValueError(f"the names of the features do not fit {inputs} inputs")
        classifier.feature_names_in_ = np.array(names, dtype=object)
    classifier.classes_, classifier.n_features_in_ = classes, inputs
    classifier.hidden_, classifier.alpha_ = hidden, alpha
    classifier._seed = int(note["seed"])
    classifier.loss_curve_ = [float(loss) for loss in note["loss"]]
    scores = note["scores"]
    classifier.validation_scores_ = None if scores is None else [float(score) for score in scores]
    classifier.n_iter_, classifier.plan_, classifier.tried_ = len(classifier.loss_curve_), None, []
    best = note.get("best")
    if (best is not None) is not isinstance(model, SparseNet):
        raise ValueError("its network is of another recipe")
    if best is not None:
        classifier.n_iter_, classifier.plan_ = int(best["epochs"]), _plan(best["plan"])
        classifier.tried_ = [(_plan(plan), float(score)) for plan, score in best["tried"]]
    return classifier


def _sizes(model: Any) -> tuple[int, int, int, int]:
    """Return the inputs, the neurons, the outputs, and the children of every neuron."""
    if isinstance(model, SparseNet):
        return model.inputs, model.neurons, model.outputs, 1
    if type(model) is not MLP or len(model.sizes) != 3:
        raise ValueError("its network is not one with one hidden layer")
    inputs, hidden, outputs = model.sizes
    return inputs, hidden, outputs, all_weights(model.layers[2]).shape[1] // hidden


# --- the recommended recipe's


def _best_note(classifier: FissileClassifier, plan: Plan) -> dict[str, Any]:
    tried = [(_plan_note(one), score) for one, score in classifier.tried_]
    return {"epochs": classifier.n_iter_, "plan": _plan_note(plan), "tried": tried}


def _plan_note(plan: Plan) -> dict[str, Any]:
    note: dict[str, Any] = {key: getattr(plan, key) for key in _PLAN}
    return note | {"prune": {key: getattr(plan.prune, key) for key in _PRUNE}}


def _plan(note: dict[str, Any]) -> Plan:
    prune = {key: note["prune"][key] for key in _PRUNE}
    saliency = prune.pop("saliency")
    values = {key: note[key] for key in _PLAN}
    numbers = [*prune.values(), *values.values()]
    if saliency not in get_args(Saliency) or not all(
        isinstance(one, bool | int | float) for one in numbers
    ):
        raise ValueError("its plan is none")
    return Plan(**values, prune=Prune(**prune, saliency=saliency))


def _check_width(labels: list[str]) -> None:
    """Refuse one label much longer than the others: numpy makes room for it in every place."""
    if 4 * len(labels) * max(map(len, labels), default=0) > _ROOM + 64 * sum(map(len, labels)):
        raise FileError("one of the labels is far longer than the others; shorten it")


def _classes(note: dict[str, Any]) -> NDArray[Any]:
    values, dtype = note["values"], note["dtype"]
    if dtype in ("str", "object"):
        if not all(isinstance(value, str) for value in values):
            raise ValueError("its labels are not strings")
        if dtype == "str":
            _check_width(values)
        classes: NDArray[Any] = np.array(values, dtype=dtype)
    elif dtype in _NUMBERS:
        classes = np.array(values, dtype=dtype)
    else:
        raise ValueError(f"its labels have the unknown dtype {dtype!r}")
    if classes.ndim != 1 or len(classes) < 2 or not (classes[1:] > classes[:-1]).all():
        raise ValueError("its labels are not at least two different ones in order")
    return classes
