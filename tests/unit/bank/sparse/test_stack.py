import copy

import pytest
import torch

import fissile
from fissile.bank.sparse import Plan, Prune, SparseNet, module_of, train

PRUNE = Prune(0.1, 0.7, "second-order")
PLANS = {
    "beside": Plan(40, 16, direct=True, prune=PRUNE),
    "hidden": Plan(40, 16, prune=PRUNE),
    "linear": Plan(10, direct=True, prune=PRUNE),
    "factorised": Plan(30, 8, activation="none", prune=PRUNE),
    "sown": Plan(60, 16, start="uniform"),  # nobody looks whether its neurons are alive
    "next to nothing": Plan(4, 16, prune=PRUNE),
}


def samples(inputs=6, classes=3):
    x = torch.randn(48, inputs, generator=torch.Generator().manual_seed(0))
    return x, x[:, :classes].argmax(1)


def trained(*plans, seeds=(0, 1), epochs=6):
    return train(plans, list(seeds), *samples(), outputs=3, epochs=epochs, batch=16)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_module_says_what_its_network_says_and_counts_as_much(plan):
    [(stack, _)] = trained(plan)
    x, _ = samples()
    said, counted = stack.logits(x.unsqueeze(0))[0].mT, stack.nonzeros().flatten()
    for index in range(2):
        module = module_of(stack, index)
        assert torch.allclose(module(x), said[index], atol=1e-5)
        count = fissile.nonzeros(module).all
        assert count <= counted[index] <= plan.budget or plan.prune is None
        dense = fissile.to_dense(module)
        assert torch.allclose(dense(x), said[index], atol=1e-5)
        if plan.prune is not None:
            assert count == counted[index]


def test_only_neurons_stay_that_see_and_are_seen():
    [(stack, _)] = trained(PLANS["sown"])
    stack.masks["first"][0, 3] = False
    stack.masks["second"][0, :, 5] = False
    stack.weights["bias"][0, 3] = 2.0  # it sees nothing, and still says something
    for name, mask in stack.masks.items():
        stack.weights[name] *= mask
    module = module_of(stack, 0)
    x, _ = samples()
    assert module.neurons <= 14
    assert module.hidden.mask.any(1).all()
    assert module.second.mask.any(0).all()
    assert torch.allclose(module(x), stack.logits(x.unsqueeze(0))[0].mT[0], atol=1e-5)


def test_networks_are_found_by_seed_and_plan():
    plans = [Plan(20, 16, prune=PRUNE), Plan(40, 16, prune=PRUNE)]
    [(stack, places)] = trained(*plans)
    assert places == [0, 1]
    counts = [fissile.nonzeros(module_of(stack, index)).all for index in range(4)]
    assert max(counts[0], counts[2]) <= 20 < min(counts[1], counts[3])


def test_the_scale_goes_into_the_weights():
    [(stack, _)] = trained(PLANS["beside"])
    x, _ = samples()
    plain, folded = module_of(stack, 0), module_of(stack, 0, scale=250.0)
    assert torch.allclose(plain(x), folded(250 * x), atol=1e-5)


def test_modules_can_be_copied_made_double_and_filled():
    [(stack, _)] = trained(PLANS["beside"])
    x, _ = samples()
    module = module_of(stack, 0)
    assert torch.allclose(copy.deepcopy(module).double()(x.double()).float(), module(x), atol=1e-5)
    empty = SparseNet.empty({key: one.shape for key, one in module.state_dict().items()})
    assert fissile.nonzeros(empty).weights == 0
    empty.load_state_dict(module.state_dict())
    assert torch.equal(empty(x), module(x))


def test_a_module_learns_on_within_its_masks():
    [(stack, _)] = trained(PLANS["beside"])
    x, y = samples()
    module = module_of(stack, 0)
    before = [one.dense_weight() != 0 for one in (module.hidden, module.second, module.direct)]
    adam = torch.optim.Adam(module.parameters(), 0.1)
    torch.nn.functional.cross_entropy(module(x), y).backward()
    adam.step()
    after = [one.dense_weight() != 0 for one in (module.hidden, module.second, module.direct)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_module_can_be_packed():
    [(stack, _)] = trained(PLANS["beside"])
    x, _ = samples()
    module = module_of(stack, 0).eval()
    assert torch.allclose(fissile.pack(module)(x), module(x), atol=1e-4)


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"hidden.weight": (4, 6)},
        {"hidden.weight": (4, 6), "second.weight": (3, 5)},
        {"hidden.weight": (4, 6), "second.weight": (3, 4), "direct.weight": (3, 5)},
        {"direct.weight": (3,)},
        {"direct.weight": (3, 0)},
    ],
)
def test_layers_that_do_not_fit_are_refused(shapes):
    with pytest.raises(fissile.FissileError):
        SparseNet.empty(shapes)
