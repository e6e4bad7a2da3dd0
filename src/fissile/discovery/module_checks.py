"""What is known of single modules: which hold neurons, which let them through, which are unfit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from fissile._common.errors import FissileError
from fissile.layers import SparseLayer, is_transposed, width_of
from fissile.layers.mlp import is_elementwise

_WRAPPERS = {
    "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule",
    "OptimizedModule",
}  # fmt: skip
_CHANNELWISE = (
    nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
    nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d,
    nn.ZeroPad2d, nn.ConstantPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d,
)  # fmt: skip
_PLAIN = {
    *vars(nn.Module()), *vars(nn.Linear(1, 1)), *vars(nn.Conv2d(1, 1, 1)), "nf", "nx",
    "alpha", "geometry", "observer", "pair", "transposed",  # of fissile's own layers
}  # fmt: skip

#: A plain pair; gate and up side by side; the same as one matrix; filters.
Kind = Literal["mlp", "gated", "fused", "conv"]
_Place = TypeVar("_Place", bound="Modules")


@dataclass(frozen=True)
class Modules:
    """The modules of a place, by their names."""

    kind: Kind
    firsts: tuple[str, ...]
    between: tuple[str, ...]
    second: str

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers with weights that count: the firsts and the second."""
        return (*self.firsts, self.second)


@dataclass(frozen=True)
class Candidate(Modules):
    """A possible place; with a ``doubt`` it must be tried out first."""

    doubt: str | None = None


def disjoint(places: Iterable[_Place]) -> list[_Place]:
    """Return places that have no layer in common: of two that have one, the first."""
    chosen: list[_Place] = []
    spent: set[str] = set()
    for place in places:
        if spent.isdisjoint(place.layers):
            chosen.append(place)
            spent.update(place.layers)
    return chosen


def forward_of(module: nn.Module) -> Any:
    """Return the forward that a module's class defines; compiled code has none."""
    return getattr(type(module), "forward", None)


def is_of_torch(module: nn.Module) -> bool:
    """Return whether a module is one of torch.nn, whose code is known."""
    return type(module).__module__.startswith("torch.nn.")


def is_known_code(module: nn.Module) -> bool:
    """Return whether a module's code is known to call the blocks below it as wholes.

    The models of torch and of transformers do; of any other code it is unknown until it is traced
    or tried out.
    """
    return type(module).__module__.startswith(("torch.nn.", "transformers.models."))


def refuse_packed(model: nn.Module) -> None:
    """Refuse a model for inference, whose layers are not what can be split or rewritten."""
    if any(isinstance(module, SparseLayer) and module.packed for module in model.modules()):
        raise FissileError("the model is packed for inference: call fissile.unpack first")


def _is_quantized(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.ao.nn") and hasattr(module, "weight")


def is_layer(module: nn.Module) -> bool:
    """Return whether a module has neurons of its own: linear layers and convolutions."""
    known = isinstance(module, nn.Linear | _ConvNd | SparseLayer)
    return known or is_transposed(module) or _is_quantized(module)


def kind_of(module: nn.Module) -> str:
    """Return the name of a layer's kind for a table."""
    if isinstance(module, nn.Linear) and forward_of(module) is nn.Linear.forward:
        return "linear"
    return type(module).__name__.lower()


def is_transformer_layer(module: nn.Module) -> bool:
    """Return whether a module is torch's own transformer layer: known, but not traceable."""
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        if isinstance(module, kind):
            mine = type(module)
            return mine.forward is kind.forward and mine._ff_block is kind._ff_block
    return False


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return inputs and neurons (channels and filters) of a plain layer, stacked or not."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if isinstance(layer, _ConvNd):
        return weight.shape[1], weight.shape[0]
    neurons, inputs = weight.shape[-2:]
    return (neurons, inputs) if is_transposed(layer) else (inputs, neurons)


def shape_of(layer: nn.Module) -> str:
    """Return a layer's sizes for a table, with ? for what it does not have."""
    inputs = getattr(layer, "in_features", getattr(layer, "in_channels", getattr(layer, "nx", "?")))
    names = ("out_features", "out_channels", "nf")
    neurons = next((getattr(layer, name) for name in names if hasattr(layer, name)), "?")
    return f"{inputs} → {neurons}"


def passage(module: nn.Module, name: str, width: int, conv: bool) -> bool | str:
    """Return whether a module bends neurons or lets them through; or why they do not pass."""
    called = f"{name!r} ({type(module).__name__})"
    if has_hooks(module):
        return f"its output goes through {called}, which has hooks; remove them"
    if _is_norm(module):
        trouble = _norm_trouble(module, width, conv)
        return f"{called} {trouble}" if trouble else isinstance(module, nn.PReLU)
    silent = (nn.Identity, nn.Sequential) if not len(module._modules) else ()
    if isinstance(module, _DropoutNd) or type(module) in silent:
        return False
    if conv and type(module) in _CHANNELWISE and not getattr(module, "return_indices", False):
        return False
    if isinstance(module, nn.Flatten | nn.Unflatten):
        return f"its output is reshaped by {called}"
    if is_elementwise(module) and (is_of_torch(module) or is_elementwise(module, training=True)):
        return True
    return f"its output goes through {called}, which is not elementwise"


def widens(module: nn.Module) -> bool:
    """Return whether a new module takes this one's place when neurons get children."""
    return is_layer(module) or width_of(module) is not None


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm, fit to widen or not, or has slopes."""
    norms = (nn.LayerNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase, nn.GroupNorm)
    return isinstance(module, norms) or type(module) is nn.PReLU


def _norm_trouble(norm: nn.Module, width: int, conv: bool) -> str | None:
    """Return why a norm or PReLU cannot widen with ``width`` neurons; None if it can."""
    if isinstance(norm, nn.PReLU):
        return None if norm.num_parameters in (1, width) else "has slopes that fit no neuron"
    known: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm)
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        fits = tuple(norm.normalized_shape) == (width,) and not conv
    elif isinstance(norm, nn.GroupNorm):
        known, fits = (nn.GroupNorm,), conv and norm.num_channels == width
    else:
        known = (nn.BatchNorm2d, nn.InstanceNorm2d) if conv else (nn.BatchNorm1d,)
        fits = bool(norm.num_features == width)
    return None if fits and type(norm) in known else "normalises something else than its neurons"


def trouble_of(layer: nn.Module) -> str | None:
    """Return why a layer cannot take part in any place, whatever surrounds it; None if it can."""
    if isinstance(layer, SparseLayer):
        return "it is expanded already; start from the dense model"
    if isinstance(layer, _ConvTransposeNd):
        return "it is a transposed convolution"
    if isinstance(layer, _ConvNd) and not isinstance(layer, nn.Conv2d):
        return "it is a convolution, but not of images; of convolutions only Conv2d can be split"
    trouble = _parameter_trouble(layer)
    if trouble is not None:
        return trouble
    if has_hooks(layer):
        return "it has hooks, which a new layer would lose; remove them"
    own = _own_things(layer)
    if own:
        return f"it has {own[0]!r} besides weight and bias, which a new layer would lose"
    if isinstance(layer, nn.Conv2d) and layer.groups != 1:
        return f"its channels are grouped (groups={layer.groups})"
    if "forward" in vars(layer):
        return "its forward was replaced, so what it computes is unknown"
    known = nn.Conv2d if isinstance(layer, nn.Conv2d) else nn.Linear
    plain = is_transposed(layer) or forward_of(layer) is known.forward
    if isinstance(layer, nn.Conv2d):
        plain = plain and type(layer)._conv_forward is nn.Conv2d._conv_forward
    return None if plain else f"{type(layer).__name__} has a forward of its own"


def marks_of(layer: nn.Module) -> dict[str, Any]:
    """Return the attributes that somebody gave a layer besides what its kind has.

    What begins with an underscore is the business of some framework, not of forward code.
    """
    known = {*_PLAIN, "forward"}
    return {k: v for k, v in vars(layer).items() if not k.startswith("_") and k not in known}


def _own_things(layer: nn.Module) -> list[str]:
    """Return what a new layer could not take over: tensors, modules, and notes on its width."""
    tensors = {*layer._parameters, *layer._buffers, *layer._modules} - {"weight", "bias"}
    sizes = tuple(layer.weight.shape) if isinstance(layer.weight, Tensor) else ()
    marks = [key for key, value in marks_of(layer).items() if not _is_mark(value, sizes)]
    return [*sorted(tensors), *marks]


def _is_mark(value: Any, sizes: tuple[int, ...]) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return value not in sizes
    return value is None or isinstance(value, bool | float | str)


def _parameter_trouble(layer: nn.Module) -> str | None:
    if _is_quantized(layer):
        return "it is quantized; expand the model before quantizing it"
    if "weight" not in layer._parameters:
        return (
            "its weight is computed, not a parameter (pruned or parametrised?); make it permanent "
            "first, e.g. with torch's prune.remove"
        )
    for parameter in layer.parameters():
        if is_lazy(parameter):
            return "it is lazy and has no size yet; run the model once first"
        if parameter.is_meta:
            return "its parameters are on the meta device and have no values"
        if parameter.is_complex():
            return "its weights are complex numbers; only real ones can be split"
        if not parameter.is_floating_point() or parameter.itemsize < 2:
            return f"it is quantized ({parameter.dtype}); expand the model before quantizing it"
        if type(parameter) is not nn.Parameter:
            return f"its parameters are not plain ones but {type(parameter).__name__}"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module or a parameter of its own has hooks, which a new one would lose."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name) for name in names):
        return True
    parameters = [p for p in module._parameters.values() if p is not None]
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)


def wrapped_in(model: nn.Module) -> str | None:
    """Return what spreads a model over processes or devices, which expansion must precede."""
    for module in model.modules():
        names = {base.__name__ for base in type(module).__mro__} & _WRAPPERS
        if names:
            return f"the model is wrapped in {min(names)}; expand before wrapping"
    for parameter in model.parameters():
        kinds = [parameter] if is_lazy(parameter) else [parameter, parameter.data]
        if any(base.__name__ == "DTensor" for kind in kinds for base in type(kind).__mro__):
            return "its parameters are spread over devices (DTensor); expand before wrapping"
    return None


def tied(model: nn.Module) -> dict[int, str]:
    """Map what the model holds under several names, parameters and norms, to those names."""
    names: dict[int, list[str]] = {}
    modules = model.named_modules(remove_duplicate=False)
    norms = ((name, module) for name, module in modules if widens(module))
    for name, part in (*model.named_parameters(remove_duplicate=False), *norms):
        names.setdefault(id(part), []).append(name)
    return {key: " and ".join(many) for key, many in names.items() if len(many) > 1}


def contents(value: Any) -> Iterator[Any]:
    """Yield what nested lists, tuples, sets and dictionaries hold; else the value."""
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if not isinstance(value, Mapping | list | tuple | set | frozenset | deque):
            yield value
        elif id(value) not in seen:  # a list may hold itself
            seen.add(id(value))
            waiting += value.values() if isinstance(value, Mapping) else value
