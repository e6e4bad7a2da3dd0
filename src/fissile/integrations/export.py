"""Expanded models for other runtimes: ONNX, checked against PyTorch before the file is there.

The file holds the model as :func:`fissile.to_dense` writes it out: plain matrices with zeros for
removed weights, because ONNX has no operator for a weight and its owner. ``torch.export.export``
takes an expanded model as it is.
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
from torch.utils._pytree import tree_leaves, tree_map

from fissile._common.errors import FileError, FissileError, first_line, needs
from fissile._common.files import move_finished
from fissile.expansion.expand import to_dense

__all__ = ["to_onnx"]

#: Positional arguments, and those with names.
Inputs = tuple[tuple[Tensor, ...], dict[str, Tensor]]
#: The dimensions of an input that may have any size, by their names in the file.
Free = dict[int, str]
_DTYPES = (torch.float32, torch.float64)
_SINGLE_FILE = 2**30  # bytes of weights; a protobuf message cannot be larger than twice that


def to_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = True,
    check: bool = True,
) -> None:
    """Write a model to an ONNX file of opset 20 that gives the same answers in onnxruntime.

    >>> to_onnx(expand(MLP([32, 8, 1]), 2), "wide.onnx", torch.rand(4, 32))
    >>> to_onnx(wide_bert, "bert.onnx", {"input_ids": ids, "attention_mask": mask})

    Args:
        model: expanded or not; it is exported in evaluation mode and left untouched.
        path: the file. Weights of more than a GiB go into a second file beside it.
        example_inputs: what ``forward`` takes: a tensor, several, or keyword arguments. The file's
            inputs come in the same order under ``forward``'s names; one that is also returned is
            renamed by torch. Outputs are named as the model's answer names them (``"logits"``),
            else ``"output"``, or ``"output_0"``, ``"output_1"``, ... of several.
        dynamic_batch: let the first dimension of every input, which must be the same, have any
            size.
        dynamic_sequence: let tokens and their masks, inputs of whole numbers with two dimensions,
            have any length.
        check: run the file in onnxruntime, on the example and on other sizes where those are free,
            and raise an error instead of leaving a file that differs from PyTorch.
    """
    for package in ("onnx", "onnxscript", *(["onnxruntime"] if check else [])):
        needs(package, "onnx")
    inputs = _arguments(example_inputs)
    if dynamic_batch:
        _check_batch(tree_leaves(inputs))
    _check_dtypes(model)
    target = _target(path)
    plain = to_dense(model).eval()
    names = _names(_answer(plain, inputs))
    free = _free(tree_leaves(inputs), dynamic_batch, dynamic_sequence)
    program = _exported(plain, _resized(inputs, free, all_sizes=False), free, names)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        draft = Path(folder) / target.name
        size = sum(p.numel() * p.element_size() for p in plain.parameters())
        program.save(draft, external_data=size > _SINGLE_FILE)
        if check:
            for tried in (inputs, _resized(inputs, free, all_sizes=True)):
                _compare(model, draft, tried)
        move_finished(Path(folder), target.parent, last=target.name)


def _arguments(inputs: Any) -> Inputs:
    args = (inputs,) if isinstance(inputs, Tensor) else ()
    args = tuple(inputs) if isinstance(inputs, tuple | list) else args
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    tensors = [*args, *kwargs.values()]
    if not tensors or not all(isinstance(x, Tensor) for x in tensors):
        raise FissileError("example_inputs must be a tensor, a tuple, list or dict of tensors")
    return args, kwargs


def _check_batch(tensors: Sequence[Tensor]) -> None:
    """Refuse inputs that cannot have one batch as their first dimension."""
    rows = {len(x) if x.ndim else 0 for x in tensors}
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


def _free(tensors: Sequence[Tensor], batch: bool, sequence: bool) -> list[Free]:
    free: list[Free] = [{0: "batch"} if batch else {} for _ in tensors]
    names: dict[int, str] = {}  # inputs of one length are of one sequence
    for x, dims in zip(tensors, free, strict=True):
        if sequence and x.ndim == 2 and not x.is_floating_point():
            other = f"sequence_{len(names) + 1}" if names else "sequence"
            dims[1] = names.setdefault(x.shape[1], other)
    return free


def _answer(plain: nn.Module, inputs: Inputs) -> Any:
    """Call the model once: its own error is shorter than the exporter's."""
    args, kwargs = inputs
    try:
        with torch.no_grad():
            return plain(*args, **kwargs)
    except Exception as error:
        raise FissileError(
            f"the model does not take these example_inputs: {first_line(error)}"
        ) from error


def _check_dtypes(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype not in _DTYPES:
            raise FissileError(
                f"{name!r} is {parameter.dtype}, which few ONNX runtimes compute in; export "
                "model.float() and let the runtime's own tools lower the precision"
            )


def _names(answer: Any, name: str = "") -> list[str]:
    """Name the tensors of an answer after the keys and places where they are."""
    if isinstance(answer, Tensor):
        return [name or "output"]
    if isinstance(answer, Mapping):
        parts = {f"{name}_{key}" if name else str(key): part for key, part in answer.items()}
    else:
        inside = answer if isinstance(answer, tuple | list) else tree_leaves(answer)
        parts = {f"{name or 'output'}_{i}": part for i, part in enumerate(inside)}
    return [one for key, part in parts.items() if part is not answer for one in _names(part, key)]


def _resized(inputs: Inputs, free: Sequence[Free], *, all_sizes: bool) -> Inputs:
    """Change all free sizes, or those of one, which torch.export would take for constants."""
    left = iter(free)

    def resized(x: Tensor) -> Tensor:
        for dim in next(left):
            if all_sizes and x.shape[dim] > 2:  # not longer: there may be a longest sequence
                x = x.narrow(dim, 0, x.shape[dim] - 1)
            elif all_sizes or x.shape[dim] == 1:
                x = torch.cat([x, x.narrow(dim, 0, 1)], dim)
        return x

    return tree_map(resized, inputs)  # type: ignore[no-any-return]


def _exported(plain: nn.Module, inputs: Inputs, free: Any, names: Sequence[str]) -> Any:
    args, kwargs = inputs
    sizes = [dict.fromkeys(dims, torch.export.Dim.DYNAMIC) or None for dims in free]
    shapes: Any = dict(zip(kwargs, sizes, strict=True)) if kwargs else tuple(sizes)
    try:
        with torch.no_grad(), _quiet():
            program = torch.onnx.export(
                plain,
                args,
                kwargs=kwargs,
                dynamo=True,
                dynamic_shapes=shapes if any(free) else None,
                opset_version=20,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        advice = " (try dynamic_batch=False or dynamic_sequence=False)" if any(free) else ""
        raise FissileError(f"torch.onnx cannot export this{advice}: {first_line(cause)}") from error
    assert program is not None
    program.rename_axes(_rename(program.model.graph, free, names))
    for node in program.model.graph.all_nodes():
        # It names files and folders of this machine, which are nobody's business elsewhere.
        node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
    return program


def _rename(graph: Any, free: Sequence[Free], names: Sequence[str]) -> dict[Any, str]:
    """Name the outputs, and return the names of the free sizes."""
    given = {node.name for node in graph.inputs}
    for node, name in zip(graph.outputs, names, strict=True):
        node.name = f"{name}_output" if name in given else name
    nodes = zip(graph.inputs, free, strict=True)
    return {node.shape[dim]: name for node, dims in nodes for dim, name in dims.items()}


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


def _compare(model: nn.Module, path: Path, inputs: Inputs) -> None:
    """Refuse a file whose answers are not the model's."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    tensors = tree_leaves(inputs)  # in the order of the file's inputs, whatever their names
    feed = {
        node.name: tensor.detach().cpu().numpy()
        for node, tensor in zip(session.get_inputs(), tensors, strict=True)
    }
    args, kwargs = inputs
    with torch.no_grad():
        answer = copy.deepcopy(model).eval()(*args, **kwargs)
    expected = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
    found = [torch.from_numpy(array) for array in session.run(None, feed)]
    try:
        check_answers([x.cpu() for x in expected], found)
    except AssertionError as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise FissileError(
            f"for inputs of shape {shapes} the ONNX file's answers differ from PyTorch's; nothing "
            f"was written: {' '.join(str(error).split())}"
        ) from None


def check_answers(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Raise an ``AssertionError`` if answers differ by more than single precision explains.

    >>> check_answers([torch.ones(2)], [torch.ones(2) + 1e-6])
    """
    if len(found) != len(expected):
        raise AssertionError(f"{len(found)} tensors instead of {len(expected)}")
    for ours, theirs in zip(expected, found, strict=True):
        rtol = atol = 0.0
        if ours.is_floating_point():
            finite = ours[ours.isfinite()].abs()
            rtol, atol = 1e-3, 1e-4 * float(finite.max()) if len(finite) else 0.0
        torch.testing.assert_close(
            theirs, ours, rtol=rtol, atol=atol, equal_nan=True, check_dtype=False
        )
