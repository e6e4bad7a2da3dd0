"""The structure of an expanded model as plain data, and a dense model given that structure.

A recipe holds no tensor: a rebuilt model is empty and waits for ``load_state_dict``. Recipes come
out of files, so nothing in one is believed: every size must be the model's own times an alpha that
its fan-in allows, before anything is made.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from fissile._common.errors import FileError
from fissile.discovery.meta_copy import random_numbers_apart
from fissile.expansion.replace import (
    dress,
    is_turned,
    masked_like,
    partitioned_like,
    without_fast_path,
)
from fissile.layers import (
    REMOVED,
    DropConnectLinear,
    MaskedConv2d,
    MaskedLinear,
    Pair,
    PartitionedConv2d,
    PartitionedLinear,
    SparseConv2d,
    SparseLayer,
    SparseLinear,
    widened,
    width_of,
)

#: The name under which the configs of transformers models hold a recipe.
METHOD = "fissile"
#: Of recipes in files and configs.
VERSION = 1

_LAYERS = PartitionedLinear, MaskedLinear, DropConnectLinear, PartitionedConv2d, MaskedConv2d
_KINDS = {layer.kind for layer in _LAYERS}


def pairs_in(model: nn.Module) -> list[Pair] | None:
    """Return which expanded layers belong together; None if that is not known of them all."""
    names = {id(module): name for name, module in model.named_modules()}
    left = {name for name, m in model.named_modules() if isinstance(m, SparseLayer)}
    pairs = []
    for name, layer in model.named_modules():
        known = layer.pair.beside(name) if isinstance(layer, SparseLayer) and layer.pair else None
        if known is None:
            continue
        try:  # of a module's several names, the one that named_modules gives
            pair = known.mapped(lambda part: names[id(model.get_submodule(part))])
        except AttributeError:
            return None
        if not left.issuperset((*pair.firsts, name)):
            return None
        left -= {*pair.firsts, name}
        pairs.append(pair)
    return None if left else pairs


def is_expanded(model: nn.Module) -> bool:
    """Return whether a model has an expanded layer."""
    return any(isinstance(module, SparseLayer) for module in model.modules())


def _described(pair: Pair) -> dict[str, Any]:
    return {"firsts": [*pair.firsts], "between": [*pair.between], "second": pair.second}


def read_pairs(recipe: Mapping[str, Any]) -> list[Pair] | None:
    """Return a recipe's pairs; None where it has none, as that of a part of a model."""
    entries = recipe.get("pairs")
    if entries is None:
        return None
    if not isinstance(entries, list):
        raise FileError("the recipe is damaged: its pairs are no list")
    return [_read_pair(entry) for entry in entries]


def _read_pair(entry: Any) -> Pair:
    if not isinstance(entry, Mapping) or entry.keys() != {"firsts", "between", "second"}:
        raise FileError("the recipe is damaged: a pair is not of firsts, between and second")
    firsts, between, second = entry["firsts"], entry["between"], entry["second"]
    lists = isinstance(firsts, list) and isinstance(between, list)
    if not lists or not all(isinstance(name, str) for name in (*firsts, *between, second)):
        raise FileError("the recipe is damaged: a pair is not made of names")
    if not 1 <= len(firsts) <= 2 or second in firsts or len(set(firsts)) < len(firsts):
        raise FileError(f"the recipe is damaged: {second!r} is paired with {firsts!r}")
    return Pair(tuple(firsts), tuple(between), second)


def recipe_of(model: nn.Module) -> dict[str, Any]:
    """Describe how a model was expanded, in plain data that JSON can hold.

    >>> recipe_of(expand(MLP([32, 8, 1]), 2))["layers"]["layers.0"]
    {'kind': 'partitioned', 'inputs': 32, 'outputs': 16, 'alpha': 2}
    """
    layers = {n: _entry(m) for n, m in model.named_modules() if isinstance(m, SparseLayer)}
    pairs = pairs_in(model)
    if pairs is not None:
        named = {name: model.get_submodule(name) for pair in pairs for name in pair.between}
        norms = {name: width_of(module) for name, module in named.items()}
        return {"layers": layers, "norms": norms, "pairs": [_described(pair) for pair in pairs]}
    # A part of a model: whatever is as wide may be between two layers.
    wide = {entry[key] for entry in layers.values() for key in ("inputs", "outputs")}
    norms = {n: width for n, m in model.named_modules() if (width := width_of(m)) in wide}
    return {"layers": layers, "norms": norms}


def note(model: nn.Module) -> None:
    """Write a transformers model's recipe into its config, where ``from_pretrained`` finds it.

    It sits where a quantizer's settings would; the entry of a real quantizer is left alone.
    """
    config = config_of(model)
    if config is None or not hasattr(model, "save_pretrained"):
        return
    entry = getattr(config, "quantization_config", None)
    ours = isinstance(entry, dict) and entry.get("quant_method") == METHOD
    recipe = recipe_of(model)
    with suppress(Exception):  # foreign code: a config that takes no notes stays without
        if recipe["layers"] and (entry is None or ours):
            about = {"quant_method": METHOD, "version": VERSION}
            config.quantization_config = about | {"recipe": recipe}
        elif ours:
            del config.quantization_config


def renamed(recipe: Mapping[str, Any], rename: Callable[[str], str | None]) -> dict[str, Any]:
    """Name a recipe's modules otherwise; what is renamed to None is left out, pairs as a whole."""
    new: dict[str, Any] = {
        key: {to: entry for name, entry in _table(recipe, key).items() if (to := rename(name))}
        for key in ("layers", "norms")
    }
    pairs = read_pairs(recipe)
    if pairs is not None:
        # Keep the old name in a partial pair, so that rebuild reports it missing.
        new["pairs"] = [
            _described(pair.mapped(lambda name: rename(name) or name))
            for pair in pairs
            if any(rename(name) for name in (*pair.firsts, pair.second))
        ]
    return new


def rebuild(model: nn.Module, recipe: Mapping[str, Any]) -> None:
    """Give a dense model the structure a recipe describes, in place and without weights.

    >>> rebuild(dense, recipe_of(wide))
    >>> dense.load_state_dict(wide.state_dict())

    Args:
        model: of the architecture that was expanded, as narrow as it was or as wide as it became;
            layers that have the structure already keep their weights.
        recipe: from :func:`recipe_of`.
    """
    layers, norms = _table(recipe, "layers"), _table(recipe, "norms")
    pairs = read_pairs(recipe)
    grown = {name: _check(name, entry, _find(model, name)) for name, entry in layers.items()}
    alphas = {growth.alpha for growth in grown.values()} - {1}
    widths = {name: _check_norm(name, _find(model, name), norms[name], alphas) for name in norms}
    if pairs is not None:
        _check_pairs(pairs, grown, widths, model)
    elif copied := [name for name, g in grown.items() if g.copies not in {1, *alphas}]:
        # Without pairs nothing else can be told.
        copies = grown[copied[0]].copies
        raise FileError(f"{copied[0]!r} reads {copies} copies of its inputs, which no layer makes")
    parents = {growth.wide[0] // growth.copies for growth in grown.values()}
    for name, entry in layers.items():
        old = _find(model, name)
        if not (isinstance(old, SparseLayer) and _entry(old) == dict(entry)):
            model.set_submodule(name, _empty(entry, old))
    for name, width in widths.items():
        norm = _find(model, name)
        new = widened(norm, width // (width_of(norm) or width))
        if new is not None and width != width_of(norm):
            dress(new[0], norm)
            model.set_submodule(name, new[0])
    for pair in pairs or ():
        second = model.get_submodule(pair.second)
        assert isinstance(second, SparseLayer)
        second.pair = pair.alone()
    without_fast_path(model, list(layers))
    if len(alphas) == 1:
        widen_config(model, parents, *alphas)


@dataclass(frozen=True)
class _Growth:
    """What a layer maps to what, in the model and in the recipe, and what makes the difference."""

    mine: tuple[int, int]
    wide: tuple[int, int]
    alpha: int
    copies: int


def _entry(layer: SparseLayer) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": layer.kind, "inputs": layer.inputs, "outputs": layer.outputs}
    if (alpha := getattr(layer, "alpha", None)) is not None:
        entry["alpha"] = alpha
    if isinstance(layer, SparseLinear) and layer.transposed:
        entry["transposed"] = True
    return entry


def _table(recipe: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = recipe.get(key, {}) if isinstance(recipe, Mapping) else None
    if not isinstance(table, Mapping):
        raise FileError(f"the recipe is damaged: its {key} are no table of names")
    return dict(table)


def _find(model: nn.Module, name: str) -> nn.Module:
    with suppress(AttributeError):
        if name:
            return model.get_submodule(name)
    raise FileError(f"the recipe expands {name!r}, which the model does not have")


def _check(name: str, entry: Any, old: nn.Module) -> _Growth:
    """Return how many children the layer's neurons have, and how many copies it reads."""
    kind = entry.get("kind") if isinstance(entry, Mapping) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise FileError(f"{name!r} has the unknown kind {kind!r}")
    if ("alpha" in entry) != kind.startswith("partitioned"):
        raise FileError(f"{name!r} is {kind}, which does not go with its alpha in the recipe")
    mine = _sizes(name, entry, old)
    wanted = _whole(name, entry, "inputs"), _whole(name, entry, "outputs")
    if "alpha" in entry:
        alpha, copies = _whole(name, entry, "alpha"), 1
        fits = mine in ((wanted[0], wanted[1] // alpha), wanted) and wanted[1] % alpha == 0
    else:
        alpha, copies = wanted[1] // mine[1], wanted[0] // mine[0]
        fits = (copies * mine[0], alpha * mine[1]) == wanted
        fits = fits and 1 in (alpha, copies) and alpha * copies > 0
    if not fits or alpha > wanted[0] or (isinstance(old, SparseLayer) and mine != wanted):
        raise FileError(f"{name!r} maps {mine} features in the model and {wanted} in the recipe")
    return _Growth(mine, wanted, alpha, copies)


def _check_pairs(
    pairs: Sequence[Pair], grown: Mapping[str, _Growth], norms: Mapping[str, int], model: nn.Module
) -> None:
    """Refuse layers that do not fit each other or grow otherwise, and those in no pair or two."""
    for pair in pairs:
        for name in (*pair.firsts, pair.second):
            if name not in grown:
                raise FileError(f"the recipe pairs {name!r}, which it does not expand")
        narrow, wide = grown[pair.second].mine[0], grown[pair.second].wide[0]
        reads = {(narrow, wide)}
        makes = {(grown[name].mine[1], grown[name].wide[1]) for name in pair.firsts}
        # One layer may hold both halves of a gate: it makes twice what is read.
        halves = {(2 * narrow, 2 * wide)} if len(pair.firsts) == 1 else reads
        if makes not in (reads, halves):
            raise FileError(f"{pair.second!r} does not read what {pair.firsts[0]!r} makes")
        for name in pair.between:
            mine = width_of(model.get_submodule(name)) if name in norms else None
            if (mine, norms.get(name)) not in reads | makes:
                raise FileError(f"{name!r} is not as wide as the neurons that pass it")
    count = Counter(name for pair in pairs for name in (*pair.firsts, pair.second))
    for name in grown:
        if count[name] != 1:
            raise FileError(f"{name!r} belongs to {count[name]} pairs of layers, not to one")
    if alone := norms.keys() - {name for pair in pairs for name in pair.between}:
        raise FileError(f"the recipe widens {min(alone)!r}, which no neurons pass")


def _whole(name: str, entry: Mapping[str, Any], key: str) -> int:
    value = entry.get(key)
    if type(value) is not int or not 0 < value < 2**31:
        raise FileError(f"{name!r} has {key}={value!r} in the recipe")
    return value


def _sizes(name: str, entry: Mapping[str, Any], old: nn.Module) -> tuple[int, int]:
    """Return what the model's own layer maps to what, if it is of the recipe's sort."""
    turned, weight = is_turned(old), getattr(old, "weight", None)
    if entry["kind"].endswith("-conv"):
        sort, dims = "convolution", 4
        fits = isinstance(old, nn.Conv2d | SparseConv2d) and getattr(old, "groups", 1) == 1
    else:
        sort, dims = "linear layer", 2
        fits = turned == (entry.get("transposed", False) is True)
        fits = fits and (turned or isinstance(old, nn.Linear | SparseLinear))
    if not fits or not isinstance(weight, Tensor) or weight.ndim != dims:
        raise FileError(f"{name!r} is a {type(old).__name__} in the model, not a {sort} to expand")
    if isinstance(old, SparseLayer):
        return old.inputs, old.outputs
    outputs, inputs = weight.shape[:2]
    return (outputs, inputs) if turned else (inputs, outputs)


def _check_norm(name: str, module: nn.Module, width: Any, alphas: set[int]) -> int:
    mine = width_of(module)
    fits = mine is not None and type(width) is int and width in {mine * a for a in (1, *alphas)}
    if not fits:
        raise FileError(
            f"{name!r} ({type(module).__name__}) is {mine} wide in the model and {width!r} in "
            "the recipe"
        )
    return int(width)


def _empty(entry: Mapping[str, Any], old: nn.Module) -> SparseLayer:
    """Make the layer a recipe describes, with nothing in it yet."""
    like, outputs = old.get_parameter("weight"), entry["outputs"]
    kernel = old.kernel_size if isinstance(old, nn.Conv2d | SparseConv2d) else ()
    rows = outputs // entry.get("alpha", 1)
    weight = like.new_zeros(rows, entry["inputs"], *kernel, requires_grad=False)
    bias = None if old.bias is None else like.new_zeros(outputs)
    new: SparseLayer
    if "alpha" in entry:
        owner = torch.full_like(weight, REMOVED, dtype=torch.int32)
        new = partitioned_like(old, weight, owner, entry["alpha"], bias)
    elif entry["kind"] == DropConnectLinear.kind:
        degree = weight.new_zeros(outputs)
        new = DropConnectLinear(weight, degree, bias, transposed=is_turned(old))
    else:
        new = masked_like(old, weight, torch.zeros_like(weight, dtype=torch.bool), bias)
    dress(new, old)
    return new


#: The names under which configs hold the width of hidden layers.
_CONFIG_KEYS = (
    "intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim",
    "dim_feedforward", "hidden_dim", "ffn_hidden_size", "mlp_dim",
)  # fmt: skip


def config_of(model: nn.Module) -> Any:
    """Return a model's config, if it has one that is an object with attributes; else None."""
    config = getattr(model, "config", None)
    return None if isinstance(config, nn.Module | Mapping) else config


def widen_config(model: nn.Module, widths: set[int], alpha: int) -> None:
    """Multiply those widths in an expanded model's config by alpha, if that describes it exactly.

    The proof is a model built from the changed config on the meta device: it must have the shapes
    of the expanded one written out. As few widths change as that takes; any doubt leaves the
    config alone. Copies of it that parts of the model hold are changed alike.
    """
    config = config_of(model)
    if config is None or alpha == 1:
        return
    found = {key: width for key in _CONFIG_KEYS if (width := _config_width(config, key)) in widths}
    shapes = _dense_shapes(model) if found else {}
    for count in range(1, len(found) + 1):
        for keys in combinations(found, count):
            wide = {key: found[key] * alpha for key in keys}
            if shapes_with(model, config, wide) == shapes:
                for held in (config, *_configs_inside(model, config)):
                    with suppress(Exception):  # foreign code: what will not change stays
                        for key in keys:
                            if _config_width(held, key) == found[key]:
                                setattr(held, key, wide[key])
                return


def _configs_inside(model: nn.Module, config: Any) -> list[Any]:
    """Return the copies of a config that expanded parts of a model hold."""
    held: dict[int, tuple[Any, nn.Module]] = {}
    for part in model.modules():
        own = config_of(part)
        if own is not config and type(own) is type(config):
            held.setdefault(id(own), (own, part))  # the outermost part comes first
    return [own for own, part in held.values() if is_expanded(part)]


def _dense_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the parameters' shapes of a model as ``to_dense`` would write it."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLayer):
            key = f"{name}.weight" if name else "weight"
            shapes[key] = tuple(layer.written_out().get_parameter("weight").shape)
    return shapes


def _config_width(config: Any, key: str) -> int | None:
    width = getattr(config, key, None)
    if width is None and key == "n_inner" and hasattr(config, key):  # GPT-2's word for four times
        embedding = getattr(config, "n_embd", None)
        return 4 * embedding if isinstance(embedding, int) else None
    return width if type(width) is int else None


def shapes_with(
    model: nn.Module, config: Any, wide: dict[str, int]
) -> dict[str, tuple[int, ...]] | None:
    """Return the parameters' shapes with a changed config, without making tensors, or None."""
    try:
        with random_numbers_apart(), torch.device("meta"):
            other = copy.deepcopy(config)
            for key, width in wide.items():
                setattr(other, key, width)
            return {name: tuple(p.shape) for name, p in type(model)(other).named_parameters()}
    except Exception:  # foreign code: whatever goes wrong, the config stays as it is
        return None
