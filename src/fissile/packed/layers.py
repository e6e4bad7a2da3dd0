"""The layers of a packed model: for inference, in the bytes of the narrow network.

A bitmap of masked weights has one bit for all copies of a weight: magnitude keeps or removes these
together. Convolutions hold filters as linear layers hold rows, and write them out at every pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor, nn

from fissile._common.errors import FissileError
from fissile._common.shapes import Bool, Float, Int
from fissile.layers import SparseConv2d, SparseLayer, SparseLinear, owner_mask
from fissile.packed import dispatch
from fissile.packed.bits import MANTISSA, exists, from_bytes, owner_bits
from fissile.packed.format import (
    Layout,
    check_dtype,
    group_starts,
    masked_dense,
    masked_misfit,
    owners,
    partitioned_dense,
    partitioned_misfit,
    recast,
)


class InferenceOnly(nn.Module):
    """A module that refuses to train, before any part of it has changed its mode."""

    def train(self, mode: bool = True) -> Self:
        """Leave training mode; refuse to enter it."""
        if mode:
            raise FissileError(
                "a packed model does not train: call fissile.unpack, train that, and pack it again"
            )
        return super().train(False)


class Packed(InferenceOnly, SparseLayer):
    """What the packed layers share: they compute, and they do not learn."""

    packed = True
    layout: Layout
    #: How many of each weight's lowest bits name its owner.
    owner_bits = 0

    def __init__(self, like: SparseLayer, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._shape_as(like)
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        cast = None if bias is None else bias.detach().to(weight.dtype)
        self.register_parameter("bias", None if cast is None else nn.Parameter(cast, False))
        self.training = False

    @abstractmethod
    def _shape_as(self, like: Any) -> None:
        """Take over what an expanded layer is besides its tensors."""

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The rows and columns of the written-out matrix, filters flattened."""
        return self.outputs, self.inputs

    def misfit(self) -> str | None:
        """Return what is wrong with the tensors; None if packing could have made them."""
        return self._misfit_of({**self._parameters, **self._buffers})

    @abstractmethod
    def _misfit_of(self, parts: Mapping[str, Any]) -> str | None: ...

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the layer; a cast rounds the weights without losing what is in them."""
        dtype = check_dtype(fn(self.weight.detach()[:0]).dtype)
        if dtype is not self.weight.dtype and not self.weight.is_meta:
            new = recast(self.weight, self.owner_bits, dtype)
            self.weight = nn.Parameter(new, requires_grad=False)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Take over a state if it is one of a packed layer; if not, nothing of it."""
        key, dtype = f"{prefix}weight", self.weight.dtype
        new = state_dict.get(key)
        if new is not None and new.dtype is not dtype and new.dtype in MANTISSA:
            state_dict[key] = recast(new, self.owner_bits, dtype)  # a plain cast loses the owners
        mine = {**self._parameters, **self._buffers}
        parts = mine | {k: state_dict[prefix + k] for k in mine if prefix + k in state_dict}
        if wrong := self._hinders(mine, parts, local_metadata.get("assign_to_params_buffers")):
            error_msgs.append(f"{prefix.removesuffix('.')}: {wrong}")
            return
        lists = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    def _hinders(self, mine: Any, parts: Any, assign: bool) -> str | None:
        """Return why a state's parts, with the layer's own for the rest, make no layer."""
        for name, part in parts.items():
            if part is not None and part.is_meta:
                return None  # nothing is in it yet
            if part is not None and not assign and part.shape != mine[name].shape:
                return f"{name} is {tuple(part.shape)}, here it is {tuple(mine[name].shape)}"
        if not assign and parts["bias"] is not None:
            parts = parts | {"bias": parts["bias"].to(self.weight.dtype)}
        return self._misfit_of(parts)

    def nonzeros(self) -> int:
        return int(exists(self.weight).sum())

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows

    def extra_repr(self) -> str:
        dtype = str(self.weight.dtype).removeprefix("torch.")
        return f"{super().extra_repr()}, layout={self.layout}, dtype={dtype}"


class PackedPartitioned(Packed):
    """The weights of a partitioned layer, packed; the tensors are kept as they are."""

    alpha: int
    planes: Tensor | None

    def __init__(
        self, like: SparseLayer, weight: Float[Tensor, "parents columns"],
        planes: Int[Tensor, "bits parents bytes"] | None, alpha: int,
        bias: Float[Tensor, " children"] | None,
    ) -> None:  # fmt: skip
        super().__init__(like, weight, bias)
        self.alpha, self.layout = alpha, "inline" if planes is None else "plane"
        self.owner_bits = owner_bits(alpha) if planes is None else 0
        self.register_buffer("planes", planes)

    def owner(self) -> Int[Tensor, "parents inputs"]:
        """Return the child that owns each weight, -1 where none is; filters are flattened."""
        return owners(self.weight, self.planes, self.alpha)

    def dense_weight(self) -> Float[Tensor, "children inputs *kernel"]:
        return self._shaped(partitioned_dense(self.weight, self.planes, self.alpha))

    def pattern(self) -> Bool[Tensor, "children inputs *kernel"]:
        return self._shaped(owner_mask(self.owner(), self.alpha))

    def _misfit_of(self, parts: Mapping[str, Any]) -> str | None:
        shape = self.outputs // self.alpha, self.matrix_shape[1]
        tensors = parts["weight"], parts["planes"], parts["bias"]
        return partitioned_misfit(*tensors, self.alpha, shape)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, {super().extra_repr()}"


class PackedMasked(Packed):
    """The weights of a masked layer, packed; the tensors are kept as they are."""

    live: Tensor
    start: Tensor
    group: int

    def __init__(
        self, like: SparseLayer, weight: Float[Tensor, " stored"],
        live: Int[Tensor, "outputs bytes"], group: int, bias: Float[Tensor, " outputs"] | None,
        layout: Layout = "inline",
    ) -> None:  # fmt: skip
        super().__init__(like, weight, bias)
        self.group, self.layout = group, layout
        self.register_buffer("live", live)
        self.register_buffer("start", group_starts(live, self.groups), persistent=False)

    @property
    def groups(self) -> int:
        """How many groups a row has."""
        return self.matrix_shape[1] // self.group

    def stored(self) -> Bool[Tensor, "outputs groups"]:
        """Return which groups are stored."""
        return from_bytes(self.live, self.groups).cpu()

    def dense_weight(self) -> Float[Tensor, "outputs inputs *kernel"]:
        columns = self.matrix_shape[1]
        return self._shaped(masked_dense(self.weight.detach(), self.live, self.group, columns))

    def pattern(self) -> Bool[Tensor, "outputs inputs *kernel"]:
        return exists(self.dense_weight())

    def _misfit_of(self, parts: Mapping[str, Any]) -> str | None:
        tensors = parts["weight"], parts["live"], parts["bias"]
        return masked_misfit(*tensors, self.group, self.matrix_shape)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.start = group_starts(self.live, self.groups)


class PackedLinear(Packed, SparseLinear):
    """What the packed linear layers share."""

    def _shape_as(self, like: Any) -> None:
        self._size(like.inputs, like.outputs, like.transposed)

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        return self.activated(x, "none")

    @abstractmethod
    def activated(self, x: Tensor, activation: dispatch.Activation) -> Tensor:
        """Apply the linear map and an activation."""


class PackedPartitionedLinear(PackedPartitioned, PackedLinear):
    """A partitioned layer, packed by :func:`fissile.pack`.

    >>> type(fissile.pack(fissile.expand(fissile.MLP([64, 8, 2]), 2)).layers[0]).__name__
    'PackedPartitionedLinear'
    """

    kind = "partitioned"

    def activated(self, x: Tensor, activation: dispatch.Activation) -> Tensor:
        return dispatch.partitioned_linear(
            x, self.weight, self.planes, self.bias, self.alpha, activation
        )


class PackedMaskedLinear(PackedMasked, PackedLinear):
    """A masked layer, packed by :func:`fissile.pack`.

    >>> type(fissile.pack(fissile.expand(fissile.MLP([64, 8, 2]), 2)).layers[2]).__name__
    'PackedMaskedLinear'
    """

    kind = "masked"

    def activated(self, x: Tensor, activation: dispatch.Activation) -> Tensor:
        how = self.bias, self.group, self.in_features, activation
        return dispatch.masked_linear(x, self.weight, self.live, self.start, *how)


class _PackedConv2d(Packed, SparseConv2d):
    """What the packed convolutions share."""

    def _shape_as(self, like: Any) -> None:
        self.in_channels, self.out_channels = like.inputs, like.outputs
        self.kernel_size, self.geometry = like.kernel_size, like.geometry

    @property
    def matrix_shape(self) -> tuple[int, int]:
        height, width = self.kernel_size
        return self.out_channels, self.in_channels * height * width

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), self.in_channels, *self.kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the filters, written out for this pass."""
        dispatch.refuse_gradients(x, self.weight, self.bias)
        return super().forward(x)


class PackedPartitionedConv2d(PackedPartitioned, _PackedConv2d):
    """A partitioned convolution, packed by :func:`fissile.pack`.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    >>> type(fissile.pack(fissile.expand(model, alpha=2))[0]).__name__
    'PackedPartitionedConv2d'
    """

    kind = "partitioned-conv"


class PackedMaskedConv2d(PackedMasked, _PackedConv2d):
    """A masked convolution, packed by :func:`fissile.pack`.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    >>> type(fissile.pack(fissile.expand(model, alpha=2))[2]).__name__
    'PackedMaskedConv2d'
    """

    kind = "masked-conv"
