"""Packed models as a user has them, on a GPU if there is one: made, moved, called and saved."""

import copy

import pytest
import torch
from torch import nn

from fissile import MLP, FissileError, expand, load, pack, save, unpack

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
