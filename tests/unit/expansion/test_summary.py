"""What a summary shows of a model before and after."""

import io

import pytest
import torch
from kinds import Filters, Plain
from torch import nn

from fissile import MLP, FissileError, expand, summary


def test_summary_shows_before_and_after():
    torch.manual_seed(0)
    dense = MLP([32, 8, 1])
    out = io.StringIO()
    summary(dense, expand(dense, 2), file=out)
    table = [line.strip() for line in summary.__doc__.splitlines()]
    assert len(out.getvalue().splitlines()) == 4
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
