"""The fast GELU is GPT-2's, value and slope."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import efftrain_cli.model.gelu as gelu_module
from efftrain_cli.model.gelu import gelu


def value_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), and its derivative, in fp64."""
    x = x.detach().double()
    scale = math.sqrt(2 / math.pi)
    t = torch.tanh(scale * (x + 0.044715 * x**3))
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * scale * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + t), slope


@pytest.mark.parametrize(
    "dtype, tolerance, of_gradient",
    # Half a unit of bf16's last place for the value; the slope times the gradient rounds twice.
    [
        (torch.float32, 5e-6, 5e-6),
        (torch.float64, 5e-14, 5e-14),
        (torch.bfloat16, 2**-8, 2**-7),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (300, 64)])
def test_value_and_slope(monkeypatch, dtype, tolerance, of_gradient, shape):
    monkeypatch.setattr(gelu_module, "_PIECE", 1000)  # several pieces, the last one shorter
    generator = torch.Generator().manual_seed(1)
    x = (4 * torch.randn(shape, generator=generator)).to(dtype)
    if x.dim() == 2:
        x = x.t()  # not contiguous
    x.requires_grad_()
    upstream = torch.randn_like(x)
    y = gelu(x)
    (gradient,) = torch.autograd.grad(y, x, upstream)
    assert y.dtype == gradient.dtype == dtype
    value, slope = value_and_slope(x)
    absolute = min(tolerance, 1e-5)
    torch.testing.assert_close(y.double(), value, rtol=tolerance, atol=absolute)
    expected = slope * upstream.double()
    torch.testing.assert_close(gradient.double(), expected, rtol=of_gradient, atol=absolute)
    with torch.no_grad():
        assert torch.equal(gelu(x), y)  # evaluation sees the function that was trained


def test_far_from_zero_it_is_relu():
    x = torch.tensor([-1e4, -30.0, 0.0, 30.0, 1e4], requires_grad=True)
    y = gelu(x)
    assert y.tolist() == [0.0, 0.0, 0.0, 30.0, 1e4]
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert slope.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_a_second_backward_pass_is_an_error_and_not_another_gradient():
    x = torch.randn(10, requires_grad=True)
    y = gelu(x).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(y, x)
