"""Chunk-based accumulation: rounding, sums in few bits against tables made outside this program, the three products of
a linear layer, and the bits that a sum needs by theory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from efftrain_cli.foundation.errors import RecipeError, UsageError
from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from efftrain_cli.methods.chunked_accumulation import Accumulator, ChunkedAccumulation, check_fp8
from efftrain_cli.methods.progressive_layer_drop import ProgressiveLayerDrop
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.methods.variance_retention import (
    log_v,
    needed_bits,
    product_bits,
    swamping_offset,
    variance_retention,
)
from efftrain_cli.model.accumulation import (
    draw_of,
    exact_matmul,
    mix,
    narrow_matmul,
    random_bits,
    round_in_range_,
    round_nearest_,
    round_stochastic_,
    scale_of,
    sum_in_order,
    sums_in_order,
    to_operand,
)
from efftrain_cli.model.linear import (
    Arithmetic,
    NarrowLinear,
    RoleAccumulator,
    clear_seen,
    first_overflow,
    fp8_matmul,
    set_draws,
)
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, load_recipe
from efftrain_cli.recipe.rules import warnings_of
from efftrain_cli.recipe.sections import Model, Optim, Train
from efftrain_cli.training.gradient import build_model
from efftrain_cli.training.trainer import read_records, train
from tests.resume_law import RandomTokens, assert_resumes_exactly_at_every_step
from tests.tiny import fresh

# --- the tables' own arithmetic --------------------------------------------------------------------------------------


def by_definition(x: np.ndarray, bits: int) -> np.ndarray:
    """Round to nearest, ties to even, to `bits` explicit mantissa bits, with an unbounded exponent."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, bits + 1)), exponent - bits - 1)


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


def test_the_vectors_are_those_of_the_tables() -> None:
    assert np.allclose(hashed(5, 0), [0.31759886, 0.19123477, 0.5232041, 0.14301601, 0.79707836], atol=5e-9)


# --- rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 5, 7, 9, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_the_definition_bit_for_bit(bits: int, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(bits)
    x = generator.standard_normal(200_000) * np.exp2(generator.integers(-20, 20, 200_000))
    x = x.astype(np.float32 if dtype == torch.float32 else np.float64)
    x[:4] = [0.0, -0.0, 1.0 + 2.0 ** -(bits + 1), 1.0 + 3 * 2.0 ** -(bits + 1)]  # ties, to even
    rounded = round_nearest_(torch.tensor(x), bits)
    assert np.array_equal(rounded.numpy().view(np.int32), by_definition(x, bits).astype(x.dtype).view(np.int32))


def test_seven_bits_are_bfloat16_and_23_are_fp32() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_nearest_(x.clone(), 7), x.bfloat16().float())
    assert torch.equal(round_nearest_(x.clone(), 23), x)


@pytest.mark.parametrize("bits", [1, 9, 22])
def test_what_is_not_finite_stays_so(bits: int) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([inf, -inf, nan, torch.finfo(torch.float32).max])
    random = torch.full((4,), -1, dtype=torch.int32)
    for rounded in (round_nearest_(x.clone(), bits), round_stochastic_(x.clone(), bits, random)):
        assert rounded[:2].tolist() == [inf, -inf]
        assert rounded[2].isnan()
        assert rounded[3] == inf  # beyond the largest number of so few bits


@pytest.mark.parametrize("carrier", [torch.float32, torch.float64])
@pytest.mark.parametrize(("exponent_bits", "bits", "dtype"), [(5, 10, torch.float16), (5, 2, torch.float8_e5m2)])
def test_a_narrow_exponent_is_that_of_ieee_formats(
    exponent_bits: int, bits: int, dtype: torch.dtype, carrier: torch.dtype
) -> None:
    """PyTorch's own formats, subnormal numbers among them; where those overflow to infinity, the accumulator
    saturates."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, generator=generator) * torch.exp2(
        torch.randint(-30, 18, (200_000,), generator=generator).float()
    )
    want, largest = x.to(dtype).float(), torch.finfo(dtype).max
    rounded = x.clone().to(carrier)
    saturated = round_in_range_(rounded, bits, exponent_bits)
    assert int(saturated) == int(want.isinf().sum()) > 1000
    assert torch.equal(rounded.float(), want.clamp(-largest, largest))
    assert int((want.abs() < torch.finfo(dtype).smallest_normal).sum()) > 1000


def test_the_papers_16_bit_accumulator_ends_at_4_billion() -> None:
    """(1, 6, 9): bias 31, largest number 2^31 (2 - 2^-9)."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([5e9, -5e9, 4.295e9, 1.0, 2.0**-39, 2.0**-41, inf, nan])
    assert int(round_in_range_(x, 9, 6)) == 3
    largest = 2.0**31 * (2 - 2.0**-9)
    assert x[:7].tolist() == [largest, -largest, largest, 1.0, 2.0**-39, 0.0, inf]
    assert x[7].isnan()


def test_stochastic_rounding_stays_in_range_and_right_on_average() -> None:
    random = random_bits(torch.tensor(draw_of(1, 2, 3, 4), dtype=torch.int32), 1_000_000)
    for carrier in (torch.float32, torch.float64):
        x = torch.full((1_000_000,), 0.25 * 2.0**-39, dtype=carrier)  # a quarter of the smallest number of (1, 6, 9)
        assert int(round_in_range_(x, 9, 6, random)) == 0
        assert set(x.unique().tolist()) == {0.0, 2.0**-39}
        assert abs(float((x > 0).double().mean()) - 0.25) < 4 * 0.433 / 1000
        x = torch.full(
            (1_000_000,), 2.0**32 - 2.0**21, dtype=carrier
        )  # half-way between the largest number and the next
        assert 0 < int(round_in_range_(x, 9, 6, random)) < 1_000_000
        assert set(x.unique().tolist()) == {2.0**31 * (2 - 2.0**-9)}


def test_stochastic_rounding_is_right_on_average_and_goes_to_a_neighbour() -> None:
    x = torch.full((1_000_000,), 1 + 2.0**-12)
    random = random_bits(torch.tensor(draw_of(1, 2, 3, 4), dtype=torch.int32), x.numel())
    rounded = round_stochastic_(x.clone(), 10, random)
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2.0**-10}
    # a quarter goes up: the mean's standard error is 2^-10 sqrt(3 / 16) / 1000
    assert abs(float(rounded.double().mean()) - (1 + 2.0**-12)) < 4 * 2.0**-10 * 0.433 / 1000
    assert torch.equal(round_stochastic_(-x, 10, random), -rounded)


def test_random_bits_are_a_function_of_their_arguments_alone() -> None:
    draw = torch.tensor(draw_of(7, 1, 0, 0), dtype=torch.int32)
    whole = random_bits(draw, 1000)
    assert torch.equal(whole[400:], random_bits(draw, 600, first=400))
    expected = [mix((i * 0x9E3779B9 + int(draw)) & 0xFFFFFFFF) for i in range(1000)]
    assert [value & 0xFFFFFFFF for value in whole.tolist()] == expected
    others = {
        draw_of(*key)
        for key in ((7, 1, 0, 1), (7, 1, 1, 0), (7, 2, 0, 0), (8, 1, 0, 0), (7, 1, 0, 0), (7 + 2**40, 1, 0, 0))
    }
    assert len(others) == 6
    shares = (whole[:, None] >> torch.arange(32) & 1).double().mean(dim=0)
    assert float((shares - 0.5).abs().max()) < 0.07  # four standard errors


# --- sums in order ---------------------------------------------------------------------------------------------------

# vector, n, mantissa bits, exact sum of the rounded inputs; then in order, and in chunks of 16, 64, 256
SUMS = [
    *(("ones", 4096, bits, 4096.0, naive, 4096, 4096, 4096) for bits, naive in ((10, 2048), (9, 1024), (7, 256))),
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
def test_sums_are_those_of_the_table(row: tuple) -> None:
    name, n, bits, exact, *expected = row
    terms = torch.tensor(by_definition(VECTORS[name](n), bits))
    assert float(terms.sum()) == pytest.approx(exact, abs=0.005)
    assert [float(sum_in_order(terms, bits, chunk)) for chunk in (0, 16, 64, 256)] == expected


def test_in_order_with_ten_bits_is_numpy_half_precision() -> None:
    terms = spread(4096, 3, 1.0).astype(np.float16)
    total = np.float16(0)
    for term in terms:
        total = np.float16(total + term)
    assert float(sum_in_order(torch.tensor(terms), 10)) == float(total)


def test_a_constant_swamps_the_sum_over_chunks_too() -> None:
    terms = torch.full((16384,), 0.1).bfloat16()
    assert float(sum_in_order(terms, 7, 16)) == 512.0


# mean, n, exact; naive, chunk 64, chunk 128 with 9 bits
FP8_DOTS = [(1.0, 4096, 4031.5508, 4096, 4024, 4032), (1.0, 16384, 16097.9047, 8192, 16224, 16128)]


@pytest.mark.parametrize("row", FP8_DOTS, ids=lambda row: f"mean {row[0]}, {row[1]}")
def test_fp8_dot_products_are_those_of_the_table(row: tuple) -> None:
    mean, n, exact, *expected = row
    products = fp8_products(20, 21, mean, n)
    assert float(products.sum()) == pytest.approx(exact, abs=1e-4)
    assert [float(sum_in_order(products, 9, chunk)) for chunk in (0, 64, 128)] == expected


def test_fp8_dot_products_of_mean_zero_are_those_of_the_table() -> None:
    products = fp8_products(22, 23, 0.0, 4096)
    assert float(products.sum()) == pytest.approx(-85.388935, abs=1e-6)
    sums = [float(sum_in_order(products, bits, chunk)) for bits, chunk in ((9, 0), (9, 64), (5, 0), (5, 64))]
    assert sums == [-87, -85.75, -68, -86]


def fp8_products(salt_a: int, salt_b: int, mean: float, n: int) -> Tensor:
    a, b = (torch.tensor(spread(n, salt, mean)).float().to(torch.float8_e5m2).double() for salt in (salt_a, salt_b))
    return a * b


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        (1.0, {4: 0.0071, 16: 0.0035, 32: 0.0027, 64: 0.0017, 128: 0.0013, 256: 0.0013, 1024: 0.0036, 0: 0.080}),
        (0.0, {4: 0.0085, 16: 0.0047, 32: 0.0035, 64: 0.0034, 128: 0.0040, 256: 0.0051, 1024: 0.0092, 0: 0.0169}),
    ],
)
def test_error_over_chunk_length_is_u_shaped(mean: float, expected: dict[int, float]) -> None:
    """256 vectors of 4096; the table's were others, so the error of an error is allowed for: a fifth."""
    terms = torch.tensor(by_definition(np.stack([spread(4096, 100 + salt, mean) for salt in range(256)], axis=1), 9))
    exact = terms.sum(dim=0)
    errors = {chunk: float((sum_in_order(terms, 9, chunk) - exact).norm() / exact.norm()) for chunk in expected}
    assert errors == {chunk: pytest.approx(value, rel=0.25) for chunk, value in expected.items()}
    assert errors[64] < errors[4]
    assert errors[64] < errors[1024] < errors[0]


def test_all_widths_at_once_are_each_width_alone() -> None:
    """Nearly: the fast sums are rounded to fp32 first. Sums of few fp8 products are exact there, so here they are the
    same."""
    products = torch.stack([fp8_products(2 * salt, 2 * salt + 1, salt % 3 - 1.0, 1000) for salt in range(50)], dim=1)
    for chunk in (0, 16, 64, 300):
        sums = sums_in_order(products.float(), (3, 5, 9, 12), chunk)
        for number, bits in enumerate((3, 5, 9, 12)):
            assert torch.equal(sums[number].double(), sum_in_order(products, bits, chunk))


def test_a_sum_beyond_the_range_saturates_and_is_counted() -> None:
    """Four exponent bits end below 2^8: at 255.875 with ten mantissa bits. 25 tens are 250; the other 15 additions
    saturate."""
    count = torch.zeros((), dtype=torch.float64)
    tens = torch.full((40, 2), 10.0, dtype=torch.float64)
    assert sum_in_order(tens, 10, exponent_bits=4, saturated=count).tolist() == [255.875] * 2
    assert float(count) == 2 * 15
    count.zero_()
    assert sum_in_order(tens, 10, 20, exponent_bits=4, saturated=count).tolist() == [255.875] * 2
    assert float(count) == 2  # only where the second chunk joins the first, in both sums
    count.zero_()
    ones = torch.ones(1, 40)
    product = narrow_matmul(ones, torch.full((40, 2), 10.0), 10, 0, 8, None, 4, count)
    assert product.tolist() == [[255.875] * 2]
    assert float(count) == 2 * 2  # blocks of 80: the fourth and the fifth


def test_stochastic_sums_do_not_stop() -> None:
    draw = torch.tensor(draw_of(0, 0, 0, 0), dtype=torch.int32)
    ones = torch.ones(4096, 200, dtype=torch.float64)
    sums = sum_in_order(ones, 7, draw=draw)
    assert float(sum_in_order(ones[:, :1], 7)) == 256  # to nearest, it stops there
    assert abs(float(sums.mean()) - 4096) < 4 * float(sums.std()) / math.sqrt(200)
    assert torch.equal(sums, sum_in_order(ones, 7, draw=draw))


# --- matrix products -------------------------------------------------------------------------------------------------


def operands(m: int, k: int, n: int, mean: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(m, k, generator=generator) + mean, torch.randn(k, n, generator=generator) + mean
    return a.to(torch.float8_e5m2).float(), b.to(torch.float8_e5m2).float()


def test_the_exact_product_is_the_sum_of_its_definition() -> None:
    a, b = operands(3, 50, 5)
    for chunk in (0, 16):
        expected = [
            [float(sum_in_order(a[i].double() * b[:, j].double(), 6, chunk)) for j in range(5)] for i in range(3)
        ]
        assert exact_matmul(a, b, 6, chunk).tolist() == expected


def test_error_of_an_fp8_product_is_that_of_the_table() -> None:
    a, b = operands(64, 768, 64)
    exact = a.double() @ b.double()
    errors = [float((exact_matmul(a, b, 9, chunk) - exact).norm() / exact.norm()) for chunk in (64, 0)]
    assert errors == [pytest.approx(0.00205, rel=0.1), pytest.approx(0.00706, rel=0.1)]


@pytest.mark.parametrize(
    ("bits", "chunk", "block"), [(9, 64, 32), (9, 0, 32), (5, 64, 0), (6, 48, 32), (5, 1000, 0), (4, 7, 3)]
)
def test_the_fast_product_rounds_where_it_says(bits: int, chunk: int, block: int) -> None:
    """Sums of blocks are exact here (fp8 operands, few products), so the order within a block does not matter."""
    a, b = operands(40, 200, 30, mean=1.0)
    length = 200 if chunk == 0 else min(chunk, 200)
    total = np.zeros((40, 30))
    for first in range(0, 200, length):
        end = min(first + length, 200)
        within = np.zeros((40, 30))
        for begin in range(first, end, block or length):
            part = slice(begin, min(begin + (block or length), end))
            within = within + a[:, part].double().numpy() @ b[part].double().numpy()
            if block:
                within = by_definition(within, bits)
        total = by_definition(total + within, bits) if length < 200 or not block else within
    assert np.array_equal(narrow_matmul(a, b, bits, chunk, block).numpy(), total)


def test_stochastic_products_repeat_and_differ_by_draw() -> None:
    a, b = operands(300, 64, 300)
    one, two = (torch.tensor(value, dtype=torch.int32) for value in (1, 2))
    product = narrow_matmul(a, b, 5, 0, 32, one)
    assert torch.equal(product, narrow_matmul(a, b, 5, 0, 32, one))
    assert not torch.equal(product, narrow_matmul(a, b, 5, 0, 32, two))
    exact = a.double() @ b.double()
    bias = float((product - exact).mean() / (product - exact).std())
    assert abs(bias) < 4 / 300  # the mean of 90,000 errors, in their standard deviations


def test_operands_take_their_format_and_scales_are_powers_of_two() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-5
    for name, dtype, largest in (("fp8_e4m3", torch.float8_e4m3fn, 448), ("fp8_e5m2", torch.float8_e5m2, 57344)):
        rounded, scale = to_operand(x, name)
        assert math.log2(float(scale)).is_integer()
        assert largest / 2 < float((x * scale).abs().max()) <= largest
        assert torch.equal(rounded, rounded.to(dtype).float())
    assert torch.equal(to_operand(x, "bf16")[0], x.bfloat16().float())
    assert to_operand(x, "fp32") == (x, None)
    for useless in (torch.zeros(3), torch.tensor([1.0, float("inf")])):
        assert float(scale_of(useless, "fp8_e4m3")) == 1.0


def test_product_bits() -> None:
    pairs = {
        ("fp8_e5m2", "fp8_e5m2"): 5,
        ("fp8_e4m3", "fp8_e5m2"): 6,
        ("fp8_e4m3", "fp8_e4m3"): 7,
        ("bf16", "bf16"): 15,
    }
    assert {pair: product_bits(*pair) for pair in pairs} == pairs


# --- the layer -------------------------------------------------------------------------------------------------------

NARROW = RoleAccumulator(4, 0)


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


NEUTRAL = RoleAccumulator(23, 0)


@pytest.mark.parametrize(
    "arithmetic",
    [Arithmetic(), Arithmetic(fidelity="intra_fp32", forward=NEUTRAL, grad_input=NEUTRAL, grad_weight=NEUTRAL)],
    ids=["no role", "neutral"],
)
def test_the_neutral_layer_moves_no_bit(arithmetic: Arithmetic, layer_and_data: tuple) -> None:
    linear, x, grad = layer_and_data
    for have, want in zip(results(NarrowLinear(linear, arithmetic), x, grad), results(linear, x, grad), strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("role", [0, 1, 2])
def test_a_role_changes_its_own_product_only(role: int, layer_and_data: tuple) -> None:
    linear, x, grad = layer_and_data
    name = ("forward", "grad_input", "grad_weight")[role]
    have = results(NarrowLinear(linear, Arithmetic(**{name: NARROW})), x, grad)
    want = results(linear, x, grad)
    assert [torch.equal(a, b) for a, b in zip(have, want, strict=True)] == [number != role for number in range(4)]
    assert 0.001 < float((have[role] - want[role]).norm() / want[role].norm()) < 0.2


def test_the_more_often_it_is_rounded_the_larger_the_error(layer_and_data: tuple) -> None:
    linear, x, grad = layer_and_data
    narrow = RoleAccumulator(6, 64)
    want = results(NarrowLinear(linear, Arithmetic("fp8_e4m3", "fp8_e5m2")), x, grad)
    errors = {}
    for fidelity in ("intra_fp32", "blocked", "exact"):
        arithmetic = Arithmetic(
            "fp8_e4m3", "fp8_e5m2", fidelity=fidelity, forward=narrow, grad_input=narrow, grad_weight=narrow
        )
        have = results(NarrowLinear(linear, arithmetic), x, grad)
        errors[fidelity] = [float((a - b).norm() / b.norm()) for a, b in zip(have, want, strict=True)]
    for role in range(3):
        assert 0.003 < errors["intra_fp32"][role] < errors["blocked"][role] < errors["exact"][role] < 0.05
    assert errors["exact"][3] == 0.0


def test_fp8_operands_change_results_by_their_rounding(layer_and_data: tuple) -> None:
    linear, x, grad = layer_and_data
    have = results(NarrowLinear(linear, Arithmetic("fp8_e4m3", "fp8_e5m2")), x, grad)
    want = results(linear, x, grad)
    for a, b in list(zip(have, want, strict=True))[:3]:
        assert 0.02 < float((a - b).norm() / b.norm()) < 0.08
    assert torch.equal(have[3], want[3])  # the bias's gradient is summed in fp32, from the gradient as it came


def test_the_hardware_layer_on_a_cpu_is_the_fp32_product_of_fp8_operands(layer_and_data: tuple) -> None:
    linear, x, grad = layer_and_data
    formats = {"operands": "fp8_e4m3", "gradient_operands": "fp8_e5m2"}
    fast = RoleAccumulator(fast=True)
    have = results(
        NarrowLinear(
            linear, Arithmetic(**formats, fidelity="hardware", forward=fast, grad_input=fast, grad_weight=fast)
        ),
        x,
        grad,
    )
    want = results(NarrowLinear(linear, Arithmetic(**formats)), x, grad)
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_on_a_cpu_the_fp8_product_is_that_of_pytorch() -> None:
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
        product, *scales = fp8_matmul(a, "fp8_e4m3", b, "fp8_e5m2", fast, torch.float32)
        torch.testing.assert_close(product, expected, rtol=1e-6, atol=1e-6)
        assert scales == [scale_a, scale_b]


@pytest.mark.parametrize("stochastic", [False, True])
def test_recomputed_activations_give_the_same_bits(stochastic: bool, layer_and_data: tuple) -> None:
    linear, x, grad = layer_and_data
    arithmetic = Arithmetic(
        "bf16", "bf16", stochastic=stochastic, forward=NARROW, grad_input=NARROW, grad_weight=NARROW
    )
    layer = NarrowLinear(linear, arithmetic)
    layer.draw.fill_(draw_of(1, 2, 3, 4))
    want = results(layer, x, grad)
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = checkpoint(layer, x, use_reentrant=False)
    y.backward(grad)
    for a, b in zip((y.detach(), x.grad, layer.weight.grad), want, strict=False):
        assert torch.equal(a, b)


def test_the_three_products_draw_noise_of_their_own() -> None:
    """With x = W = dL/dy = A symmetric all three are A A: equal where rounding is to nearest, and drawn apart where it
    is stochastic."""
    a = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    a = a + a.t()
    for stochastic in (False, True):
        linear = nn.Linear(16, 16)
        linear.weight.data.copy_(a)
        linear.bias.data.zero_()
        layer = NarrowLinear(
            linear, Arithmetic(stochastic=stochastic, forward=NARROW, grad_input=NARROW, grad_weight=NARROW)
        )
        y, grad_x, grad_weight = results(layer, a, a)[:3]
        pairs = ((y, grad_x), (y, grad_weight), (grad_x, grad_weight))
        assert [torch.allclose(left, right, rtol=1e-6) for left, right in pairs] == [not stochastic] * 3


def test_without_gradients_rounding_is_to_nearest(layer_and_data: tuple) -> None:
    linear, x, _ = layer_and_data
    noisy = NarrowLinear(linear, Arithmetic(stochastic=True, forward=NARROW))
    plain = NarrowLinear(linear, Arithmetic(forward=NARROW))
    with torch.no_grad():
        assert torch.equal(noisy(x), plain(x))
    assert not torch.equal(noisy(x), plain(x))


@pytest.mark.parametrize("fidelity", ["blocked", "intra_fp32", "exact"])
def test_a_layer_counts_what_saturates_and_notes_its_scales(fidelity: str, layer_and_data: tuple) -> None:
    linear, x, grad = layer_and_data
    formats = {"operands": "fp8_e4m3", "gradient_operands": "fp8_e5m2", "fidelity": fidelity}
    layer = NarrowLinear(linear, Arithmetic(**formats, grad_input=RoleAccumulator(6, 64, exponent_bits=5)))
    wide = results(NarrowLinear(linear, Arithmetic(**formats)), x, grad)
    have = results(layer, x, grad)
    # e4m3 times e5m2 goes to 2.6e7, the accumulator to 65,024
    largest = 2.0**15 * (2 - 2.0**-6) / float(scale_of(grad, "fp8_e5m2") * scale_of(linear.weight, "fp8_e4m3"))
    assert float(have[1].abs().max()) == pytest.approx(largest)
    assert float(wide[1].abs().max()) > largest
    assert torch.equal(have[0], wide[0])
    assert layer.seen[0] == layer.seen[2] == 0
    assert float(layer.seen[1]) >= int((have[1].abs() > 0.999 * largest).sum()) > 0
    scales = [float(scale_of(*pair)) for pair in ((x, "fp8_e4m3"), (linear.weight, "fp8_e4m3"), (grad, "fp8_e5m2"))]
    assert layer.seen[3:6].exp2().tolist() == (-layer.seen[6:]).exp2().tolist() == scales


@pytest.mark.slow
def test_the_traced_layer_computes_the_same_bits(layer_and_data: tuple) -> None:
    """Forward and backward pass as one graph without a break; what the compiler's back end makes of the rest is its own
    affair."""
    linear, x, grad = layer_and_data
    for stochastic in (False, True):
        short = RoleAccumulator(4, 0, exponent_bits=4)
        arithmetic = Arithmetic(
            "fp8_e4m3", "fp8_e5m2", stochastic=stochastic, forward=short, grad_input=short, grad_weight=short
        )
        layer = NarrowLinear(linear, arithmetic)
        layer.draw.fill_(5)
        want = results(layer, x, grad)
        seen = layer.seen.clone()
        clear_seen(layer)
        torch._dynamo.reset()
        layer.compile(backend="aot_eager", fullgraph=True)
        for a, b in zip(results(layer, x, grad)[:3], want, strict=False):
            assert torch.equal(a, b)
        assert torch.equal(layer.seen, seen)
        assert float(seen[:3].min()) > 0
        assert bool(seen.isfinite().all())


# --- theory ----------------------------------------------------------------------------------------------------------

LENGTHS = (64, 144, 512, 1024, 4096, 16384, 65536)
RETENTION = {
    5: (0.992193, 0.989016, 0.835876, 0.709002, 0.564379, 0.475618, 0.418928),
    6: (0.998135, 0.997159, 0.993358, 0.945290, 0.697042, 0.563834, 0.475716),
    7: (0.999523, 0.999313, 0.998677, 0.998001, 0.921691, 0.690254, 0.563543),
    8: (0.999847, 0.999799, 0.999675, 0.999520, 0.998974, 0.892640, 0.686628),
    9: (0.999998, 0.999928, 0.999899, 0.999871, 0.999759, 0.999443, 0.864773),
    10: (1.0, 1.0, 0.999954, 0.999945, 0.999935, 0.999879, 0.999642),
    12: (1.0, 1.0, 1.0, 1.0, 0.999998, 0.999985, 0.999984),
}


@pytest.mark.parametrize("m_acc", RETENTION)
def test_variance_retention_is_that_of_the_table(m_acc: int) -> None:
    have = [round(variance_retention(m_acc, 5, n), 6) for n in LENGTHS]
    assert have == list(RETENTION[m_acc])


def test_variance_retention_to_eight_digits() -> None:
    expected = {
        (7, 5, 1024): (0.99800085, 2.0471),
        (8, 5, 4096): (0.99897360, 4.2041),
        (9, 5, 4096): (0.99975883, 0.9878),
        (9, 5, 16384): (0.99944346, 9.1184),
        (12, 5, 131072): (0.99997929, 2.7144),
    }
    have = {key: (round(variance_retention(*key), 8), round(log_v(*key), 4)) for key in expected}
    assert have == expected
    assert round(variance_retention(9, 7, 4096), 8) == 0.99973679
    assert swamping_offset(9, 5) == 369.09375
    assert [swamping_offset(9, 5, stage) for stage in (2, 3, 4, 5)] == [0.03125, 0.46875, 4.84375, 43.59375]


def test_needed_bits_are_those_of_the_table() -> None:
    lengths = (64, 256, 768, 1024, 2304, 3072, 4096, 8192, 16384, 50304, 65536, 131072, 524288)
    normal = [4, 6, 7, 7, 8, 8, 9, 9, 10, 11, 12, 12, 14]
    assert [needed_bits(5, n) for n in lengths] == normal
    assert [needed_bits(7, n) for n in lengths] == normal
    assert [needed_bits(5, n, 64) for n in lengths] == [4, 4, 4, 4, 4, 4, 4, 5, 6, 7, 7, 8, 9]
    assert [needed_bits(7, n, 128) for n in lengths] == [4, 5, 5, 5, 5, 5, 5, 5, 5, 6, 6, 7, 9]


@pytest.mark.parametrize(("bits", "n"), [(5, 1024), (6, 4096)])
def test_the_formula_is_pessimistic_for_products_of_mean_zero(bits: int, n: int) -> None:
    """Simulated sums keep nearly all of their variance where the formula expects a third of it gone."""
    generator = torch.Generator().manual_seed(0)
    terms = torch.tensor(by_definition(torch.randn(n, 4000, generator=generator, dtype=torch.float64).numpy(), 5))
    kept = float(sum_in_order(terms, bits).var() / terms.sum(dim=0).var())
    assert kept > 0.93
    assert variance_retention(bits, 5, n) < 0.75


# --- training --------------------------------------------------------------------------------------------------------


def small(**sections: object) -> Recipe:
    return Recipe(
        model=Model(n_layer=3, n_head=2, n_embd=16, seq_len=16),
        optim=Optim(lr=1e-2, warmup_steps=2),
        train=Train(
            tokens=6 * 4 * 16, batch_size=4, micro_batch_tokens=32, dtype="fp32", activation_checkpointing=False
        ),
        **sections,
    )


FP8 = ChunkedAccumulation(
    operands="fp8_e4m3",
    gradient_operands="fp8_e5m2",
    head=True,
    forward=Accumulator(bits=6, chunk=8),
    grad_input=Accumulator(bits=6, chunk=8),
    grad_weight=Accumulator(bits=6, chunk=8),
)


def losses(recipe: Recipe) -> list[float]:
    data = RandomTokens(recipe.model.seq_len)
    val = torch.stack([data.window(10**6 + i) for i in range(2)])
    state = fresh(recipe)
    records = list(train(state, recipe, data, val))  # type: ignore[arg-type]
    return [row.get("loss") or row["val_loss"] for row in read_records(state, recipe, records)]


@pytest.mark.parametrize("head", [False, True])
def test_neutral_training_moves_no_bit(head: bool) -> None:
    wide = Accumulator()
    neutral = ChunkedAccumulation(fidelity="intra_fp32", head=head, forward=wide, grad_input=wide, grad_weight=wide)
    have, want = losses(small(chunked_accumulation=neutral)), losses(small())
    # the head's own cross-entropy is written by hand and rounds a little differently from the plain one that stands in
    # for it
    assert have == (pytest.approx(want, rel=1e-5) if head else want)
    assert len(set(want)) == len(want)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_resuming_is_exact(rounding: str) -> None:
    rows = assert_resumes_exactly_at_every_step(small(chunked_accumulation=replace(FP8, rounding=rounding)))
    assert rows[-1]["loss"] < rows[1]["loss"]


def test_rows_say_what_saturated_and_the_scales() -> None:
    section = replace(
        FP8, forward=Accumulator(bits=6, chunk=8, exponent_bits=4), grad_weight=Accumulator(bits=6, exponent_bits=8)
    )
    recipe = small(chunked_accumulation=section)
    rows = [row for row in assert_resumes_exactly_at_every_step(recipe) if "loss" in row]
    for row in rows:
        assert row["chunked_saturated_forward"] > 0
        assert "chunked_saturated_grad_weight" not in row
        for kind in ("inputs", "weights", "gradients"):
            low, high = row[f"chunked_log2_scale_min_{kind}"], row[f"chunked_log2_scale_max_{kind}"]
            assert low == int(low) <= high == int(high)
    plain = small(chunked_accumulation=replace(FP8, operands="bf16", gradient_operands="bf16"))
    data = RandomTokens(plain.model.seq_len)
    state = fresh(plain)
    (record, *_) = train(state, plain, data, torch.stack([data.window(10**6)]))  # type: ignore[arg-type]
    assert not [name for name in read_records(state, plain, [record])[0] if name.startswith("chunked_")]


OTHERS = {
    "seq_len_warmup": SeqLenWarmup(start=8, steps=4),
    "batch_size_warmup": BatchSizeWarmup(start=2, increment=1, sequences=8),
    "progressive_layer_drop": ProgressiveLayerDrop(theta=0.5, steps=0),
    "simigrad": SimiGrad(target=0.2, min_batch_size=2, max_batch_size=8, quantum=2),
    "optim": Optim(name="muon", lr=1e-2, muon_lr=1e-2, warmup_steps=2),
}


@pytest.mark.parametrize("other", OTHERS)
def test_with_each_other_method_it_trains_and_resumes(other: str) -> None:
    section = replace(FP8, rounding="stochastic")
    recipe = replace(small(chunked_accumulation=section), **{other: OTHERS[other]})
    rows = assert_resumes_exactly_at_every_step(recipe)
    assert all(math.isfinite(row["loss"]) for row in rows[1:])


def test_checkpointed_activations_change_nothing() -> None:
    recipe = small(chunked_accumulation=replace(FP8, rounding="stochastic"))
    assert losses(replace(recipe, train=replace(recipe.train, activation_checkpointing=True))) == losses(recipe)


def test_inner_layers_leave_the_first_and_the_last_block_alone() -> None:
    model = build_model(small(chunked_accumulation=replace(FP8, layers="inner", head=False)), 64, torch.device("cpu"))
    narrow = {name for name, layer in model.named_modules() if isinstance(layer, NarrowLinear)}
    assert narrow == {f"h.1.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert model.narrow_head is None
    plain = build_model(small(), 64, torch.device("cpu"))
    for (name, have), (other, want) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(have, want)


def test_stochastic_rounding_differs_by_step_and_layer() -> None:
    model = build_model(small(chunked_accumulation=replace(FP8, rounding="stochastic")), 64, torch.device("cpu"))
    seen = set()
    for step, micro_step in ((1, 0), (1, 1), (2, 0)):
        set_draws(model, 1234, step, micro_step)
        seen |= {int(value) for name, value in model.named_buffers() if name.endswith("draw")}
    assert len(seen) == 3 * (12 + 1)


@pytest.mark.parametrize("role", ["forward", "grad_input", "grad_weight"])
def test_an_overflow_names_its_layer_and_role(role: str) -> None:
    model = build_model(
        small(chunked_accumulation=replace(FP8, operands="fp32", gradient_operands="fp32")), 64, torch.device("cpu")
    )
    layer = model.h[1].mlp.c_proj
    x = torch.ones(1, 4, 64, requires_grad=True)
    grad = torch.ones(1, 4, 16)
    with torch.no_grad():
        if role == "forward":
            layer.weight.fill_(1e38)
        elif role == "grad_input":
            layer.weight.fill_(1.0)
            x.fill_(1e-3)
            grad = grad * 1e38
        else:
            layer.weight.fill_(1e-30)
            x.fill_(1e20)
            grad = grad * 1e20
    assert first_overflow(model, lambda: layer(x).backward(grad)) == ("h.1.mlp.c_proj", role)
    assert first_overflow(model, lambda: layer(x * 1e-30).backward(grad * 1e-30)) is None


# --- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"forward": {"bits": 0}}, ["bits", "at least 1"]),
        ({"forward": {"bits": 24}}, ["bits", "at most 23"]),
        ({"grad_weight": {"chunk": -1}}, ["chunk", "at least 0"]),
        ({"forward": {"fast_accumulation": True}}, ["fast_accumulation", "hardware"]),
        (
            {"fidelity": "hardware", "operands": "fp8_e4m3", "forward": {"bits": 9}},
            ["cannot choose bits, chunk and exponent_bits, given in forward"],
        ),
        ({"fidelity": "hardware"}, ["operands", "fp8_e4m3", "gradient_operands"]),
        ({"fidelity": "hardware", "operands": "fp8_e4m3", "rounding": "stochastic"}, ["rounding", "emulated only"]),
        ({"operands": "fp8"}, ["operands", "fp8_e4m3"]),
    ],
)
def test_impossible_settings_are_refused_with_their_key(settings: dict, words: list[str]) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe("small", [f"chunked_accumulation={as_toml(settings)}"])
    for word in words:
        assert word in str(refused.value)


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(inner)}" for key, inner in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def test_rules_between_sections() -> None:
    hardware = 'chunked_accumulation={fidelity = "hardware", operands = "fp8_e4m3", forward = {}}'
    with pytest.raises(RecipeError, match="multiple of 16"):
        load_recipe("small", [hardware, "model.n_embd=100"])
    with pytest.raises(RecipeError, match="leaves none of 2 blocks"):
        load_recipe("small", ['chunked_accumulation={layers = "inner"}', "model.n_layer=2"])


def test_what_is_probably_not_meant_is_said() -> None:
    recipe = load_recipe(
        "small", ["chunked_accumulation={forward = {bits = 9, chunk = 256}, grad_weight = {bits = 9, chunk = 8192}}"]
    )
    found = "\n".join(warnings_of(recipe))
    assert "forward.chunk = 256: sums of 128 products are not cut" in found
    assert "grad_weight.chunk = 8192 is no shorter than any sum there, the longest being 4_096" in found
    assert "it changes nothing" in "\n".join(warnings_of(load_recipe("small", ["chunked_accumulation={}"])))
    assert not [line for line in warnings_of(load_recipe("small")) if "chunked" in line]


def test_a_weights_sum_is_no_longer_than_the_batch() -> None:
    """2 sequences of 16 tokens where a micro-batch would hold 1,024: chunks of 64 cut nothing of 32 products."""
    recipe = small(chunked_accumulation=ChunkedAccumulation(grad_weight=Accumulator(bits=9, chunk=64)))
    recipe = replace(recipe, train=replace(recipe.train, batch_size=2, micro_batch_tokens=1024))
    assert recipe.chunked_accumulation.lengths(recipe)["grad_weight"] == (32,)
    assert any("the longest being 32: nothing is cut" in warning for warning in warnings_of(recipe))


def test_a_recipe_is_written_and_read_back(tmp_path: Path) -> None:
    recipe = load_recipe("small", ['chunked_accumulation={operands = "bf16", grad_weight = {bits = 9, chunk = 64}}'])
    path = tmp_path / "written.toml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(str(path)) == recipe


def test_a_gpu_without_fp8_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no fp8 matrix units .*8\.0"):
        check_fp8("NVIDIA A100", (8, 0))
    for capability in ((8, 9), (9, 0), (10, 0)):
        check_fp8("a newer one", capability)
