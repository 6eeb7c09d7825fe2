"""The fast GELU agrees with PyTorch's, value and slope."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import efftrain_cli.model.gelu as gelu_module
from efftrain_cli.model.gelu import gelu


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 5e-6), (torch.float64, 5e-14)])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5, 7), (300, 64)])
def test_value_and_slope(monkeypatch, dtype, tolerance, shape):
    monkeypatch.setattr(gelu_module, "_CHUNK", 1000)  # several chunks, the last one shorter
    generator = torch.Generator().manual_seed(1)
    x = (4 * torch.randn(shape, generator=generator, dtype=dtype)).requires_grad_()
    upstream = torch.randn(shape, generator=generator, dtype=dtype)
    theirs = F.gelu(x, approximate="tanh")
    ours = gelu(x)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    (slope,), (expected,) = (torch.autograd.grad(y, x, upstream) for y in (ours, theirs))
    torch.testing.assert_close(slope, expected, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        assert torch.equal(gelu(x), ours)  # evaluation sees the function that was trained


def test_far_from_zero_it_is_relu():
    x = torch.tensor([-1e4, -30.0, 0.0, 30.0, 1e4], requires_grad=True)
    y = gelu(x)
    assert y.tolist() == [0.0, 0.0, 0.0, 30.0, 1e4]
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert slope.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_what_has_no_fast_form_takes_pytorchs():
    x = torch.randn(10, dtype=torch.bfloat16)
    assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))
    transposed = torch.randn(4, 6).t()
    torch.testing.assert_close(gelu(transposed), F.gelu(transposed, approximate="tanh"))
