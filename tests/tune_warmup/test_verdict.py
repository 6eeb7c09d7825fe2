"""What makes a probe unstable or calm, and how sure a share of seeds is."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from efftrain_cli.tune_warmup.verdict import chance_of_fluctuation, fluctuation, share_interval


def test_fluctuation_is_perplexity_over_the_best_before() -> None:
    log = math.log
    assert fluctuation(
        [(0, log(100)), (5, log(50)), (10, log(60)), (15, log(40)), (20, log(60))]
    ) == (
        pytest.approx(1.5),
        20,
    )
    assert fluctuation([(0, log(100)), (5, log(90))]) == (pytest.approx(0.9), 5)
    assert fluctuation([(0, 5.0)]) == (0.0, 0)
    assert fluctuation([(0, 5.0), (5, math.inf), (10, 1.0)]) == (math.inf, 5)
    assert fluctuation([(0, 5.0), (5, math.nan)]) == (math.inf, 5)
    assert fluctuation([(0, 1.0), (5, 5000.0)])[1] == 5


def curve_of(excess: list[float], best: float = 5.0) -> list[tuple[int, float]]:
    """A curve from step 10 on, every 10 steps, whose losses are off the best before them by `excess`."""
    curve = [(10, best)]
    for number, value in enumerate(excess, 1):
        curve.append((10 + 10 * number, best + value))
        best = min(best, best + value)
    return curve


def test_the_chance_is_student_s_prediction_for_what_is_left_at_every_look() -> None:
    excess = [0.04, 0.01, 0.05, -0.01, 0.03, 0.02, 0.04, -0.03, 0.01, 0.0]  # falls: the mean
    n, mean = len(excess), sum(excess) / len(excess)
    assert (
        stats.linregress(range(n), excess).slope < 0
        and stats.linregress(range(8), np.clip(excess[-8:], 0, None)).slope < 0
    )
    sd = (sum((x - mean) ** 2 for x in excess) / (n - 1)) ** 0.5
    room = (math.log(1.1) - mean) / (sd * (1 + 1 / n) ** 0.5)
    one = stats.t.sf(room, n - 1)
    # Validations at 120, 130, 140, 150 are left; looks are at 90, 100, ..., 140.
    assert chance_of_fluctuation(curve_of(excess), 10, 90, 150, 1.1) == pytest.approx(6 * 4 * one)
    assert 6 * 4 * one < 0.5
    # A falling loss is not counted on to go on falling: around 0.
    falling = [(10 * i, 5 - 0.1 * i + 0.02 * (i % 2)) for i in range(13)]
    steps = [b - a for (_, a), (_, b) in pairwise(falling)]
    assert stats.linregress(range(12), steps).slope < 0
    one = stats.t.sf(math.log(1.3) / (stats.tstd(steps) * (1 + 1 / 12) ** 0.5), 11)
    assert chance_of_fluctuation(falling, 0, 90, 150, 1.3) == pytest.approx(6 * 3 * one)


def test_a_rise_is_drawn_on_by_its_line() -> None:
    excess = [
        -0.05,
        -0.04,
        0.05,
        0.05,
        0.04,
        0.05,
        0.05,
        0.04,
        0.05,
        0.04,
    ]  # the last eight do not rise, the line through all does
    n = len(excess)
    line = stats.linregress(range(n), excess)
    assert line.slope > 0
    residuals = [value - line.intercept - line.slope * i for i, value in enumerate(excess)]
    sd = (sum(value**2 for value in residuals) / (n - 2)) ** 0.5
    middle, spread = (n - 1) / 2, sum((i - (n - 1) / 2) ** 2 for i in range(n))
    expected = sum(
        stats.t.sf(
            (math.log(1.3) - line.intercept - line.slope * i)
            / (sd * (1 + 1 / n + (i - middle) ** 2 / spread) ** 0.5),
            n - 2,
        )
        for i in (10, 11, 12, 13)
    )
    flat = 4 * stats.t.sf(
        (math.log(1.3) - np.mean(excess)) / (stats.tstd(excess) * (1 + 1 / n) ** 0.5), n - 1
    )
    assert expected > flat
    assert chance_of_fluctuation(curve_of(excess), 10, 90, 150, 1.3) == pytest.approx(6 * expected)


def test_no_probe_is_calm_while_its_loss_ratio_rises() -> None:
    """A loss that falls until the peak of the learning rate and then climbs ever faster, by 0.06 nats until two
    learning-rate warmups have passed and by 0.7 until the third has. A bound from the scatter alone took it for
    calm."""
    losses = [9 - 0.4 * i for i in range(11)] + [
        5 + 0.7 * 2 ** (-(20 - i) / 2.8) for i in range(1, 21)
    ]
    curve = [(10 * i, loss) for i, loss in enumerate(losses)]
    assert fluctuation(curve)[0] > 1.9
    at = next(end for end in range(len(curve)) if fluctuation(curve[: end + 1])[0] > 1.3)
    assert at >= 24, "four looks before it shows"
    assert all(
        chance_of_fluctuation(curve[: end + 1], 100, 200, 300, 1.3) == 1.0 for end in range(20, at)
    )
    excess = [losses[i] - min(losses[:i]) for i in range(11, 21)]
    scatter_alone = 10 * stats.t.sf(
        (math.log(1.3) - np.mean(excess)) / (stats.tstd(excess) * 1.1**0.5), 9
    )
    assert scatter_alone < 0.01


def test_too_few_validations_say_nothing() -> None:
    flat = [(10 * i, 5.0) for i in range(20)]
    assert chance_of_fluctuation(flat, 0, 100, 500, 1.3) == 0.0
    assert chance_of_fluctuation(flat, 0, 200, 500, 1.3) == 1.0, "before the first look"
    assert chance_of_fluctuation(flat[:8], 0, 10, 500, 1.3) == 1.0, "seven after the critical step"
    assert chance_of_fluctuation(flat, 120, 190, 500, 1.3) == 1.0
    assert chance_of_fluctuation([*flat, (200, math.inf)], 0, 100, 500, 1.3) == 1.0
    assert chance_of_fluctuation([(0, 5.0)], 0, 0, 500, 1.3) == 1.0


@pytest.mark.parametrize(("successes", "number"), [(0, 1), (1, 1), (2, 3), (3, 3), (5, 9), (0, 10)])
def test_the_interval_of_a_share_is_wilson_s(successes: int, number: int) -> None:
    wanted = stats.binomtest(successes, number).proportion_ci(method="wilson")
    assert share_interval(successes, number) == pytest.approx((wanted.low, wanted.high), abs=1e-6)
