"""The command ``fissile embed``: a features file from images or texts."""

from __future__ import annotations

import os
import sys
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from fissile._common.errors import check_device
from fissile._common.progress import ProgressBar
from fissile.data.catalogue import places
from fissile.data.embed.encoders import EXAMPLES
from fissile.data.embed.run import DTYPES, stem

HELP = (
    "Encode images or texts into a features file; after Ctrl-C, run it again to go on.\n\n"
    "The file is named after the set and the encoder, and lies where studies look for it, unless "
    "--to says otherwise. Encoders:"
    + "".join(f"\n\n{spec}: {text}" for spec, text in EXAMPLES.items())
)
EPILOG = (
    "Examples: fissile embed cifar100 --encoder open_clip:ViT-B-16/openai --device cuda · "
    "fissile embed PATH/TO/imagenet1k --encoder open_clip:ViT-B-16/openai --device cuda · "
    "fissile embed clinc150 --encoder minilm · "
    "fissile embed cifar100 --encoder efficientnet_lite:0 --pca 512 --to features.npz"
)

Dtype = Enum("Dtype", {name: name for name in DTYPES}, type=str)  # type: ignore[misc]


def embed(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder with train/CLASS and val/CLASS, or a set of images or texts."
        ),
    ],
    encoder: Annotated[str, typer.Option(metavar="SPEC", help="One of those above.")],
    to: Annotated[
        Path | None,
        typer.Option(help="A .safetensors or .npz file or a folder; by default named after both."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Where data is, and where the file goes by default (FISSILE_DATA)."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to encode: cpu, cuda, cuda:1, ...")] = "cpu",
    batch: Annotated[int, typer.Option(min=1, help="Images or texts at a time.")] = 256,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads that decode; by default one per core.")
    ] = None,
    pca: Annotated[
        int | None,
        typer.Option(min=1, help="Keep so many principal components of the training set."),
    ] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Scale every row to unit length.")
    ] = False,
    dtype: Annotated[Dtype, typer.Option(help="How numbers are stored.")] = "float16",  # type: ignore[assignment]
) -> None:
    """Encode images or texts into a features file."""
    from fissile.data.embed import embed as embed_set
    from fissile.data.embed import encoder as find_encoder
    from fissile.data.embed import source as find_source

    check_device(device)
    if encoder.startswith("module:"):
        # Where a module of the user's own is; at the end, so that it hides nothing. No other
        # encoder may find its library among what happens to lie here.
        sys.path.append(os.getcwd())
    found = find_source(source, data)
    coder = find_encoder(encoder, device)
    name = stem(found.name, coder.name, coder.width, pca=pca, normalize=normalize)
    target = to or places(data)[0] / f"{name}.safetensors"
    since = time.perf_counter()
    try:
        with ProgressBar("encoding", "item") as bar:
            made = embed_set(
                found, coder, target, batch=batch, workers=workers, pca=pca, normalize=normalize,
                dtype=dtype.value, progress=bar,
            )  # fmt: skip
    except KeyboardInterrupt:
        typer.echo(
            f"Stopped. What is done is in {target}.part; the same command goes on.", err=True
        )
        raise typer.Exit(130) from None
    typer.echo(
        f"{target}: {len(made.y):,} + {len(made.y_test):,} rows of {made.inputs} features, "
        f"{made.classes} classes, by {made.encoder}, in {time.perf_counter() - since:,.1f} s"
    )
