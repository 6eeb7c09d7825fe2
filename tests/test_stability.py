"""Measures of instability, on series whose values can be worked out by hand."""

from __future__ import annotations

import math
import random

import pytest

from efftrain_cli.stability import SpikeAlarm, describe, loss_ratios, measure


def rows_of(losses: list[float | None], **columns: list[float]) -> list[dict[str, object]]:
    ratios = loss_ratios(losses)
    return [
        {
            "step": i + 1,
            "loss": losses[i],
            "loss_ratio": ratios[i],
            "nonfinite": losses[i] is None,
            **{name: values[i] for name, values in columns.items()},
        }
        for i in range(len(losses))
    ]


def test_loss_ratio_is_against_the_best_so_far() -> None:
    assert loss_ratios([4.0, 2.0, 3.0, None, 1.0, 1.5, math.nan, 1.0]) == [None, 0.5, 1.5, None, 0.5, 1.5, None, 1.0]


def test_counts_and_shares() -> None:
    found = measure(rows_of([4.0, 2.0, 2.4, 2.5, 3.1, 2.0, None]))
    # Ratios 0.5, 1.2 (not above), 1.25, 1.55, 1.0.
    assert (found.steps, found.above_slight, found.above_severe) == (5, 2, 1)
    assert (found.share_slight, found.share_severe) == (0.4, 0.2)
    assert (found.max_loss_ratio, found.max_loss_ratio_step) == (1.55, 5)
    assert found.first_nonfinite_step == 7
    assert "2 of 5 steps (40.0%)" in describe(found)[0]
    assert "from step 7" in describe(found)[-1]


def test_a_run_without_losses() -> None:
    found = measure([{"step": 0, "val_loss": 6.0}])
    assert (found.steps, found.share_slight, found.max_loss_ratio) == (0, 0.0, None)
    assert describe(found)


def test_correlations_are_pearson_s() -> None:
    # Worked by hand: ratios 1/2, 1, 3/2 against 1, 2, 3 (r = 1) and 3, 1, 2 (r = -1/2, p = 2/3 with one degree of freedom).
    found = measure(rows_of([4.0, 2.0, 2.0, 3.0], adam_sqrt_v_l1=[9, 1, 2, 3], adam_sqrt_v_max=[9, 3, 1, 2]))
    norm, largest = found.correlations["adam_sqrt_v_l1"], found.correlations["adam_sqrt_v_max"]
    assert norm is not None and largest is not None
    assert norm.r == pytest.approx(1)
    assert (largest.r, largest.p, largest.n) == (pytest.approx(-0.5), pytest.approx(2 / 3), 3)
    assert found.correlations["grad_norm"] is None  # no such column
    assert measure(rows_of([4.0, 2.0, 2.0, 3.0], grad_norm=[1, 1, 1, 1])).correlations["grad_norm"] is None  # constant


def falling(steps: int, noise: float, seed: int = 0) -> list[float]:
    """A training curve from 6 towards 2 nats with normal noise."""
    draw = random.Random(seed)
    return [2 + 4 / (1 + step / 50) ** 0.5 + draw.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("at", [10, 40, 700])
def test_a_threefold_loss_is_noticed_at_once(at: int) -> None:
    losses = falling(1000, 0.1)
    losses[at : at + 5] = [3 * loss for loss in losses[at : at + 5]]
    alarm = SpikeAlarm()
    spikes = [spike for row in rows_of(losses) if (spike := alarm.read(row))]
    assert [spike.step for spike in spikes] == [at + 1]


def test_each_jump_is_one_alarm() -> None:
    losses = falling(300, 0.05)
    for at in (100, 200):
        losses[at : at + 3] = [9.0, 9.0, 9.0]
    alarm = SpikeAlarm()
    assert [spike.step for row in rows_of(losses) if (spike := alarm.read(row))] == [101, 201]


@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_noise_alone_raises_no_alarm(noise: float) -> None:
    alarm = SpikeAlarm()
    assert not any(alarm.read(row) for row in rows_of(falling(10_000, noise)))
