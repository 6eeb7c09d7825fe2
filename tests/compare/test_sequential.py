"""Looks are paid for: levels, p-values and intervals of planned looks, and that 20 of them err in 5
% of studies."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import special, stats

from benchmarks.simulations import sequential_looks
from efftrain_cli.compare import sequential
from efftrain_cli.compare.engine import _clearest
from efftrain_cli.compare.inference import Estimate
from efftrain_cli.compare.planning import conditional_power
from efftrain_cli.compare.sequential import nominal_levels, schedule, sequential_p


def two_sided(values: np.ndarray, n: int) -> np.ndarray:
    return stats.ttest_1samp(values[:, :n], 0, axis=1).pvalue


def test_looks_are_spread_over_the_seeds_and_end_with_all():
    assert schedule(8, 1) == (8,)
    assert schedule(20, 4) == (5, 10, 15, 20)
    assert schedule(5, 2) == (3, 5)
    assert schedule(22, 20) == tuple(range(3, 23))
    with pytest.raises(ValueError, match="at least 6 seeds"):
        schedule(5, 4)
    for seeds in range(3, 25):
        for looks in range(1, seeds - 1):
            plan = schedule(seeds, looks)
            assert len(plan) == looks and plan[-1] == seeds
            assert all(later > look for look, later in itertools.pairwise(plan))


def test_one_look_is_the_t_test_itself():
    assert sequential_p([0.03], (8,), 2) == 0.03
    assert nominal_levels(0.05, (8,), 1) == (0.05,)


def test_levels_of_known_variances_are_those_of_the_literature():
    """With 60 seeds and more a look t is nearly normal: Pocock's nominal level for five looks is
    0.0158, O'Brien and Fleming's last one 0.0413 (Jennison and Turnbull 2000, tables 2.1 and
    2.3)."""
    plan = (60, 120, 180, 240, 300)
    small = sequential._DRAWS, sequential._CHUNK
    try:
        sequential._DRAWS, sequential._CHUNK = 40_000, 4_000
        assert nominal_levels(0.05, plan, 2, 0.5)[0] == pytest.approx(0.0158, rel=0.08)
        assert nominal_levels(0.05, plan, 2, 0.0)[-1] == pytest.approx(0.0413, rel=0.08)
    finally:
        sequential._DRAWS, sequential._CHUNK = small
        sequential._null_maxima.cache_clear()


def test_p_and_levels_agree():
    plan = schedule(10, 3)
    for sides in (1, 2):
        for k, level in enumerate(nominal_levels(0.05, plan, sides)):
            quiet = [0.9] * k
            assert sequential_p([*quiet, level * 0.999], plan, sides) <= 0.05 + 1e-4
            assert sequential_p([*quiet, level * 1.02], plan, sides) > 0.05


def test_p_never_grows_with_a_further_look_and_is_never_below_the_look_s_own():
    plan = schedule(12, 4)
    before = 1.0
    for taken in range(1, 5):
        now = sequential_p([0.2, 0.03, 0.5, 0.001][:taken], plan, 2)
        assert now <= before
        before = now
    assert before > 0.001
    with pytest.raises(ValueError, match="were planned"):
        sequential_p([0.5] * 5, plan, 2)


def test_the_clearest_look_decides_whichever_it_is():
    """p of 0.2 and 0.001 are 1.28 and 3.29 standard errors, which no weight of the looks
    outdoes."""
    faint, clear = Estimate(-0.1, p=0.2), Estimate(0.1, p=0.001)
    assert _clearest([faint, clear], (3, 6)) is clear
    assert _clearest([clear, faint], (3, 6)) is clear
    assert _clearest([faint, Estimate(0.1, p=None)], (3, 6)) is faint


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "looks", "sides"), [(22, 20, 2), (20, 5, 1), (5, 2, 2)])
def test_studies_without_a_difference_err_at_most_in_5_percent(seeds, looks, sides):
    """100,000 studies with draws of their own: the standard error is 0.07 %."""
    plan = schedule(seeds, looks)
    values = np.random.default_rng(11).standard_normal((100_000, seeds))
    found = np.zeros(len(values), bool)
    for n, level in zip(plan, nominal_levels(0.05, plan, sides), strict=True):
        t = values[:, :n].mean(1) / (values[:, :n].std(1, ddof=1) / math.sqrt(n))
        found |= special.stdtr(n - 1, -np.abs(t) if sides == 2 else -t) * sides <= level
    assert 0.044 <= found.mean() <= 0.0515


@pytest.mark.slow
def test_looking_without_paying_errs_in_a_quarter_of_studies():
    values = np.random.default_rng(12).standard_normal((20_000, 22))
    found = np.any([two_sided(values, n) <= 0.05 for n in range(3, 23)], axis=0)
    assert found.mean() > 0.2


def test_intervals_of_all_looks_hold_together():
    plan = schedule(9, 3)
    values = np.random.default_rng(13).standard_normal((20_000, 9)) + 0.7
    missed = np.zeros(len(values), bool)
    for n, level in zip(plan, nominal_levels(0.05, plan, 2), strict=True):
        first = values[:, :n]
        half = first.std(1, ddof=1) * sequential_looks.half_width(1.0, n, level)
        missed |= np.abs(first.mean(1) - 0.7) > half
    assert 0.044 <= missed.mean() <= 0.054


# --- the alternative ------------------------------------------------------------------------------


def test_the_mixture_is_a_bayes_factor():
    """Against numerical integration over the effect: t given an effect d is noncentral t with
    noncentrality d sqrt(n)."""
    n, t, variance = 6, 2.3, 1.5
    effects = np.linspace(-12, 12, 4001)
    density = stats.norm.pdf(effects, 0, math.sqrt(variance))
    likelihood = np.array([stats.nct.pdf(t, n - 1, effect * math.sqrt(n)) for effect in effects])
    factor = np.trapezoid(likelihood * density, effects) / stats.t.pdf(t, n - 1)
    assert sequential_looks.mixture_log_e(t, n, variance) == pytest.approx(
        math.log(factor), abs=1e-4
    )


def test_the_mixture_s_interval_ends_where_its_e_value_is_1_over_alpha():
    half = sequential_looks.mixture_half_width(1.0, 10, 0.05, 1.0)
    assert sequential_looks.mixture_log_e(half * math.sqrt(10), 10, 1.0) == pytest.approx(
        math.log(20)
    )
    assert sequential_looks.mixture_half_width(1.0, 3, 0.05, 1.0) == math.inf


def test_the_mixture_shows_less_than_the_planned_looks():
    """Why the planned looks were taken: at every effect they decide more studies."""
    plan = schedule(12, 4)
    levels = nominal_levels(0.05, plan, 2)
    for effect in (0.8, 1.2):
        values = np.random.default_rng(14).standard_normal((4000, 12)) + effect
        planned = np.any(
            [two_sided(values, n) <= level for n, level in zip(plan, levels, strict=True)], axis=0
        )
        log_e = [
            sequential_looks.mixture_log_e(sequential.t_statistic(values, n), n, 1.0)
            for n in range(2, 13)
        ]
        assert planned.mean() > 0.1 + (np.max(log_e, axis=0) >= math.log(20)).mean()


def test_the_chance_of_a_claim_is_the_textbook_s_conditional_power():
    """Half of the pairs are there with z = 1.2, the trend goes on: B = 1.2 x 0.7071 = 0.8485, and
    0.8485 more is expected. The chance to pass 1.96 at the end is Phi((1.6971 - 1.96) / 0.7071) =
    Phi(-0.372) = 0.355."""
    n, sd = 400, 2.0
    gain = 1.2 * sd / math.sqrt(n)
    at_end = {"more": [n], "levels": [0.05], "margin": 0.0}
    assert conditional_power(gain, sd, n, direction="different", **at_end) == pytest.approx(
        0.355, abs=0.02
    )
    # One-sided at 2.5 % the boundary is the same.
    one_sided = at_end | {"levels": [0.025]}
    assert conditional_power(gain, sd, n, direction="better", **one_sided) == pytest.approx(
        0.355, abs=0.02
    )
    # A margin of half an sd lies 10 standard errors away: not worse by it is shown, and so is
    # within it.
    wide = one_sided | {"margin": 0.5 * sd}
    assert conditional_power(gain, sd, n, direction="noninferior", **wide) == 1.0
    assert conditional_power(gain, sd, n, direction="equivalent", **wide) == 1.0
    assert conditional_power(-gain, sd, n, direction="better", **one_sided) < 0.001


def test_the_chance_of_a_claim_counts_every_later_look():
    """Against the t tests of scipy, on continuations of four pairs."""
    first = np.array([0.8, -0.1, 1.4, 0.3])
    levels, draw = (0.01, 0.03), np.random.default_rng(4)
    whole = np.concatenate(
        [np.tile(first, (4000, 1)), draw.normal(first.mean(), first.std(ddof=1), (4000, 5))], 1
    )
    passed = (two_sided(whole, 6) < levels[0]) | (two_sided(whole, 9) < levels[1])
    chance = conditional_power(
        float(first.mean()),
        float(first.std(ddof=1)),
        4,
        more=[2, 5],
        levels=levels,
        direction="different",
        margin=0.0,
    )
    assert chance == pytest.approx(passed.mean(), abs=0.03) and 0.1 < chance < 0.9
