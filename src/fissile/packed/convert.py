"""Packing a model for inference, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.sparse import SparseSemiStructuredTensor

from fissile._common.errors import FissileError
from fissile.discovery.module_checks import has_hooks, marks_of
from fissile.expansion.replace import without_fast_path
from fissile.expansion.structure import note
from fissile.layers import SparseLayer
from fissile.packed.format import cast, check_layout, refuse_overflow
from fissile.packed.inline_layout import settle
from fissile.packed.layers import DOES_NOT_TRAIN, Packed
from fissile.packed.make import packed_layer, unpacked_layer
from fissile.packed.semi import semi_structured
from fissile.packed.sequence import PackedSequential

__all__ = ["finish", "pack", "unpack"]


def pack(
    model: nn.Module, *, dtype: torch.dtype | None = None, layout: str = "inline"
) -> nn.Module:
    """Return an expanded model for inference, in the bytes of the narrow one.

    >>> packed = pack(expand(model, 4), dtype=torch.float16)
    >>> packed(x.half())

    Args:
        model: an expanded model, left as it is; what is not expanded in it is copied.
        dtype: float32, float16 or bfloat16 for the whole model; by default each layer keeps its
            own.
        layout: ``"inline"`` writes the owners into the lowest bits of the weights, which are
            rounded for it; ``"plane"`` keeps them beside the weights, which stay as they are;
            ``"2:4"`` hands layers of a 2:4 split to PyTorch's semi-structured tensors, on a GPU.
    """
    if layout == "2:4":
        return _two_of_four(model, dtype)
    how = check_layout(layout)
    news = _each(model, lambda layer: packed_layer(layer, dtype, how))
    learns = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    packed = _with(model, news)
    packed = packed if dtype is None else packed.to(dtype)
    given = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in [*packed.named_parameters(), *packed.named_buffers()]:
        if tensor.is_floating_point() and name in given:
            refuse_overflow(name, given[name], tensor)
    settle(packed)
    finish(packed, learns)
    return packed


def unpack(model: nn.Module) -> nn.Module:
    """Return a packed model as an expanded one again, which can be trained.

    >>> wide = unpack(packed)

    The weights are as they were packed: in layout ``inline``, rounded.
    """
    if any(isinstance(p, SparseSemiStructuredTensor) for p in model.parameters()):
        raise FissileError("2:4 layers are not unpacked; keep the expanded model")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Packed)}
    if not layers:
        raise FissileError("the model has no packed layers")
    wide = _with(model, {name: unpacked_layer(layer) for name, layer in layers.items()})
    _recast_sequences(wide, PackedSequential, nn.Sequential)
    learns = wide.__dict__.pop("learns", None)
    for name, parameter in wide.named_parameters():
        parameter.requires_grad_(learns is None or name in learns)
    for name in ("save_pretrained", "train"):
        wide.__dict__.pop(name, None)
    return wide


def finish(packed: nn.Module, learns: frozenset[str]) -> None:
    """Make a model with packed layers one for inference, that remembers what would learn."""
    _recast_sequences(packed, nn.Sequential, PackedSequential)
    packed.requires_grad_(False).eval()
    packed.__dict__["learns"] = learns
    if not isinstance(packed, Packed):  # which refuses by itself
        packed.__dict__["train"] = partial(_refuse_training, packed)
    if hasattr(packed, "save_pretrained"):
        packed.__dict__["save_pretrained"] = _refuse_pretrained


def _two_of_four(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a model whose 2:4 layers are PyTorch's, and whose other layers are packed."""
    made = _each(
        model, lambda layer: semi_structured(layer, dtype) or packed_layer(layer, dtype, "plane")
    )
    if all(isinstance(layer, Packed) for layer in made.values()):
        raise FissileError('no layer has a 2:4 pattern; expand with alpha=2 and split="2:4"')
    packed = _with(model, made)
    if dtype is not None:
        for module in packed.modules():  # one by one: a semi-structured weight takes no cast
            if module not in made.values():
                module._apply(partial(cast, dtype=dtype), recurse=False)
    finish(packed, frozenset())
    return packed


def _each(model: nn.Module, make: Callable[[SparseLayer], nn.Module]) -> dict[str, nn.Module]:
    """Make a new layer for every expanded one, and say of which one an error speaks."""
    news = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLayer):
            try:
                news[name] = make(layer)
            except FissileError as error:
                raise FissileError(f"{name!r}: {error}") from None
    if not news:
        raise FissileError("the model has no expanded layers to pack; call fissile.expand first")
    return news


def _refuse_training(model: nn.Module, mode: bool = True) -> nn.Module:
    """Refuse before any part of the model has changed its mode."""
    if mode:
        raise FissileError(DOES_NOT_TRAIN)
    return type(model).train(model, False)


def _refuse_pretrained(*_: object, **__: object) -> None:
    raise FissileError(
        "transformers does not know packed layers: write the file with fissile.save, and read it "
        "with fissile.load(path, dense_model)"
    )


def _with(model: nn.Module, news: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of the model with other layers, without copying those they replace."""
    olds = {name: _sparse(model, name) for name in news}
    for name, layer in olds.items():
        if has_hooks(layer):
            raise FissileError(f"{name!r} has hooks, which a new layer would lose; remove them")
        new = news[name]
        if isinstance(new, SparseLayer):
            new.pair = layer.pair
        for key, value in marks_of(layer).items():
            if not hasattr(new, key) and not _is_own(layer, key):
                setattr(new, key, value)
    # A copy that finds a layer in its memo takes what lies there.
    built = copy.deepcopy(model, {id(layer): news[name] for name, layer in olds.items()})
    without_fast_path(built, list(news))
    note(built)
    return built


def _sparse(model: nn.Module, name: str) -> SparseLayer:
    layer = model.get_submodule(name)
    assert isinstance(layer, SparseLayer)
    return layer


def _is_own(layer: nn.Module, key: str) -> bool:
    """Tell what a layer's kind has by itself from what somebody noted on it."""
    return any(key in (*vars(kind), *kind.__annotations__) for kind in type(layer).__mro__[:-1])


def _recast_sequences(model: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> None:
    """Let sequences that hold such layers be of another class, with all they have."""
    for module in model.modules():
        if type(module) is old and any(isinstance(m, SparseLayer) for m in module.children()):
            module.__dict__.pop("_plan", None)
            module.__class__ = new
