"""Predict how many mantissa bits an accumulator needs: the variance retention ratio of Sakr et al.,
ICLR 2019.

"Accumulation Bit-Width Scaling For Ultra-Low Precision Training of Deep Networks", arXiv
1901.06588.

A sum of n products that is rounded after every addition loses variance: what is far below the
running sum is swallowed ("swamping"). The ratio VRR = Var(computed) / Var(exact) says how much is
left, and an accumulator is called wide enough where v(n) = exp(n (1 - VRR)) < 50.

    Q(x)    = P(N(0, 1) > x)
    alpha_j = 2^(m_acc - 3 m_p) / 3 * sum_{i=1}^{j-1} 2^i (2^i - 1) (2^(i+1) - 1)
    alpha   = alpha_(m_p + 1)
    q_i     = 2 Q(2^m_acc / sqrt(i)) (1 - 2 Q(2^m_acc / sqrt(i - 1)))    full swamping begins at i
    q'_j    = N_j 2 Q(2^(m_acc-m_p+j-1) / sqrt(n)) (1 - 2 Q(2^(m_acc-m_p+j) / sqrt(n)))    partial
    N_j     = 2^(m_acc-m_p+j)
    k_1     = sum_{i=2}^{n-1} q_i [i > alpha]
    k_2     = sum_{j=2}^{m_p} q'_j [n > alpha_j]
    k_3     = 1 - 2 Q(2^(m_acc-m_p+1) / sqrt(n))
    VRR     = (sum (i - alpha) q_i [i > alpha] + sum (n - alpha_j) q'_j [n > alpha_j] + n k_3)
              / (n (k_1 + k_2 + k_3))

The formula assumes products of mean zero, independent and alike, and a sum that stops for good at
its first swamping; it is therefore pessimistic for such products, and blind to a mean that is not
zero, which is the worse case in language models. With chunks, the sums within chunks and the sum
over them are judged one by one ("stagewise"); that reading, and the bound of 50, are recollected
from the paper, the equations are those of a public implementation.
"""

from __future__ import annotations

import math
from functools import cache

LN_50 = math.log(50.0)
"""n (1 - VRR) below which an accumulation counts as wide enough."""


def swamping_offset(m_acc: int, m_p: int, stage: int) -> float:
    """Return alpha_j of partial-swamping `stage` j."""
    total = 0
    for i in range(1, stage):
        power = 2**i
        total += power * (power - 1) * (2 * power - 1)
    return math.ldexp(total, m_acc - 3 * m_p) / 3


def variance_retention(m_acc: int, m_p: int, n: int) -> float:
    """Return the VRR of a sum of `n` products of `m_p` mantissa bits in an accumulator of `m_acc`;
    1: no loss."""
    import numpy as np
    from scipy.special import erf, erfc

    if n <= 2:
        return 1.0

    # 2 Q(x) = erfc(x / sqrt 2), 1 - 2 Q(x) = erf(x / sqrt 2)
    # Full swamping: k_1 and its term of the numerator.
    offset = swamping_offset(m_acc, m_p, m_p + 1)
    i = np.arange(2, n, dtype=np.float64)
    i = i[i > offset]
    largest = 2.0**m_acc / math.sqrt(2)
    begins = erfc(largest / np.sqrt(i))
    not_before = erf(largest / np.sqrt(i - 1))
    q = begins * not_before
    weight = q.sum()
    kept = ((i - offset) * q).sum()

    # Partial swamping: k_2 and its term.
    root = math.sqrt(2 * n)
    for stage in range(2, m_p + 1):
        effective = n - swamping_offset(m_acc, m_p, stage)
        if effective <= 0:
            continue
        steps = 2.0 ** (m_acc - m_p + stage)
        begins = erfc(steps / 2 / root)
        not_before = erf(steps / root)
        q = steps * begins * not_before
        weight += q
        kept += effective * q

    # No swamping: k_3.
    smallest = 2.0 ** (m_acc - m_p + 1)
    never = erf(smallest / root)
    weight += never
    kept += n * never
    return float(kept / (n * weight))


def log_v(m_acc: int, m_p: int, n: int) -> float:
    """Return ln v(n) = n (1 - VRR); below `LN_50` the accumulator is wide enough."""
    kept = variance_retention(m_acc, m_p, n)
    return n * (1 - kept)


@cache
def needed_bits(m_p: int, n: int, chunk: int = 0) -> int:
    """Return the fewest mantissa bits with v < 50 within chunks and over them.

    A sum of n_1 products has log2(n_1) more bits than one, as far as the accumulator holds them.
    `chunk` 0 is one chunk of all products.
    """
    length = min(chunk or n, n)
    chunks = math.ceil(n / length)
    grown = m_p + round(math.log2(length))
    m_acc = 0
    worst = LN_50
    while worst >= LN_50:
        m_acc += 1
        within = log_v(m_acc, m_p, length)
        over = log_v(m_acc, min(m_acc, grown), chunks)
        worst = max(within, over)
    return m_acc


MANTISSA_BITS = {
    "fp32": 23,
    "bf16": 7,
    "fp8_e4m3": 3,
    "fp8_e5m2": 2,
}


def product_bits(a: str, b: str) -> int:
    """Return the mantissa bits of exact products: (1 + m_a) + (1 + m_b) significant ones, one of
    them implicit."""
    return MANTISSA_BITS[a] + MANTISSA_BITS[b] + 1
