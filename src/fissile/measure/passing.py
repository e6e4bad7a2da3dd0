"""Passing data through a model: what each of its places reads and says, sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from fissile._common.errors import FissileError, first_line
from fissile._common.shapes import Float, Int
from fissile.discovery import Kind, Place, discover
from fissile.discovery.meta_copy import random_numbers_apart
from fissile.expansion.expand import choose
from fissile.layers import SparseConv2d, SparseLayer

_BATCH = 256
_LABELS = ("labels", "label")
_GIVE = "give (x, y), a Dataset or a DataLoader"


class Batch(NamedTuple):
    """What the model is called with, the labels if there are any, and which positions count."""

    args: tuple[Any, ...]
    named: dict[str, Any]
    labels: Any = None
    mask: Tensor | None = None


class Seen(NamedTuple):
    """What a place reads and what its neurons say, positions averaged: a row for each sample."""

    place: Place
    x: Float[Tensor, "samples inputs"]
    said: Float[Tensor, "samples neurons"]


def passed(
    model: nn.Module, data: Any, example_inputs: Any, most: int, *, labelled: bool
) -> tuple[list[Seen], Int[Tensor, " samples"]]:
    """Return what every place of a model has seen of some data, and the labels if asked for.

    The model runs in evaluation mode, and is left as it was; so are all random numbers.
    """
    with random_numbers_apart(), _evaluating(model):
        batches = _batches(data, most)
        first = next(batches, None)
        if first is None:
            raise FissileError(f"data holds no samples; {_GIVE}")
        places = _places(model, example_inputs, first)
        ears = [_Ear(model, place) for place in places]
        labels = list[Tensor]()
        try:
            for batch in chain([first], batches):
                batch = _beside(model, batch)
                _run(model, batch)
                count = {ear.note(batch) for ear in ears}.pop()
                labels.append(_labels_of(batch, count) if labelled else torch.zeros(count))
                if sum(map(len, labels)) >= most:
                    break
        finally:
            for ear in ears:
                ear.close()
    if not sum(map(len, labels)):
        raise FissileError(f"data holds no samples; {_GIVE}")
    return [ear.seen(most) for ear in ears], torch.cat(labels)[:most]


def _run(model: nn.Module, batch: Batch) -> None:
    """Call the model; an error of its own says which data it was given."""
    try:
        model(*batch.args, **batch.named)
    except FissileError:
        raise
    except Exception as error:
        given = (*batch.args, *batch.named.values())
        shapes = ", ".join(str(list(one.shape)) for one in given if isinstance(one, Tensor))
        raise FissileError(
            f"the model cannot read a batch of shape {shapes}: {first_line(error)}; give data as "
            "the model takes them"
        ) from error


# --- places


def _places(model: nn.Module, example_inputs: Any, first: Batch) -> list[Place]:
    """Return what can be split, and what has been; data tell where the code alone does not."""
    expanded = [
        _expanded(model, name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, SparseLayer) and layer.pair is not None
    ]
    found = discover(model, example_inputs)
    if not found.places and not expanded and example_inputs is None:
        batch = _beside(model, first)
        found = discover(model, batch.named or batch.args)
    if not found.places and not expanded:
        choose(found, None)  # which says why
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted((*found.places, *expanded), key=lambda place: order[place.name])


def _expanded(model: nn.Module, name: str, second: SparseLayer) -> Place:
    """Return the place whose neurons an expanded layer reads."""
    pair = second.pair.beside(name) if second.pair is not None else None
    if pair is None:
        raise FissileError(f"{name!r} was moved away from the layers it was split with")
    layers: Any = [model.get_submodule(one) for one in (*pair.firsts, name)]
    kind: Kind = "gated" if len(layers) > 2 else "mlp"
    if isinstance(second, SparseConv2d):
        kind = "conv"
    elif layers[0].outputs == 2 * second.inputs:
        kind = "fused"
    count = sum(layer.nonzeros() for layer in layers)
    sizes = layers[0].inputs, second.inputs, second.outputs
    return Place(kind, pair.firsts, pair.between, name, *sizes, count)


class _Ear:
    """Listens to what the first layer of a place reads, and to what its second one does."""

    def __init__(self, model: nn.Module, place: Place) -> None:
        self.place = place
        self._heard: dict[str, list[Tensor]] = {place.name: [], place.second: []}
        self._kept: dict[str, list[Tensor]] = {place.name: [], place.second: []}
        self._hooks = [self._listen(model, name) for name in self._heard]

    def _listen(self, model: nn.Module, name: str) -> Any:
        def hear(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._heard[name].append(args[0])

        return model.get_submodule(name).register_forward_pre_hook(hear)

    def note(self, batch: Batch) -> int:
        """Keep what one pass has brought; return how many samples it had."""
        for name, heard in self._heard.items():
            if len(heard) != 1:
                raise FissileError(
                    f"{name!r} ran {len(heard)} times when the model was called with a batch, not "
                    "once; give data that the model reads in one pass"
                )
            self._kept[name].append(_pooled(heard.pop(), self.place, batch.mask).cpu())
        counts = [len(kept[-1]) for kept in self._kept.values()]
        given = counts[0] if batch.labels is None else len(batch.labels)
        if {*counts} != {given}:
            raise FissileError(
                f"{self.place.name!r} saw {counts[0]} rows of a batch with {given} labels, so it "
                "is unknown which belongs to which"
            )
        return counts[0]

    def seen(self, most: int) -> Seen:
        """Return all that was kept; NaN and infinities are refused."""
        x, said = (torch.cat(kept)[:most] for kept in self._kept.values())
        for name, values in ((self.place.name, x), (self.place.second, said)):
            if bad := int((~torch.isfinite(values)).any(-1).sum()):
                raise FissileError(
                    f"{name!r} reads NaN or infinity in {bad:,} of {len(values):,} samples; "
                    "look at the data, or at the layers before it"
                )
        return Seen(self.place, x, said)

    def close(self) -> None:
        """Stop listening."""
        for hook in self._hooks:
            hook.remove()


def _pooled(x: Tensor, place: Place, mask: Tensor | None) -> Tensor:
    """Return a row for each sample: the mean over its positions, padded ones left out."""
    x = x.detach().float()
    if place.kind == "conv":
        return x.flatten(2).mean(-1)
    if x.ndim == 2:
        return x
    if mask is not None and mask.shape == x.shape[:-1]:
        weight = mask.to(x).unsqueeze(-1)
        return (x * weight).sum(1) / weight.sum(1).clamp(min=1)
    return x.flatten(1, -2).mean(1)


# --- data


def _batches(data: Any, most: int) -> Iterator[Batch]:
    for batch in _cut(data, most):
        if isinstance(batch, Mapping):
            named = dict(batch.items())
            found = [named.pop(key) for key in _LABELS if key in named]
            yield Batch((), named, found[0] if found else None, named.get("attention_mask"))
        elif isinstance(batch, list | tuple):
            *args, last = batch
            yield Batch(tuple(args), {}, last) if args else Batch((last,), {})
        else:
            yield Batch((batch,), {})


def _cut(data: Any, most: int) -> Iterable[Any]:
    """Yield batches of whatever holds samples."""
    if hasattr(data, "x") and hasattr(data, "y"):  # our own sets
        data = data.x, data.y
    if isinstance(data, Tensor | np.ndarray):
        data = (data,)
    arrays = (Tensor, np.ndarray, list)
    if isinstance(data, tuple) and data and isinstance(data[0], Tensor | np.ndarray):
        if not all(isinstance(one, arrays) and len(one) == len(data[0]) for one in data):
            raise FissileError(f"data's arrays have not one row for each sample; {_GIVE}")
        return _rows(list(data), len(data[0]), most, tuple)
    if isinstance(data, Mapping) and all(isinstance(one, arrays) for one in data.values()):
        count = len(next(iter(data.values()), ()))
        return _rows(
            list(data.values()), count, most, lambda some: dict(zip(data, some, strict=True))
        )
    if isinstance(data, Dataset):
        return DataLoader(data, _BATCH, shuffle=hasattr(data, "__len__"))
    if isinstance(data, Iterable) and not isinstance(data, str):
        return data
    raise FissileError(f"data cannot be {type(data).__name__}; {_GIVE}")


def _rows(arrays: Sequence[Any], count: int, most: int, made: Any) -> Iterator[Any]:
    """Yield batches of arrays; where there are too many samples, of some drawn from all."""
    try:
        arrays = [torch.as_tensor(np.asarray(a) if isinstance(a, list) else a) for a in arrays]
    except TypeError as error:  # texts, objects
        raise FissileError(f"data is not all numbers ({error}); number classes from 0") from None
    order = torch.arange(count)
    if count > most:  # the first ones might be all of one class
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        order = drawn[:most].sort().values
    for rows in order.split(_BATCH):
        yield made([array[rows] for array in arrays])


def _beside(model: nn.Module, batch: Batch) -> Batch:
    """Return a batch on the model's device, its fractions in the model's numbers."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))

    def move(value: Any) -> Any:
        value = torch.as_tensor(value) if isinstance(value, np.ndarray) else value
        if not isinstance(value, Tensor):
            return value
        return value.to(like.device, like.dtype if value.is_floating_point() else None)

    args, named = tree_map(move, (batch.args, batch.named))
    return batch._replace(args=args, named=named)


def _labels_of(batch: Batch, count: int) -> Tensor:
    if batch.labels is None:
        raise FissileError(
            "data has no labels, and the features are class means by default; give (x, y), or "
            "features= or groups="
        )
    labels = torch.as_tensor(batch.labels).detach().cpu()
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    whole = labels.is_floating_point() and bool((labels == labels.round()).all())
    if labels.shape != (count,) or not (whole or not labels.is_floating_point()):
        raise FissileError(
            f"labels are {labels.dtype} of shape {list(labels.shape)} for {count} samples; give "
            "each sample the number of its class"
        )
    if (labels == -100).any():
        raise FissileError("labels hold -100, which PyTorch ignores; leave those samples out")
    return labels.long()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
