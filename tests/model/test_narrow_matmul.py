"""Sums in few bits: rounding, sums in order and matrix products, against tables made outside this
program."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.accumulation import sums_in_order
from efftrain_cli.methods.variance_retention import product_bits
from efftrain_cli.model.accumulator import Accumulator
from efftrain_cli.model.linear import Arithmetic, NarrowLinear
from efftrain_cli.model.narrow_matmul import (
    narrow_matmul,
    round_in_range_,
    round_nearest_,
    scale_of,
    to_operand,
)
from tests.model.rounding import by_definition, sum_in_order

# --- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 5, 7, 9, 10])
def test_rounding_is_the_definition_bit_for_bit(bits):
    generator = np.random.default_rng(bits)
    x = generator.standard_normal(200_000) * np.exp2(generator.integers(-20, 20, 200_000))
    x = x.astype(np.float32)
    x[:4] = [0.0, -0.0, 1.0 + 2.0 ** -(bits + 1), 1.0 + 3 * 2.0 ** -(bits + 1)]  # ties, to even
    rounded = round_nearest_(torch.tensor(x), bits)
    assert np.array_equal(
        rounded.numpy().view(np.int32), by_definition(x, bits).astype(x.dtype).view(np.int32)
    )


def test_seven_bits_are_bfloat16_and_23_are_fp32():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_nearest_(x.clone(), 7), x.bfloat16().float())
    assert torch.equal(round_nearest_(x.clone(), 23), x)


@pytest.mark.parametrize("bits", [1, 9, 22])
def test_what_is_not_finite_stays_so(bits):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([inf, -inf, nan, torch.finfo(torch.float32).max])
    rounded = round_nearest_(x, bits)
    assert rounded[:2].tolist() == [inf, -inf]
    assert rounded[2].isnan()
    assert rounded[3] == inf  # beyond the largest number of so few bits


@pytest.mark.parametrize(
    "exponent_bits, bits, dtype", [(5, 10, torch.float16), (5, 2, torch.float8_e5m2)]
)
def test_a_narrow_exponent_is_that_of_ieee_formats(exponent_bits, bits, dtype):
    """PyTorch's own formats, subnormal numbers among them; where those overflow to infinity, the
    accumulator saturates."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, generator=generator) * torch.exp2(
        torch.randint(-30, 18, (200_000,), generator=generator).float()
    )
    want, largest = x.to(dtype).float(), torch.finfo(dtype).max
    assert int(want.isinf().sum()) > 1000
    assert torch.equal(round_in_range_(x, bits, exponent_bits), want.clamp(-largest, largest))
    assert int((want.abs() < torch.finfo(dtype).smallest_normal).sum()) > 1000


def test_the_papers_16_bit_accumulator_ends_at_4_billion():
    """(1, 6, 9): bias 31, largest number 2^31 (2 - 2^-9)."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([5e9, -5e9, 4.295e9, 1.0, 2.0**-39, 2.0**-41, inf, nan])
    round_in_range_(x, 9, 6)
    largest = 2.0**31 * (2 - 2.0**-9)
    assert x[:7].tolist() == [largest, -largest, largest, 1.0, 2.0**-39, 0.0, inf]
    assert x[7].isnan()


# --- sums in order --------------------------------------------------------------------------------


def test_in_order_with_ten_bits_is_numpy_half_precision():
    terms = np.random.default_rng(0).normal(1.0, 1.0, 4096).astype(np.float16)
    total = np.float16(0)
    for term in terms:
        total = np.float16(total + term)
    assert float(sum_in_order(terms, 10)) == float(total)


def test_all_widths_at_once_are_each_width_alone():
    """Nearly: the fast sums are rounded to fp32 first. Sums of few fp8 products are exact there, so
    here they are the same."""
    a, b = operands(1000, 50, 1)[0], operands(1000, 50, 1, mean=1.0)[0]
    products = a * b
    for chunk in (0, 16, 64, 300):
        sums = sums_in_order(products.float(), (3, 5, 9, 12), chunk)
        for number, bits in enumerate((3, 5, 9, 12)):
            expected = sum_in_order(products.numpy(), bits, chunk)
            assert np.array_equal(sums[number].numpy(), expected)


@pytest.mark.parametrize("chunk, block", [(0, 1), (20, 1), (0, 8)])
def test_a_sum_beyond_the_range_saturates(chunk, block):
    """Four exponent bits end below 2^8: at 255.875 with ten mantissa bits. 25 tens are 250."""
    tens = torch.full((40, 2), 10.0)
    product = narrow_matmul(torch.ones(1, 40), tens, 10, chunk, block, exponent_bits=4)
    assert product.tolist() == [[255.875] * 2]


# --- matrix products ------------------------------------------------------------------------------


def operands(m: int, k: int, n: int, mean: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(m, k, generator=generator) + mean,
        torch.randn(k, n, generator=generator) + mean,
    )
    return a.to(torch.float8_e5m2).float(), b.to(torch.float8_e5m2).float()


@pytest.mark.parametrize(
    "bits, chunk, block",
    [(9, 64, 32), (9, 0, 32), (6, 48, 32), (4, 7, 3)],
)
def test_the_fast_product_rounds_where_it_says(bits, chunk, block):
    """Sums of blocks are exact here (fp8 operands, few products), so the order within a block does
    not matter."""
    a, b = operands(40, 200, 30, mean=1.0)
    length = 200 if chunk == 0 else min(chunk, 200)
    total = np.zeros((40, 30))
    for first in range(0, 200, length):
        end = min(first + length, 200)
        within = np.zeros((40, 30))
        for begin in range(first, end, block):
            part = slice(begin, min(begin + block, end))
            within = within + a[:, part].double().numpy() @ b[part].double().numpy()
            within = by_definition(within, bits)
        total = by_definition(total + within, bits) if length < 200 else within
    assert np.array_equal(narrow_matmul(a, b, bits, chunk, block).numpy(), total)


@pytest.mark.parametrize(
    "ones, bits, chunk, total",
    [
        # 11 rounds to 12 (even), then 24, 36 -> 32, 44 -> 48 (even)
        (44, 2, 11, 48.0),
        # 21 rounds to 20 (even), then 40, 60, 80, 100 -> 96 (even), 116 -> 112 (even)
        (126, 3, 21, 112.0),
    ],
)
def test_a_chunk_shorter_than_a_block_is_rounded_before_it_joins(ones, bits, chunk, total):
    """By hand, in the product and in a layer of fidelity "blocked"."""
    arithmetic = Arithmetic(forward=Accumulator(bits=bits, chunk=chunk))
    layer = NarrowLinear(torch.nn.Linear(ones, 1, bias=False), arithmetic)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    assert layer(torch.ones(1, ones)).item() == total
    assert narrow_matmul(torch.ones(1, ones), torch.ones(ones, 1), bits, chunk, 32).item() == total


def test_operands_take_their_format_and_scales_are_powers_of_two():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-5
    for name, dtype, largest in (
        ("fp8_e4m3", torch.float8_e4m3fn, 448),
        ("fp8_e5m2", torch.float8_e5m2, 57344),
    ):
        rounded, scale = to_operand(x, name)
        assert math.log2(float(scale)).is_integer()
        assert largest / 2 < float((x * scale).abs().max()) <= largest
        assert torch.equal(rounded, rounded.to(dtype).float())
    assert torch.equal(to_operand(x, "bf16")[0], x.bfloat16().float())
    assert to_operand(x, "fp32") == (x, None)
    for useless in (torch.zeros(3), torch.tensor([1.0, float("inf")])):
        assert float(scale_of(useless, "fp8_e4m3")) == 1.0


@pytest.mark.parametrize("operands", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(
    "largest, log2",
    [
        (2.0**-100, {"fp8_e4m3": 108, "fp8_e5m2": 115}),
        (2.0**-112, {"fp8_e4m3": 120, "fp8_e5m2": 126}),
        (2.0**-120, {"fp8_e4m3": 126, "fp8_e5m2": 126}),
        (2.0**-149, {"fp8_e4m3": 126, "fp8_e5m2": 126}),
    ],
)
def test_the_scale_of_tiny_numbers_is_the_largest_one(operands, largest, log2):
    """448 = 1.75 * 2^8 and 57344 = 1.75 * 2^15: the scale of 2^-n is 2^(n + 8) or 2^(n + 15), at
    most 2^126."""
    x = torch.tensor([largest, -largest / 2])
    assert float(scale_of(x, operands)) == 2.0 ** log2[operands]
    rounded, scale = to_operand(x, operands)
    assert scale is not None
    if largest > 2.0**-130:
        assert torch.equal(rounded / scale, x)


def test_product_bits():
    pairs = {
        ("fp8_e5m2", "fp8_e5m2"): 5,
        ("fp8_e4m3", "fp8_e5m2"): 6,
        ("fp8_e4m3", "fp8_e4m3"): 7,
        ("bf16", "bf16"): 15,
    }
    assert {pair: product_bits(*pair) for pair in pairs} == pairs
