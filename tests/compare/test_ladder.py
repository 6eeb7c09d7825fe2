"""Compute multipliers by size, and what is said of them over sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from efftrain_cli.compare.arms import group_runs
from efftrain_cli.compare.comparison import compare
from efftrain_cli.compare.figures import colours_of, gains_figure, losses_figure
from efftrain_cli.compare.judge import Claim
from efftrain_cli.compare.ladder import (
    NOT_IDENTIFIED,
    describe_trends,
    gain_table,
    ladder_of,
    shift_of,
    trend_of,
)
from efftrain_cli.compare.show import frame_lines
from tests.compare.known_runs import row_of
from tests.compare.runs import make_run

T2 = 4.302652729911275
"""Two-sided 5 % point of t with 2 degrees of freedom."""
COST = np.log([[1.0, 2.0, 4.0]] * 3)


def test_a_shift_is_read_seed_by_seed_with_one_slope():
    """Slopes .19, .2 and .21 of both arms, so s is .2; the arm leads by .2 of .1, .2 and .3, and
    costs 2^(1/2) more."""
    falls = np.array([[0.19], [0.2], [0.21]])
    base = 3.0 - falls * (COST - COST.mean())
    arm = base - 0.2 * np.array([[0.1], [0.2], [0.3]])
    shift = shift_of(base, arm, COST, COST + math.log(2) / 2)
    assert shift.slope == pytest.approx(0.2)
    assert list(shift.logs) == pytest.approx([x - math.log(2) / 2 for x in (0.1, 0.2, 0.3)])
    half = T2 * 0.1 / math.sqrt(3)
    mean = 0.2 - math.log(2) / 2
    ends = [mean, mean - half, mean + half]
    assert shift.interval == pytest.approx(tuple(map(math.exp, ends)))
    # Between seeds only the slopes differ: by .01 ln 2 at the outer budgets.
    outer = 0.01 * math.log(2)
    variance = (2 * outer**2 + 0) / 3
    base_only = shift_of(base, base, COST, COST)
    assert base_only.noise == pytest.approx(math.sqrt(variance) / 0.2)


def test_a_loss_that_does_not_fall_identifies_nothing():
    draw = np.random.default_rng(1)
    base, arm = 3.0 + 0.02 * draw.normal(size=(2, *COST.shape))
    shift = shift_of(base, arm, COST, COST)
    assert shift.why == NOT_IDENTIFIED and np.isnan(shift.interval).all()


def test_an_arm_beyond_the_budgets_has_a_bound():
    """A lead of 2 in ln C, where the budgets span ln 4."""
    base = 3.0 - np.array([[0.19], [0.2], [0.21]]) * COST
    assert shift_of(base, base - 0.4, COST, COST).interval == (pytest.approx(4), 4, math.inf)
    assert shift_of(base, base + 0.4, COST, COST).interval == (pytest.approx(0.25), 0, 0.25)


SIZES = 1e5 * 2.0 ** np.arange(4)


def logs_of(at_largest: float, slope: float, residual: float) -> np.ndarray:
    """ln M on a line over four sizes, but for residuals (1, -1, -1, 1), which move no line."""
    return at_largest + slope * np.arange(-3, 1) + residual * np.array([1, -1, -1, 1])


def test_the_line_and_its_intervals():
    """Residual sd r sqrt 2; Sxx is 5; the largest size lies 1.5 doublings from the mean, four times
    it 3.5."""
    trend = trend_of(SIZES, logs_of(0.5, -0.1, 0.01))
    sd = 0.01 * math.sqrt(2)
    assert trend.slope == pytest.approx(-0.1)
    assert trend.half == pytest.approx(2.919986 * sd / math.sqrt(5))
    half = T2 * sd * math.sqrt(1 / 4 + 1.5**2 / 5)
    assert trend.largest == pytest.approx(tuple(np.exp([0.5, 0.5 - half, 0.5 + half])))
    half = T2 * sd * math.sqrt(1 + 1 / 4 + 3.5**2 / 5)
    assert trend.beyond == pytest.approx(tuple(np.exp([0.3, 0.3 - half, 0.3 + half])))


@pytest.mark.parametrize(
    ("at_largest", "slope", "residual", "verdict"),
    [
        (0.5, -0.1, 0.01, "fades"),
        (0.5, 0.01, 0.01, "holds"),  # .01 + 2.92 x .0063 < .05
        (0.5, 0.01, 0.03, "cannot tell"),
        (-0.5, -0.1, 0.01, "grows"),  # of a penalty
        (-0.5, 0.1, 0.01, "fades"),
    ],
)
def test_a_verdict_is_of_the_gain_or_of_the_penalty(at_largest, slope, residual, verdict):
    trend = trend_of(SIZES, logs_of(at_largest, slope, residual))
    assert (trend.verdict, trend.is_gain) == (verdict, at_largest > 0)


def rungs(multiplier: float, sizes=(1e5,), fade: float = 0.0):
    """Losses 5 - 0.3 ln(cost): the arm needs 1 / multiplier of the baseline's cost."""
    runs = []
    for number, size in enumerate(sizes):
        gain = math.log(multiplier) - fade * number
        for seed in range(3):
            for budget in (1000.0, 2000.0, 4000.0):
                for arm, lead in (("base", 0.0), ("arm", 0.3 * gain)):
                    noise = 0.001 * math.sin(seed + budget + len(arm) + size)
                    final = 8 - 0.3 * math.log(budget * 6) - lead + noise
                    runs.append(make_run(arm, seed, [6.0, final], tokens=budget, size=size))
    return runs


def gains_of(runs):
    return ladder_of(group_runs(runs), "base").gains


def test_runs_become_a_row_per_size():
    (gain,) = gains_of(rungs(1.5)).itertuples()
    assert (gain.arm, gain.size, gain.budget, gain.seeds) == ("arm", 1e5, 4000.0, 3)
    # A seed without all budgets is left out; one seed identifies nothing.
    assert gains_of(rungs(1.5)[:-1]).seeds[0] == 2
    (alone,) = gains_of(rungs(1.5)[:6]).itertuples()
    assert (alone.why, alone.noise) == (NOT_IDENTIFIED, 0)
    # A run that is not decayed at its end is no point.
    runs = [
        replace(run, settings={**run.settings, "optim.decay_tokens": 9e3}) for run in rungs(1.5)
    ]
    assert gains_of(runs).empty


LADDER = """
arm  parameters    D/N  seeds      s  sigma/s          M in FLOPs         M in tokens
arm        100K   0.04      3  0.301    0.002  1.50x [1.50, 1.50]  1.50x [1.50, 1.50]
           200K   0.02      3  0.299    0.002  1.36x [1.36, 1.36]  1.36x [1.36, 1.36]
           400K   0.01      3  0.299    0.002  1.23x [1.23, 1.23]  1.23x [1.23, 1.23]
           800K  0.005      3  0.299    0.002  1.11x [1.11, 1.11]  1.11x [1.11, 1.11]
arm: the gain fades over 4 sizes; M changes 0.91x [0.90, 0.91] (90 %) per doubling of the size;\
 by the line 1.11x [1.11, 1.12] at 800K parameters, extended to 3.2M 0.91x [0.90, 0.92]\
 (prediction).
note: these intervals leave out errors of tuning: with rates off by a sd of 0.05 in ln M,\
 one of 95 % covers 64 %"""


def test_a_ladder_is_a_table_and_from_four_sizes_on_a_sentence():
    """Slopes of 0.3; of a multiplier of 1.5 each doubling leaves exp(-0.1) = 0.905."""
    sizes = (1e5, 2e5, 4e5, 8e5)
    gains = gains_of(rungs(1.5, sizes, fade=0.1))
    lines = [*frame_lines(gain_table(gains)), *describe_trends(gains)]
    assert "\n".join(lines) == LADDER
    assert len(describe_trends(gains[1:])) == 1, "the note alone"
    steady, _ = describe_trends(gains_of(rungs(1.5, sizes)))
    assert steady.startswith("arm: the gain holds over 4 sizes; M changes 1.0")
    gains.multiplier = [0.9, 0.8, 0.95, 0.85]
    penalty, _ = describe_trends(gains)
    assert penalty.startswith("arm: cannot tell whether the penalty holds over 4 sizes; M changes ")


def test_a_claim_is_about_the_largest_size():
    runs = rungs(1.5, (1e5, 2e5), fade=0.2)
    claim = Claim(measure="compute_multiplier", direction="better")
    comparison = compare(runs, baseline="base", claims=[claim])
    row = row_of(comparison, "compute_multiplier", "arm")
    assert row.estimate == pytest.approx(1.5 * math.exp(-0.2), rel=0.02)
    assert (row.verdict, row.n) == ("better", 3)
    assert comparison.gains.multiplier.iloc[-1] == pytest.approx(row.estimate)


def test_figures_show_runs_fits_intervals_and_the_line():
    """Two arms over four sizes with three seeds and budgets: 36 runs each, and a fit per size."""
    comparison = compare(rungs(1.5, (1e5, 2e5, 4e5, 8e5), fade=0.1), baseline="base")
    colours = colours_of(comparison.arms)
    losses = losses_figure(comparison.ladder, colours).axes[0]
    assert [len(runs.get_offsets()) for runs in losses.collections] == [36, 36]
    assert len(losses.get_lines()) == 2 * 4
    ends = 8 - 0.3 * np.log([6e3 * 1.5, 24e3 * 1.5])
    assert losses.get_lines()[0].get_ydata() == pytest.approx(ends, abs=0.002)
    axes = gains_figure(comparison.gains, colours).axes[0]
    sizes, line, one = axes.get_lines()
    assert list(one.get_ydata()) == [1, 1]
    first = comparison.gains.iloc[0]
    assert axes.collections[0].get_segments()[0][:, 1] == pytest.approx([first.low, first.high])
    assert list(sizes.get_xdata()) == [1e5, 2e5, 4e5, 8e5]
    start, end = line.get_ydata()
    assert start / end == pytest.approx(math.exp(0.3), rel=0.02)
