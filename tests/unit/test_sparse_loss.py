"""The gradient of the loss; without a GPU its kernel runs in Triton's interpreter."""

import pytest
import torch
from torch.nn import functional as F

from fissile.bank.step import _torch_logit_gradient, _triton_logit_gradient, logit_gradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMOOTH = [0.0, 0.25, 0.0, 0.25, 0.5, 0.0]  # of two seeds, three plans each


def drawn(outputs, batch, dtype=torch.float32):
    torch.manual_seed(outputs)
    logits = (5 * torch.randn(6, outputs, batch)).to(DEVICE, dtype)
    y = torch.randint(0, max(2, outputs), (2, batch), device=DEVICE)
    targets = y.unsqueeze(-1) if outputs == 1 else F.one_hot(y, outputs)
    return logits, targets.mT.to(dtype), torch.tensor(SMOOTH, device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("outputs", [1, 2, 7])
def test_it_is_the_gradient_of_the_mean_cross_entropy(outputs):
    logits, targets, smooth = (one.cpu() for one in drawn(outputs, 9, torch.float64))
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
    given = drawn(outputs, batch)
    torch.testing.assert_close(
        _triton_logit_gradient(*given), _torch_logit_gradient(*given), rtol=1e-5, atol=1e-7
    )


def test_the_kernel_takes_what_does_not_lie_in_a_row():
    logits, targets, smooth = drawn(4, 6)
    logits = logits.mT.contiguous().mT
    targets = targets.mT.contiguous().mT
    assert not logits.is_contiguous()
    assert not targets.is_contiguous()
    found = _triton_logit_gradient(logits, targets, smooth)
    torch.testing.assert_close(
        found, _torch_logit_gradient(logits, targets, smooth), rtol=1e-5, atol=1e-7
    )


def test_logits_may_be_far_apart():
    logits, targets, smooth = drawn(4, 5)
    for way in (_torch_logit_gradient, _triton_logit_gradient):
        assert way(logits * 1e4, targets, smooth).isfinite().all()
