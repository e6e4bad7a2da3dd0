"""Counting and selecting: by rank, ties in the stated order, never one more."""

import io

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fissile import MLP, dropconnect, expand, nonzeros, summary
from fissile.expansion.budget import keep_largest, keep_together

magnitudes = st.lists(st.integers(0, 3), min_size=1, max_size=20)


@given(magnitudes, st.integers(0, 20))
def test_keep_largest_is_a_stable_sort(values, count):
    count = min(count, len(values))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    kept = keep_largest(torch.tensor(values, dtype=torch.float32), count)
    assert kept.nonzero().flatten().tolist() == sorted(order)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 99)), min_size=1, max_size=5))
def test_keep_largest_in_a_batch_is_each_alone(rows):
    batch = [torch.randint(0, 4, (6,), generator=torch.Generator().manual_seed(s)) for _, s in rows]
    counts = torch.tensor([count for count, _ in rows])
    kept = keep_largest(torch.stack(batch).float(), counts)
    for row, values, (count, _) in zip(kept, batch, rows, strict=True):
        assert torch.equal(row, keep_largest(values.float(), count))


def test_ties_go_to_the_first_layer_then_in_order_of_storage():
    first, second = torch.ones(2, 2), torch.ones(1, 4)
    keep_first, keep_second = keep_together(first, second, 6)
    assert keep_first.all()
    assert keep_second.tolist() == [[True, True, False, False]]


def test_nonzeros_by_layer_and_kind():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.PReLU(), nn.Linear(2, 1))
    model[0].weight.data[0, 0] = 0
    model[0].bias.data.zero_()
    counts = nonzeros(model)
    assert [(c.layer, c.kind, c.count) for c in counts.counts] == [
        ("0", "weight", 5),
        ("0", "bias", 2),
        ("1", "norm", 2),
        ("1", "norm", 2),
        ("2", "other", 1),
        ("3", "weight", 2),
        ("3", "bias", 1),
    ]
    assert (counts.weights, counts.all) == (7, 15)
    assert nonzeros(nn.Linear(3, 2)).weights == 6


def test_tied_weights_count_once():
    one, other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    other.weight = one.weight
    assert nonzeros(nn.Sequential(one, other)).weights == 9


def test_summary_is_the_table_of_the_docstring():
    torch.manual_seed(0)
    out = io.StringIO()
    summary(expand(MLP([32, 8, 1]), 2), file=out)
    table = [line.strip() for line in summary.__doc__.splitlines()]
    for line in out.getvalue().splitlines():
        assert line in table


def test_summary_knows_every_kind_of_layer(capsys):
    summary(dropconnect(MLP([8, 4, 2], layer_norm=True, embedding=6), 2))
    out = capsys.readouterr().out
    for word in ("embedding", "dropconnect, ", "layernorm", "masked", "non-zero weights"):
        assert word in out
