"""What is known of single modules: which hold neurons, which let them through, which are unfit."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from fissile.layers import is_transposed

__all__ = [
    "has_hooks", "is_expanded", "is_layer", "is_transformer_layer", "kind_of",
    "norm_trouble", "passes_channels", "passes_silently", "shape_of", "sizes_of",
    "tied_parameters", "trouble_of", "wrapped_in",
]  # fmt: skip

_WRAPPERS = {
    "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule",
    "OptimizedModule",
}  # fmt: skip
_CHANNELWISE = (
    nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
    nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d,
    nn.ZeroPad2d, nn.ConstantPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d,
)  # fmt: skip


def is_expanded(module: nn.Module) -> bool:
    """Tell a layer of fissile's own, which was expanded before."""
    home = type(module).__module__
    return home == "fissile.layers" or home.startswith("fissile.layers.")


def _is_quantized(module: nn.Module) -> bool:
    home = type(module).__module__
    return home.startswith("torch.ao.nn") and hasattr(module, "weight")


def is_layer(module: nn.Module) -> bool:
    """Tell whether a module has neurons of its own: linear layers and convolutions."""
    if isinstance(module, nn.Linear | _ConvNd):
        return True
    return is_transposed(module) or is_expanded(module) or _is_quantized(module)


def kind_of(module: nn.Module) -> str:
    """Name the kind of a layer in a table.

    >>> kind_of(nn.Conv2d(3, 8, 3))
    'conv2d'
    """
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return "linear"
    return type(module).__name__.lower()


def is_transformer_layer(module: nn.Module) -> bool:
    """Tell torch's own transformer layers, whose code cannot be traced but is known."""
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        if isinstance(module, kind):
            mine = type(module)
            return mine.forward is kind.forward and mine._ff_block is kind._ff_block
    return False


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return inputs and neurons (channels and filters) of a plain layer, stacked or not.

    >>> sizes_of(nn.Linear(32, 8))
    (32, 8)
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if isinstance(layer, _ConvNd):
        return weight.shape[1], weight.shape[0]
    neurons, inputs = weight.shape[-2:]
    return (neurons, inputs) if is_transposed(layer) else (inputs, neurons)


def shape_of(layer: nn.Module) -> str:
    """Write a layer's sizes for a table, whatever it can tell about them."""
    inputs = getattr(layer, "in_features", getattr(layer, "in_channels", getattr(layer, "nx", "?")))
    names = ("out_features", "out_channels", "nf")
    neurons = next((getattr(layer, name) for name in names if hasattr(layer, name)), "?")
    return f"{inputs} → {neurons}"


def passes_silently(module: nn.Module) -> bool:
    """Tell modules that let every neuron through as it is, but for chance."""
    nothing = type(module) is nn.Sequential and not len(module)
    return isinstance(module, _DropoutNd) or type(module) is nn.Identity or nothing


def passes_channels(module: nn.Module) -> bool:
    """Tell pooling, padding and scaling that act on every channel of an image alone."""
    return type(module) in _CHANNELWISE and not getattr(module, "return_indices", False)


def norm_trouble(module: nn.Module, width: int, conv: bool) -> str | None:
    """Say why a norm or PReLU cannot widen with ``width`` neurons; an empty text if it can.

    None is the answer for any other module.
    """
    if type(module) is nn.PReLU:
        return "" if module.num_parameters in (1, width) else "has slopes that fit no neuron"
    mine: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        fits = tuple(module.normalized_shape) == (width,) and not conv
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        mine = (nn.BatchNorm2d, nn.InstanceNorm2d) if conv else (nn.BatchNorm1d,)
        fits = module.num_features == width
    elif isinstance(module, nn.GroupNorm):
        mine, fits = (nn.GroupNorm,), conv and module.num_channels == width
    else:
        return None
    return "" if fits and type(module) in mine else "normalises something else than its neurons"


def trouble_of(layer: nn.Module) -> str | None:
    """Say why a layer cannot take part in any place, whatever surrounds it; None if it can."""
    if is_expanded(layer):
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
    if isinstance(layer, nn.Conv2d) and layer.groups != 1:
        return f"its channels are grouped (groups={layer.groups})"
    own = nn.Conv2d if isinstance(layer, nn.Conv2d) else nn.Linear
    if "forward" in vars(layer):
        return "its forward was replaced, so what it computes is unknown"
    plain = is_transposed(layer) or type(layer).forward is own.forward
    if isinstance(layer, nn.Conv2d):
        plain = plain and type(layer)._conv_forward is nn.Conv2d._conv_forward
    return None if plain else f"{type(layer).__name__} has a forward of its own"


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
        if not parameter.is_floating_point():
            return f"it is quantized ({parameter.dtype}); expand the model before quantizing it"
        if type(parameter) is not nn.Parameter:
            return f"its parameters are not plain ones but {type(parameter).__name__}"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a module has hooks, which a new one in its place would lose."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)


def wrapped_in(model: nn.Module) -> str | None:
    """Say what spreads a model over processes or devices, which expansion must precede."""
    for module in model.modules():
        names = {base.__name__ for base in type(module).__mro__} & _WRAPPERS
        if names:
            return f"the model is wrapped in {min(names)}; expand before wrapping"
    for parameter in model.parameters():
        if any(base.__name__ == "DTensor" for base in _bases(parameter)):
            return "its parameters are spread over devices (DTensor); expand before wrapping"
    return None


def _bases(parameter: Tensor) -> Iterator[type]:
    yield from type(parameter).__mro__
    if not is_lazy(parameter):
        yield from type(parameter.data).__mro__


def tied_parameters(model: nn.Module) -> dict[int, str]:
    """Map every parameter that the model holds under several names to those names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: " and ".join(many) for key, many in names.items() if len(many) > 1}
