"""The narrow linear layer: its three products, and what each role changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from efftrain_cli.model.accumulator import Accumulator
from efftrain_cli.model.linear import Arithmetic, NarrowLinear, fp8_matmul
from efftrain_cli.model.narrow_matmul import to_operand

NARROW = Accumulator(bits=4)


def results(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and gradients of the input, the weight and the bias."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(grad)
    return [y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()]


@pytest.fixture
def layer_and_data() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(96, 160), torch.randn(4, 40, 96), torch.randn(4, 40, 160)


def test_a_layer_without_roles_moves_no_bit(layer_and_data):
    linear, x, grad = layer_and_data
    for have, want in zip(
        results(NarrowLinear(linear, Arithmetic()), x, grad), results(linear, x, grad), strict=True
    ):
        assert torch.equal(have, want)


@pytest.mark.parametrize("role", [0, 1, 2])
def test_a_role_changes_its_own_product_only(role, layer_and_data):
    linear, x, grad = layer_and_data
    name = ("forward", "grad_input", "grad_weight")[role]
    have = results(NarrowLinear(linear, Arithmetic(**{name: NARROW})), x, grad)
    want = results(linear, x, grad)
    assert [torch.equal(a, b) for a, b in zip(have, want, strict=True)] == [
        number != role for number in range(4)
    ]
    assert 0.001 < float((have[role] - want[role]).norm() / want[role].norm()) < 0.2


def test_the_hardware_layer_on_a_cpu_is_the_fp32_product_of_fp8_operands(layer_and_data):
    linear, x, grad = layer_and_data
    formats = {"operands": "fp8_e4m3", "gradient_operands": "fp8_e5m2"}
    fast = Accumulator(fast_accumulation=True)
    have = results(
        NarrowLinear(
            linear,
            Arithmetic(
                **formats, fidelity="hardware", forward=fast, grad_input=fast, grad_weight=fast
            ),
        ),
        x,
        grad,
    )
    want = results(NarrowLinear(linear, Arithmetic(**formats)), x, grad)
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_on_a_cpu_the_fp8_product_is_that_of_pytorch():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, 32, generator=generator), torch.randn(16, 32, generator=generator)
    (a8, scale_a), (b8, scale_b) = to_operand(a, "fp8_e4m3"), to_operand(b, "fp8_e5m2")
    expected = torch._scaled_mm(
        a8.to(torch.float8_e4m3fn),
        b8.to(torch.float8_e5m2).t(),
        scale_a=scale_a.reciprocal(),
        scale_b=scale_b.reciprocal(),
        out_dtype=torch.float32,
    )
    for fast in (False, True):
        product = fp8_matmul(a, "fp8_e4m3", b, "fp8_e5m2", fast, torch.float32)
        torch.testing.assert_close(product, expected, rtol=1e-6, atol=1e-6)


def test_recomputed_activations_give_the_same_bits(layer_and_data):
    linear, x, grad = layer_and_data
    arithmetic = Arithmetic("bf16", "bf16", forward=NARROW, grad_input=NARROW, grad_weight=NARROW)
    layer = NarrowLinear(linear, arithmetic)
    want = results(layer, x, grad)
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = checkpoint(layer, x, use_reentrant=False)
    y.backward(grad)
    for a, b in zip((y.detach(), x.grad, layer.weight.grad), want, strict=False):
        assert torch.equal(a, b)


def test_the_three_products_round_alike():
    """With x = W = dL/dy = A symmetric all three are A A."""
    a = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    a = a + a.t()
    linear = nn.Linear(16, 16)
    linear.weight.data.copy_(a)
    linear.bias.data.zero_()
    arithmetic = Arithmetic(forward=NARROW, grad_input=NARROW, grad_weight=NARROW)
    y, grad_x, grad_weight = results(NarrowLinear(linear, arithmetic), a, a)[:3]
    assert torch.allclose(y, grad_x, rtol=1e-6) and torch.allclose(y, grad_weight, rtol=1e-6)


@pytest.mark.slow
def test_the_traced_layer_computes_the_same_bits(layer_and_data):
    """Forward and backward pass as one graph without a break; what the compiler's back end makes of
    the rest is its own affair."""
    linear, x, grad = layer_and_data
    short = Accumulator(bits=4, exponent_bits=4)
    arithmetic = Arithmetic(
        "fp8_e4m3", "fp8_e5m2", forward=short, grad_input=short, grad_weight=short
    )
    layer = NarrowLinear(linear, arithmetic)
    want = results(layer, x, grad)
    torch._dynamo.reset()
    layer.compile(backend="aot_eager", fullgraph=True)
    for a, b in zip(results(layer, x, grad)[:3], want, strict=False):
        assert torch.equal(a, b)
