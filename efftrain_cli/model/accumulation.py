"""Sums in an accumulator of few mantissa bits: rounding, long sums in their order, and the matrix product made of them.

Wang et al., "Training Deep Neural Networks with 8-bit Floating Point Numbers", NeurIPS 2018, arXiv 1812.08011. In s + p the
smaller number is shifted to the larger one's exponent, so a long sum in few bits swallows what is added late ("swamping").
Chunks mend it: sums of `chunk` products each, then the sum of those.

Values lie in fp32 (or fp64 where every addition is rounded): the accumulator has the exponents of that carrier, only its mantissa is
narrow. Rounding to nearest sends ties to the even neighbour; stochastic rounding goes up with the probability of what it drops, so its
expectation is the number itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Products that `narrow_matmul` adds in fp32 before it rounds, where it rounds within chunks: what tensor cores do, roughly."""
_PIECE = 1 << 16
"""Elements of the result worked on at once on a CPU: they and their scratch stay in the cache."""
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
_LCG = 1664525, 1013904223


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of `value`."""
    return (value + 2**31) % 2**32 - 2**31


def mix(value: int) -> int:
    """Murmur3's 32-bit finalizer: 32 bits in, 32 well-mixed bits out."""
    value &= 0xFFFFFFFF
    value = (value ^ (value >> 16)) * _MIX_1 & 0xFFFFFFFF
    value = (value ^ (value >> 13)) * _MIX_2 & 0xFFFFFFFF
    return value ^ (value >> 16)


def draw_of(seed: int, step: int, micro_step: int, layer: int) -> int:
    """The int32 that all random bits of a layer in one forward and backward pass are made from: no generator, no state."""
    value = seed
    for part in (seed >> 32, step, micro_step, layer):
        value = mix(value) + part * _GOLDEN + 1
    return _signed(mix(value))


def random_bits(draw: Tensor, count: int, first: int = 0) -> Tensor:
    """32 random bits, int32 (count,), for each element from the `first` on: a function of its number and the 0-d int32 `draw`."""
    bits = torch.arange(first, first + count, dtype=torch.int32, device=draw.device)
    return _mix_(bits.mul_(_signed(_GOLDEN)).add_(draw))


def _mix_(bits: Tensor) -> Tensor:
    for shift, factor in ((16, _MIX_1), (13, _MIX_2), (16, None)):
        bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)  # the shift of signed numbers drags the sign along
        if factor is not None:
            bits *= _signed(factor)
    return bits


def round_nearest_(x: Tensor, bits: int, scratch: Tensor | None = None) -> Tensor:
    """Rounds `x`, fp32 or fp64, to `bits` explicit mantissa bits, in place; ties go to even. Beyond the largest number: infinity.

    Args:
        scratch: of the integer type as wide as `x`, same shape.
    """
    drop, whole = _dropped(x, bits)
    if drop <= 0:
        return x
    keep_nan = x.isnan() if x.device.type == "cuda" else None
    scratch = torch.bitwise_right_shift(whole, drop, out=scratch) if scratch is not None else whole >> drop
    whole.add_(scratch.bitwise_and_(1).add_((1 << (drop - 1)) - 1)).bitwise_and_(-(1 << drop))
    # CUDA's NaN is all ones, and adding to it would give a finite number.
    return x if keep_nan is None else x.masked_fill_(keep_nan, float("nan"))


def round_stochastic_(x: Tensor, bits: int, random: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Rounds `x` (fp32) to `bits` mantissa bits, in place, away from zero with the probability of the part that is dropped.

    Args:
        random: int32, the shape of `x`; the high ones of its 32 random bits are used.
    """
    drop, whole = _dropped(x, bits)
    if drop <= 0:
        return x
    keep_nan = x.isnan() if x.device.type == "cuda" else None
    scratch = torch.bitwise_right_shift(random, 32 - drop, out=scratch) if scratch is not None else random >> (32 - drop)
    whole.add_(scratch.bitwise_and_((1 << drop) - 1)).bitwise_and_(-(1 << drop))
    return x if keep_nan is None else x.masked_fill_(keep_nan, float("nan"))


def _dropped(x: Tensor, bits: int) -> tuple[int, Tensor]:
    """Mantissa bits too many, and `x` seen as integers."""
    if x.dtype == torch.float64:
        return 52 - bits, x.view(torch.int64)
    return 23 - bits, x.view(torch.int32)


# --- operands --------------------------------------------------------------------------------------------------------

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""(1, 4, 3) with a largest number of 448, and (1, 5, 2) with 57344."""


def scale_of(x: Tensor, operands: str) -> Tensor:
    """The power of two, 0-d fp32, that brings the largest magnitude of `x` just inside the format's range; 1 where `x` is 0
    or not finite. A power of two changes no mantissa, so only the format itself rounds."""
    if operands not in FP8:
        return torch.ones((), device=x.device)
    largest = x.detach().abs().amax().float()
    exponent = torch.floor(torch.log2(torch.finfo(FP8[operands]).max / largest))
    usable = torch.isfinite(exponent)
    return torch.exp2(torch.where(usable, exponent, 0.0).clamp(-126, 126))


def to_operand(x: Tensor, operands: str) -> tuple[Tensor, Tensor | None]:
    """`x` rounded to the operand format, in fp32, and the scale that it was multiplied by, None where the format needs none."""
    if operands == "fp32":
        return x, None
    if operands == "bf16":
        return x.bfloat16().float(), None
    scale = scale_of(x, operands)
    return (x * scale).to(FP8[operands]).float(), scale


# --- sums ------------------------------------------------------------------------------------------------------------


def sum_in_order(
    terms: Tensor,
    bits: int,
    chunk: int = 0,
    draw: Tensor | None = None,
    carrier: torch.dtype = torch.float64,
) -> Tensor:
    """Sums `terms` (n, ...) over their first dimension, in order, rounding to `bits` mantissa bits after every addition.

    With `chunk` > 0, sums of `chunk` terms first and then the sum of those, each rounded in the same way. Additions are
    exact in fp64 before they are rounded, wherever the summands' exponents differ by less than 2^(52 - bits).

    Args:
        draw: 0-d int32 for stochastic rounding, in fp64 only; None rounds to nearest.
        carrier: type that the running sum lies in. fp32 takes a third of the time; an addition is then rounded twice, to 23 bits and
            to `bits`, which seldom matters where `bits` are far fewer.
    """
    n = terms.shape[0]
    chunk = n if chunk == 0 else min(chunk, n)
    count = -(-n // chunk)
    terms = terms.to(carrier)
    if count * chunk > n:  # a sum does not change by adding zeros
        terms = torch.cat([terms, terms.new_zeros(count * chunk - n, *terms.shape[1:])])
    partial = _running(terms.view(count, chunk, *terms.shape[1:]).transpose(0, 1), bits, draw, 0)
    return partial[0] if count == 1 else _running(partial, bits, draw, chunk)


def _running(terms: Tensor, bits: int, draw: Tensor | None, first: int) -> Tensor:
    total = torch.zeros(terms.shape[1:], dtype=terms.dtype, device=terms.device)
    integers = torch.int64 if terms.dtype == torch.float64 else torch.int32
    scratch = torch.empty(total.shape, dtype=integers, device=terms.device)
    for number, term in enumerate(terms, first):
        total += term
        if draw is None:
            round_nearest_(total, bits, scratch)
        else:
            random = random_bits(draw + number * _signed(_MIX_1), total.numel()).view(total.shape).long()
            drop, whole = _dropped(total, bits)
            # 32 random bits, as the top ones of those dropped: fp64 drops more than that
            whole.add_((random & 0xFFFFFFFF) << (drop - 32)).bitwise_and_(-(1 << drop))
    return total


def exact_matmul(a: Tensor, b: Tensor, bits: int, chunk: int, draw: Tensor | None = None) -> Tensor:
    """`a` (m, k) times `b` (k, n) with every addition rounded, k ascending: fp32 (m, n). For tests and tiny layers: it holds all
    m n k products of a piece at once and rounds each."""
    rows = max(1, (1 << 22) // max(1, b.numel()))
    parts = []
    for part in a.double().split(rows):
        terms = part.t().unsqueeze(2) * b.double().unsqueeze(1)
        parts.append(sum_in_order(terms, bits, chunk, draw).float())
    return torch.cat(parts)


def narrow_matmul(a: Tensor, b: Tensor, bits: int, chunk: int, block: int, draw: Tensor | None = None) -> Tensor:
    """`a` (m, k) times `b` (k, n), fp32, in an accumulator of `bits` mantissa bits: fp32 (m, n).

    `block` products are summed in fp32 and added to the accumulator, which is then rounded. With `chunk` > 0 the accumulator
    begins anew after every `chunk` products, and what it held is added to a second one, rounded too.

    Args:
        chunk: 0 or at least k: none.
        block: 0: the whole chunk, so that only the sum over the chunks is rounded as it goes.
        draw: 0-d int32 for stochastic rounding; None rounds to nearest.
    """
    return torch.ops.efftrain.narrow_matmul(a, b, bits, chunk, block, draw)


def _narrow_matmul(a: Tensor, b: Tensor, bits: int, chunk: int, block: int, draw: Tensor | None) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    chunk = k if chunk == 0 else min(chunk, k)
    if block == 0 or block > chunk:
        # The sum of a chunk is rounded only as it joins the others: the accumulator over the chunks is the only one.
        chunk, block = k, chunk
    out = a.new_empty(m, n)
    rows = m if a.device.type != "cpu" else max(1, _PIECE // n)
    for start in range(0, m, rows):
        tile, left = out[start : start + rows], a[start : start + rows]
        scratch = torch.empty(tile.shape, dtype=torch.int32, device=a.device)
        within = tile if chunk >= k else torch.empty_like(tile)
        random = None if draw is None else random_bits(draw, tile.numel(), start * n).view(tile.shape)
        for first in range(0, k, chunk):
            for begin in range(first, min(first + chunk, k), block):
                part = slice(begin, min(begin + block, first + chunk, k))
                if begin == first:
                    torch.mm(left[:, part], b[part], out=within)
                else:
                    within.addmm_(left[:, part], b[part])
                _round_(within, bits, scratch, random)
            if within is tile:
                continue
            if first == 0:
                tile.copy_(within)
            else:
                _round_(tile.add_(within), bits, scratch, random)
    return out


def _round_(x: Tensor, bits: int, scratch: Tensor, random: Tensor | None) -> None:
    if random is None:
        round_nearest_(x, bits, scratch)
        return
    random.mul_(_LCG[0]).add_(_LCG[1])  # the next number of each element's own sequence
    round_stochastic_(x, bits, random, scratch)


# An operator of its own: torch.compile then sees one call instead of thousands of roundings, and computes the same bits.
_LIBRARY = torch.library.Library("efftrain", "DEF")
_LIBRARY.define("narrow_matmul(Tensor a, Tensor b, SymInt bits, SymInt chunk, SymInt block, Tensor? draw) -> Tensor")
_LIBRARY.impl("narrow_matmul", _narrow_matmul, "CompositeExplicitAutograd")


@torch.library.register_fake("efftrain::narrow_matmul", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _shape_of_matmul(a: Tensor, b: Tensor, bits: int, chunk: int, block: int, draw: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])
