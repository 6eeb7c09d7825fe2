"""Speed-up at matched loss from ladders of finished runs: against power laws whose gain is known,
and at the ladder's ends."""

from __future__ import annotations

import math

import numpy as np
import pytest

from efftrain_cli.compare.ladder import Rung, falling, gains, log_cost_of, not_decayed

BUDGETS = (1_000_000, 2_000_000, 4_000_000, 8_000_000)


def ladder(
    speed: float, seeds: int = 4, noise: float = 0.0, seed: int = 0, per_token: float = 6e5
) -> dict[int, dict[int, Rung]]:
    """Losses that fall with the logarithm of the budget; a method of speed s has the loss of a
    baseline with s times its budget."""
    draw = np.random.default_rng(seed)
    shared = np.random.default_rng(99).normal(0, 0.05, seeds)
    return {
        i: {
            b: Rung(
                b * per_token, 10 - 0.4 * math.log(speed * b) + shared[i] + draw.normal(0, noise)
            )
            for b in BUDGETS
        }
        for i in range(seeds)
    }


def test_a_known_speed_up_is_found_at_every_rung_inside():
    *inside, last = gains(ladder(1.0, noise=1e-9), ladder(1.5, noise=1e-9, seed=1))
    assert [gain.estimate.mean for gain in inside] == [pytest.approx(1.5, rel=1e-6)] * 3
    assert math.isnan(last.estimate.mean) and last.estimate.why.kind == "beyond"
    why = "the baseline's largest budget misses this loss in 4 of 4 seeds"
    assert last.estimate.why.text == why


def test_a_slower_method_is_open_at_the_lower_end():
    first, *inside = gains(ladder(1.0, noise=1e-9), ladder(0.8, noise=1e-9, seed=1))
    why = "the baseline's smallest budget reaches it in 4 of 4 seeds"
    assert first.estimate.why.text == why
    assert [gain.estimate.mean for gain in inside] == [pytest.approx(0.8, rel=1e-6)] * 3


def test_a_method_that_costs_more_per_token_gains_less():
    (_, gain, *_) = gains(ladder(1.0, noise=1e-9), ladder(1.5, noise=1e-9, seed=1, per_token=9e5))
    assert gain.estimate.mean == pytest.approx(1.0, rel=1e-6)


def test_the_interval_holds_the_true_gain_in_95_percent():
    held = [
        gain.estimate.low <= 1.3 <= gain.estimate.high
        for i in range(400)
        for gain in gains(ladder(1.0, 5, 0.01, 2 * i), ladder(1.3, 5, 0.01, 2 * i + 1))[1:2]
    ]
    assert len(held) == 400
    assert 0.92 <= sum(held) / len(held) <= 0.98


def test_noise_that_lets_a_loss_rise_is_pooled():
    assert falling([5.0, 4.0, 4.4, 3.0]) == [5.0, 4.2, 4.2, 3.0]
    assert falling([3.0, 4.0, 5.0]) == [4.0, 4.0, 4.0]
    rungs = {
        b: Rung(float(b), loss)
        for b, loss in zip((1, 10, 100, 1000), (5.0, 4.0, 4.4, 3.0), strict=True)
    }
    assert log_cost_of(rungs, 4.6) == pytest.approx(0.5 * math.log(10))
    assert log_cost_of(rungs, falling([4.0, 4.4])[0]) == pytest.approx(1.5 * math.log(10))
    assert log_cost_of(rungs, 3.6) == pytest.approx(2.5 * math.log(10))
    assert log_cost_of(rungs, 2.9) == math.inf and log_cost_of(rungs, 5.1) == -math.inf


def test_only_seeds_with_both_count():
    base, method = ladder(1.0), ladder(1.5, seed=1)
    del base[0]
    base[1] = {BUDGETS[0]: base[1][BUDGETS[0]]}  # one rung makes no ladder
    assert {gain.estimate.n for gain in gains(base, method)} == {2}


def test_a_schedule_that_does_not_end_with_its_budget_is_no_rung():
    assert not_decayed("cosine", None, None, 1000) is None
    assert "has no end" in not_decayed("constant", None, None, 1000)
    assert "another budget" in not_decayed("cosine", 2000, None, 1000)
