"""A small head in one call: prepared once, and again whenever its tensors are others."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from fissile import MLP, FissileError, expand, pack, unpack
from fissile.packed import dispatch
from fissile.packed.cpu import LEAST, can_run
from fissile.packed.sequence import Block

pytestmark = pytest.mark.skipif(not can_run(), reason="the kernels do not run here")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def head(sizes=(24, 6, 5), alpha=4, activation="relu", layout="inline"):
    torch.manual_seed(0)
    return pack(expand(MLP(list(sizes), activation=activation), alpha), layout=layout)


def general(packed, x):
    return unpack(packed).eval()(x).detach()


@pytest.fixture
def quick(monkeypatch):
    """Let nothing but the prepared call answer."""
    monkeypatch.setattr(dispatch, "ready", lambda *_: pytest.fail("it went the general way"))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("layout", ["inline", "plane"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", nn.GELU(approximate="tanh")])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (7, 24), (2, 1, 8, 24)])
def test_few_samples_take_the_prepared_call(shape, activation, layout):
    packed = head(activation=activation, layout=layout)
    x = torch.randn(shape)
    found = packed(x)
    assert found.shape == (*shape[:-1], 5)
    torch.testing.assert_close(found, general(packed, x), **CLOSE)


@pytest.mark.parametrize("alpha", [2, 3, 5, 8])
def test_any_number_of_children(alpha):
    packed, x = head(alpha=alpha), torch.randn(3, 24)
    torch.testing.assert_close(packed(x), general(packed, x), **CLOSE)


def test_other_tensors_are_noticed():
    packed, x = head(), torch.randn(2, 24)
    before = packed(x)
    first, second = packed.layers[0], packed.layers[2]
    with torch.no_grad():
        second.bias += 1  # in place: the same address
    torch.testing.assert_close(packed(x), before + 1, **CLOSE)
    second.bias = nn.Parameter(second.bias - 1, requires_grad=False)  # another parameter
    torch.testing.assert_close(packed(x), before, **CLOSE)
    first.weight.data = first.weight.data.clone()  # the same parameter, elsewhere
    first.weight.data.zero_()
    torch.testing.assert_close(packed(x), general(packed, x), **CLOSE)
    packed.half()
    assert packed(x.half()).dtype is torch.float16
    packed.float()
    torch.testing.assert_close(packed(x), general(packed, x), **CLOSE)


def test_another_state_is_noticed():
    packed, x = head(), torch.randn(2, 24)
    packed(x)
    other = copy.deepcopy(packed)
    with torch.no_grad():
        other.layers[0].bias += 0.5
    packed.load_state_dict(other.state_dict())
    torch.testing.assert_close(packed(x), other(x), rtol=0, atol=0)


def test_what_is_not_plain_goes_the_general_way():
    packed, x = head(), torch.randn(3, 24)
    wanted = packed(x)
    torch.testing.assert_close(packed(x.mT.contiguous().mT), wanted, **CLOSE)
    torch.testing.assert_close(packed(x.expand(40, 3, 24))[7], wanted, **CLOSE)  # too many
    assert packed(x[:0]).shape == (0, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert packed(x).dtype is torch.bfloat16
    with pytest.raises(FissileError, match="24 inputs"):
        packed(torch.randn(3, 23))
    with pytest.raises(FissileError, match="float64"):
        packed(x.double())
    with pytest.raises(FissileError, match="gradients"):
        packed(x.clone().requires_grad_())
    packed.layers[2].weight.requires_grad_()
    with pytest.raises(FissileError, match="gradients"):
        packed(x)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), wanted)


def test_a_large_layer_is_left_to_the_threads():
    packed = head((1024, 2 * LEAST // 1024, 2), alpha=2)
    block = Block(packed.layers[0], "relu", packed.layers[2])
    x = torch.randn(1, 1024)
    torch.testing.assert_close(block(x), general(packed, x), rtol=1e-4, atol=1e-4)
    assert block._ready.few is None


def test_threads_do_not_share_what_is_between_the_layers():
    packed = head((64, 16, 10))
    batches = [torch.randn(1, 64) for _ in range(64)]
    alone = [packed(x) for x in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            together = list(pool.map(packed, batches))
            assert all(map(torch.equal, alone, together))


@pytest.fixture
def defaults():
    """Put back whatever a test makes the default."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_makes_no_difference(dtype):
    packed, x = head(), torch.randn(2, 24)
    wanted = packed(x)
    torch.set_default_dtype(dtype)
    assert torch.equal(packed(x), wanted)
    assert torch.equal(copy.deepcopy(packed)(x), wanted)  # prepared only now
    can_run.cache_clear()
    assert can_run()


def test_the_default_device_makes_no_difference():
    packed, x = head(), torch.randn(2, 24)
    wanted = packed(x)
    with torch.device("meta"):
        assert torch.equal(packed(x), wanted)
        assert torch.equal(copy.deepcopy(packed)(x), wanted)


def test_a_weight_cut_short_is_noticed():
    packed, x = head(), torch.randn(1, 24)
    packed(x)
    first = packed.layers[0]
    first.weight.data = first.weight.data[:3]  # the same object at the same address
    with pytest.raises(FissileError):
        packed(x)


def test_what_a_call_reads_stays_alive():
    packed, x = head(), torch.randn(1, 24)
    wanted = packed(x)
    call, _ = packed._modules["layers"]._plan[1][0]._ready.few
    for layer in (packed.layers[0], packed.layers[2]):
        layer.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)
    packed(x)
    filler = [torch.full((24 * 6,), torch.nan) for _ in range(100)]
    assert torch.equal(call(x, 1), wanted)
    del filler


def test_tensors_without_memory_of_their_own():
    packed, x = head(), torch.randn(2, 24)
    wanted = packed(x)
    torch.testing.assert_close(packed(torch._neg_view(-x)), wanted, **CLOSE)
    nothing = torch._efficientzerotensor((2, 24))
    torch.testing.assert_close(packed(nothing), packed(torch.zeros(2, 24)), **CLOSE)

    class Named(torch.Tensor):
        pass

    torch.testing.assert_close(torch.Tensor(packed(x.as_subclass(Named))), wanted, **CLOSE)


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop",
    "ignore:.torch.jit:DeprecationWarning",
    "ignore::torch.jit.TracerWarning",
)
def test_function_transforms_and_traces():
    packed, x = head(), torch.randn(3, 24)
    wanted = packed(x)
    torch.testing.assert_close(torch.func.vmap(packed)(x), wanted, **CLOSE)
    torch.testing.assert_close(torch.jit.trace(packed, x, check_trace=False)(x), wanted, **CLOSE)
    tangent = torch.ones_like(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        with pytest.raises(FissileError, match="forward-mode"):
            packed(dual)
    with pytest.raises(FissileError, match="forward-mode"):
        torch.func.jvp(packed, (x,), (tangent,))
