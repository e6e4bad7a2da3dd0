"""What the tests of the bank share: a small task, and comparing networks."""

import torch

from fissile.bank import Data


def blobs(seed, classes, samples=70, tests=33):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples + tests, 8, generator=generator)
    y = (x[:, :classes].argmax(1) if classes > 1 else (x[:, 0] > 0)).long()
    return Data(x[:samples], y[:samples], x[samples:], y[samples:])


def assert_same(one, other, tolerance):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], rtol=0, atol=tolerance, msg=key)
