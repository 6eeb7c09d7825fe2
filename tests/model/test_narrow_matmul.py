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


def hashed(n: int, salt: int) -> np.ndarray:
    """Murmur3's finalizer of i + salt * 0x9E3779B9 + 1, in [0, 1)."""
    x = (np.arange(n, dtype=np.uint64) + np.uint64(salt * 0x9E3779B9 + 1)) & np.uint64(0xFFFFFFFF)
    x ^= x >> np.uint64(16)
    x = x * np.uint64(0x85EBCA6B) & np.uint64(0xFFFFFFFF)
    x ^= x >> np.uint64(13)
    x = x * np.uint64(0xC2B2AE35) & np.uint64(0xFFFFFFFF)
    x ^= x >> np.uint64(16)
    return x / 2**32


def spread(n: int, salt: int, mean: float) -> np.ndarray:
    """Uniform numbers of standard deviation 1."""
    return mean + (2 * hashed(n, salt) - 1) * math.sqrt(3)


VECTORS = {
    "ones": lambda n: np.ones(n),
    "tenth": lambda n: np.full(n, 0.1),
    "u11": lambda n: spread(n, 0, 1.0),
    "zm": lambda n: spread(n, 1, 0.0),
}


def test_the_vectors_are_those_of_the_tables():
    assert np.allclose(
        hashed(5, 0), [0.31759886, 0.19123477, 0.5232041, 0.14301601, 0.79707836], atol=5e-9
    )


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

# vector, n, mantissa bits, exact sum of the rounded inputs; then in order, and in chunks of 16, 64,
# 256
SUMS = [
    *(
        ("ones", 4096, bits, 4096.0, naive, 4096, 4096, 4096)
        for bits, naive in ((10, 2048), (9, 1024), (7, 256))
    ),
    ("tenth", 4096, 10, 409.5, 256, 402.5, 412.25, 402.75),
    ("tenth", 4096, 9, 409.5, 128, 393.5, 415.5, 392.5),
    ("tenth", 4096, 7, 410.0, 32, 472, 386, 478),
    ("u11", 4096, 10, 4113.663393, 4092, 4112, 4116, 4116),
    ("u11", 4096, 9, 4113.609917, 3752, 4120, 4112, 4112),
    ("u11", 4096, 7, 4113.742447, 1024, 4160, 4128, 4096),
    ("zm", 4096, 10, 100.256739, 100.0625, 100, 100.375, 100.125),
    ("zm", 4096, 9, 100.256021, 97.875, 99.25, 100, 100),
    ("zm", 4096, 7, 100.398903, 95.5, 100, 100, 100),
    ("u11", 16384, 10, 16536.18, 8192, 16464, 16544, 16544),
    ("u11", 16384, 9, 16536.03, 4096, 16368, 16576, 16512),
    ("u11", 16384, 7, 16536.27, 1024, 8192, 16256, 16512),
]


@pytest.mark.parametrize("row", SUMS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_sums_are_those_of_the_table(row):
    name, n, bits, exact, *expected = row
    terms = by_definition(VECTORS[name](n), bits)
    assert float(terms.sum()) == pytest.approx(exact, abs=0.005)
    assert [float(sum_in_order(terms, bits, chunk)) for chunk in (0, 16, 64, 256)] == expected


def test_in_order_with_ten_bits_is_numpy_half_precision():
    terms = spread(4096, 3, 1.0).astype(np.float16)
    total = np.float16(0)
    for term in terms:
        total = np.float16(total + term)
    assert float(sum_in_order(terms, 10)) == float(total)


def test_a_constant_swamps_the_sum_over_chunks_too():
    terms = torch.full((16384,), 0.1).bfloat16().double()
    assert float(sum_in_order(terms, 7, 16)) == 512.0


# mean, n, exact; naive, chunk 64, chunk 128 with 9 bits
FP8_DOTS = [(1.0, 4096, 4031.5508, 4096, 4024, 4032), (1.0, 16384, 16097.9047, 8192, 16224, 16128)]


@pytest.mark.parametrize("row", FP8_DOTS, ids=lambda row: f"mean {row[0]}, {row[1]}")
def test_fp8_dot_products_are_those_of_the_table(row):
    mean, n, exact, *expected = row
    products = fp8_products(20, 21, mean, n)
    assert float(products.sum()) == pytest.approx(exact, abs=1e-4)
    assert [float(sum_in_order(products, 9, chunk)) for chunk in (0, 64, 128)] == expected


def test_fp8_dot_products_of_mean_zero_are_those_of_the_table():
    products = fp8_products(22, 23, 0.0, 4096)
    assert float(products.sum()) == pytest.approx(-85.388935, abs=1e-6)
    sums = [
        float(sum_in_order(products, bits, chunk))
        for bits, chunk in ((9, 0), (9, 64), (5, 0), (5, 64))
    ]
    assert sums == [-87, -85.75, -68, -86]


def fp8_products(salt_a: int, salt_b: int, mean: float, n: int) -> Tensor:
    a, b = (
        torch.tensor(spread(n, salt, mean)).float().to(torch.float8_e5m2).double()
        for salt in (salt_a, salt_b)
    )
    return a * b


@pytest.mark.parametrize(
    "mean, expected",
    [
        (
            1.0,
            {
                4: 0.0071,
                16: 0.0035,
                32: 0.0027,
                64: 0.0017,
                128: 0.0013,
                256: 0.0013,
                1024: 0.0036,
                0: 0.080,
            },
        ),
        (
            0.0,
            {
                4: 0.0085,
                16: 0.0047,
                32: 0.0035,
                64: 0.0034,
                128: 0.0040,
                256: 0.0051,
                1024: 0.0092,
                0: 0.0169,
            },
        ),
    ],
)
def test_error_over_chunk_length_is_u_shaped(mean, expected):
    """256 vectors of 4096; the table's were others, so the error of an error is allowed for: a
    fifth."""
    drawn = np.stack([spread(4096, 100 + salt, mean) for salt in range(256)], axis=1)
    terms = by_definition(drawn, 9)
    exact = terms.sum(axis=0)
    errors = {
        chunk: np.linalg.norm(sum_in_order(terms, 9, chunk) - exact) / np.linalg.norm(exact)
        for chunk in expected
    }
    assert errors == {chunk: pytest.approx(value, rel=0.25) for chunk, value in expected.items()}
    assert errors[64] < errors[4]
    assert errors[64] < errors[1024] < errors[0]


def test_all_widths_at_once_are_each_width_alone():
    """Nearly: the fast sums are rounded to fp32 first. Sums of few fp8 products are exact there, so
    here they are the same."""
    products = torch.stack(
        [fp8_products(2 * salt, 2 * salt + 1, salt % 3 - 1.0, 1000) for salt in range(50)], dim=1
    )
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


def test_error_of_an_fp8_product_is_that_of_the_table():
    a, b = (matrix.double().numpy() for matrix in operands(64, 768, 64))
    products = a.T[:, :, None] * b[:, None, :]
    exact = a @ b
    errors = [
        np.linalg.norm(sum_in_order(products, 9, chunk) - exact) / np.linalg.norm(exact)
        for chunk in (64, 0)
    ]
    assert errors == [pytest.approx(0.00205, rel=0.1), pytest.approx(0.00706, rel=0.1)]


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
