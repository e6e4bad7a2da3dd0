"""The recipe's loss by hand, and what importing the core brings along."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from fissile import MLP, expand
from fissile.bank.loop import Recipe, accuracy, fit, penalty, task_loss
from fissile.layers import weight_of

MODELS = {
    "dense": lambda: MLP([6, 4, 2]),
    "expanded": lambda: expand(MLP([6, 4, 2]), 2),
    "overlapping": lambda: expand(MLP([6, 4, 2]), 2, "overlapping"),
    "embedded": lambda: MLP([6, 4, 2], embedding=5, layer_norm=True),
    "plain": lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_penalty_is_three_sums(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    first = model[1] if name == "plain" else model.layers[0]
    weight = weight_of(first).detach()
    l1 = sum(abs(v) for v in weight.flatten().tolist())
    l2 = sum(v * v for p in model.parameters() for v in p.flatten().tolist())
    orthogonal = 0.0
    for i, one in enumerate(weight.tolist()):
        for j, other in enumerate(weight.tolist()):
            product = sum(a * b for a, b in zip(one, other, strict=True))
            orthogonal += (product - (i == j)) ** 2
    recipe = Recipe(l1=0.3, l2=0.05, orthogonal=0.7)
    expected = 0.3 * l1 + 0.05 * l2 + 0.7 * orthogonal
    assert penalty(model, recipe).item() == pytest.approx(expected, rel=1e-5)
    assert penalty(model, Recipe(l1=0, l2=0)).item() == 0


def test_the_task_loss_is_the_cross_entropy():
    logits, y = torch.tensor([[0.3], [-1.2]]), torch.tensor([1, 0])
    expected = (math.log(1 + math.exp(-0.3)) + math.log(1 + math.exp(-1.2))) / 2
    assert float(task_loss(logits, y)) == pytest.approx(expected)
    logits, y = torch.tensor([[0.3, 0.1, -1.0]]), torch.tensor([1])
    expected = math.log(sum(math.exp(v) for v in logits[0].tolist())) - 0.1
    assert float(task_loss(logits, y)) == pytest.approx(expected)


def test_fit_sees_every_sample_once_an_epoch_and_learns():
    torch.manual_seed(0)
    x = torch.randn(100, 6)
    y = (x[:, 0] > 0).long()
    model, seen = MLP([6, 8, 1]), []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    fit(model, adam, x, y, epochs=1, seed=0, recipe=Recipe(batch=32))
    assert [len(batch) for batch in seen] == [32, 32, 32, 4]
    assert torch.equal(torch.cat(seen).sort(0).values, x.sort(0).values)
    fit(model, adam, x, y, epochs=40, seed=0, start=1)
    assert accuracy(model, x, y) > 0.9


IMPORTED = """
import sys, fissile
extras = {"safetensors", "rich", "matplotlib", "numba", "triton", "sklearn", "scipy", "pandas"}
print(sorted(extras & set(sys.modules)))
import fissile.bank.sparse, fissile.bank.vision
print("triton" in sys.modules)
import torch
from fissile.bank import Bank, Data, Dense, Expand, Spec
data = Data(torch.randn(32, 8), torch.arange(32) % 2, torch.randn(8, 8), torch.arange(8) % 2)
bank = Bank([Spec([8, 4, 1], data)])
bank.train(1)
arms = {"dense": Dense(), "child": Expand(2), "fresh": Expand(2, moments="fresh")}
bank.branch(arms).train(2)
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_the_core_brings_torch_and_numpy_only_and_kernels_and_compilers_wait():
    command = [sys.executable, "-c", IMPORTED]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["[]", "False", "False"]
