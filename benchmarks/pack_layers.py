"""Layers to be timed by pack.py: random weights of a given size, before the split and after it.

A large layer repeats the rows of a smaller one. No kernel is faster for it, and packing hundreds
of millions of numbers takes a CPU longer than timing them.
"""

import warnings

import torch
from torch.nn import functional

import fissile
from fissile import MaskedLinear
from fissile.packed import PackedMaskedLinear, PackedPartitionedLinear
from fissile.packed.format import masked_dense, pack_masked, pack_partitioned, partitioned_dense
from fissile.packed.timing import DENSE, EXPANDED, Rival, attempt, dense, module

#: Weights that are drawn and packed; the rest repeats them.
DRAWN = 2**22


def partitioned(outputs, inputs, alpha, *, dtype, device, most, plane):
    """Return the rivals of W1': parents' weights, and owners that were drawn at random."""
    rows = divisor(outputs, DRAWN // inputs)
    times = outputs // rows
    how = {"dtype": dtype, "device": device}
    weight = torch.randn(rows, inputs, device=device) / inputs**0.5
    owner = owners(rows, inputs, alpha, device)
    inline, _ = pack_partitioned(weight, owner, alpha, dtype, "inline")
    wide = partitioned_dense(inline, None, alpha)
    bias = torch.randn(alpha * outputs, **how)
    like = like_of(alpha * outputs, inputs)
    rivals = {
        DENSE: dense(inline.repeat(times, 1), bias[:outputs].clone()),
        "inline": module(PackedPartitionedLinear(like, inline.repeat(times, 1), None, alpha, bias)),
        "plane": Rival(None, why="left out; --plane times it"),
        EXPANDED: attempt(lambda: expanded(wide, times, bias, most)),
        "csr": attempt(lambda: rows_of(wide, times, bias)),
        "2:4": Rival(None, why="for alpha 2, in float16 and bfloat16, on a GPU"),
    }
    if plane:
        _, planes = pack_partitioned(inline, owner, alpha, dtype, "plane")
        parts = inline.repeat(times, 1), planes.repeat(1, times, 1)
        rivals["plane"] = module(PackedPartitionedLinear(like, *parts, alpha, bias))
    if alpha == 2 and weight.is_cuda:
        rivals["2:4"] = attempt(lambda: two_of_four(wide.repeat(times, 1), bias))
    return rivals


def masked(outputs, parents, alpha, *, dtype, device, most):
    """Return the rivals of W2': of the copies of a weight, all are kept or none."""
    inputs = alpha * parents
    rows = divisor(outputs, max(1, DRAWN // inputs))
    times = outputs // rows
    how = {"dtype": dtype, "device": device}
    weight = torch.randn(rows, inputs, device=device) / parents**0.5
    kept = torch.rand(rows, parents, device=device) < 1 / alpha
    values, live, group = pack_masked(weight, kept.repeat_interleave(alpha, 1), dtype)
    wide = masked_dense(values, live, group, inputs)
    bias = torch.randn(outputs, **how)
    parts = values.repeat(times), live.repeat(times, 1), group
    packed = PackedMaskedLinear(like_of(outputs, inputs), *parts, bias)
    narrow = torch.randn(rows, parents, **how).repeat(times, 1)
    return {
        DENSE: dense(narrow, bias),
        "inline": module(packed),
        EXPANDED: attempt(lambda: expanded(wide, times, bias, most)),
        "csr": attempt(lambda: rows_of(wide, times, bias)),
    }


def head(sizes, alpha, *, dtype, device, plane):
    """Return a whole classifier: before the split, expanded and written out, and packed."""
    torch.manual_seed(0)
    model = fissile.MLP(sizes)
    wide = fissile.expand(model, alpha)
    rivals = {DENSE: model.layers, EXPANDED: fissile.to_dense(wide).layers}
    for layout in ("inline", "plane") if plane else ("inline",):
        rivals[layout] = fissile.pack(wide, dtype=dtype, layout=layout).layers
    return {name: module(one.eval().to(device, dtype)) for name, one in rivals.items()}


def like_of(outputs, inputs):
    """Return a layer of a size, without memory."""
    weight = torch.empty(outputs, inputs, device="meta")
    return MaskedLinear(weight, weight.bool())


def owners(rows, inputs, alpha, device):
    """Draw owners: any child or, of two children, each of them twice in four inputs."""
    if alpha != 2 or inputs % 4:
        return torch.randint(alpha, (rows, inputs), device=device)
    order = torch.rand(rows, inputs // 4, 4, device=device).argsort(-1)
    return (order % 2).flatten(1)


def expanded(wide, times, bias, most):
    """Return the layer written out, unless it is too large."""
    size = times * wide.nbytes
    if size > most:
        return Rival(None, why=f"{size / 1e9:.1f} GB, more than {most / 1e9:.0f} GB")
    return dense(wide.repeat(times, 1), bias)


def rows_of(wide, times, bias):
    """Return the layer in compressed sparse rows, with short indices, which are the faster."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse")  # in beta; invariants that are not checked
        one = wide.to_sparse_csr()
        counts = one.crow_indices().diff().repeat(times)
        start = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        columns, values = one.col_indices().int().repeat(times), one.values().repeat(times)
        shape = times * wide.shape[0], wide.shape[1]
        return csr(torch.sparse_csr_tensor(start, columns, values, shape), bias)


def two_of_four(weight, bias):
    """Return PyTorch's product with a 2:4 weight, for GPUs with sparse tensor cores."""
    if weight.dtype is torch.float32:
        return Rival(None, why="for float16 and bfloat16 on a GPU only")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        sparse = torch.sparse.to_sparse_semi_structured(weight)
    parts = getattr(sparse, "packed", None), getattr(sparse, "meta", None), bias
    read = sum(part.nbytes for part in parts if part is not None)
    return Rival(lambda x: functional.linear(x, sparse, bias), read)


def csr(weight, bias):
    """Return PyTorch's product with a weight in compressed sparse rows.

    Its result lies the other way round, which costs it nothing here.
    """
    outputs = weight.shape[0]
    column = weight.values().new_zeros(outputs, 1) if bias is None else bias[:, None]
    parts = weight.crow_indices(), weight.col_indices(), weight.values(), bias
    read = sum(part.nbytes for part in parts if part is not None)
    return Rival(lambda x: torch.addmm(column, weight, x.T).T, read)


def divisor(number, most):
    """Return the largest divisor of a number that is no larger than that."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)
