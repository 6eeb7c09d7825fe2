"""Sum in an accumulator of few mantissa bits: rounding, and the matrix product made of such sums.

Wang et al., "Training Deep Neural Networks with 8-bit Floating Point Numbers", NeurIPS 2018, arXiv
1812.08011. In s + p the smaller number is shifted to the larger one's exponent, so a long sum in
few bits swallows what is added late ("swamping"). Chunks mend it: sums of `chunk` products each,
then the sum of those.

Values lie in fp32. The accumulator has fp32's exponents, or fewer: then it saturates at its largest
number, and below its smallest normal one its numbers are evenly spaced, as IEEE's subnormals.
Rounding goes to nearest, ties to the even neighbour.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Products that a layer adds in fp32 before it rounds: what tensor cores do, roughly."""
_TILE = 1 << 16
"""Elements of the result worked on at once on a CPU: they and their scratch stay in the cache."""


def round_nearest_(
    x: Tensor,
    bits: int,
    scratch: Tensor | None = None,
) -> Tensor:
    """Round `x`, fp32, to `bits` explicit mantissa bits, in place. Ties go to even.

    A number beyond the largest one becomes infinity.

    Args:
        scratch: int32, the shape of `x`.
    """
    drop = 23 - bits
    if drop <= 0:
        return x
    last = torch.bitwise_right_shift(
        x.view(torch.int32),
        drop,
        out=scratch,
    )
    # Half of the last bit kept, less one bit where that is 0: a tie goes up only from an odd
    # number.
    addend = last.bitwise_and_(1).add_((1 << (drop - 1)) - 1)
    is_nan = None
    if x.device.type == "cuda":
        # CUDA's NaN is all ones, and adding to it would give a finite number.
        is_nan = x.isnan()
    x.view(torch.int32).add_(addend).bitwise_and_(-(1 << drop))
    if is_nan is not None:
        x.masked_fill_(is_nan, float("nan"))
    return x


def round_in_range_(
    x: Tensor,
    bits: int,
    exponent_bits: int,
    scratch: Tensor | None = None,
) -> Tensor:
    """Round `x`, fp32, in place to the numbers of the format (1, exponent_bits, bits), as IEEE 754
    defines them.

    Exponents are 2 - 2^(e-1) to 2^(e-1) - 1. Smaller numbers become multiples of the smallest one,
    larger ones the largest. Infinity and NaN stay.

    Args:
        exponent_bits: 2 to 7.
        scratch: int32, the shape of `x`.
    """
    bias = 2 ** (exponent_bits - 1) - 1
    smallest_normal = 2.0 ** (1 - bias)
    largest = 2.0**bias * (2 - 2.0**-bits)
    step = 2.0 ** (1 - bias - bits)
    is_finite = x.isfinite()
    is_subnormal = x.abs() < smallest_normal

    # The sum's last bit is one step: the addition rounds, once and to even.
    magic = 1.5 * 2.0**23 * step
    subnormal = (x + magic) - magic
    round_nearest_(x, bits, scratch)

    saturates = is_finite & (x.abs() > largest)
    limit = torch.full_like(x, largest).copysign_(x)
    limited = torch.where(saturates, limit, x)
    return x.copy_(torch.where(is_subnormal, subnormal, limited))


# --- operands -------------------------------------------------------------------------------------

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""(1, 4, 3) with a largest number of 448, and (1, 5, 2) with 57344."""


def to_fp8(x: Tensor, operands: str) -> tuple[Tensor, Tensor]:
    """Return `x` in an fp8 format, and the scale that it was multiplied by, 0-d fp32.

    It is the power of two, at most 2^126, that brings the largest of |x| just inside the format; 1
    if `x` is 0 or not finite. A power of two changes no mantissa, so only the format rounds.
    """
    largest = x.detach().abs().amax().float()
    limit = torch.finfo(FP8[operands]).max
    # A quotient beyond 2^128 would be infinite; from 2^126 on the scale is the same.
    quotient = limit / largest.clamp_min(limit * 2.0**-127)
    exponent = torch.floor(torch.log2(quotient))
    is_usable = torch.isfinite(largest) & (largest > 0)
    exponent = torch.where(is_usable, exponent, 0.0)
    scale = torch.exp2(exponent.clamp(max=126))
    return (x * scale).to(FP8[operands]), scale


def to_operand(x: Tensor, operands: str) -> tuple[Tensor, Tensor | None]:
    """Round `x` to the operand format.

    Return it in fp32, with the scale that it was multiplied by; None if the format has no scale.
    """
    if operands == "fp32":
        return x, None
    if operands == "bf16":
        return x.bfloat16().float(), None
    rounded, scale = to_fp8(x, operands)
    return rounded.float(), scale


# --- sums -----------------------------------------------------------------------------------------


def narrow_matmul(
    a: Tensor,
    b: Tensor,
    bits: int,
    chunk: int,
    block: int,
    exponent_bits: int,
) -> Tensor:
    """Multiply `a` (m, k) by `b` (k, n), fp32, summed with `bits` mantissa bits: fp32 (m, n).

    `block` products are summed in fp32 and added to the accumulator, which is then rounded. With
    `chunk` > 0 the accumulator begins anew after every `chunk` products, and what it held is added
    to a second one, rounded too.

    Args:
        chunk: products per chunk; 0 or at least k: one sum.
        exponent_bits: of the accumulators, 2 to 8; 8: fp32's range.
    """
    m, k = a.shape
    n = b.shape[1]
    chunk = min(chunk or k, k)
    block = min(block, chunk)
    out = a.new_empty(m, n)
    rows = m
    if a.device.type == "cpu":
        rows = max(1, _TILE // n)
    for start in range(0, m, rows):
        tile = out[start : start + rows]
        left = a[start : start + rows]
        scratch = torch.empty(tile.shape, dtype=torch.int32, device=a.device)
        within = tile
        if chunk < k:
            within = torch.empty_like(tile)

        for first in range(0, k, chunk):
            end = min(first + chunk, k)
            for begin in range(first, end, block):
                part = slice(begin, min(begin + block, end))
                if begin == first:
                    torch.mm(left[:, part], b[part], out=within)
                else:
                    within.addmm_(left[:, part], b[part])
                _round_(within, bits, exponent_bits, scratch)
            if within is tile:
                continue
            if first == 0:
                tile.copy_(within)
            else:
                tile.add_(within)
                _round_(tile, bits, exponent_bits, scratch)
    return out


def _round_(
    x: Tensor,
    bits: int,
    exponent_bits: int,
    scratch: Tensor,
) -> None:
    if exponent_bits < 8:
        round_in_range_(x, bits, exponent_bits, scratch)
    else:
        round_nearest_(x, bits, scratch)


# torch.ops.efftrain.narrow_matmul: torch.compile then sees one call instead of thousands of
# roundings, with their bits.
_LIBRARY = torch.library.Library("efftrain", "DEF")
_LIBRARY.define(
    "narrow_matmul(Tensor a, Tensor b, SymInt bits, SymInt chunk, SymInt block,"
    " SymInt exponent_bits) -> Tensor"
)
_LIBRARY.impl("narrow_matmul", narrow_matmul, "CompositeExplicitAutograd")


@torch.library.register_fake("efftrain::narrow_matmul", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _shape_of_matmul(a: Tensor, b: Tensor, *settings: object) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])
