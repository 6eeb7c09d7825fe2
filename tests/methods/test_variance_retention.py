"""The bits that a sum needs by theory, against tables of the formula."""

from __future__ import annotations

import pytest

from efftrain_cli.methods.variance_retention import (
    log_v,
    needed_bits,
    swamping_offset,
    variance_retention,
)

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
def test_variance_retention_is_that_of_the_table(m_acc):
    have = [round(variance_retention(m_acc, 5, n), 6) for n in LENGTHS]
    assert have == list(RETENTION[m_acc])


def test_variance_retention_to_eight_digits():
    for (m_acc, m_p, n), expected in {
        (7, 5, 1024): (0.99800085, 2.0471),
        (9, 5, 16384): (0.99944346, 9.1184),
        (9, 7, 4096): (0.99973679, 1.0781),
        (12, 5, 131072): (0.99997929, 2.7144),
    }.items():
        found = (round(variance_retention(m_acc, m_p, n), 8), round(log_v(m_acc, m_p, n), 4))
        assert found == expected
    assert variance_retention(1, 5, 2) == 1.0 > variance_retention(1, 5, 3)
    offsets = [swamping_offset(9, 5, stage) for stage in (2, 3, 4, 5, 6)]
    assert offsets == [0.03125, 0.46875, 4.84375, 43.59375, 369.09375]


def test_needed_bits_are_those_of_the_table():
    lengths = (64, 256, 768, 1024, 2304, 3072, 4096, 8192, 16384, 50304, 65536, 131072, 524288)
    normal = [4, 6, 7, 7, 8, 8, 9, 9, 10, 11, 12, 12, 14]
    assert [needed_bits(5, n) for n in lengths] == normal
    assert [needed_bits(7, n) for n in lengths] == normal
    assert [needed_bits(5, n, 64) for n in lengths] == [4, 4, 4, 4, 4, 4, 4, 5, 6, 7, 7, 8, 9]
    assert [needed_bits(7, n, 128) for n in lengths] == [4, 5, 5, 5, 5, 5, 5, 5, 5, 6, 6, 7, 9]
