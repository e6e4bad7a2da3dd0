"""Packed models as a user has them, on a GPU if there is one: made, moved, called and saved."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from fissile import MLP, FissileError, expand, load, pack, save, unpack
from fissile.packed import dispatch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
OFF = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


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
    return dispatch.activated(sums if bias is None else sums + bias.double(), activation)


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


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "batch"), [(3072, 1), (4096, 2), (5120, 7), (8192, 8)])
@pytest.mark.parametrize(("alpha", "activation", "biased"), LAYERS)
def test_many_children_of_few_samples_agree(batch, alpha, activation, biased, inputs, dtype):
    weight, bias = large(16 * 139, inputs, alpha, dtype, biased=biased)
    x = torch.randn(batch, inputs, device="cuda").to(dtype)
    y = dispatch.partitioned_linear(x, weight, None, bias, alpha, activation)
    assert is_right(y, exact(x, weight, bias, alpha, activation))
    assert torch.equal(y, dispatch.partitioned_linear(x, weight, None, bias, alpha, activation))


@needs_gpu
@pytest.mark.parametrize("batch", [4, 8])
def test_many_children_in_graphs_streams_and_threads(batch):
    weight, bias = large(4096, 4096, 8, torch.float16, biased=True)
    x = torch.randn(batch, 4096, device="cuda").half()

    def call():
        return dispatch.partitioned_linear(x, weight, None, bias, 8, "relu")

    wanted = call()
    assert is_right(wanted, exact(x, weight, bias, 8, "relu"))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(call(), wanted)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(call).result(), wanted)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, wanted)


@needs_gpu
def test_odd_sizes_and_addresses_of_many_children_agree():
    for parents, batch, start in ((2200, 4, 0), (4096, 9, 0), (4096, 2, 1), (4096, 6, 1)):
        weight, _ = large(parents, 4096, 8, torch.float16, biased=False)
        x = torch.randn(batch * 4096 + start, device="cuda").half()[start:].view(batch, 4096)
        y = dispatch.partitioned_linear(x, weight, None, None, 8, "none")
        assert is_right(y, exact(x, weight, None, 8, "none"))
