"""Expanded models for other runtimes: ONNX, checked against PyTorch before the file is there.

The file holds the model as :func:`fissile.to_dense` writes it out: plain matrices with zeros for
removed weights. That is what every ONNX runtime multiplies fast and what every tool reads; ONNX has
no operator for a weight and its owner, and masks would have to be folded into the weights anyway.
``torch.export.export`` takes an expanded model as it is and needs nothing from here.
"""

from __future__ import annotations

import copy
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fissile._common.errors import FileError, FissileError, needs
from fissile._common.files import move_finished
from fissile.expansion.expand import to_dense

__all__ = ["to_onnx"]

_DTYPES = (torch.float32, torch.float64)
_SINGLE_FILE = 2**30  # bytes of weights; a protobuf message cannot be larger than twice that


def to_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    *,
    dynamic_batch: bool = True,
    check: bool = True,
) -> None:
    """Write a model to an ONNX file that gives the same answers in onnxruntime.

    >>> to_onnx(expand(MLP([32, 8, 1]), 2), "wide.onnx", torch.rand(4, 32))

    Args:
        model: expanded or not; it is exported in evaluation mode and left untouched.
        path: the file. Weights of more than a GiB go into a second file beside it.
        example_inputs: what ``forward`` takes: a tensor, several, or keyword arguments. The file's
            inputs come in the same order; one that is also returned is renamed by torch.
        dynamic_batch: let the first dimension of every input, which must be the same, have any
            size.
        check: run the file in onnxruntime, on the example and on twice as many rows if the batch
            is free, and raise an error instead of leaving a file that differs from PyTorch.
    """
    for package in ("onnx", "onnxscript", *(["onnxruntime"] if check else [])):
        needs(package, "onnx")
    args, kwargs = _arguments(example_inputs)
    if dynamic_batch:
        _check_batch([*args, *kwargs.values()])
    _check_dtypes(model)
    target = _target(path)
    plain = to_dense(model).eval()
    _try(plain, args, kwargs)
    # torch.export takes a batch of one for a constant.
    rows = _repeated(args, kwargs) if dynamic_batch and _rows(args, kwargs) == 1 else (args, kwargs)
    program = _exported(plain, *rows, dynamic_batch)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        draft = Path(folder) / target.name
        size = sum(p.numel() * p.element_size() for p in plain.parameters())
        program.save(draft, external_data=size > _SINGLE_FILE)
        if check:
            tried = [(args, kwargs)] + ([_repeated(args, kwargs)] if dynamic_batch else [])
            for one in tried:
                _compare(model, draft, *one)
        move_finished(Path(folder), target.parent, last=target.name)


def _arguments(inputs: Any) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    args = (inputs,) if isinstance(inputs, Tensor) else ()
    args = tuple(inputs) if isinstance(inputs, tuple | list) else args
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    tensors = [*args, *kwargs.values()]
    if not tensors or not all(isinstance(one, Tensor) for one in tensors):
        raise FissileError(
            "example_inputs must be a tensor, a tuple or list of tensors, or a dictionary of them"
        )
    return args, kwargs


def _check_batch(tensors: Sequence[Tensor]) -> None:
    """Refuse inputs that cannot have one batch as their first dimension."""
    rows = {len(one) if one.ndim else 0 for one in tensors}
    if len(rows) > 1 or 0 in rows:
        raise FissileError(
            "for a free batch all example inputs must have equally many rows, and at least one; "
            "else give dynamic_batch=False"
        )


def _target(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.is_dir():
        raise FileError(f"{path} is a folder; name the file to write")
    if not target.parent.is_dir():
        raise FileError(f"{target.parent} is no folder; make it before exporting to {path}")
    return target


def _try(plain: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
    """Call the model once: what it says of inputs is shorter than what the exporter says."""
    try:
        with torch.no_grad():
            plain(*args, **kwargs)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise FissileError(f"the model does not take these example_inputs: {reason}") from error


def _check_dtypes(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype not in _DTYPES:
            raise FissileError(
                f"{name!r} is {parameter.dtype}, which few ONNX runtimes compute in; export "
                "model.float() and let the runtime's own tools lower the precision"
            )


def _rows(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> int:
    return len(next(iter((*args, *kwargs.values()))))


def _repeated(
    args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the same rows twice."""
    twice = tuple(torch.cat([one, one]) for one in args)
    return twice, {key: torch.cat([one, one]) for key, one in kwargs.items()}


def _exported(
    plain: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], dynamic_batch: bool
) -> Any:
    free = {0: torch.export.Dim.DYNAMIC}
    shapes: Any = dict.fromkeys(kwargs, free) if kwargs else tuple(free for _ in args)
    try:
        with torch.no_grad(), _quiet():
            program = torch.onnx.export(
                plain,
                args,
                kwargs=kwargs,
                dynamo=True,
                dynamic_shapes=shapes if dynamic_batch else None,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        advice = " (try dynamic_batch=False)" if dynamic_batch else ""
        raise FissileError(
            f"torch.onnx cannot export this model{advice}: {_innermost(error)}"
        ) from error
    assert program is not None
    for node in program.model.graph.all_nodes():
        # It names files and folders of this machine, which are nobody's business elsewhere.
        node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
    return program


def _innermost(error: BaseException) -> str:
    """Return the first line of what an error was caused by."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().split("\n")[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from remarking on itself: what its user needs to know is in the error."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.filterwarnings("ignore", r".*LeafSpec.*", FutureWarning)
            yield
    finally:
        logger.setLevel(before)


def _compare(
    model: nn.Module, path: Path, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
) -> None:
    """Refuse a file whose answers are not the model's."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    tensors = [*args, *kwargs.values()]  # in the order of the file's inputs, whatever their names
    feed = {
        node.name: tensor.detach().cpu().numpy()
        for node, tensor in zip(session.get_inputs(), tensors, strict=True)
    }
    with torch.no_grad():
        answer = copy.deepcopy(model).eval()(*args, **kwargs)
    expected = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
    found = [torch.from_numpy(array) for array in session.run(None, feed)]
    if len(expected) != len(found):
        raise FissileError(
            f"the ONNX file answers with {len(found)} tensors and PyTorch with {len(expected)}; "
            "nothing was written: let the model return plain tensors"
        )
    for ours, theirs in zip(expected, found, strict=True):
        if trouble := _difference(ours.cpu(), theirs):
            shapes = ", ".join(str(tuple(one.shape)) for one in tensors)
            raise FissileError(f"for inputs of shape {shapes} {trouble}; nothing was written")


def _difference(ours: Tensor, theirs: Tensor) -> str | None:
    """Say how two answers differ, if by more than single precision explains."""
    if ours.shape != theirs.shape:
        return (
            f"the ONNX file answers with shape {tuple(theirs.shape)} and PyTorch with "
            f"{tuple(ours.shape)}"
        )
    if not ours.is_floating_point():
        same = torch.equal(ours, theirs.to(ours.dtype))
        return None if same else f"the ONNX file's {ours.dtype} answers differ from PyTorch's"
    ours, theirs = ours.double(), theirs.double()
    scale = float(ours[ours.isfinite()].abs().max()) if ours.isfinite().any() else 0.0
    close = torch.isclose(ours, theirs, rtol=1e-3, atol=1e-4 * scale, equal_nan=True)
    if close.all():
        return None
    apart = float((ours - theirs)[~close].abs().max())  # NaN where one of them is
    return f"the ONNX file's answers differ from PyTorch's by up to {apart:.2g}"
