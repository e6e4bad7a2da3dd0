"""The kernels of packed layers against float64; without a GPU, in Triton's interpreter."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from fissile.packed import gpu
from fissile.packed.gpu import MaskedTiles, Tiles, launch, masked_tiles, partitioned_tiles

pytestmark = pytest.mark.slow  # together: make quick leaves them out

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter cuts bfloat16 off where a GPU rounds.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ACTIVATIONS = {
    "none": lambda a: a,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "silu": F.silu,
}
BATCHES = [1, 2, 5, 8, 9, 16, 17]


def assert_near(found, expected, dtype):
    assert found.dtype == dtype
    assert found.is_contiguous()
    torch.testing.assert_close(
        found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 4
    )


def numbers(generator, *shape, dtype):
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def bits_of(flags):
    """Write flags, (..., n), into bytes, (..., ceil(n / 8)), the first one lowest."""
    padded = F.pad(flags.long(), (0, -flags.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (padded << torch.arange(8, device=flags.device)).sum(-1).to(torch.uint8)


def owned_layer(h, d, alpha, dtype, layout, seed=0, keep=0.8):
    """Return the weight and planes of a packed layer, and the same written out in float64."""
    generator = torch.Generator().manual_seed(seed)
    bits = (alpha - 1).bit_length()
    weight = numbers(generator, h, d, dtype=dtype) / d**0.5
    owner = torch.randint(0, alpha, (h, d), generator=generator).to(DEVICE)
    pruned = (torch.rand(h, d, generator=generator) > keep).to(DEVICE)
    pattern = weight.view(torch.int32 if dtype == torch.float32 else torch.int16)
    if layout == "inline":
        pattern &= ~(2**bits - 1)
        pattern |= owner.to(pattern.dtype)
    pattern[pruned] = 0
    owner[pruned] = 0
    planes = None
    if layout == "plane":
        planes = torch.stack([bits_of((owner >> t) & 1) for t in range(bits)]).contiguous()
    child = torch.arange(alpha, device=DEVICE)[None, :, None]
    wide = torch.where(owner[:, None] == child, weight[:, None].double(), 0.0).flatten(0, 1)
    return weight, planes, wide


def masked_layer(outputs, groups, group, dtype, seed=0, keep=0.3):
    """Return weight, live and start of a packed layer, and the same written out in float64."""
    generator = torch.Generator().manual_seed(seed)
    stored = (torch.rand(outputs, groups, generator=generator) < keep).to(DEVICE)
    if outputs > 2:
        stored[0], stored[1] = True, False
    values = numbers(generator, outputs, groups, group, dtype=dtype) / (groups * group) ** 0.5
    values = values * stored[:, :, None]
    values[:, ::3, 0] = 0  # weights that do not exist, some inside of groups that are stored
    blocks = F.pad(stored, (0, -groups % 256)).unflatten(-1, (-1, 256)).sum(-1)
    start = blocks.flatten().cumsum(0).view_as(blocks) - blocks
    weight = values[stored].flatten().contiguous()
    return (weight, bits_of(stored), start.int()), values.flatten(1).double()


def expected_of(x, wide, bias, activation):
    out = x.double() @ wide.T
    return ACTIVATIONS[activation](out if bias is None else out + bias.double())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["inline", "plane"])
@pytest.mark.parametrize("alpha", range(2, 9))
def test_owned_agrees_at_odd_sizes(alpha, layout, dtype):
    generator = torch.Generator().manual_seed(alpha)
    weight, planes, wide = owned_layer(21, 77, alpha, dtype, layout, seed=alpha)
    x = numbers(generator, BATCHES[alpha - 2], 77, dtype=dtype)
    bias = numbers(generator, 21 * alpha, dtype=dtype) if alpha % 2 else None
    activation = list(ACTIVATIONS)[alpha % 5]
    found = launch.partitioned_linear(x, weight, planes, bias, alpha, activation)
    assert_near(found, expected_of(x, wide, bias, activation), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["inline", "plane"])
@pytest.mark.parametrize("batch", [1, 16, 17])
def test_owned_agrees_at_even_sizes(batch, layout, dtype):
    generator = torch.Generator().manual_seed(batch)
    weight, planes, wide = owned_layer(32, 256, 4, dtype, layout)
    x, bias = numbers(generator, batch, 256, dtype=dtype), numbers(generator, 128, dtype=dtype)
    found = launch.partitioned_linear(x, weight, planes, bias, 4, "none")
    assert_near(found, expected_of(x, wide, bias, "none"), dtype)


TILES = [
    Tiles(16, 32, 8, True, 4, 4, 2),
    Tiles(32, 128, 8, False, 1, 2, 3),
    Tiles(64, 64, 8, True, 1, 4, 3),
    Tiles(64, 32, 32, False, 1, 4, 3),
    *{
        partitioned_tiles(batch, h, 256, bits, 2, False)
        for batch in (1, 16, 40, 200)
        for h in (64, 4096, 14336, 28672)
        for bits in (1, 2, 3)
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("tiles", sorted(TILES), ids=lambda tiles: "-".join(map(str, tiles)))
def test_every_way_to_cut_a_layer_agrees(tiles):
    generator = torch.Generator().manual_seed(0)
    alpha = 8 if tiles.samples < 64 else 4
    weight, _, wide = owned_layer(70, 256, alpha, torch.float16, "inline")
    x = numbers(generator, 19, 256, dtype=torch.float16)
    found = launch.partitioned_linear(x, weight, None, None, alpha, "none", tiles)
    assert_near(found, expected_of(x, wide, None, "none"), torch.float16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    generator = torch.Generator().manual_seed(1)
    weight, _, wide = owned_layer(16, 32, 2, torch.float32, "inline")
    x, bias = numbers(generator, 3, 32, dtype=torch.float32) * 3, None
    found = launch.partitioned_linear(x, weight, None, bias, 2, activation)
    assert_near(found, expected_of(x, wide, bias, activation), torch.float32)
    packed, wide = masked_layer(5, 16, 2, torch.float32, keep=0.6)
    bias = numbers(generator, 5, dtype=torch.float32)
    found = launch.masked_linear(x, *packed, bias, 2, activation)
    assert_near(found, expected_of(x, wide, bias, activation), torch.float32)


@pytest.mark.parametrize("layout", ["inline", "plane"])
def test_parents_without_weights_give_their_biases(layout):
    generator = torch.Generator().manual_seed(2)
    weight, planes, _ = owned_layer(18, 40, 3, torch.float16, layout, keep=0.0)
    assert not weight.any()
    x, bias = (numbers(generator, *shape, dtype=torch.float16) for shape in ((2, 40), (54,)))
    found = launch.partitioned_linear(x, weight, planes, bias, 3, "none")
    assert torch.equal(found, bias.expand(2, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["inline", "plane"])
@pytest.mark.parametrize("alpha", [2, 3, 8])
def test_owned_is_written_out_bit_by_bit(alpha, layout, dtype):
    weight, planes, wide = owned_layer(6, 77, alpha, dtype, layout)
    assert torch.equal(launch.partitioned_written(weight, planes, alpha).double(), wide)


def check_masked(outputs, groups, group, batch, dtype, biased, keep=0.3):
    generator = torch.Generator().manual_seed(group)
    packed, wide = masked_layer(outputs, groups, group, dtype, seed=group, keep=keep)
    x = numbers(generator, batch, groups * group, dtype=dtype)
    bias = numbers(generator, outputs, dtype=dtype) if biased else None
    found = launch.masked_linear(x, *packed, bias, group, "none")
    assert_near(found, expected_of(x, wide, bias, "none"), dtype)
    assert torch.equal(launch.masked_written(*packed, groups * group, group).double(), wide)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_bitmap_agrees(group, dtype):
    # a second block that is not full, words and bytes that are not, an empty row and a full one
    check_masked(3, 300, group, {1: 1, 2: 2, 4: 3, 8: 1}[group], dtype, biased=group % 3 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 9, 17, 70])
def test_bitmap_agrees_for_several_samples(batch):
    check_masked(18, 300, 4, batch, torch.bfloat16, biased=True)


def test_bitmap_agrees_at_other_sizes():
    check_masked(2, 40, 4, 9, torch.float16, biased=True)
    check_masked(2, 1100, 2, 1, torch.float16, biased=False, keep=0.05)
    check_masked(18, 256, 2, 3, torch.float16, biased=True)  # words, and whole parts


MASKED = [
    MaskedTiles(16, 8, 2, 16, True, 1, 1),
    MaskedTiles(64, 8, 1, 16, False, 2, 5),
    *{
        masked_tiles(batch, 4096, 56, group, 2)._replace(part=1)
        for batch in (2, 16, 32, 64, 100)
        for group in (4, 8)
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("tiles", sorted(MASKED), ids=lambda tiles: "-".join(map(str, tiles)))
def test_every_way_to_cut_a_masked_layer_agrees(tiles):
    generator = torch.Generator().manual_seed(0)
    group = 4 if tiles.step == 32 else 8
    packed, wide = masked_layer(20, 268, group, torch.float16)
    x = numbers(generator, 11, 268 * group, dtype=torch.float16)
    bias = numbers(generator, 20, dtype=torch.float16)
    found = launch.masked_linear(x, *packed, bias, group, "relu", tiles)
    assert_near(found, expected_of(x, wide, bias, "relu"), torch.float16)


def test_bitmap_without_a_stored_group_gives_its_biases():
    generator = torch.Generator().manual_seed(3)
    packed, _ = masked_layer(2, 24, 4, torch.float16, keep=0.0)
    assert len(packed[0]) == 0
    x, bias = (numbers(generator, *shape, dtype=torch.float16) for shape in ((1, 96), (2,)))
    assert torch.equal(launch.masked_linear(x, *packed, bias, 4, "none"), bias.expand(1, -1))


def shifted(tensor):
    """Return the same numbers at an address that only their own size divides."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
    return room.copy_(tensor.flatten()).view_as(tensor)


def test_addresses_need_no_alignment():
    generator = torch.Generator().manual_seed(4)
    for layout in ("inline", "plane"):
        weight, planes, wide = owned_layer(16, 64, 4, torch.float16, layout)
        x = numbers(generator, 2, 64, dtype=torch.float16)
        planes = None if planes is None else shifted(planes)
        found = launch.partitioned_linear(shifted(x), shifted(weight), planes, None, 4, "none")
        assert_near(found, expected_of(x, wide, None, "none"), torch.float16)
    (weight, *rest), wide = masked_layer(3, 32, 8, torch.float16)
    x = numbers(generator, 2, 256, dtype=torch.float16)
    found = launch.masked_linear(shifted(x), shifted(weight), *map(shifted, rest), None, 8, "none")
    assert_near(found, expected_of(x, wide, None, "none"), torch.float16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
def test_an_infinite_input_reaches_the_child_that_owns_it():
    weight, _, wide = owned_layer(16, 32, 4, torch.float16, "inline", keep=1.0)
    x = torch.ones(1, 32, dtype=torch.float16, device=DEVICE)
    x[0, 5] = float("inf")
    found = launch.partitioned_linear(x, weight, None, None, 4, "none")[0]
    owns = wide[:, 5] != 0
    assert torch.equal(found[owns], (wide[:, 5][owns] * float("inf")).half())
    assert not found[~owns].isfinite().any()  # like 0 * inf in a dense layer


def test_it_says_where_it_runs_and_what_it_takes():
    assert gpu.can_run() == CUDA
    assert not gpu.can_run("cpu")
    for bits in (1, 2, 3):
        assert gpu.takes(1, torch.float16, bits)
        assert not gpu.takes(10**5, torch.float16, bits)
    assert not gpu.takes(1, torch.float16, 4)
    assert gpu.takes(64, torch.float32, 1)
    assert not gpu.takes(64, torch.float32, 1, planes=True)
    assert gpu.takes(64, torch.float16, 1, planes=True)
    for group in (1, 2, 4, 8):
        assert gpu.takes(1, torch.float16, None, group)
        assert not gpu.takes(10**4, torch.float16, None, group)
    assert gpu.takes(64, torch.float16, None, 4)
    assert not gpu.takes(64, torch.float32, None, 4)


def test_importing_it_leaves_triton_alone():
    code = "import sys, fissile.packed.gpu; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- on a GPU only -----------------------------------------------------------------------------

on_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")


def norm_error(found, expected):
    assert found.isfinite().all()
    return float((found.double() - expected).norm() / expected.norm())


ERROR = {torch.float32: 2e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["inline", "plane"])
@pytest.mark.parametrize(("h", "d", "alpha"), [(4096, 4096, 2), (4096, 4096, 8), (9001, 1000, 4)])
def test_owned_agrees_at_large_sizes(h, d, alpha, layout, dtype):
    weight, planes, wide = owned_layer(h, d, alpha, dtype, layout, seed=h + alpha)
    for batch in (1, 7, 16, 33, 100):
        x = torch.randn(batch, d, device=DEVICE).to(dtype)
        bias = torch.randn(h * alpha, device=DEVICE).to(dtype)
        found = launch.partitioned_linear(x, weight, planes, bias, alpha, "silu")
        assert norm_error(found, expected_of(x, wide, bias, "silu")) < ERROR[dtype]
        again = launch.partitioned_linear(x, weight, planes, bias, alpha, "silu")
        assert torch.equal(found, again)
    assert torch.equal(launch.partitioned_written(weight, planes, alpha).double(), wide)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_bitmap_agrees_at_large_sizes(group, dtype):
    for outputs, groups in ((1024, 14336), (333, 5003)):
        packed, wide = masked_layer(outputs, groups, group, dtype, seed=groups, keep=1 / group)
        for batch in (1, 3, 8, 11, 29, 70, 130):
            x = torch.randn(batch, groups * group, device=DEVICE).to(dtype)
            bias = torch.randn(outputs, device=DEVICE).to(dtype)
            expected = expected_of(x, wide, bias, "relu")
            found = launch.masked_linear(x, *packed, bias, group, "relu")
            assert norm_error(found, expected) < ERROR[dtype]
            assert torch.equal(found, launch.masked_linear(x, *packed, bias, group, "relu"))
        assert torch.equal(launch.masked_written(*packed, groups * group, group).double(), wide)


@on_gpu
def test_graphs_and_streams():
    weight, _, wide = owned_layer(512, 512, 4, torch.float16, "inline")
    packed, wide2 = masked_layer(256, 512, 4, torch.float16)
    x = torch.randn(2, 512, device=DEVICE).half()

    def both():
        hidden = launch.partitioned_linear(x, weight, None, None, 4, "relu")
        return launch.masked_linear(hidden, *packed, None, 4, "none")

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = both()
    for _ in range(3):
        x.copy_(torch.randn(2, 512, device=DEVICE))
        graph.replay()
        hidden = F.relu(x.double() @ wide.T)
        assert norm_error(y, hidden @ wide2.T) < 2e-3
        assert torch.equal(y, both())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other = both()
        side.synchronize()
        assert torch.equal(y, other)
