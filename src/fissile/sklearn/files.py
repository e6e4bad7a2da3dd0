"""A classifier as one file: the network as ``fissile.save`` writes it, and a note beside it.

The note, JSON in the metadata, holds the labels and the parameters. ``fissile.load`` reads the
network from the same file; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.optim import Adam

import fissile.files
from fissile.budget import nonzeros
from fissile.errors import FileError, needs
from fissile.layers import all_weights
from fissile.network import MLP
from fissile.sklearn.width import outputs_for

if TYPE_CHECKING:
    from fissile.sklearn.classifier import FissileClassifier

__all__ = ["read", "write"]

_KEY, _VERSION = "fissile.sklearn", 1
_NUMBERS = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64",
)  # fmt: skip
_Classifier = TypeVar("_Classifier", bound="FissileClassifier")


def write(classifier: FissileClassifier, path: str | os.PathLike[str]) -> None:
    """Write a fitted classifier; a file already there is replaced whole or not at all."""
    needs("safetensors", "files")
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    note = json.dumps(_note(classifier))
    try:
        with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
            plain, noted = Path(folder, "plain"), Path(folder, "noted")
            fissile.files.save(classifier.model_, plain)
            with safe_open(plain, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                save_file(tensors, noted, {**file.metadata(), _KEY: note})
            os.replace(noted, path)
    except (OSError, SafetensorError) as error:
        raise FileError(f"could not write {path}: {error}") from None


def read(kind: type[_Classifier], path: str | os.PathLike[str]) -> _Classifier:
    """Make a classifier of what a file holds, after checking that it is one."""
    model = fissile.files.load(path)
    try:
        classifier = _noted(kind, _read_note(path), model)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FileError(f"{path}: the classifier's note is damaged: {error}") from None
    classifier.model_ = model.eval()
    classifier._adam = Adam(model.parameters())
    classifier.nonzeros_ = nonzeros(model).all
    return classifier


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
    }


def _class_note(classes: NDArray[Any]) -> dict[str, Any]:
    kind = {"U": "str", "O": "object"}.get(classes.dtype.kind, classes.dtype.name)
    values = classes.tolist()
    if kind == "object" and not all(isinstance(value, str) for value in values):
        raise FileError("cannot save labels that are neither numbers nor strings; number them")
    if kind not in ("str", "object", *_NUMBERS):
        raise FileError(f"cannot save labels of {classes.dtype}; use numbers or strings")
    return {"dtype": kind, "values": values}


def _read_note(path: str | os.PathLike[str]) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    if _KEY not in metadata:
        raise FileError(f"{path}: holds a network but no classifier; read it with fissile.load")
    note = json.loads(metadata[_KEY])
    if note["version"] != _VERSION:
        raise FileError(
            f"{path}: the classifier is of version {note['version']!r} of the format, this is "
            f"version {_VERSION}; update fissile"
        )
    return dict(note)


def _noted(kind: type[_Classifier], note: dict[str, Any], model: Any) -> _Classifier:
    """Build the estimator around a network it must fit."""
    classifier = kind(**note["parameters"])
    classes = _classes(note["classes"])
    if type(model) is not MLP or len(model.sizes) != 3:
        raise ValueError("its network is not one with one hidden layer")
    inputs, hidden, outputs = model.sizes
    if outputs != outputs_for(len(classes)):
        raise ValueError(f"{len(classes)} classes do not fit {outputs} outputs")
    if (names := note["names"]) is not None:
        if len(names) != inputs or not all(isinstance(name, str) for name in names):
            raise ValueError(f"the names of the features do not fit {inputs} inputs")
        classifier.feature_names_in_ = np.array(names, dtype=object)
    classifier.classes_, classifier.n_features_in_ = classes, inputs
    classifier.hidden_ = hidden
    classifier.alpha_ = all_weights(model.layers[2]).shape[1] // hidden
    classifier._seed = int(note["seed"])
    classifier.loss_curve_ = [float(loss) for loss in note["loss"]]
    scores = note["scores"]
    classifier.validation_scores_ = None if scores is None else [float(score) for score in scores]
    classifier.n_iter_ = len(classifier.loss_curve_)
    return classifier


def _classes(note: dict[str, Any]) -> NDArray[Any]:
    values, dtype = note["values"], note["dtype"]
    if dtype in ("str", "object"):
        if not all(isinstance(value, str) for value in values):
            raise ValueError("its labels are not strings")
        classes: NDArray[Any] = np.array(values, dtype=dtype)
    elif dtype in _NUMBERS:
        classes = np.array(values, dtype=dtype)
    else:
        raise ValueError(f"its labels have the unknown dtype {dtype!r}")
    if classes.ndim != 1 or len(classes) < 2 or not (classes[1:] > classes[:-1]).all():
        raise ValueError("its labels are not at least two different ones in order")
    return classes
