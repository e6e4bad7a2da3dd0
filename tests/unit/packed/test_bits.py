"""Weights that end in bits of our choice, bits in bytes, and where weights are as a stream."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fissile import FileError, FissileError
from fissile.packed import bits as bitwise
from fissile.packed.bits import (
    MANTISSA,
    MOST,
    Carrier,
    Reader,
    embedded,
    ending_in,
    exists,
    from_bytes,
    low_bits,
    owner_bits,
    pattern_of,
    read_groups,
    read_mask,
    to_bytes,
    write_groups,
    write_mask,
)
from fissile.packed.format import (
    check_dtype,
    check_layout,
    group_starts,
    masked_dense,
    masked_misfit,
    owners,
    pack_masked,
    pack_partitioned,
    partitioned_dense,
    partitioned_misfit,
    recast,
)

SHORT = [torch.float16, torch.bfloat16]
DTYPES = list(MANTISSA)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 10_000)


def every_number(dtype):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    return numbers[numbers.isfinite()]


def least_distance(weight, low, count, dtype):
    """How far the nearest of all 16-bit numbers with that ending is, by looking at all of them."""
    allowed = every_number(dtype)
    allowed = allowed[(low_bits(allowed, count) == low) & exists(allowed)].double().sort().values
    after = torch.searchsorted(allowed, weight.double()).clamp(max=len(allowed) - 1)
    near = allowed[torch.stack([(after - 1).clamp(min=0), after])]
    return (near - weight.double()).abs().amin(0)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_the_nearest_of_all_numbers_with_an_ending_is_found(dtype, count):
    torch.manual_seed(count)
    same = every_number(dtype)
    most = torch.finfo(dtype).max
    finer = torch.cat([same.float()[::7] * (1 + 0.01 * torch.rand(1)), torch.randn(500) * 1e-6])
    finer = torch.cat([finer.clamp(-most, most), torch.tensor([most, -most, 0.0, -0.0])])
    for weight in (same, finer):
        for low in range(2**count):
            found = ending_in(torch.full(weight.shape, low), count, weight, dtype)
            assert found.dtype is dtype
            assert (low_bits(found, count) == low).all()
            assert found.isfinite().all()
            assert exists(found).all(), "a living weight became a removed one"
            distance = (found.double() - weight.double()).abs()
            torch.testing.assert_close(distance, least_distance(weight, low, count, dtype),
                                       rtol=0, atol=0)  # fmt: skip
            assert ((found.sign() == weight.sign()) | (found == 0) | (weight == 0)).all()


@settings(max_examples=75, deadline=None)
@given(
    numbers=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20
    ),
    count=st.integers(0, 12),
    data=st.data(),
)
def test_no_neighbour_in_float32_with_that_ending_is_nearer(numbers, count, data):
    weight = torch.tensor(numbers, dtype=torch.float32)
    low = torch.tensor([data.draw(st.integers(0, 2**count - 1)) for _ in numbers])
    found = ending_in(low, count, weight, torch.float32)
    assert (low_bits(found, count) == low).all()
    assert exists(found).all()
    assert found.isfinite().all()
    distance = (found.double() - weight.double()).abs()
    magnitude = pattern_of(found).long() & (2**31 - 1)
    for step in (-(2**count), 2**count):
        other = magnitude + step
        there = (other > 0) & (other <= 0x7F7FFFFF)
        value = torch.where(there, other, 0).int().view(torch.float32).double()
        for sign in (1, -1):
            assert ((distance <= (sign * value - weight.double()).abs()) | ~there).all()


def test_a_weight_with_its_ending_is_left_alone_and_zero_stays_alive():
    for dtype in DTYPES:
        weight = torch.randn(300).to(dtype)
        low = low_bits(weight, 3)
        assert torch.equal(pattern_of(ending_in(low, 3, weight, dtype)), pattern_of(weight))
        zero = ending_in(torch.zeros(2), 2, torch.tensor([0.0, -0.0]), dtype)
        assert zero.tolist() == [0.0, 0.0]
        assert torch.signbit(zero).all()
        top = torch.finfo(dtype).max
        least = ending_in(torch.tensor([0]), 3, torch.tensor([top]), dtype)
        assert least.isfinite().all()
        assert least > 0.5 * top
    assert ending_in(torch.zeros(0), 2, torch.zeros(0), torch.float16).shape == (0,)


@settings(max_examples=30, deadline=None)
@given(dtype=dtypes, seed=seeds, count=st.integers(0, 4))
def test_the_error_is_bounded_by_what_was_given_away(dtype, seed, count):
    torch.manual_seed(seed)
    weight = torch.randn(200)
    found = ending_in(torch.randint(0, 2**count, (200,)), count, weight, dtype)
    far = weight.abs() > 2.0**-10  # what lies below is rounded by an absolute step
    error = ((found.double() - weight.double()) / weight.double()).abs()[far]
    assert error.max() <= 2.0 ** (count - MANTISSA[dtype])


def test_counts_may_differ_and_large_layers_are_cut(monkeypatch):
    weight, counts = torch.randn(100), torch.arange(100) % 4
    low = torch.randint(0, 8, (100,)) & ((1 << counts) - 1)
    whole = ending_in(low, counts, weight, torch.float16)
    assert ((pattern_of(whole) & ((1 << counts) - 1)) == low).all()
    monkeypatch.setattr(bitwise, "_CHUNK", 7)
    assert torch.equal(ending_in(low, counts, weight, torch.float16), whole)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_what_is_not_finite_is_refused(bad):
    with pytest.raises(FissileError, match=r"not finite in torch.float16; .* another dtype"):
        ending_in(torch.tensor([0]), 1, torch.tensor([bad]), torch.float16)


def test_how_many_bits_name_a_child():
    for alpha in range(1, 70):
        assert 2 ** owner_bits(alpha) >= alpha
        assert alpha == 1 or 2 ** (owner_bits(alpha) - 1) < alpha


@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(0, 20), min_size=1, max_size=3), seed=seeds)
def test_bits_come_out_of_bytes_as_they_went_in(shape, seed):
    torch.manual_seed(seed)
    mask = torch.rand(shape) < 0.5
    packed = to_bytes(mask)
    assert packed.shape == (*shape[:-1], -(-shape[-1] // 8))
    assert torch.equal(from_bytes(packed, shape[-1]), mask)
    rest = from_bytes(packed, 8 * packed.shape[-1])[..., shape[-1] :]
    assert not rest.any(), "the last byte is filled with zeros"
    if mask.numel():
        assert bool(packed[..., 0].flatten()[0] & 1) == bool(mask[..., 0].flatten()[0])


@st.composite
def masks(draw, most=400):
    torch.manual_seed(draw(seeds))
    places = draw(st.integers(0, most))
    density = draw(st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.95, 1.0]))
    return torch.rand(places) < density


@settings(max_examples=75, deadline=None)
@given(mask=masks(), after=masks(30))
def test_places_are_read_as_they_were_written(mask, after):
    stream = write_mask(mask)
    assert len(stream) <= len(mask), "a plain mask would be shorter"
    reader = Reader([], torch.cat([stream, after]))
    assert torch.equal(read_mask(reader, len(mask), int(mask.sum())), mask)
    assert torch.equal(reader.take(len(after)), after), "the next one begins where this one ends"


def test_few_places_take_few_bits():
    mask = torch.zeros(2**16, dtype=torch.bool)
    mask[torch.randperm(2**16)[:64]] = True
    assert len(write_mask(mask)) < 64 * 13
    assert len(write_mask(~mask)) == len(write_mask(mask))


@st.composite
def grouped(draw):
    torch.manual_seed(draw(seeds))
    groups, size = draw(st.integers(0, 60)), draw(st.sampled_from([1, 2, 4, 8]))
    whole = torch.rand(groups, 1) < draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
    holes = torch.rand(groups, size) < draw(st.sampled_from([0.0, 0.1, 0.9]))
    return whole.expand(-1, size) & ~holes


@settings(max_examples=50, deadline=None)
@given(mask=grouped(), after=masks(10))
def test_groups_are_read_as_they_were_written(mask, after):
    reader = Reader([], torch.cat([write_groups(mask), after]))
    some, inside = read_groups(reader, *mask.shape, int(mask.sum()))
    assert torch.equal(some, mask.any(1))
    assert torch.equal(inside, mask[some])
    assert torch.equal(reader.take(len(after)), after)


def test_groups_without_a_weight_are_not_stored():
    mask = torch.tensor([[True, True], [True, False]])
    stream = write_groups(mask)
    stream[-2:] = torch.tensor([False, False])
    with pytest.raises(FileError, match="its groups do not fit the weights"):
        read_groups(Reader([], stream), 2, 2, 2)


@settings(max_examples=75, deadline=None)
@given(stream=masks(200), size=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_a_damaged_stream_is_refused_or_fits(stream, size, data):
    places = data.draw(st.integers(0, 300))
    taken = data.draw(st.integers(-1, places + 1))
    try:
        mask = read_mask(Reader([], stream), places, taken)
    except FileError:
        pass
    else:
        assert mask.shape == (places,)
        assert int(mask.sum()) == taken
    try:
        some, inside = read_groups(Reader([], stream), places, size, taken)
    except FileError:
        return
    assert some.shape == (places,)
    assert inside.shape == (int(some.sum()), size)
    assert int(inside.sum()) == taken
    assert inside.any(1).all()


@st.composite
def carried(draw):
    """Weights of several layers and dtypes, with owners in some, and what they may carry."""
    torch.manual_seed(draw(seeds))
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        dtype, alpha = draw(dtypes), draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
        weight = torch.randn(draw(st.integers(0, 40)))
        owner = torch.randint(0, alpha, weight.shape)
        weight = ending_in(owner, owner_bits(alpha), weight, dtype)
        layers.append(Carrier(weight, owner_bits(alpha)))
    return layers


def room_of(carriers):
    return sum(len(c.weight) * (MOST[c.weight.dtype] - c.owner_bits) for c in carriers)


@settings(max_examples=40, deadline=None)
@given(carriers=carried(), share=st.floats(0, 1), seed=seeds)
def test_a_stream_in_the_weights_comes_out_again(carriers, share, seed):
    torch.manual_seed(seed)
    stream = torch.rand(int(share * room_of(carriers))) < 0.5
    values = embedded(stream, carriers)
    news = [Carrier(v, c.owner_bits) for v, c in zip(values, carriers, strict=True)]
    assert torch.equal(Reader(news).take(len(stream)), stream)
    for new, old in zip(news, carriers, strict=True):
        assert new.weight.dtype is old.weight.dtype
        owner = low_bits(old.weight, old.owner_bits)
        assert torch.equal(low_bits(new.weight, old.owner_bits), owner), "an owner was lost"
        assert exists(new.weight).all()
    again = embedded(stream, news)
    assert all(torch.equal(one, c.weight) for one, c in zip(again, news, strict=True))
    parts = Reader(news)
    cut = [parts.take(len(stream) // 3), parts.take(0), parts.take(len(stream) - len(stream) // 3)]
    assert torch.equal(torch.cat(cut), stream)


@settings(max_examples=30, deadline=None)
@given(carriers=carried())
def test_a_stream_that_is_too_long_is_not_squeezed_in(carriers):
    room = room_of(carriers)
    assert embedded(torch.ones(room, dtype=torch.bool), carriers) is not None
    assert embedded(torch.ones(room + 1, dtype=torch.bool), carriers) is None
    with pytest.raises(FileError, match="longer than the weights can hold"):
        Reader(carriers).take(room + 1)


def test_the_stream_takes_the_lowest_planes_of_all_before_the_next():
    weight = torch.full((8,), 0x3F80000F, dtype=torch.int32).view(torch.float32)
    carriers = [Carrier(weight, 0), Carrier(weight, 2), Carrier(weight, 0)]
    values = embedded(torch.zeros(20, dtype=torch.bool), carriers)
    endings = [low_bits(value, 2).tolist() for value in values]
    assert endings == [[0] * 4 + [2] * 4, [3] * 8, [2] * 8]
    assert torch.equal(values[1], weight), "what carries nothing is left alone"


# --- packing as pure functions


@st.composite
def dealt(draw):
    torch.manual_seed(draw(seeds))
    alpha = draw(st.sampled_from([2, 3, 4, 5, 7, 8, 16]))
    weight = torch.randn(draw(st.integers(1, 5)), draw(st.integers(1, 20)))
    weight[torch.rand_like(weight) < 0.1] = 0.0
    owner = torch.randint(-1, alpha, weight.shape)
    return torch.where(owner < 0, 0, weight), owner, alpha, draw(dtypes)


@settings(max_examples=50, deadline=None)
@given(case=dealt(), layout=st.sampled_from(["inline", "plane"]))
def test_owners_are_found_where_they_were_put(case, layout):
    weight, owner, alpha, dtype = case
    values, planes = pack_partitioned(weight, owner, alpha, dtype, layout)
    assert (planes is None) == (layout == "inline")
    assert values.shape == weight.shape
    assert torch.equal(owners(values, planes, alpha), owner.int())
    assert torch.equal(exists(values), owner >= 0), "removed weights are zero bits, no others"
    if layout == "plane":
        assert torch.equal(values, weight.to(dtype)), "the weights are untouched"
    assert partitioned_misfit(values, planes, None, alpha, tuple(weight.shape)) is None
    wide = torch.zeros(len(weight), alpha, weight.shape[1], dtype=dtype)
    rows, columns = (owner >= 0).nonzero(as_tuple=True)
    wide[rows, owner[rows, columns], columns] = values[rows, columns]
    assert torch.equal(partitioned_dense(values, planes, alpha), wide.flatten(0, 1))
    for other in DTYPES:
        cast = recast(values, 0 if planes is not None else owner_bits(alpha), other)
        assert torch.equal(owners(cast, planes, alpha), owner.int())
        assert cast.dtype is other


@settings(max_examples=40, deadline=None)
@given(mask=grouped(), rows=st.integers(1, 5), dtype=dtypes, seed=seeds)
def test_a_bitmap_holds_the_groups_that_have_a_weight(mask, rows, dtype, seed):
    torch.manual_seed(seed)
    mask = mask.flatten()[: mask.numel() // rows * rows].view(rows, -1)
    weight = torch.where(mask, torch.randn(mask.shape), 0)
    values, live, group = pack_masked(weight, mask, dtype)
    assert mask.shape[1] % group == 0
    assert masked_misfit(values, live, None, group, tuple(mask.shape)) is None
    wide = masked_dense(values, live, group, mask.shape[1])
    assert torch.equal(wide, weight.to(dtype))
    assert torch.equal(exists(wide), mask)
    stored = from_bytes(live, mask.shape[1] // group)
    starts = group_starts(live, mask.shape[1] // group)
    for row in range(rows):
        for block in range(starts.shape[1]):
            before = stored[:row].sum() + stored[row, : 256 * block].sum()
            assert starts[row, block] == before


def test_starts_count_over_all_blocks_of_all_rows():
    live = to_bytes(torch.rand(3, 700) < 0.4)
    bits, starts = from_bytes(live, 700), group_starts(live, 700)
    assert starts.shape == (3, 3)
    assert starts[1, 2] == bits[0].sum() + bits[1, :512].sum()


def test_copies_that_stay_together_are_one_group():
    whole = (torch.rand(6, 10) < 0.5).repeat_interleave(4, 1)
    assert pack_masked(torch.ones(6, 40), whole, torch.float16)[2] >= 4
    single = torch.zeros(6, 40, dtype=torch.bool)
    single[:, ::8] = True
    assert pack_masked(torch.ones(6, 40), single, torch.float32)[2] == 1
    assert pack_masked(torch.ones(6, 7), torch.ones(6, 7).bool(), torch.float16)[2] == 1


def test_settings_that_are_none():
    with pytest.raises(FissileError, match=r"unknown layout 'rows'; use \"inline\", \"plane\""):
        check_layout("rows")
    with pytest.raises(FissileError, match=r"float32, float16, bfloat16, not torch.float64; use"):
        check_dtype(torch.float64)
    for dtype, alpha in [(torch.bfloat16, 17), (torch.float16, 65), (torch.float32, 4097)]:
        owner = torch.zeros(1, 2, dtype=torch.int32)
        with pytest.raises(FissileError, match=r"to give away; use layout=\"plane\""):
            pack_partitioned(torch.ones(1, 2), owner, alpha, dtype, "inline")
        assert pack_partitioned(torch.ones(1, 2), owner, alpha - 1, dtype, "inline")[1] is None
        assert pack_partitioned(torch.ones(1, 2), owner, alpha, dtype, "plane")[1] is not None
    with pytest.raises(FissileError, match="to give away; unpack the model"):
        recast(torch.ones(2), 8, torch.bfloat16)
