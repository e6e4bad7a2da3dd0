"""Which layers of an expanded model belong together, and whether a recipe's pairs can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fissile.children import width_of
from fissile.errors import FileError
from fissile.layers import Pair, SparseLayer

__all__ = ["check_pairs", "described", "pairs_in", "read_pairs", "remember"]

#: What a layer maps to what: inputs and outputs.
Sizes = tuple[int, int]


def pairs_in(model: nn.Module) -> list[Pair] | None:
    """Return which expanded layers belong together; None if that is not known of them all."""
    names = {id(module): name for name, module in model.named_modules()}
    left = {name for name, m in model.named_modules() if isinstance(m, SparseLayer)}
    pairs = []
    for name, layer in model.named_modules():
        known = layer.pair.beside(name) if isinstance(layer, SparseLayer) and layer.pair else None
        if known is None:
            continue
        pair = _as_named(model, known, names)
        if pair is None or not left.issuperset((*pair.firsts, name)):
            return None
        left -= {*pair.firsts, name}
        pairs.append(pair)
    return None if left else pairs


def remember(model: nn.Module, pair: Pair) -> None:
    """Let the layer that reads the children know its pair."""
    second = model.get_submodule(pair.second)
    assert isinstance(second, SparseLayer)
    second.pair = pair.alone()


def described(pair: Pair) -> dict[str, Any]:
    """Return a pair as plain data."""
    return {
        "firsts": list(pair.firsts),
        "between": list(pair.between),
        "second": pair.second,
    }


def read_pairs(recipe: Mapping[str, Any]) -> list[Pair] | None:
    """Return a recipe's pairs; None where it has none, as those of the first release."""
    entries = recipe.get("pairs")
    if entries is None:
        return None
    if not isinstance(entries, list):
        raise FileError("the recipe is damaged: its pairs are no list")
    return [_read(entry) for entry in entries]


def check_pairs(
    pairs: Sequence[Pair],
    sizes: Mapping[str, tuple[Sizes, Sizes]],
    norms: Mapping[str, int],
    model: nn.Module,
) -> None:
    """Refuse pairs that do not fit, and whatever belongs to none or to two.

    Args:
        pairs: the names.
        sizes: what each expanded layer maps in the model, and in the recipe.
        norms: the width of each widened norm or slope in the recipe.
        model: the model to be rebuilt.
    """
    for pair in pairs:
        _check(pair, sizes, norms, model)
    count = Counter(name for pair in pairs for name in (*pair.firsts, pair.second))
    for name in sizes:
        if count[name] != 1:
            raise FileError(f"{name!r} belongs to {count[name]} pairs of layers, not to one")
    if alone := norms.keys() - {name for pair in pairs for name in pair.between}:
        raise FileError(f"the recipe widens {min(alone)!r}, which no neurons pass")


def _check(
    pair: Pair,
    sizes: Mapping[str, tuple[Sizes, Sizes]],
    norms: Mapping[str, int],
    model: nn.Module,
) -> None:
    """Refuse layers that do not fit each other, or do not grow alike."""
    for name in (*pair.firsts, pair.second):
        if name not in sizes:
            raise FileError(f"the recipe pairs {name!r}, which it does not expand")
    (narrow, _), (wide, _) = sizes[pair.second]
    reads = {(narrow, wide)}
    makes = {(mine[1], wanted[1]) for mine, wanted in (sizes[name] for name in pair.firsts)}
    # One layer may hold both halves of a gate: it makes twice what is read.
    halves = {(2 * narrow, 2 * wide)} if len(pair.firsts) == 1 else reads
    if makes not in (reads, halves):
        raise FileError(f"{pair.second!r} does not read what {pair.firsts[0]!r} makes")
    for name in pair.between:
        grown = (width_of(model.get_submodule(name)), norms[name]) if name in norms else None
        if grown not in reads | makes:
            raise FileError(f"{name!r} is not as wide as the neurons that pass it")


def _as_named(model: nn.Module, pair: Pair, names: Mapping[int, str]) -> Pair | None:
    """Name the modules as ``named_modules`` does, which knows each by one name; None if gone."""
    try:
        return pair.mapped(lambda name: names[id(model.get_submodule(name))])
    except AttributeError:
        return None


def _read(entry: Any) -> Pair:
    if not isinstance(entry, Mapping) or entry.keys() != {"firsts", "between", "second"}:
        raise FileError("the recipe is damaged: a pair is not of firsts, between and second")
    firsts, between, second = entry["firsts"], entry["between"], entry["second"]
    lists = isinstance(firsts, list) and isinstance(between, list)
    if not lists or not all(isinstance(name, str) for name in (*firsts, *between, second)):
        raise FileError("the recipe is damaged: a pair is not made of names")
    if not 1 <= len(firsts) <= 2 or second in firsts or len(set(firsts)) < len(firsts):
        raise FileError(f"the recipe is damaged: {second!r} is paired with {firsts!r}")
    return Pair(tuple(firsts), tuple(between), second)
