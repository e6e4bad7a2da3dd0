"""What a summary shows of a model before and after."""

import dataclasses
import io

import pytest
import torch
from place_models import Filters, Plain
from torch import nn

import fissile
from fissile import MLP, FissileError, expand, nonzeros, summary


def test_summary_shows_before_and_after():
    torch.manual_seed(0)
    dense = MLP([32, 8, 1])
    out = io.StringIO()
    summary(dense, expand(dense, 2), file=out)
    table = [line.strip() for line in summary.__doc__.splitlines()]
    assert len(out.getvalue().splitlines()) == 5
    for line in out.getvalue().splitlines():
        assert line in table


def test_summary_of_a_large_model_shows_what_changed(capsys):
    dense = nn.Sequential(Plain(), *(nn.Linear(5, 5) for _ in range(40)))
    summary(dense, expand(dense, 2))
    out = capsys.readouterr().out
    assert "and 40 layers that are as they were" in out
    assert "0.norm" in out
    assert "\n7 " not in out
    filters = Filters()
    summary(filters, expand(filters, 2))
    out = capsys.readouterr().out
    assert "8 → 6, 3×3   8 → 6×2 = 12, 3×3" in out
    summary(expand(filters, 2))
    assert "partitioned  8 → 6×2 = 12, 3×3" in capsys.readouterr().out
    with pytest.raises(FissileError, match="other layers"):
        summary(filters, dense)


def test_a_batchnorm_network_grows_as_the_docstring_says(capsys):
    dense = nn.Sequential(nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10))
    wide, strict = expand(dense, 4), expand(dense, 4, budget="all")
    assert [nonzeros(one).all for one in (dense, wide, strict)] == [472, 526, 472]
    assert "from 472" in expand.__doc__
    assert "526" in expand.__doc__
    summary(dense, wide)
    assert "472 → 526" in (shown := capsys.readouterr().out)
    assert shown.endswith('(biases and norms come with the neurons; budget="all" counts them)\n')
    summary(dense, strict)
    assert "come with the neurons" not in capsys.readouterr().out


def test_what_functions_return_is_shown_on_a_line():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    assert repr(nonzeros(encoder)) == "NonZeros(weights=16384, all=17088)"
    assert repr(fissile.discover(encoder)) == "Discovery(places: 2, refusals: 4)"
    train, _ = fissile.data.dnf_task(clauses=3, size=4, train=200, test=50)
    assert repr(train) == "Samples(x=float32[200, 12], y=int64[200], bits=bool[200, 12])"
    bank = fissile.bank
    data = bank.Data(train.x, train.y, train.x, train.y)
    texts = fissile.data.Texts(["hi"] * 99, [0] * 99, ["ho"], [0], ("greeting",))
    networks = bank.Bank([bank.Spec([12, 4, 1], data, seed=seed) for seed in range(9)])
    groups = []
    networks.measure(lambda group: groups.append(group) or torch.zeros(len(group.members)))
    features = fissile.data.Labelled(*[train.x.numpy(), train.y.numpy()] * 2)
    for one in (data, texts, groups[0], features, fissile.discover(encoder).places[0]):
        assert dataclasses.is_dataclass(one)
        assert "\n" not in repr(one)
        assert len(repr(one)) < 300
    assert "train=<99 of str>" in repr(texts)
