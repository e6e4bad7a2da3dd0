"""Features of a whole set, batch by batch, in a file; what is finished is never encoded again."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fissile._common.errors import FileError, FissileError, whole
from fissile._common.files import locked
from fissile._common.progress import ProgressBar
from fissile.data.embed.encoders import Encoder, foreign
from fissile.data.embed.encoders import encoder as find_encoder
from fissile.data.embed.part import Part
from fissile.data.embed.sources import Source
from fissile.data.embed.sources import source as find_source
from fissile.data.features import read_features, write_features
from fissile.data.sets import Labelled, chunks, mean_length

DTYPES = ("float16", "float32")
_FORMATS = (".npz", ".safetensors", "")
_AHEAD = 3  # batches that are read and decoded while the encoder is busy
#: What the catalogue calls an encoder that has another name.
_SHORT = {"all-MiniLM-L6-v2": "minilm"}


def embed(
    source: Source | str | os.PathLike[str],
    encoder: Encoder | str,
    to: str | os.PathLike[str],
    *,
    batch: int = 256,
    device: torch.device | str = "cpu",
    workers: int | None = None,
    pca: int | None = None,
    normalize: bool = False,
    dtype: str = "float16",
    progress: ProgressBar | None = None,
) -> Labelled:
    """Encode a training and a test set into a features file, and return what the file holds.

    >>> embed("imagenet100", "open_clip:ViT-B-16/openai", "features.safetensors", device="cuda")

    Finished rows are kept in ``TO.part`` beside the target. After an interruption the same call
    goes on where it stopped; the same arguments always make the same file.

    Args:
        source: a folder of images, the name of a set of the catalogue, or a ``Source``.
        encoder: its short name as for :func:`fissile.data.embed.encoder`, or an ``Encoder``.
        to: a .npz or .safetensors file, or a folder of .npy files.
        batch: images or texts at a time.
        device: where the encoder runs, if it is given by name.
        workers: threads that read and decode; by default one per core, at most 16.
        pca: keep so many principal components, fitted on the training set.
        normalize: scale every row to unit length (before the components are taken).
        dtype: of the file, "float16" or "float32".
        progress: shows how far it is.
    """
    to = Path(to)
    folder, lock = (to.with_name(f"{to.name}.{suffix}") for suffix in ("part", "lock"))
    if to.suffix not in _FORMATS:
        raise FileError(f"{to}: cannot write {to.suffix}; give .npz, .safetensors or a folder")
    taken = FileError(f"{to} is there already; remove it, or give another target")
    if to.exists() and not folder.exists():
        raise taken
    if dtype not in DTYPES:
        raise FissileError(f"dtype={dtype!r} is none of {', '.join(DTYPES)}; give one")
    whole("batch", batch, least=1)
    threads = min(16, os.cpu_count() or 1) if workers is None else workers
    whole("workers", threads, least=1)
    items = source if isinstance(source, Source) else find_source(source)
    model = find_encoder(encoder, device) if isinstance(encoder, str) else encoder
    _check_fit(items, model, pca)
    what = {
        "source": items.key, "encoder": model.name, "weights": model.key, "batch": batch,
        "normalize": normalize, "pca": pca,
    }  # fmt: skip
    shapes = {name: (len(split.items), model.width) for name, split in items.splits.items()}
    with locked(lock, f"another process works in {folder}; wait for it, or give another target"):
        part = Part(folder, what, shapes, dtype if pca is None else "float32")
        if to.exists() and not part.complete:  # a complete part was only not removed
            if not any(part.done.values()):
                part.remove()
            raise taken
        if progress is not None:
            progress.start(sum(n for n, _ in shapes.values()), done=sum(part.done.values()))
        for split in items.splits:
            for rows in _features(items, model, split, part, batch, threads, normalize):
                part.append(split, rows)
                if progress is not None:
                    progress.advance(len(rows))
        _write(to, part, items, model.name, pca, normalize, dtype)
        part.remove()
    return read_features(to)


def stem(
    source: str, encoder: str, width: int, *, pca: int | None = None, normalize: bool = False
) -> str:
    """Return the name by which the catalogue finds features: the set, the encoder, the width.

    >>> stem("cifar100", "open_clip:ViT-B-16/openai", 512)
    'cifar100-clip-vit-b-16'
    >>> stem("cifar100", "open_clip:ViT-L-14/openai", 768, pca=512)
    'cifar100-clip-vit-l-14-768-pca512'
    >>> stem("cifar100", "efficientnet_lite:2", 1280, pca=512)
    'cifar100-efficientnet-lite2-512'
    """
    encoder = _SHORT.get(encoder, encoder)
    family, _, rest = encoder.partition(":")
    if family == "open_clip":
        # The paper's encoder has the short name; it always gives 512 features.
        words = f"clip-{rest.removesuffix('/openai')}" + ("" if width == 512 else f"-{width}")
    elif family == "efficientnet_lite":
        # Fewer than there are can only be components; the catalogue calls them so.
        width, pca = (pca, None) if pca is not None and pca < width else (width, pca)
        words = f"efficientnet-lite{rest}-{width}"
    else:
        words = f"{encoder}-{width}"
    words = f"{source}-{words}" + ("" if pca is None else f"-pca{pca}")
    words += "-unit" if normalize else ""
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")


def components(x: NDArray[Any], count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean (width,) and the first principal directions (width, count) of rows.

    Exact, and read piece by piece; scikit-learn's IncrementalPCA would only approximate them.
    """
    samples, width = x.shape
    total = sum((part.astype(np.float64).sum(0) for part in chunks(x)), np.zeros(width))
    mean, scatter = total / samples, np.zeros((width, width))
    for part in chunks(x):
        centred = part.astype(np.float64) - mean
        scatter += centred.T @ centred
    directions = np.linalg.eigh(scatter)[1][:, ::-1][:, :count]
    # A direction and its opposite are as good: the larger entries shall be positive.
    largest = directions[np.abs(directions).argmax(0), np.arange(count)]
    return mean, directions * np.sign(largest)


# --- helpers


def _check_fit(source: Source, encoder: Encoder, pca: int | None) -> None:
    if source.kind != encoder.kind:
        raise FissileError(
            f"{source.name} holds {source.kind}, and {encoder.name} takes {encoder.kind}; "
            f"give an encoder of {source.kind}"
        )
    most = min(encoder.width, len(source.splits["train"].items) - 1)
    if pca is not None and whole("pca", pca, least=1) > most:
        raise FissileError(f"pca={pca} is more than the {most:,} components there are; give fewer")


def _features(
    source: Source,
    encoder: Encoder,
    split: str,
    part: Part,
    batch: int,
    threads: int,
    normalize: bool,
) -> Iterator[NDArray[Any]]:
    """Yield the features of a split that are missing, batch by batch."""
    for begin, prepared in _prepared(source, encoder, split, part.done[split], batch, threads):
        where = f"item {begin:,} and after, {split}"
        with foreign(f"{encoder.name} failed ({where})"):
            try:
                features = encoder.encode(prepared).numpy()
            except torch.OutOfMemoryError:
                why = f"batch={batch} does not fit into memory; give a smaller one"
                raise FissileError(why) from None
        if normalize:
            features = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
        if features.ndim != 2 or features.shape[1] != encoder.width:
            gave = f"{features.shape}, not rows of {encoder.width}"
            raise FissileError(f"{encoder.name} gave {gave} ({where})")
        if not np.isfinite(features).all():
            raise FissileError(f"{encoder.name} gave NaN or infinity ({where}); give it other data")
        _check_range(features, encoder.name, part.dtype)
        yield features


def _prepared(
    source: Source, encoder: Encoder, split: str, start: int, batch: int, threads: int
) -> Iterator[tuple[int, list[Any]]]:
    """Yield batches of prepared items; a few threads stay a little ahead."""
    items = source.splits[split].items
    pool = ThreadPoolExecutor(threads)

    def prepare(number: int) -> Any:
        item = items[number]
        called = f" ({item})" if isinstance(item, str) and source.kind == "images" else ""
        with foreign(f"{encoder.name} cannot take item {number:,} of {split}{called}"):
            return encoder.prepare(source.open(item))

    def submit(begin: int) -> tuple[int, list[Future[Any]]]:
        numbers = range(begin, min(begin + batch, len(items)))
        return begin, [pool.submit(prepare, number) for number in numbers]

    batches = map(submit, range(start, len(items), batch))
    try:
        waiting = deque(islice(batches, _AHEAD))
        while waiting:
            begin, futures = waiting.popleft()
            yield begin, [future.result() for future in futures]
            waiting.extend(islice(batches, 1))
    finally:
        pool.shutdown(cancel_futures=True)


def _check_range(features: NDArray[Any], name: str, dtype: np.dtype[Any]) -> None:
    if np.abs(features).max(initial=0) > np.finfo(dtype).max:
        raise FissileError(f"{name} gives more than {dtype} holds; give --dtype float32")


def _write(
    to: Path, part: Part, source: Source, name: str, pca: int | None, normalize: bool, dtype: str
) -> None:
    """Write the file; what is mapped of the part is let go with the end of this function."""
    from fissile import __version__

    rows = {split: part.rows(split) for split in source.splits}
    about = [name] + ["unit length"] * normalize
    if pca is not None:
        rows = _projected(part, rows, pca, dtype)
        about.append(f"PCA {pca}")
    about.append(f"mean length {mean_length(rows['train']):.3g}")
    y, y_test = (np.asarray(source.splits[split].labels) for split in ("train", "test"))
    encoder = f"{', '.join(about)} (fissile {__version__})"
    write_features(to, Labelled(rows["train"], y, rows["test"], y_test, source.names, encoder))


def _projected(
    part: Part, rows: dict[str, NDArray[Any]], pca: int, dtype: str
) -> dict[str, NDArray[Any]]:
    """Return the principal components of all rows, mapped from the part."""
    mean, directions = components(rows["train"], pca)

    def pieces(x: NDArray[Any]) -> Iterator[NDArray[Any]]:
        for chunk in chunks(x):
            piece = (chunk - mean) @ directions
            _check_range(piece, f"PCA {pca}", np.dtype(dtype))
            yield piece

    return {
        split: part.derived(f"{split}-pca", (len(x), pca), dtype, pieces(x))
        for split, x in rows.items()
    }
