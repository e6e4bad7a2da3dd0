"""Masks of DropConnect: compiled against PyTorch."""

import copy

import pytest
import torch

from fissile.bank.cpu.masks import drawn
from fissile.layers import DropConnectLinear


@pytest.mark.parametrize(("children", "inputs"), [(16, 512), (7, 33), (5, 1), (2, 3000)])
def test_compiled_masks_are_those_of_the_layer(children, inputs):
    degree = torch.randint(0, inputs + 1, (3, children))
    degree[0, 0], degree[0, -1] = 0, inputs
    seeds = torch.tensor([0, 2**31, 2**62 + 1])
    layer = DropConnectLinear(torch.randn(3, children, inputs), degree, seed=seeds)
    other = copy.deepcopy(layer)
    for _ in range(4):
        mask = drawn(other)
        assert torch.equal(mask, layer.draw_mask())
        assert torch.equal(mask.sum(-1), degree)
    assert torch.equal(layer.stream, other.stream)
