"""Data sets made from a seed: always there, whatever was downloaded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fissile.data.sets import Labelled
from fissile.data.text import characters

_APART = 0.4  # spread of the class means, in units of the noise: neither easy nor hopeless


def features(
    *, inputs: int = 64, classes: int = 20, train: int = 2000, test: int = 500, seed: int = 0
) -> Labelled:
    """Clouds around random means, one per class.

    >>> features().classes
    20
    """
    rng = np.random.default_rng(seed)
    means = _APART * rng.standard_normal((classes, inputs))
    y, y_test = (rng.permutation(np.arange(samples) % classes) for samples in (train, test))
    x, x_test = (
        (means[labels] + rng.standard_normal((len(labels), inputs))).astype(np.float32)
        for labels in (y, y_test)
    )
    return Labelled(x, y, x_test, y_test)


def text(*, names: str = "abcdefghijklmnop", length: int = 5000, seed: int = 0) -> Labelled:
    """A text in which every character goes on in one of three ways, at odds of 6:3:1.

    >>> text().classes
    16
    """
    rng, count = np.random.default_rng(seed), len(names)
    after = np.array([[*rng.permutation(count)[:2], (at + 1) % count] for at in range(count)])
    ways = rng.choice(3, size=length, p=(0.6, 0.3, 0.1))
    found = np.zeros(length, dtype=np.uint8)
    for at in range(1, length):
        found[at] = after[found[at - 1], ways[at]]
    return characters(found, tuple(names))


def images(
    *, side: int = 32, classes: int = 10, train: int = 600, test: int = 200, seed: int = 0
) -> Labelled:
    """Coloured stripes whose direction, width and colour the class decides, under noise.

    >>> images().x.shape
    (600, 32, 32, 3)
    """
    rng = np.random.default_rng(seed)
    y, y_test = (rng.permutation(np.arange(samples) % classes) for samples in (train, test))
    angles = np.pi * np.arange(classes) / classes
    waves, colours = rng.uniform(2, 5, classes), rng.uniform(0.2, 1, (classes, 3))
    x, x_test = (_stripes(rng, side, angles[t], waves[t], colours[t]) for t in (y, y_test))
    return Labelled(x, y, x_test, y_test)


def _stripes(
    rng: np.random.Generator,
    side: int,
    angles: NDArray[np.float64],
    waves: NDArray[np.float64],
    colours: NDArray[np.float64],
) -> NDArray[np.uint8]:
    """One image per angle; the phase is random, so no pixel tells the class by itself."""
    down, right = np.mgrid[:side, :side] / side
    angles, waves = angles[:, None, None], waves[:, None, None]
    along = np.cos(angles) * right + np.sin(angles) * down
    phase = rng.uniform(0, 2 * np.pi, angles.shape)
    stripes = np.sin(2 * np.pi * waves * along + phase)
    shown = 128 + 50 * stripes[..., None] * colours[:, None, None, :]
    noisy: NDArray[np.float64] = shown + 40 * rng.standard_normal(shown.shape)
    return np.clip(noisy, 0, 255).astype(np.uint8)
