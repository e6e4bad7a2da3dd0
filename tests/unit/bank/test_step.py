"""The loss's gradient and Adam; without a GPU the kernels run in Triton's interpreter."""

import pytest
import torch
from torch.nn import functional as F

from fissile.bank.step import (
    AdamMoments,
    Rates,
    _torch_adam,
    _triton_adam,
    _triton_logit_gradient,
    bias_corrections,
    logit_gradient,
    masked_adam,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LR, DECAY, L1 = [1e-2, 3e-3, 0.3], [0.0, 0.5, 0.1], [1e-2, 0.0, 1e-3]
STEPS = 6


def rates_at(step, device="cpu"):
    unbias = [1 - 0.9**step, 1 - 0.999**step]
    return Rates(*(torch.tensor(one, device=device) for one in (LR, DECAY, L1, unbias)))


def drawn(*shape, masked, seed=0, device="cpu"):
    """Return weights, moments of zero, a mask or None, and the gradients of every step."""
    torch.manual_seed(seed)
    mask = torch.rand(3, *shape) < 0.4 if masked else None
    weight = torch.randn(3, *shape) * (1 if mask is None else mask)
    # From large to so small that eps decides.
    gradients = torch.randn(STEPS, 3, *shape) * 10 ** torch.empty(3, *shape).uniform_(-9, 2)
    gradients[:, :, 0] = 0
    moments = AdamMoments(*(torch.zeros_like(weight, device=device) for _ in range(2)))
    mask = None if mask is None else mask.to(device)
    return weight.to(device), moments, mask, gradients.to(device)


@pytest.mark.parametrize("shape", [(4, 5), (7,)])
def test_without_a_mask_it_is_adamw(shape):
    weight, moments, _, gradients = drawn(*shape, masked=False)
    ours = [one.clone().requires_grad_() for one in weight]
    theirs = [
        torch.optim.AdamW([one], lr=lr, weight_decay=decay)
        for one, lr, decay in zip(ours, LR, DECAY, strict=True)
    ]
    for step, gradient in enumerate(gradients, 1):
        masked_adam([weight], [gradient], [moments], [None], rates_at(step))
        for number, (one, optimizer) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = gradient[number].clone()
            optimizer.step()
            state = optimizer.state[one]
            torch.testing.assert_close(weight[number], one.detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(moments.mean[number], state["exp_avg"])
            torch.testing.assert_close(moments.square[number], state["exp_avg_sq"])


def test_what_does_not_exist_stays_zero_and_the_rest_does_not_notice():
    weight, moments, mask, gradients = drawn(4, 5, masked=True)
    free, free_moments = weight.clone(), AdamMoments(*(torch.zeros_like(weight) for _ in range(2)))
    for step, gradient in enumerate(gradients, 1):
        masked_adam([weight], [gradient], [moments], [mask], rates_at(step))
        masked_adam([free], [gradient], [free_moments], [None], rates_at(step))
        for one in (weight, *moments):
            assert not one[~mask].any()
    assert torch.equal(weight[mask], free[mask])
    assert torch.equal(moments.square[mask], free_moments.square[mask])


def test_means_are_unbiased_to_the_last_bit_of_a_float():
    expected = [[1 - 0.9**step, 1 - 0.999**step] for step in range(1, 21)]
    torch.testing.assert_close(bias_corrections(20), torch.tensor(expected), rtol=1e-7, atol=0)


@pytest.mark.parametrize("way", [_torch_adam, _triton_adam])
def test_momentum_does_not_revive_a_weight_that_went(way):
    weight, moments, _, gradients = drawn(4, 5, masked=False, device=DEVICE)
    way(weight, gradients[0], moments, None, rates_at(1, DEVICE), False)
    mask = torch.zeros_like(weight, dtype=torch.bool)
    mask[0, 1] = True
    way(weight, gradients[1], moments, mask, rates_at(2, DEVICE), False)
    assert moments.mean[~mask].any()
    assert torch.equal(weight != 0, mask)


@pytest.mark.parametrize("masked", [False, True])
def test_the_penalty_shrinks_towards_zero_in_adams_metric(masked):
    weight, moments, mask, gradients = drawn(6, 7, masked=masked)
    lr, penalty = (torch.tensor(one).view(3, 1, 1) for one in (LR, L1))
    vanished = 0
    for step, gradient in enumerate(gradients, 1):
        smooth, seen = weight.clone(), AdamMoments(*(one.clone() for one in moments))
        masked_adam([smooth], [gradient], [seen], [mask], rates_at(step))
        masked_adam([weight], [gradient], [moments], [mask], rates_at(step), l1=True)
        curved = (seen.square.double() / (1 - 0.999**step)).sqrt() + 1e-8
        threshold = lr * penalty / curved
        expected = torch.nn.functional.relu(smooth - threshold) - torch.nn.functional.relu(
            -smooth - threshold
        )
        torch.testing.assert_close(weight.double(), expected, rtol=1e-4, atol=1e-5)
        assert all(torch.equal(one, other) for one, other in zip(moments, seen, strict=True))
        vanished += int(((weight == 0) & (smooth != 0)).sum())
    assert vanished
    assert torch.equal(weight[1], smooth[1])  # whose penalty is zero


# Several blocks, of which networks begin in the middle; and less than one.
@pytest.mark.parametrize("shape", [(23, 57), (3,)])
@pytest.mark.parametrize("l1", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_makes_the_same_steps(masked, l1, shape):
    weight, moments, mask, gradients = drawn(*shape, masked=masked, device=DEVICE)
    plain, plain_moments = weight.clone(), AdamMoments(*(one.clone() for one in moments))
    for step, gradient in enumerate(gradients, 1):
        rates = rates_at(step, DEVICE)
        _torch_adam(plain, gradient, plain_moments, mask, rates, l1)
        _triton_adam(weight, gradient, moments, mask, rates, l1)
    assert weight.abs().max() > 0.1
    torch.testing.assert_close(weight, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moments.square, plain_moments.square, rtol=1e-5, atol=0)
    # Gradients cancel in the mean: it is as exact as they are large.
    size = plain_moments.square.sqrt()
    assert ((moments.mean - plain_moments.mean).abs() <= 1e-5 * size).all()
    if mask is not None:
        assert not any(one[~mask].any() for one in (weight, *moments))


def test_the_kernel_takes_gradients_that_do_not_lie_in_a_row():
    weight, moments, mask, gradients = drawn(6, 6, masked=True, device=DEVICE)
    plain, plain_moments = weight.clone(), AdamMoments(*(one.clone() for one in moments))
    gradient = gradients[0].mT
    assert not gradient.is_contiguous()
    _torch_adam(plain, gradient, plain_moments, mask, rates_at(1, DEVICE), False)
    _triton_adam(weight, gradient, moments, mask, rates_at(1, DEVICE), False)
    torch.testing.assert_close(weight, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_step_is_the_plain_one(masked):
    torch.manual_seed(0)
    weight = torch.randn(3, 5, 7)
    mask = torch.rand(3, 5, 7) > 0.5 if masked else None
    weight = weight if mask is None else weight * mask
    ways = [
        [weight.clone(), AdamMoments(torch.zeros(3, 5, 7), torch.zeros(3, 5, 7))] for _ in range(2)
    ]
    lr, decay = torch.tensor([1e-3, 1e-2, 0.0]), torch.tensor([0.3, 0.0, 0.1])
    for number, unbias in enumerate(bias_corrections(4)):
        gradient = torch.randn(3, 5, 7)
        for (one, moments), step in zip(ways, (None, torch.tensor([number + 1.0])), strict=True):
            rates = Rates(lr, decay, torch.zeros(3), unbias, step)
            masked_adam([one], [gradient], [moments], [mask], rates)
    (plain, first), (fused, second) = ways
    torch.testing.assert_close(plain, fused)
    torch.testing.assert_close(first, second)
    assert not torch.equal(plain, weight)
    if mask is not None:
        assert (fused[~mask] == 0).all()


# --- the gradient of the loss

SMOOTH = [0.0, 0.25, 0.0, 0.25, 0.5, 0.0]  # of two seeds, three plans each


def drawn_logits(outputs, batch, dtype=torch.float32):
    torch.manual_seed(outputs)
    logits = (5 * torch.randn(6, outputs, batch)).to(DEVICE, dtype)
    y = torch.randint(0, max(2, outputs), (2, batch), device=DEVICE)
    targets = y.unsqueeze(-1) if outputs == 1 else F.one_hot(y, outputs)
    return logits, targets.mT.to(dtype), torch.tensor(SMOOTH, device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("outputs", [1, 2, 7])
def test_it_is_the_gradient_of_the_mean_cross_entropy(outputs):
    logits, targets, smooth = (one.cpu() for one in drawn_logits(outputs, 9, torch.float64))
    found = logit_gradient(logits, targets, smooth)
    logits.requires_grad_()
    for number, (own, spread) in enumerate(zip(logits, SMOOTH, strict=True)):
        wanted = targets[number // 3]
        if outputs == 1:
            wanted = wanted * (1 - spread) + spread / 2
            F.binary_cross_entropy_with_logits(own, wanted).backward()
        else:
            F.cross_entropy(own.mT, wanted.argmax(0), label_smoothing=spread).backward()
    torch.testing.assert_close(found, logits.grad)


# Powers of two and others; one block of samples, several, and one that is not full.
@pytest.mark.parametrize(("outputs", "batch"), [(2, 64), (3, 1), (5, 130), (100, 70), (130, 33)])
def test_the_kernel_finds_the_same(outputs, batch):
    given = drawn_logits(outputs, batch)
    found, expected = _triton_logit_gradient(*given), logit_gradient(*(x.cpu() for x in given))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-7)


def test_the_kernel_takes_what_does_not_lie_in_a_row():
    logits, targets, smooth = drawn_logits(4, 6)
    logits = logits.mT.contiguous().mT
    targets = targets.mT.contiguous().mT
    assert not logits.is_contiguous()
    assert not targets.is_contiguous()
    found = _triton_logit_gradient(logits, targets, smooth)
    expected = logit_gradient(logits.cpu(), targets.cpu(), smooth.cpu())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-7)


def test_logits_may_be_far_apart():
    logits, targets, smooth = drawn_logits(4, 5)
    assert logit_gradient(logits.cpu() * 1e4, targets.cpu(), smooth.cpu()).isfinite().all()
    assert _triton_logit_gradient(logits * 1e4, targets, smooth).isfinite().all()
