"""Features of a whole set, batch by batch, in a file; what is finished is never encoded again."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fissile._common.errors import FileError, FissileError, whole
from fissile.data.embed.encoders import Encoder
from fissile.data.embed.encoders import encoder as find_encoder
from fissile.data.embed.part import Part, sweep
from fissile.data.embed.pca import fit
from fissile.data.embed.progress import Watcher
from fissile.data.embed.sources import Source
from fissile.data.embed.sources import source as find_source
from fissile.data.embed.trouble import foreign
from fissile.data.features import read_features, write_features
from fissile.data.sets import Labelled, chunks, mean_length

__all__ = ["DTYPES", "embed"]

DTYPES = ("float16", "float32")
_FORMATS = (".npz", ".safetensors", "")
_AHEAD = 2  # batches that are being made ready while the encoder is busy


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
    watcher: Watcher | None = None,
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
        watcher: is told how far it is.
    """
    to, watcher = Path(to), watcher or Watcher()
    _check_target(to)
    if dtype not in DTYPES:
        raise FissileError(f"dtype={dtype!r} is none of {', '.join(DTYPES)}; give one")
    whole("batch", batch, least=1)
    found = source if isinstance(source, Source) else find_source(source)
    coder = find_encoder(encoder, device) if isinstance(encoder, str) else encoder
    _check_fit(found, coder, pca)
    what = {
        "source": found.key, "encoder": coder.name, "weights": coder.key, "batch": batch,
        "normalize": normalize, "pca": pca,
    }  # fmt: skip
    shapes = {name: (len(split.items), coder.width) for name, split in found.splits.items()}
    with Part(_part(to), what, shapes, dtype if pca is None else "float32") as part:
        _check_unfinished(to, part)
        watcher.begin(sum(n for n, _ in shapes.values()), sum(part.done.values()))
        for name in found.splits:
            _encode(part, name, found, coder, batch, workers, normalize, watcher)
        _write(to, part, found, coder.name, pca, normalize, dtype)
        part.remove()
    return read_features(to)


def _part(to: Path) -> Path:
    return to.with_name(f"{to.name}.part")


def _check_target(to: Path) -> None:
    if to.suffix not in _FORMATS:
        raise FileError(f"{to}: cannot write {to.suffix}; give .npz, .safetensors or a folder")
    sweep(_part(to))
    if to.exists() and not _part(to).exists():
        raise _there(to)


def _there(to: Path) -> FileError:
    return FileError(f"{to} is there already; remove it, or give another target")


def _check_unfinished(to: Path, part: Part) -> None:
    """Refuse to encode for a target that is there; only a complete part was just not removed."""
    if to.exists() and not part.complete:
        if not any(part.done.values()):
            part.remove()
        raise _there(to)


def _check_fit(source: Source, encoder: Encoder, pca: int | None) -> None:
    if source.kind != encoder.kind:
        raise FissileError(
            f"{source.name} holds {source.kind}, and {encoder.name} takes {encoder.kind}; "
            f"give an encoder of {source.kind}"
        )
    most = min(encoder.width, len(source.splits["train"].items) - 1)
    if pca is not None and whole("pca", pca, least=1) > most:
        raise FissileError(
            f"pca={pca} is more than the {most:,} components there can be; give fewer"
        )


def _encode(
    part: Part,
    name: str,
    source: Source,
    encoder: Encoder,
    batch: int,
    workers: int | None,
    normalize: bool,
    watcher: Watcher,
) -> None:
    """Encode what is missing of a split."""
    items = source.splits[name].items

    def ready(number: int) -> Any:
        item = items[number]
        called = f" ({item})" if isinstance(item, str) and source.kind == "images" else ""
        with foreign(f"{encoder.name} cannot take item {number:,} of {name}{called}"):
            return encoder.prepare(source.open(item))

    for begin, prepared in _ahead(len(items), ready, part.done[name], batch, workers):
        where = f"item {begin:,} and after, {name}"
        features = _encoded(encoder, prepared, batch, where)
        if normalize:
            features = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
        _check_rows(features, encoder, part.dtype, where)
        part.append(name, features)
        watcher.advance(len(features))


def _encoded(encoder: Encoder, prepared: list[Any], batch: int, where: str) -> NDArray[Any]:
    with foreign(f"{encoder.name} failed ({where})"):
        try:
            return encoder.encode(prepared).numpy()
        except torch.OutOfMemoryError:
            raise FissileError(
                f"batch={batch} does not fit into memory; give a smaller one"
            ) from None


def _ahead(
    count: int,
    ready: Callable[[int], Any],
    start: int,
    batch: int,
    workers: int | None,
) -> Iterator[tuple[int, list[Any]]]:
    """Yield batches made ready by a few threads, which stay a little ahead."""
    threads = min(16, os.cpu_count() or 1) if workers is None else workers
    waiting: deque[tuple[int, list[Future[Any]]]] = deque()
    pool = ThreadPoolExecutor(whole("workers", threads, least=1))
    try:
        for begin in range(start, count, batch):
            chosen = range(begin, min(begin + batch, count))
            waiting.append((begin, [pool.submit(ready, number) for number in chosen]))
            if len(waiting) > _AHEAD:
                begin, futures = waiting.popleft()
                yield begin, [future.result() for future in futures]
        for begin, futures in waiting:
            yield begin, [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)


def _check_rows(features: NDArray[Any], encoder: Encoder, dtype: np.dtype[Any], where: str) -> None:
    if features.ndim != 2 or features.shape[1] != encoder.width:
        raise FissileError(
            f"{encoder.name} gave {features.shape}, not rows of {encoder.width} ({where})"
        )
    if not np.isfinite(features).all():
        raise FissileError(f"{encoder.name} gave NaN or infinity ({where}); give it other data")
    _check_range(features, encoder.name, dtype)


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
    components = fit(rows["train"], pca)

    def pieces(x: NDArray[Any]) -> Iterator[NDArray[Any]]:
        for chunk in chunks(x):
            piece = components(chunk)
            _check_range(piece, f"PCA {pca}", np.dtype(dtype))
            yield piece

    return {
        split: part.derived(f"{split}-pca", (len(x), pca), dtype, pieces(x))
        for split, x in rows.items()
    }
