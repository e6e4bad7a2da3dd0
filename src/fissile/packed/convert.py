"""Packing a model for inference, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensor

from fissile._common.errors import FissileError
from fissile._common.shapes import Bool, Float
from fissile.discovery.module_checks import has_hooks, marks_of
from fissile.expansion.replace import without_fast_path
from fissile.expansion.structure import note
from fissile.layers import (
    DropConnectLinear,
    Masked,
    MaskedConv2d,
    MaskedLinear,
    Partitioned,
    PartitionedConv2d,
    PartitionedLinear,
    SparseConv2d,
    SparseLayer,
    SparseLinear,
)
from fissile.packed.bits import Carrier, embedded, exists, write_groups, write_mask
from fissile.packed.format import (
    Layout,
    cast,
    check_dtype,
    check_layout,
    pack_masked,
    pack_partitioned,
    refuse_overflow,
)
from fissile.packed.layers import (
    InferenceOnly,
    Packed,
    PackedMasked,
    PackedMaskedConv2d,
    PackedMaskedLinear,
    PackedPartitioned,
    PackedPartitionedConv2d,
    PackedPartitionedLinear,
)
from fissile.packed.sequence import PackedSequential


def packed_layer(layer: SparseLayer, dtype: torch.dtype | None, layout: Layout) -> Packed:
    """Pack one expanded layer by itself."""
    if isinstance(layer, Packed):
        raise FissileError("it is packed already; fissile.unpack comes first")
    if isinstance(layer, DropConnectLinear):
        raise FissileError(
            "DropConnect uses all its weights in evaluation: nothing to pack; expand the model"
        )
    if layer.weight.ndim != (4 if isinstance(layer, SparseConv2d) else 2):
        raise FissileError("a stack of networks is not packed; take the networks out one by one")
    if layer.weight.is_meta:
        raise FissileError("its weights are on the meta device and have no values; load them first")
    kind, weight = check_dtype(dtype or layer.weight.dtype), layer.rows(layer.weight.detach())
    if not bool(weight.isfinite().all()):
        raise FissileError("it has weights that are NaN or infinite; repair the model first")
    bias = None if layer.bias is None else layer.bias.detach().to(kind, copy=True)
    if isinstance(layer, Partitioned):
        owner = layer.rows(layer.owner)
        values, planes = pack_partitioned(weight, owner, layer.alpha, kind, layout)
        return partitioned_like(layer, values, planes, bias)
    assert isinstance(layer, Masked)
    values, live, group = pack_masked(weight, layer.rows(layer.mask), kind)
    return masked_like(layer, values, live, group, bias, layout)


def partitioned_like(
    layer: Partitioned, weight: Tensor, planes: Tensor | None, bias: Tensor | None
) -> PackedPartitioned:
    """Hold packed tensors in a layer that computes what the given one does."""
    convolution = isinstance(layer, SparseConv2d)
    kind = PackedPartitionedConv2d if convolution else PackedPartitionedLinear
    return kind(layer, weight, planes, layer.alpha, bias)


def masked_like(
    layer: Masked, weight: Tensor, live: Tensor, group: int, bias: Tensor | None, layout: Layout
) -> PackedMasked:
    """Hold packed tensors in a layer that computes what the given one does."""
    kind = PackedMaskedConv2d if isinstance(layer, SparseConv2d) else PackedMaskedLinear
    return kind(layer, weight, live, group, bias, layout)


def unpacked_layer(layer: Packed) -> SparseLayer:
    """Return an expanded layer with the weights that were packed."""
    turned, bias = isinstance(layer, SparseLinear) and layer.transposed, layer.bias
    if isinstance(layer, PackedPartitioned):
        weight, owner = layer._shaped(layer.weight.detach()), layer._shaped(layer.owner())
        if isinstance(layer, SparseConv2d):
            return PartitionedConv2d(weight, owner, layer.alpha, bias, layer.geometry)
        return PartitionedLinear(weight, owner, layer.alpha, bias, transposed=turned)
    weight, mask = layer.dense_weight(), layer.pattern()
    if isinstance(layer, SparseConv2d):
        return MaskedConv2d(weight, mask, bias, layer.geometry)
    return MaskedLinear(weight, mask, bias, transposed=turned)


# --- layout inline: weights that carry their places


def inline_layers(model: nn.Module) -> dict[str, Packed]:
    """Return the packed layers of layout ``inline`` by their names, in the model's order."""
    named = model.named_modules()
    return {name: m for name, m in named if isinstance(m, Packed) and m.layout == "inline"}


def living(layer: Packed) -> Float[Tensor, " living"]:
    """Return the weights that exist, row after row."""
    weight = layer.weight.detach().cpu()
    return weight[exists(weight)]


def stream_of(layers: Mapping[str, Packed]) -> Bool[Tensor, " bits"]:
    """Write down where the weights of these layers go, apart from their owners."""
    parts = [torch.zeros(0, dtype=torch.bool, device="cpu")]
    for layer in layers.values():
        there = exists(layer.weight.detach().cpu())
        if isinstance(layer, PackedMasked):
            shape = layer.outputs * layer.groups, layer.group
            mask = torch.zeros(shape, dtype=torch.bool, device="cpu")
            mask[layer.stored().flatten()] = there.view(-1, layer.group)
            parts.append(write_groups(mask))
        else:
            parts.append(write_mask(there.flatten()))
    return torch.cat(parts)


def settled(layers: Mapping[str, Packed]) -> dict[str, Tensor] | None:
    """Return the living weights, rounded to carry the stream; None if it is too long for them."""
    carriers = [Carrier(living(layer), layer.owner_bits) for layer in layers.values()]
    values = embedded(stream_of(layers), carriers)
    return None if values is None else dict(zip(layers, values, strict=True))


# --- layout 2:4: PyTorch's semi-structured tensors


class SemiStructuredLinear(InferenceOnly, nn.Linear):
    """PyTorch's linear layer over a semi-structured weight."""


def semi_structured(layer: SparseLayer, dtype: torch.dtype | None) -> nn.Module | None:
    """Return a plain linear layer over a semi-structured weight; None if the layer is not 2:4."""
    if not isinstance(layer, SparseLinear) or layer.transposed or layer.weight.ndim != 2:
        return None
    pattern = layer.pattern()
    if pattern.shape[1] % 4 or int(pattern.unflatten(1, (-1, 4)).sum(-1).max()) > 2:
        return None
    weight = cast(layer.dense_weight().detach(), dtype)
    if not weight.is_cuda:
        raise FissileError(
            'layout="2:4" is for GPUs: move the model there first, or use layout="inline"'
        )
    try:
        sparse = torch.sparse.to_sparse_semi_structured(weight)
    except (RuntimeError, ValueError) as error:
        raise FissileError(f"PyTorch does not take it as a 2:4 weight: {error}") from None
    new = SemiStructuredLinear(layer.inputs, layer.outputs, device="meta")
    new.weight = nn.Parameter(sparse, requires_grad=False)
    bias = None if layer.bias is None else nn.Parameter(cast(layer.bias.detach(), dtype).clone())
    new.register_parameter("bias", bias)
    return new


# --- whole models


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
    before = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in [*packed.named_parameters(), *packed.named_buffers()]:
        if tensor.is_floating_point() and name in before:
            refuse_overflow(name, before[name], tensor)
    layers = inline_layers(packed)
    # Rounded now to what a file will hold, so that saving changes nothing.
    for name, values in (settled(layers) or {}).items():
        weight = layers[name].weight.detach()
        weight[exists(weight)] = values.to(weight.device)
    return for_inference(packed, learns)


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
    wide = _swap_sequences(wide, PackedSequential, nn.Sequential)
    learns = vars(wide).pop("learns", None)
    for name, parameter in wide.named_parameters():
        parameter.requires_grad_(learns is None or name in learns)
    if isinstance(getattr(wide, "hf_quantizer", None), _Unserializable):
        del wide.hf_quantizer
    return wide


def for_inference(packed: nn.Module, learns: frozenset[str]) -> nn.Module:
    """Return a model with packed layers as one for inference that remembers what would learn."""
    packed = _swap_sequences(packed, nn.Sequential, PackedSequential)
    packed.requires_grad_(False).eval()
    setattr(packed, "learns", learns)  # noqa: B010
    if hasattr(packed, "save_pretrained"):
        setattr(packed, "hf_quantizer", _Unserializable())  # noqa: B010
    return packed


class _Unserializable:
    """A quantizer that makes transformers' ``save_pretrained`` refuse, and quote its method."""

    def __init__(self) -> None:
        self.quantization_config = SimpleNamespace(
            quant_method="fissile.pack (write the file with fissile.save, and read it with "
            "fissile.load(path, dense_model))"
        )


def _two_of_four(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a model whose 2:4 layers are PyTorch's, and whose other layers are packed."""
    news = _each(
        model, lambda old: semi_structured(old, dtype) or packed_layer(old, dtype, "plane")
    )
    if all(isinstance(layer, Packed) for layer in news.values()):
        raise FissileError('no layer has a 2:4 pattern; expand with alpha=2 and split="2:4"')
    packed = _with(model, news)
    if dtype is not None:
        for module in packed.modules():  # one by one: a semi-structured weight takes no cast
            if module not in news.values():
                module._apply(partial(cast, dtype=dtype), recurse=False)
    return for_inference(packed, frozenset())


def _each(model: nn.Module, make: Callable[[SparseLayer], nn.Module]) -> dict[str, nn.Module]:
    """Return a new layer for every expanded one; an error names its layer."""
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


def _with(model: nn.Module, news: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of the model with other layers, without copying those they replace."""
    olds = {name: model.get_submodule(name) for name in news}
    for name, layer in olds.items():
        if has_hooks(layer):
            raise FissileError(f"{name!r} has hooks, which a new layer would lose; remove them")
        new = news[name]
        if isinstance(new, SparseLayer) and isinstance(layer, SparseLayer):
            new.pair = layer.pair
        classes = type(layer).__mro__[:-1]
        declared = {key for kind in classes for key in (*vars(kind), *kind.__annotations__)}
        for key, value in marks_of(layer).items():  # what was added to the instance
            if not hasattr(new, key) and key not in declared:
                setattr(new, key, value)
    # A copy that finds a layer in its memo takes what lies there.
    built = copy.deepcopy(model, {id(layer): news[name] for name, layer in olds.items()})
    without_fast_path(built, list(news))
    note(built)
    return built


def _swap_sequences(
    model: nn.Module, old: type[nn.Sequential], new: type[nn.Sequential]
) -> nn.Module:
    """Return the model with sequences of class ``new`` for ``old`` ones with expanded layers."""
    swapped: dict[nn.Module, nn.Module] = {
        module: new()
        for module in model.modules()
        if type(module) is old
        and any(isinstance(m, SparseLayer | InferenceOnly) for m in module.children())
    }
    for sequence, like in swapped.items():  # with its modules, hooks and marks
        state = {key: value for key, value in vars(sequence).items() if key != "_plan"}
        like.__setstate__(state | {"_modules": dict(sequence._modules)})
    for module in [*model.modules(), *swapped.values()]:
        for name, child in module._modules.items():
            if child in swapped:
                setattr(module, name, swapped[child])
    return swapped.get(model, model)
