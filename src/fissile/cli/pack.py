"""The commands ``fissile pack``, ``unpack`` and ``bench``: saved models for inference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console
from rich.progress import Progress

from fissile._common.errors import FissileError
from fissile.cli.common import show, table_of
from fissile.layers import SparseLinear
from fissile.packed.format import Layout

if TYPE_CHECKING:
    import torch

    from fissile.io.packing import Content, Packing
    from fissile.packed.timing import Rival, Timing

    # A layer's name, what to time, its shape in words, its inputs and its dtype.
    _Contest = tuple[str, Mapping[str, Rival], str, int, torch.dtype]

PACK = (
    "Examples: fissile pack wide.safetensors -o packed.safetensors --dtype float16 · "
    "fissile pack wide.safetensors -o packed.safetensors --layout plane"
)
UNPACK = "Example: fissile unpack packed.safetensors -o wide.safetensors"
BENCH = (
    "Examples: fissile bench wide.safetensors · "
    "fissile bench packed.safetensors --batch 1 --batch 16 --device cuda --dtype float16"
)

_DTYPES = ("float32", "float16", "bfloat16")

Dtype = Enum("Dtype", {name: name for name in _DTYPES}, type=str)  # type: ignore[misc]
Where = Enum("Where", {name: name for name in get_args(Layout)}, type=str)  # type: ignore[misc]

To = Annotated[Path, typer.Option("--to", "-o", help="The file to write.")]


def pack(
    model: Annotated[Path, typer.Argument(help="An expanded model that fissile.save wrote.")],
    to: To,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of all numbers; by default they keep their own.")
    ] = None,
    layout: Annotated[
        Where, typer.Option(help="Owners in the weights' lowest bits, or in planes beside them.")
    ] = "inline",  # type: ignore[assignment]
) -> None:
    """Pack a saved model for inference: the wide network in the bytes of the narrow one."""
    from fissile.io.packing import pack_file

    done = pack_file(model, to, dtype=_dtype(dtype), layout=layout.value)
    _print_packing(done)
    typer.echo(f"{to}: {done.weights:,} weights in {done.after:,} bytes")


def unpack(model: Annotated[Path, typer.Argument(help="A packed model.")], to: To) -> None:
    """Write a packed model as an expanded one again, which can be trained."""
    from fissile.io.packing import unpack_file

    unpack_file(model, to)
    typer.echo(f"{to}: {to.stat().st_size:,} bytes")


def bench(
    model: Annotated[Path, typer.Argument(help="An expanded or packed model.")],
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Samples at a time; may be given repeatedly.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of all numbers; by default each layer's own.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="How long to time each layer and batch, about.")
    ] = 0.5,
) -> None:
    """Time the layers of a saved model: before the split, expanded and dense, and packed."""
    import torch

    from fissile.bank import check_device
    from fissile.io.packing import read
    from fissile.packed.timing import DENSE, EXPANDED, race

    where, content = check_device(device), read(model)
    batches, kind = batch or [1, 16], _dtype(dtype)
    columns = (DENSE, EXPANDED, *get_args(Layout))
    table = table_of("layer", "shape", "batch", *columns, numbers=("batch", *columns))
    reasons: dict[tuple[str, str], str] = {}
    if not any(isinstance(layer, SparseLinear) for layer in content.layers.values()):
        raise FissileError(f"{model}: its expanded layers are convolutions, which are not timed")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("making the layers", total=None)
        contests = list(_contests(content, model, kind, where))
        timed = {name for name, *_ in contests}
        bar.update(task, description="timing", total=len(contests) * len(batches))
        for name, rivals, shape, inputs, of_layer in contests:
            for size in batches:
                x = torch.randn(size, inputs, device=where).to(of_layer)
                times, why = race(rivals, x, seconds=seconds)
                table.add_row(name, shape, str(size), *_cells(columns, times))
                reasons |= {(name, rival): text for rival, text in why.items()}
                bar.advance(task)
    show(table)
    for (name, rival), text in reasons.items():
        typer.echo(f"{name}, {rival}: {text}")
    for name in content.layers:
        if name not in timed:
            typer.echo(f"{name}: a convolution, which is not timed by itself")
    typer.echo(f"Microseconds, and multiples of the dense layer's before the split; on {where}.")


def _dtype(chosen: Enum | None) -> torch.dtype | None:
    import torch

    return None if chosen is None else getattr(torch, str(chosen.value))


def _print_packing(done: Packing) -> None:
    columns = ("file", "tensors alone", "against the dense network")
    table = table_of("", *columns, numbers=columns)
    rows = {
        "expanded": (done.before, done.tensors_before),
        "packed": (done.after, done.tensors_after),
    }
    for name, (whole, tensors) in rows.items():
        ratio = "" if not done.narrow else f"{tensors / done.narrow:.3f} ×"
        table.add_row(name, f"{whole:,} bytes", f"{tensors:,} bytes", ratio)
    narrow = "unknown" if done.narrow is None else f"{done.narrow:,} bytes"
    table.add_row("dense, before the split", "", narrow, "")
    show(table)
    if done.bits:
        typer.echo(f"Of a weight, {done.bits:.2f} bits say where it goes, on average.")


def _contests(
    content: Content, path: Path, dtype: torch.dtype | None, device: torch.device
) -> Iterator[_Contest]:
    """Yield every linear layer, and the whole network if it is known, with what they take."""
    import fissile
    from fissile.packed.convert import unpacked_layer
    from fissile.packed.files import dense_sizes
    from fissile.packed.layers import Packed
    from fissile.packed.timing import DENSE, EXPANDED, attempt, layer_rivals, module

    sizes = dense_sizes(content.recipe)
    for name, layer in content.layers.items():
        wide = unpacked_layer(layer) if isinstance(layer, Packed) else layer
        if isinstance(wide, SparseLinear):
            kind = dtype or wide.weight.dtype
            rivals = layer_rivals(wide, sizes.get(name), dtype=kind, device=device)
            shape = f"{wide.inputs:,} → {wide.outputs:,}"
            yield name, rivals, shape, wide.inputs, kind
    if content.recipe.get("mlp") is None:
        return
    loaded = fissile.load(path)
    network = fissile.unpack(loaded) if content.packed else loaded
    kind = dtype or next(network.parameters()).dtype
    before = fissile.MLP.from_recipe(content.recipe["mlp"])

    def rival(model: torch.nn.Module) -> Rival:
        return module(model.eval().to(device, kind))

    rivals = {DENSE: rival(before), EXPANDED: rival(fissile.to_dense(network))}
    for layout in get_args(Layout):
        rivals[layout] = attempt(
            lambda how=layout: rival(fissile.pack(network, dtype=kind, layout=how))  # type: ignore[misc]
        )
    shape = " → ".join(f"{size:,}" for size in before.sizes)
    yield "whole network", rivals, shape, before.sizes[0], kind


def _cells(rivals: Sequence[str], times: Mapping[str, Timing]) -> list[str]:
    """Return the time of every rival and, after the first, its ratio to the first."""
    cells, base = [], times.get(rivals[0])
    for name in rivals:
        timing = times.get(name)
        text = "-" if timing is None else f"{1e6 * timing.median:,.1f}"
        if timing is not None and base is not None and timing is not base:
            text += f" {timing.median / base.median:.2f}×"
        cells.append(text)
    return cells
