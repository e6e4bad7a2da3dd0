"""The kernels of a CNN's training step, and its graphs against the plain loop.

Without a GPU the kernels run in Triton's interpreter, and what needs graphs is skipped.
"""

import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional

from fissile._common.random import order
from fissile.bank import Dense, Expand
from fissile.bank.gpu.kernels import flat_adam_kernel
from fissile.bank.loop import Recipe
from fissile.bank.vision import ConvNet, Images, Network, train
from fissile.bank.vision.convnet import scaled
from fissile.bank.vision.graphs import Flat, Graphs, Resident, Step, batch_sizes
from fissile.bank.vision.norm import Norm, evaluated, normed
from fissile.bank.vision.train import Job, Loop, make_adam

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ARMS = {"dense": Dense(), "split": Expand(2)}
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs need a GPU")


@pytest.fixture(autouse=True)
def exact():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def make_images(samples, size=16, classes=4, tests=40, seed=0):
    """Noise, and in it a square whose colour and place tell the class."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 80, (samples + tests, size, size, 3), generator=generator)
    y = torch.randint(0, classes, (samples + tests,), generator=generator)
    half = size // 2
    for image, label in zip(x, y.tolist(), strict=True):
        image[half * (label % 2) :, : half * (1 + label // 2), label % 3] += 120
    x = x.to(torch.uint8)
    return Images(x[:samples], y[:samples], x[samples:], y[samples:])


def make_norm(channels, pool):
    torch.manual_seed(0)
    return Norm(
        gamma=torch.randn(channels, device=DEVICE).requires_grad_(),
        beta=torch.randn(channels, device=DEVICE).requires_grad_(),
        mean=torch.randn(channels, device=DEVICE),
        var=torch.rand(channels, device=DEVICE),
        momentum=0.1,
        eps=1e-5,
        pool=pool,
        finished=torch.zeros(8, dtype=torch.int32, device=DEVICE),
        batch=5,
    )


def torch_norm(x, norm, training):
    mean, var = norm.mean.clone(), norm.var.clone()
    y = functional.batch_norm(x, mean, var, norm.gamma, norm.beta, training, 0.1, norm.eps)
    y = torch.relu(y)
    return (functional.max_pool2d(y, 2) if norm.pool else y), mean, var


@pytest.mark.slow
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("batch", "channels", "size"), [(2, 64, 4), (3, 24, 8), (5, 130, 2)])
@pytest.mark.parametrize("programs", [256, 4])
def test_the_norm_is_batch_norm_relu_and_pool(batch, channels, size, pool, programs, monkeypatch):
    monkeypatch.setattr("fissile.bank.vision.norm._PROGRAMS", programs)
    norm = make_norm(channels, pool)
    shape = (batch, channels, size, size)
    x = 5 * torch.rand(channels, 1, 1, device=DEVICE) + torch.randn(shape, device=DEVICE)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    inputs = (x, norm.gamma, norm.beta)
    expected, mean, var = torch_norm(x, norm, training=True)
    slope = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, inputs, slope)
    for _ in range(2):  # the second time, what the first has left behind must not matter
        norm.mean.copy_(make_norm(channels, pool).mean)
        norm.var.copy_(make_norm(channels, pool).var)
        found = normed(x, norm)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norm.mean, mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norm.var, var, rtol=1e-4, atol=1e-5)
        grads = torch.autograd.grad(found, inputs, slope)
        torch.testing.assert_close(grads, expected_grads, rtol=1e-3, atol=1e-4)
    expected, *_ = torch_norm(x, norm, training=False)
    torch.testing.assert_close(evaluated(x, norm), expected, rtol=1e-4, atol=1e-5)


def test_a_nan_is_handed_on():
    norm = make_norm(8, pool=True)
    x = torch.randn(2, 8, 4, 4, device=DEVICE).contiguous(memory_format=torch.channels_last)
    x[0, 3, 0, 0] = torch.nan
    found = normed(x, norm)
    assert found[:, 3].isnan().all()
    assert found[:, :3].isfinite().all()


def test_gathering_mirrors_the_rows_below_zero():
    images = make_images(12, size=8, tests=3)
    data = Resident(images, DEVICE, torch.float32)
    order = torch.tensor([7, ~3, 11, ~0], device=DEVICE)
    x, y = data.batch(4, order, torch.tensor([0, 0], device=DEVICE))
    flipped = Images(images.x.flip(2), images.y, images.x_test, images.y_test)
    for place, (row, source) in enumerate([(7, images), (3, flipped), (11, images), (0, flipped)]):
        one = Resident(source, DEVICE, torch.float32)
        alone = one.batch(1, torch.tensor([row], device=DEVICE), torch.tensor([0], device=DEVICE))
        assert torch.equal(x[place], alone[0][0])
        assert y[place] == images.y[row]


def test_gathering_scales_the_bytes_and_lays_out_patches():
    images = make_images(12, size=8, tests=3)
    data = Resident(images, DEVICE, torch.float32)
    order = torch.tensor([7, 3, 11, 0, 5], device=DEVICE)
    counters = torch.tensor([1, 0], device=DEVICE)
    found = [data.batch(3, order, counters), *data.test_batches()]
    wanted = [(images.x[[3, 11, 0]], images.y[[3, 11, 0]]), (images.x_test, images.y_test)]
    kernel = torch.randn(5, 3, 3, 3)
    for (x, y), (pixels, labels) in zip(found, wanted, strict=True):
        assert torch.equal(y.cpu(), labels)
        assert not x[..., 27:].any()
        matrix = functional.pad(kernel.permute(0, 2, 3, 1).flatten(1), (0, 5))
        expected = functional.conv2d(scaled(pixels, *images.scale()), kernel, padding=1)
        torch.testing.assert_close((x.cpu() @ matrix.T).permute(0, 3, 1, 2), expected)


def test_adam_is_torchs_with_both_penalties():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 1, bias=False), nn.Linear(8, 5))
    recipe = Recipe(lr=1e-2, l1=0.3, l2=0.1)
    adam = torch.optim.Adam(model.parameters(), recipe.lr, weight_decay=2 * recipe.l2)
    twin = torch.optim.Adam(model.parameters(), recipe.lr, weight_decay=2 * recipe.l2)
    flat = Flat(model, twin, model[2].weight, DEVICE, torch.float32, recipe)
    steps = 3
    for step in range(steps):
        grads = []
        for p, place in zip(model.parameters(), flat.places, strict=True):
            p.grad = torch.randn_like(p)
            grads.append(place.whole(torch.zeros_like(flat.grads)))
            place.view(grads[-1]._base).copy_(p.grad)
        model[2].weight.grad += recipe.l1 * model[2].weight.detach().sign()
        flat.step(tuple(grads), torch.tensor([0, step], device=DEVICE))
        adam.step()
    expected = [p.detach().clone() for p in model.parameters()]
    flat.home(steps)
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-5, atol=1e-6)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            found, wanted = twin.state[p][key], adam.state[p][key]
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert not flat.low[: flat.places[0].end].view(4, 32)[:, 27:].any()


def make_job(arm, recipe, seed=0, neurons=6):
    model = ConvNet(32, neurons, 4, seed=seed)
    job = Job(0, None, seed, model, make_adam(model, recipe), 0, 0)
    return job.branch("arm", arm, 1, recipe)


def distance(a, b):
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def moved(job, other):
    """Return how far the weights of two jobs are apart, as a root mean square."""
    pairs = zip(job.model.parameters(), other.model.parameters(), strict=True)
    apart = torch.cat([(p - q.cpu()).detach().flatten() for p, q in pairs])
    return float(apart.square().mean().sqrt())


@pytest.fixture
def one_thread():
    """On a busy machine threads wait for each other, and so little work needs one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("arm", [Dense(), Expand(2)])
def test_steps_without_a_graph_are_those_of_the_loop(arm, monkeypatch):
    if DEVICE.type == "cpu":  # the interpreter is done sooner with few large programs
        monkeypatch.setattr("fissile.bank.vision.graphs._BLOCK", 2**17)
        monkeypatch.setattr("fissile.bank.vision.norm._BLOCK", 2**14)
        monkeypatch.setattr("fissile.bank.vision.norm._PROGRAMS", 8)
    images = make_images(14, size=8, tests=10)
    recipe = Recipe(batch=8, l1=1e-3, l2=1e-3, orthogonal=1e-2)
    begin, loop, ours = (make_job(arm, recipe) for _ in range(3))
    step = Step(ours, Resident(images, DEVICE, torch.float32), recipe)
    step.order.copy_(order(torch.tensor(ours.seed), 0, len(images.y)))
    for number, _ in enumerate(Loop(images, recipe, DEVICE).train(loop)):
        step.train((8, 6)[number])
        step.home()
        assert moved(ours, loop) < 2e-4 < 9e-4 < moved(begin, loop)
        if number == 0:  # later, Adam has turned rounding into steps
            for p, q in zip(ours.model.parameters(), loop.model.parameters(), strict=True):
                for key in ("exp_avg", "exp_avg_sq"):
                    assert distance(ours.adam.state[p][key], loop.adam.state[q][key].cpu()) < 1e-3
    step.evaluate()
    assert float(step.loss) == pytest.approx(loop.loss[0], rel=1e-3)
    assert int(step.right) / len(images.y_test) == pytest.approx(loop.accuracy[0], abs=0.05)
    for name, buffer in loop.model.named_buffers():
        torch.testing.assert_close(ours.model.get_buffer(name), buffer.cpu(), rtol=1e-3, atol=1e-3)


def test_adam_is_one_program_for_heads_of_every_width():
    """A kernel that is compiled while a graph is recorded spoils the graph."""
    jitted = flat_adam_kernel
    varying = {"begin", "end", "kernels", "size"}
    if DEVICE.type == "cpu":  # the interpreter compiles nothing, but knows what it was told
        assert varying <= set(jitted.kwargs["do_not_specialize"] or ())
    else:
        assert varying <= {p.name for p in jitted.params if p.do_not_specialize}


@needs_gpu
@pytest.mark.parametrize("arm", [Dense(), Expand(2)])
def test_the_first_steps_of_a_graph_are_those_of_the_loop(arm):
    images, recipe = make_images(32), Recipe(batch=32, l1=1e-3, l2=1e-3, orthogonal=1e-2)
    jobs = [make_job(arm, recipe) for _ in range(2)]
    for job, engine in zip(
        jobs,
        (Loop(images, recipe, DEVICE), Graphs(images, recipe, DEVICE, torch.float32, 2)),
        strict=True,
    ):
        for _ in engine.train(job):
            pass
    loop, graph = jobs
    assert graph.loss == pytest.approx(loop.loss, rel=1e-5)
    for p, q in zip(graph.model.parameters(), loop.model.parameters(), strict=True):
        assert graph.adam.state[p]["step"] == loop.adam.state[q]["step"] == 1
        moment = graph.adam.state[p]["exp_avg"], loop.adam.state[q]["exp_avg"]
        assert distance(*moment) < 1e-3
    for name, buffer in loop.model.named_buffers():
        torch.testing.assert_close(graph.model.get_buffer(name), buffer, rtol=1e-4, atol=1e-5)


@needs_gpu
def test_graphs_learn_what_the_loop_learns():
    images, recipe = make_images(200), Recipe(batch=32)
    networks = [Network(32, 6, seed) for seed in range(2)]
    settings = {"warm_up": 2, "fine_tune": 2, "recipe": recipe}
    loop = train(networks, images, ARMS, **settings)
    exactly = train(networks, images, ARMS, **settings, device="cuda", precision="float32")
    roughly = train(networks, images, ARMS, **settings, device="cuda", side_by_side=2)
    for a, b, c in zip(loop, exactly, roughly, strict=True):
        for name in ARMS:
            assert b[name].loss == pytest.approx(a[name].loss, rel=0.05)
            assert c[name].loss[0] == pytest.approx(a[name].loss[0], rel=0.05)
            assert abs(c[name].loss[-1] - a[name].loss[-1]) < 0.1
            assert b[name].nonzeros == a[name].nonzeros == c[name].nonzeros
            state = b[name].model.state_dict()
            assert {k: v.shape for k, v in state.items()} == {
                k: v.shape for k, v in a[name].model.state_dict().items()
            }
            assert state["backbone.1.num_batches_tracked"] == 4 * 7


@needs_gpu
def test_company_does_not_matter():
    images, recipe = make_images(72), Recipe(batch=32)
    networks = [Network(32, 6, seed) for seed in range(4)] + [Network(32, 3, 9)]
    settings = {"warm_up": 1, "fine_tune": 1, "recipe": recipe, "device": "cuda"}
    together = train(networks, images, ARMS, **settings, side_by_side=3, precision="float32")
    for network, found in zip(networks[2:], together[2:], strict=True):
        alone = train([network], images, ARMS, **settings, side_by_side=1, precision="float32")[0]
        for name in ARMS:
            assert found[name].loss == pytest.approx(alone[name].loss, rel=1e-2)


@needs_gpu
def test_a_network_that_diverges_is_frozen_and_the_others_go_on(monkeypatch):
    class Poisoned(ConvNet):
        def __init__(self, *sizes, seed):
            super().__init__(*sizes, seed=seed)
            if seed == 1:
                with torch.no_grad():
                    self.backbone[0].weight[0, 0, 0, 0] = torch.nan

    monkeypatch.setattr(importlib.import_module("fissile.bank.vision.train"), "ConvNet", Poisoned)
    images, networks = make_images(40), [Network(32, 6, 0), Network(32, 6, 1)]
    settings = {"warm_up": 1, "fine_tune": 1, "recipe": Recipe(batch=32), "device": "cuda"}
    good, bad = train(networks, images, ARMS, **settings)
    assert not any(result.diverged for result in good.values())
    for result in bad.values():
        assert result.diverged
        assert all(value != value for value in result.accuracy)
        assert torch.equal(
            result.model.backbone[3].weight, Poisoned(32, 6, 4, seed=1).backbone[3].weight
        )


def test_batch_sizes():
    assert batch_sizes(10, 4) == [4, 4, 2]
    assert batch_sizes(8, 4) == [4, 4]
    assert batch_sizes(3, 4) == [3]
