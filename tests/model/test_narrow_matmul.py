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
from efftrain_cli.model.arithmetic import Accumulator, Arithmetic
from efftrain_cli.model.linear import NarrowLinear
from efftrain_cli.model.narrow_matmul import (
    narrow_matmul,
    round_in_range_,
    round_nearest_,
    to_fp8,
    to_operand,
)

INF, NAN = math.inf, math.nan


def by_definition(x: np.ndarray, bits: int) -> np.ndarray:
    """Round to nearest, ties to even, to `bits` explicit mantissa bits, with an unbounded exponent:
    exact arithmetic in fp64."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, bits + 1)), exponent - bits - 1)


def summed_by_definition(terms: np.ndarray, bits: int, chunk: int) -> np.ndarray:
    """Sum over the first dimension in order, rounded after every addition; with a chunk, sums of so
    many terms first, and then the sum of those."""
    if chunk:
        parts = np.split(terms, range(chunk, len(terms), chunk))
        terms = np.stack([summed_by_definition(part, bits, 0) for part in parts])
    total = np.zeros(terms.shape[1:])
    for term in terms:
        total = by_definition(total + term, bits)
    return total


def of_all_sizes(count: int) -> Tensor:
    """Normal numbers times powers of two from -30 to 17."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 18, (count,), generator=generator).float()
    return torch.randn(count, generator=generator) * torch.exp2(exponents)


# --- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 9, 22, 23])
def test_rounding_is_the_definition_bit_for_bit(bits):
    x = of_all_sizes(200_000)
    x[0] = -0.0
    x[1] = 1.0 + 2.0 ** -(bits + 1)  # ties, to even
    x[2] = 1.0 + 3 * 2.0 ** -(bits + 1)
    expected = by_definition(x.numpy(), bits).astype(np.float32)
    assert np.array_equal(round_nearest_(x, bits).numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("bits", [1, 22])
def test_what_is_not_finite_stays_so(bits):
    largest = torch.finfo(torch.float32).max  # beyond the largest number of so few bits
    rounded = round_nearest_(torch.tensor([INF, -INF, largest, NAN]), bits)
    assert rounded[:3].tolist() == [INF, -INF, INF]
    assert rounded[3].isnan()


@pytest.mark.parametrize("bits, dtype", [(10, torch.float16), (2, torch.float8_e5m2)])
def test_a_narrow_exponent_is_that_of_ieee_formats(bits, dtype):
    """PyTorch's own formats of 5 exponent bits, subnormal numbers among them; where those overflow
    to infinity, the accumulator saturates."""
    x = of_all_sizes(200_000)
    want, largest = x.to(dtype).float(), torch.finfo(dtype).max
    assert int(want.isinf().sum()) > 1000
    assert int((want.abs() < torch.finfo(dtype).smallest_normal).sum()) > 1000
    assert torch.equal(round_in_range_(x, bits, 5), want.clamp(-largest, largest))


def test_the_papers_16_bit_accumulator_ends_at_4_billion():
    """(1, 6, 9): bias 31, largest number 2^31 (2 - 2^-9)."""
    x = torch.tensor([5e9, -5e9, 4.295e9, 1.0, 2.0**-39, 2.0**-41, INF, NAN])
    round_in_range_(x, 9, 6)
    largest = 2.0**31 * (2 - 2.0**-9)
    assert x[:7].tolist() == [largest, -largest, largest, 1.0, 2.0**-39, 0.0, INF]
    assert x[7].isnan()


# --- sums in order --------------------------------------------------------------------------------


def operands(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Draw numbers of fp8, m x k and k x n: sums of few products are exact in fp32."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=generator) + 1
    b = torch.randn(k, n, generator=generator) + 1
    return a.to(torch.float8_e5m2).float(), b.to(torch.float8_e5m2).float()


@pytest.mark.parametrize("chunk", [0, 16])
def test_all_widths_at_once_are_each_width_alone(chunk):
    a, _ = operands(1000, 50, 1)
    products = a * a.flip(0)
    widths = (3, 9, 12)
    for bits, sums in zip(widths, sums_in_order(products, widths, chunk), strict=True):
        expected = summed_by_definition(products.numpy().astype(np.float64), bits, chunk)
        assert np.array_equal(sums.numpy(), expected)


@pytest.mark.parametrize("chunk, block", [(0, 1), (20, 1), (0, 8)])
def test_a_sum_beyond_the_range_saturates(chunk, block):
    """Four exponent bits end below 2^8: at 255.875 with ten mantissa bits. 25 tens are 250."""
    tens = torch.full((40, 2), 10.0)
    product = narrow_matmul(torch.ones(1, 40), tens, 10, chunk, block, exponent_bits=4)
    assert product.tolist() == [[255.875] * 2]


# --- matrix products ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits, chunk, block", [(9, 64, 32), (9, 0, 32), (4, 7, 3)])
def test_the_fast_product_rounds_where_it_says(bits, chunk, block):
    """After each block, exactly summed, and after each chunk."""
    a, b = operands(40, 200, 30)
    length = chunk or 200
    sums = []
    for first in range(0, 200, length):
        end = min(first + length, 200)
        within = np.zeros((40, 30))
        for begin in range(first, end, block):
            part = slice(begin, min(begin + block, end))
            product = a[:, part].double() @ b[part].double()
            within = by_definition(within + product.numpy(), bits)
        sums.append(within)
    expected = summed_by_definition(np.stack(sums), bits, 0)
    assert np.array_equal(narrow_matmul(a, b, bits, chunk, block, 8).numpy(), expected)


def test_a_chunk_shorter_than_a_block_is_rounded_before_it_joins():
    """126 ones in a layer: 21 rounds to 20 (even), then 40, 60, 80, 100 -> 96 (even), 116 -> 112
    (even)."""
    arithmetic = Arithmetic(forward=Accumulator(bits=3, chunk=21))
    layer = NarrowLinear(torch.nn.Linear(126, 1, bias=False), arithmetic)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    assert layer(torch.ones(1, 126)).item() == 112


@pytest.mark.parametrize(
    "name, dtype, largest",
    [("fp8_e4m3", torch.float8_e4m3fn, 448), ("fp8_e5m2", torch.float8_e5m2, 57344)],
)
def test_operands_take_their_format_and_scales_are_powers_of_two(name, dtype, largest):
    """A scale is at most 2^126, even for tiny numbers, and 1 for zeros and infinities."""
    x = 1e-5 * of_all_sizes(1000)
    rounded, scale = to_operand(x, name)
    assert math.log2(float(scale)).is_integer()
    assert largest / 2 < float((x * scale).abs().max()) <= largest
    assert torch.equal(rounded, rounded.to(dtype).float())
    # 448 = 1.75 * 2^8 and 57344 = 1.75 * 2^15
    exponent = 108 if largest == 448 else 115
    for tiny, power in ((2.0**-100, exponent), (2.0**-149, 126)):
        assert float(to_fp8(torch.tensor([tiny, -tiny / 2]), name)[1]) == 2.0**power
    for useless in ([0.0, 0.0], [1.0, INF]):
        assert float(to_fp8(torch.tensor(useless), name)[1]) == 1.0


def test_wider_operands_have_no_scale():
    x = of_all_sizes(1000)
    assert torch.equal(to_operand(x, "bf16")[0], x.bfloat16().float())
    assert to_operand(x, "fp32") == (x, None)


def test_product_bits():
    assert product_bits("fp8_e5m2", "fp8_e5m2") == 5
    assert product_bits("fp8_e4m3", "fp8_e5m2") == 6
    assert product_bits("bf16", "fp32") == 31
