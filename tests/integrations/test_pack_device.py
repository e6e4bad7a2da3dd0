"""Packed models as a user has them, on a GPU if there is one: made, moved, called and saved."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from fissile import MLP, FissileError, expand, load, pack, save, unpack
from fissile.packed import dispatch, plain

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
OFF = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs an H100 or H200")


def off(found, wanted):
    """Return how far a result is off, as a share of its size."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def made(alpha, activation="relu", sizes=(136, 24, 17)):
    torch.manual_seed(0)
    return expand(MLP(list(sizes), activation=activation), alpha).eval().to(DEVICE)


@pytest.mark.parametrize("layout", ["inline", "plane"])
@pytest.mark.parametrize("dtype", list(OFF))
@pytest.mark.parametrize(
    ("alpha", "activation"), [(2, "relu"), (3, "gelu"), (4, "silu"), (8, "tanh")]
)
def test_a_model_computes_where_it_is(alpha, activation, dtype, layout, tmp_path):
    wide = made(alpha, activation)
    packed = pack(wide, dtype=dtype, layout=layout)
    assert {tensor.device.type for tensor in packed.state_dict().values()} == {DEVICE}
    plain = unpack(packed).eval()
    with torch.no_grad():
        for shape in ((136,), (1, 136), (7, 136), (2, 10, 136), (600, 136)):
            x = torch.randn(shape, device=DEVICE, dtype=dtype)
            found = packed(x)
            assert found.shape == (*shape[:-1], 17)
            assert found.dtype is dtype
            assert off(found, plain(x)) < OFF[dtype]
            assert off(found, wide(x.float())) < 20 * OFF[dtype]
        assert packed(x[:0]).shape == (0, 17)
        elsewhere = copy.deepcopy(packed).to("cpu")
        assert off(elsewhere(x.cpu()), packed(x).cpu()) < OFF[dtype]
        save(packed, tmp_path / "packed")
        assert torch.equal(load(tmp_path / "packed", device=DEVICE)(x), packed(x))


def test_autocast():
    x = torch.randn(3, 136, device=DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        assert pack(made(4))(x).dtype is torch.bfloat16


@needs_gpu
def test_a_batch_elsewhere_is_refused():
    with pytest.raises(FissileError, match="the batch is on cpu"):
        pack(made(4))(torch.randn(3, 136))


@needs_gpu
# torch 2.11's own compiler warns about its own TorchScript on a GPU
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_compiled_model_agrees():
    packed, x = pack(made(4), dtype=torch.float16), torch.randn(5, 136, device=DEVICE).half()
    with torch.no_grad():
        compiled = torch.compile(packed, fullgraph=True)
        for rows in (5, 1):
            assert off(compiled(x[:rows]), packed(x[:rows])) < 1e-2


@needs_gpu
def test_a_model_in_a_graph():
    packed, x = pack(made(4), dtype=torch.float16), torch.randn(5, 136, device=DEVICE).half()
    with torch.no_grad():
        wanted = packed(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = packed(x)
        found.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(found, wanted)


@needs_gpu
@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_two_of_four_goes_to_torch(tmp_path):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 128))
    wide = expand(dense, 2, split="2:4").eval().to(DEVICE)
    packed = pack(wide, dtype=torch.float16, layout="2:4")
    assert isinstance(packed[0].weight, torch.sparse.SparseSemiStructuredTensor)
    for rows in (1, 5, 64):
        x = torch.randn(rows, 256, device=DEVICE)
        with torch.no_grad():
            assert off(packed(x.half()), wide(x)) < 1e-2
    with pytest.raises(FissileError, match="save the expanded model"):
        save(packed, tmp_path / "packed")
    with pytest.raises(FissileError, match="keep the expanded model"):
        unpack(packed)
    with pytest.raises(FissileError, match="does not train"):
        packed.train()


# --- kernels in CUDA, for up to eight samples and five to eight children


def large(parents, inputs, alpha, dtype, *, biased):
    """Return a packed layer's weights and biases."""
    pattern = torch.randn(parents, inputs, device="cuda").to(dtype).view(torch.int16)
    owner = torch.randint(alpha, pattern.shape, device="cuda", dtype=torch.int16)
    kept = torch.rand(pattern.shape, device="cuda") < 0.9
    weight = torch.where(kept, (pattern & ~7) | owner, 0).view(dtype)
    return weight, 20 * torch.randn(parents * alpha, device="cuda").to(dtype) if biased else None


def exact(x, weight, bias, alpha, activation):
    """Return the layer in float64."""
    owner = weight.view(torch.int16) & 7
    parts = [x.double() @ (weight.double() * (owner == k)).T for k in range(alpha)]
    sums = torch.stack(parts, -1).flatten(1)
    return plain.activated(sums if bias is None else sums + bias.double(), activation)


def is_right(found, wanted):
    """Tell whether every output is rounded from the exact one, but for the order of a sum."""
    slack = torch.finfo(found.dtype).eps * wanted.abs() + 1e-3 * wanted.std()
    return bool(((found.double() - wanted).abs() <= slack).all())


LAYERS = [  # children, activation, biases
    (8, "none", False),
    (8, "gelu", True),
    (5, "relu", True),
    (7, "silu", False),
    (6, "gelu_tanh", True),
]
# Samples, by the number of inputs; the last is too many for one of the programs.
WIDTHS = {3072: (1, 8), 4096: (2, 5), 5120: (4, 7), 7168: (4, 8), 8192: (3, 6), 11264: (4,)}


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "batch"), [(n, b) for n in WIDTHS for b in WIDTHS[n]])
@pytest.mark.parametrize(("alpha", "activation", "biased"), LAYERS)
def test_few_samples_agree(batch, alpha, activation, biased, inputs, dtype):
    from fissile.packed.gpu import few

    weight, bias = large(16 * 139, inputs, alpha, dtype, biased=biased)
    x = torch.randn(batch, inputs, device="cuda").to(dtype)
    assert few.suits(x, weight, None, bias, alpha)
    found = dispatch.owned(x, weight, None, bias, alpha, activation)
    assert is_right(found, exact(x, weight, bias, alpha, activation))
    assert torch.equal(found, dispatch.owned(x, weight, None, bias, alpha, activation))


@needs_hopper
@pytest.mark.parametrize("batch", [4, 8])
@pytest.mark.parametrize("cold", [False, True])
def test_few_samples_in_graphs_streams_and_threads(cold, batch):
    from fissile.packed.gpu import few

    weight, bias = large(4096, 4096, 8, torch.float16, biased=True)
    x = torch.randn(batch, 4096, device="cuda").half()

    def call():
        return dispatch.owned(x, weight, None, bias, 8, "relu")

    def first(where):  # of all calls, if it is cold
        if cold:
            few._kernel.cache_clear()
        return where()

    wanted = call()
    assert is_right(wanted, exact(x, weight, bias, 8, "relu"))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(first(call), wanted)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(first, call).result(), wanted)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = first(call)
    found.fill_(torch.nan)
    graph.replay()
    assert torch.equal(found, wanted)
    assert few._kernel.cache_info().currsize > 0


@needs_hopper
@pytest.mark.parametrize("way", ["called", "in a graph"])
def test_a_kernel_that_is_there_early_waits(way):
    """Layers whose inputs, weights and room come from the kernel just before, again and again."""
    # Outputs are as large as inputs: each is a sum of 512 products, of which a tenth are none.
    weights = [large(2304, 4096, 8, torch.float16, biased=False)[0] / 21.5 for _ in range(6)]
    first = torch.randn(8, 4096, device="cuda").half()
    used = torch.empty_like(weights[0])

    def chain(pause):
        x = first
        for i in range(48):
            batch = (8, 4, 1, 6)[i % 4]
            x = x.flatten()[: batch * 4096].view(batch, 4096)
            used.copy_(weights[i % 6])
            x = x * 1  # a kernel of PyTorch's comes before, but not always
            pause()
            for weight in (used, weights[i % 5]):
                x = dispatch.owned(x, weight, None, None, 8, "none")
                pause()
                x = x.flatten()[: batch * 4096].view(batch, 4096)
            x = torch.cat([x.flatten(), first.flatten()])[: 8 * 4096]
            pause()
        return x

    wanted = chain(torch.cuda.synchronize)
    assert bool(wanted.isfinite().all())
    assert float(wanted[:4096].float().std()) > 0.01
    if way == "called":
        assert all(torch.equal(chain(lambda: None), wanted) for _ in range(20))
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(lambda: None)
    for _ in range(20):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, wanted)


@needs_hopper
def test_what_does_not_suit_goes_elsewhere():
    from fissile.packed.gpu import few

    for parents, batch, start in ((2200, 4, 0), (4096, 9, 0), (4096, 2, 1), (4096, 6, 1)):
        weight, _ = large(parents, 4096, 8, torch.float16, biased=False)
        x = torch.randn(batch * 4096 + start, device="cuda").half()[start:].view(batch, 4096)
        assert not few.suits(x, weight, None, None, 8)
        assert is_right(
            dispatch.owned(x, weight, None, None, 8, "none"), exact(x, weight, None, 8, "none")
        )


@needs_hopper
@pytest.mark.parametrize("batch", [2, 7])
def test_without_a_compiler_triton_serves(batch, monkeypatch):
    from fissile.packed.gpu import few, nvrtc

    def broken(*_):
        raise RuntimeError("out of order")

    monkeypatch.setattr(nvrtc, "compiled", broken)
    few._kernel.cache_clear()
    weight, _ = large(4096, 4096, 8, torch.float16, biased=False)
    x = torch.randn(batch, 4096, device="cuda").half()
    with pytest.warns(UserWarning, match="out of order"):
        found = dispatch.owned(x, weight, None, None, 8, "none")
    assert is_right(found, exact(x, weight, None, 8, "none"))
    assert torch.equal(dispatch.owned(x, weight, None, None, 8, "none"), found)  # said once
    few._kernel.cache_clear()
