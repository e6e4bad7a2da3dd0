"""Data for the classifier, and its files changed as somebody else might."""

import json

from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.datasets import make_classification

from fissile.packed.files import opened, sealed


def blobs(classes=3, samples=200, **options):
    options = {"n_features": 8, "n_informative": 6, "class_sep": 2.0, "random_state": 0, **options}
    return make_classification(samples, n_classes=classes, **options)


def rewrite(path, note=lambda note: None, tensors=lambda tensors: None):
    """Change the note of a classifier's file, or its tensors."""
    with safe_open(path, framework="pt") as file:
        held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    told = json.loads(opened(metadata["fissile.sklearn"]))
    note(told)
    tensors(held)
    save_file(held, path, {**metadata, "fissile.sklearn": sealed(json.dumps(told))})
