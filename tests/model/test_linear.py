"""The narrow linear layer: its three products, and what each role changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from efftrain_cli.model.arithmetic import Accumulator, Arithmetic
from efftrain_cli.model.linear import NarrowLinear, fp8_matmul
from efftrain_cli.model.narrow_matmul import to_operand

ROLES = ("forward", "grad_input", "grad_weight")
NARROW = Accumulator(bits=4)
ALL_NARROW = dict.fromkeys(ROLES, NARROW)
FP8 = {"operands": "fp8_e4m3", "gradient_operands": "fp8_e5m2"}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def results(layer: nn.Module) -> list[Tensor]:
    """Output, and gradients of the input, the weight and the bias."""
    x = drawn(4, 37, 96).requires_grad_()  # 148 tokens, no multiple of 16
    layer.zero_grad()
    y = layer(x)
    y.backward(drawn(4, 37, 160, seed=1))
    return [y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()]


def assert_same_bits(have: list[Tensor], want: list[Tensor]) -> None:
    torch.testing.assert_close(have, want, rtol=0, atol=0)


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 160)


def test_a_layer_without_roles_moves_no_bit(linear):
    assert_same_bits(results(NarrowLinear(linear, Arithmetic())), results(linear))


def test_an_accumulator_without_settings_is_fp32s():
    """A sum of 24 significant bits, and a number of the largest exponent."""
    linear = nn.Linear(2, 1, bias=False)
    linear.weight.data.fill_(1.0)
    layer = NarrowLinear(linear, Arithmetic(forward=Accumulator()))
    x = torch.tensor([[2.0**23, 1.0], [2.0**127, 0.0]])
    assert layer(x).flatten().tolist() == [2**23 + 1, 2**127]


@pytest.mark.parametrize("role", [0, 1, 2])
def test_a_role_changes_its_own_product_only(role, linear):
    have = results(NarrowLinear(linear, Arithmetic(**{ROLES[role]: NARROW})))
    want = results(linear)
    equal = [torch.equal(a, b) for a, b in zip(have, want, strict=True)]
    assert equal == [number != role for number in range(4)]
    assert 0.001 < float((have[role] - want[role]).norm() / want[role].norm()) < 0.2


def test_the_hardware_layer_on_a_cpu_is_the_fp32_product_of_fp8_operands(linear):
    fast = dict.fromkeys(ROLES, Accumulator(fast_accumulation=True))
    hardware = NarrowLinear(linear, Arithmetic(**FP8, fidelity="hardware", **fast))
    plain = NarrowLinear(linear, Arithmetic(**FP8))
    torch.testing.assert_close(results(hardware), results(plain), rtol=1e-5, atol=1e-5)


def test_on_a_cpu_the_fp8_product_is_that_of_pytorch():
    a, b = drawn(16, 32), drawn(16, 32, seed=1)
    (a8, scale_a), (b8, scale_b) = to_operand(a, "fp8_e4m3"), to_operand(b, "fp8_e5m2")
    expected = torch._scaled_mm(
        a8.to(torch.float8_e4m3fn),
        b8.to(torch.float8_e5m2).t(),
        scale_a=scale_a.reciprocal(),
        scale_b=scale_b.reciprocal(),
        out_dtype=torch.float32,
    )
    product = fp8_matmul(a, "fp8_e4m3", b, "fp8_e5m2", True, torch.float32)
    torch.testing.assert_close(product, expected, rtol=1e-6, atol=1e-6)


def test_the_three_products_round_alike():
    """With x = W = dL/dy = A symmetric all three are A A."""
    a = drawn(16, 16)
    a = (a + a.t()).requires_grad_()
    linear = nn.Linear(16, 16, bias=False)
    linear.weight.data.copy_(a)
    layer = NarrowLinear(linear, Arithmetic(**ALL_NARROW))
    y = layer(a)
    y.backward(a.detach())
    assert torch.allclose(y, a.grad, rtol=1e-6)
    assert torch.allclose(y, layer.weight.grad, rtol=1e-6)


@pytest.mark.slow
def test_the_traced_layer_computes_the_same_bits(linear):
    """Forward and backward pass as one graph without a break; what the compiler's back end makes of
    the rest is its own affair."""
    short = dict.fromkeys(ROLES, Accumulator(bits=4, exponent_bits=4))
    layer = NarrowLinear(linear, Arithmetic(**FP8, **short))
    want = results(layer)
    torch._dynamo.reset()
    layer.compile(backend="aot_eager", fullgraph=True)
    assert_same_bits(results(layer)[:3], want[:3])
