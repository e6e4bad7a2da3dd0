"""The commands ``fissile pack``, ``unpack`` and ``bench``: saved models for inference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from fissile._common.errors import FissileError
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
_WHOLE = "whole network"

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
        Where,
        typer.Option(help="Owners in the weights' lowest bits, or in planes beside them."),
    ] = "inline",  # type: ignore[assignment]
) -> None:
    """Pack a saved model for inference: the wide network in the bytes of the narrow one."""
    from fissile.io.packing import pack_file

    done = pack_file(model, to, dtype=_dtype(dtype), layout=layout.value)
    _print_packing(done)
    typer.echo(f"{to}: {done.weights:,} weights in {done.after:,} bytes")


def unpack(
    model: Annotated[Path, typer.Argument(help="A packed model.")],
    to: To,
) -> None:
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
    from fissile.bank import check_device
    from fissile.io.packing import read
    from fissile.packed.timing import race

    where, content = check_device(device), read(model)
    batches, kind = batch or [1, 16], _dtype(dtype)
    table, reasons = _bench_table(), dict[tuple[str, str], str]()
    if not any(isinstance(layer, SparseLinear) for layer in content.layers.values()):
        raise FissileError(f"{model}: its expanded layers are convolutions, which are not timed")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("making the layers", total=None)
        found = list(_contestants(content, model, kind, where))
        timed = {name for name, *_ in found}
        bar.update(task, description="timing", total=len(found) * len(batches))
        for name, rivals, shape, inputs, its in found:
            for size in batches:
                times, why = race(rivals, _input(size, inputs, its, where), seconds=seconds)
                table.add_row(escape(name), shape, str(size), *_cells(times))
                reasons |= {(name, rival): text for rival, text in why.items()}
                bar.advance(task)
    Console().print(table)
    for (name, rival), text in reasons.items():
        typer.echo(f"{name}, {rival}: {text}")
    for name in content.layers:
        if name not in timed:
            typer.echo(f"{name}: a convolution, which is not timed by itself")
    typer.echo(f"Microseconds, and multiples of the dense layer's before the split; on {where}.")


# --- packing


def _dtype(chosen: Enum | None) -> torch.dtype | None:
    import torch

    return None if chosen is None else getattr(torch, str(chosen.value))


def _print_packing(done: Packing) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "file", "tensors alone", "against the dense network"):
        table.add_column(column, justify="left" if not column else "right")
    rows = {
        "expanded": (done.before, done.tensors_before),
        "packed": (done.after, done.tensors_after),
    }
    for name, (whole, tensors) in rows.items():
        ratio = "" if not done.narrow else f"{tensors / done.narrow:.3f} ×"
        table.add_row(name, f"{whole:,} bytes", f"{tensors:,} bytes", ratio)
    narrow = "unknown" if done.narrow is None else f"{done.narrow:,} bytes"
    table.add_row("dense, before the split", "", narrow, "")
    Console().print(table)
    if done.bits:
        typer.echo(f"Of a weight, {done.bits:.2f} bits say where it goes, on average.")


# --- timing


def _contestants(
    content: Content, path: Path, dtype: torch.dtype | None, device: torch.device
) -> Iterator[_Contest]:
    """Yield every linear layer, and the whole network if it is known, with what they take."""
    from fissile.packed.convert import unpacked_layer
    from fissile.packed.files import dense_sizes
    from fissile.packed.layers import Packed
    from fissile.packed.timing import layer_rivals

    sizes = dense_sizes(content.recipe)
    for name, layer in content.layers.items():
        wide = unpacked_layer(layer) if isinstance(layer, Packed) else layer
        if isinstance(wide, SparseLinear):
            kind = dtype or wide.weight.dtype
            rivals = layer_rivals(wide, sizes.get(name), dtype=kind, device=device)
            shape = f"{wide.inputs:,} → {wide.outputs:,}"
            yield name, rivals, shape, wide.inputs, kind
    if content.recipe.get("mlp") is not None:
        yield _network(content, path, dtype, device)


def _network(
    content: Content, path: Path, dtype: torch.dtype | None, device: torch.device
) -> _Contest:
    import fissile
    from fissile.packed.timing import DENSE, EXPANDED, attempt, module

    loaded = fissile.load(path)
    wide = fissile.unpack(loaded) if content.packed else loaded
    kind = dtype or next(wide.parameters()).dtype
    before = fissile.MLP.from_recipe(content.recipe["mlp"])

    def as_it_is(model: torch.nn.Module) -> Rival:
        return module(model.eval().to(device, kind))

    rivals = {DENSE: as_it_is(before), EXPANDED: as_it_is(fissile.to_dense(wide))}
    for layout in get_args(Layout):
        rivals[layout] = attempt(
            lambda how=layout: as_it_is(fissile.pack(wide, dtype=kind, layout=how))  # type: ignore[misc]
        )
    shape = " → ".join(f"{size:,}" for size in before.sizes)
    return _WHOLE, rivals, shape, before.sizes[0], kind


def _input(batch: int, inputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    import torch

    return torch.randn(batch, inputs, device=device).to(dtype)


def _bench_table() -> Table:
    from fissile.packed.timing import DENSE, EXPANDED

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("layer", "shape", "batch", DENSE, EXPANDED, "inline", "plane"):
        left = column in ("layer", "shape")  # these give way on a narrow screen, numbers do not
        table.add_column(column, justify="left" if left else "right", no_wrap=not left)
    return table


def _cells(times: Mapping[str, Timing]) -> list[str]:
    """Return what a row says of every rival: its time and, after the first, its ratio."""
    from fissile.packed.timing import DENSE, EXPANDED

    base, cells = times.get(DENSE), []
    for name in (DENSE, EXPANDED, "inline", "plane"):
        one = times.get(name)
        text = "-" if one is None else f"{1e6 * one.median:,.1f}"
        if one is not None and base is not None and name != DENSE:
            text += f" {one.median / base.median:.2f}×"
        cells.append(text)
    return cells
