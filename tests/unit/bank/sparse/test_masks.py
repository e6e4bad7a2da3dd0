"""Which weights exist, against loops over every weight and every threshold."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fissile.bank.sparse.stack import alive, effective, sown, within

# As they come, so small that all are neighbours, and so large that hardly more is a number.
SCALES = [1.0, 1e-44, 3e38]


def shapes_of(inputs, hidden, outputs, direct):
    shapes = {"first": (hidden, inputs), "second": (outputs, hidden)} if hidden else {}
    return shapes | ({"direct": (outputs, inputs)} if direct or not hidden else {})


@st.composite
def scored(draw):
    """Scores of a few small networks, with ties and zeros as often as not."""
    shapes = shapes_of(
        draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 3)),
        draw(st.booleans()),
    )  # fmt: skip
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([2, 4, 1 << 20]))
    number, scale = draw(st.integers(1, 3)), np.float32(draw(st.sampled_from(SCALES)))
    scores = {
        name: (rng.integers(0, levels, (number, *shape)) / (levels - 1)).astype("f4") * scale
        for name, shape in shapes.items()
    }
    most = sum(np.prod(shape) for shape in shapes.values()) + 5
    room = draw(st.lists(st.integers(0, int(most)), min_size=number, max_size=number))
    return scores, room


def without_the_dead(masks):
    """Drop, weight by weight, what leads to or comes from a neuron that does nothing."""
    kept, living = {name: mask.copy() for name, mask in masks.items()}, 0
    for neuron in range(masks["first"].shape[0] if "first" in masks else 0):
        sees = any(masks["first"][neuron, i] for i in range(masks["first"].shape[1]))
        seen = any(masks["second"][o, neuron] for o in range(masks["second"].shape[0]))
        if sees and seen:
            living += 1
        else:
            kept["first"][neuron, :] = False
            kept["second"][:, neuron] = False
    return kept, living


def strictly(masks):
    """Count weights, and the biases of neurons that are alive."""
    return sum(int(mask.sum()) for mask in masks.values()) + int(alive(masks).sum())


def counted(masks, living):
    return sum(int(entry) for mask in masks.values() for entry in mask.flat) + living


def largest_that_fits(scores, room, bias):
    """Try every threshold, the smallest first."""
    for threshold in sorted({0.0, *(float(s) for score in scores.values() for s in score.flat)}):
        masks = {name: score > threshold for name, score in scores.items()}
        kept, living = without_the_dead(masks)
        if counted(kept, living if bias else 0) <= room:
            return kept
    raise AssertionError("nothing at all always fits")


def tensors(arrays):
    return {name: torch.tensor(array) for name, array in arrays.items()}


def one_of(arrays, number):
    return {name: array[number] for name, array in arrays.items()}


@settings(max_examples=150, deadline=None)
@given(scored(), st.booleans())
def test_a_stack_keeps_what_the_best_threshold_of_each_network_keeps(case, bias):
    scores, room = case
    found = within(tensors(scores), torch.tensor(room), bias=bias)
    for number, least in enumerate(room):
        expected = largest_that_fits(one_of(scores, number), least, bias)
        assert found.keys() == expected.keys()
        for name, mask in expected.items():
            assert np.array_equal(found[name][number], mask), (name, number)


@settings(deadline=None)
@given(scored(), st.booleans())
def test_a_network_keeps_in_a_stack_what_it_keeps_alone(case, bias):
    scores, room = case
    together = within(tensors(scores), torch.tensor(room), bias=bias)
    for number in range(len(room)):
        own = {name: score[number : number + 1] for name, score in tensors(scores).items()}
        alone = within(own, torch.tensor(room[number : number + 1]), bias=bias)
        assert all(torch.equal(together[name][number], alone[name][0]) for name in alone)


@settings(deadline=None)
@given(scored())
def test_dead_neurons_go_as_they_do_in_loops(case):
    masks = {name: score > 0 for name, score in case[0].items()}
    found = effective(tensors(masks))
    for number in range(len(case[1])):
        kept, living = without_the_dead(one_of(masks, number))
        assert all(np.array_equal(found[name][number], mask) for name, mask in kept.items())
        if "first" in masks:
            assert int(alive(tensors(masks))[number].sum()) == living


def test_where_no_score_ties_a_linear_network_fills_its_room():
    scores = {"direct": torch.randperm(40).add(1).float().view(2, 4, 5)}
    found = within(scores, torch.tensor([0, 13]), bias=False)["direct"]
    assert found.sum((-2, -1)).tolist() == [0, 13]
    assert scores["direct"][1][found[1]].min() > scores["direct"][1][~found[1]].max()


def test_a_neuron_costs_its_bias_as_long_as_it_lives():
    # One input, two neurons, one output; the second neuron is the weaker one.
    scores = {"first": torch.tensor([[[4.0], [2.0]]]), "second": torch.tensor([[[3.0, 1.0]]])}
    kept = {room: strictly(within(scores, torch.tensor([room]), bias=True)) for room in range(8)}
    assert kept == {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 3, 6: 6, 7: 6}


def test_what_is_infinite_is_not_kept_in_excess():
    scores = {"direct": torch.tensor([[[torch.inf, torch.inf, torch.inf, 1.0]]])}
    found = within(scores, torch.tensor([2]), bias=False)
    assert not any(mask.any() for mask in found.values())


# ---- sown --------------------------------------------------------------------------------------


def noise_of(networks, shapes):
    return {name: torch.rand(networks, *shape) for name, shape in shapes.items()}


def numbers_of(masks):
    return torch.stack([mask.sum((-2, -1)) for mask in masks.values()], -1)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9), st.data())
def test_exactly_so_many_weights_are_sown_where_their_noise_is_largest(d, h, c, data):
    shapes = shapes_of(d, h, c, data.draw(st.booleans()))
    most = sum(rows * columns for rows, columns in shapes.values())
    room = data.draw(st.lists(st.integers(0, most), min_size=2, max_size=2))
    erdos_renyi, noise = data.draw(st.booleans()), noise_of(2, shapes)
    found = sown(noise, torch.tensor(room), erdos_renyi=erdos_renyi)
    assert numbers_of(found).sum(-1).tolist() == room
    for name, mask in found.items():
        for entries, chosen in zip(noise[name], mask, strict=True):
            least = entries[chosen].min() if chosen.any() else 2
            assert not (entries[~chosen] > least).any()


@pytest.mark.parametrize("direct", [False, True])
def test_uniform_gives_every_layer_its_density(direct):
    shapes = shapes_of(20, 10, 5, direct)
    sizes = torch.tensor([rows * columns for rows, columns in shapes.values()])
    room = torch.tensor([sum(sizes) // 5, sum(sizes) // 2])
    found = numbers_of(sown(noise_of(2, shapes), room, erdos_renyi=False))
    assert torch.equal(found, torch.stack([sizes // 5, sizes // 2]))


def test_erdos_renyi_gives_every_layer_by_its_rows_and_columns():
    shapes = shapes_of(20, 10, 6, True)  # rows and columns: 30, 16, 26
    found = sown(noise_of(1, shapes), torch.tensor([72]), erdos_renyi=True)
    assert numbers_of(found).tolist() == [[30, 16, 26]]


def test_what_a_layer_has_no_place_for_goes_to_the_others():
    shapes = {"first": (10, 20), "second": (1, 10)}  # rows and columns: 30, 11
    found = sown(noise_of(2, shapes), torch.tensor([82, 205]), erdos_renyi=True)
    assert numbers_of(found).tolist() == [[72, 10], [195, 10]]  # 60 + 22, 150 + 55 wanted


def test_all_there_is_when_there_is_room_for_more():
    shapes = shapes_of(4, 3, 2, True)
    for erdos_renyi in (False, True):
        found = sown(noise_of(1, shapes), torch.tensor([99]), erdos_renyi=erdos_renyi)
        assert all(mask.all() for mask in found.values())
