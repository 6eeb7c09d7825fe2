"""What makes a probe unstable or calm, and how sure a share of seeds is."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from scipy import stats

from efftrain_cli.tune_warmup.verdict import chance_of_fluctuation, fluctuation, share_interval


def test_fluctuation_is_perplexity_over_the_best_before() -> None:
    log = math.log
    assert fluctuation([(0, log(100)), (5, log(50)), (10, log(60)), (15, log(40)), (20, log(60))]) == (pytest.approx(1.5), 20)
    assert fluctuation([(0, log(100)), (5, log(90))]) == (pytest.approx(0.9), 5)
    assert fluctuation([(0, 5.0)]) == (0.0, 0)
    assert fluctuation([(0, 5.0), (5, math.inf), (10, 1.0)]) == (math.inf, 5)
    assert fluctuation([(0, 5.0), (5, math.nan)]) == (math.inf, 5)
    assert fluctuation([(0, 1.0), (5, 5000.0)])[1] == 5


def test_the_chance_is_student_s_prediction_for_what_is_left() -> None:
    excess = [0.01, -0.02, 0.03, -0.01, 0.02, 0.0, 0.05, -0.03, 0.01, 0.04]
    curve, best = [(10, 5.0)], 5.0
    for number, value in enumerate(excess, 1):
        curve.append((10 + 10 * number, best + value))
        best = min(best, best + value)
    n, mean = len(excess), sum(excess) / len(excess)
    sd = (sum((x - mean) ** 2 for x in excess) / (n - 1)) ** 0.5
    room = (math.log(1.05) - mean) / (sd * (1 + 1 / n) ** 0.5)
    expected = 4 * stats.t.sf(room, n - 1)  # from step 110 to 150, every 10
    assert chance_of_fluctuation(curve, 10, 150, 1.05) == pytest.approx(min(1.0, expected))
    # A falling loss is not counted on to go on falling.
    falling = [(10 * i, 5 - 0.1 * i + 0.02 * (i % 2)) for i in range(12)]
    steps = [b - a for (_, a), (_, b) in pairwise(falling)]
    sd = stats.tstd(steps)
    assert chance_of_fluctuation(falling, 0, 150, 1.05) == pytest.approx(
        min(1.0, 4 * stats.t.sf(math.log(1.05) / (sd * (1 + 1 / 11) ** 0.5), 10))
    )


def test_too_few_validations_say_nothing() -> None:
    flat = [(10 * i, 5.0) for i in range(20)]
    assert chance_of_fluctuation(flat, 0, 500, 1.3) == 0.0
    assert chance_of_fluctuation(flat[:8], 0, 500, 1.3) == 1.0, "seven after the critical step"
    assert chance_of_fluctuation(flat, 120, 500, 1.3) == 1.0
    assert chance_of_fluctuation([*flat, (200, math.inf)], 0, 500, 1.3) == 1.0


@pytest.mark.parametrize(("successes", "number"), [(0, 1), (1, 1), (2, 3), (3, 3), (5, 9), (0, 10)])
def test_the_interval_of_a_share_is_wilson_s(successes: int, number: int) -> None:
    wanted = stats.binomtest(successes, number).proportion_ci(method="wilson")
    assert share_interval(successes, number) == pytest.approx((wanted.low, wanted.high), abs=1e-6)
