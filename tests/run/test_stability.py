"""The detector of loss spikes, on recorded and made series."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path

import pytest

from efftrain_cli.run.stability import LossSpikeDetector, count_jumps

RECORDED = Path(__file__).parent.parent / "recorded"


def recorded(name: str) -> list[float | None]:
    """Losses of a recorded run: a GPT of one block at 8, or 2, sequences of 32 tokens a step."""
    with gzip.open(RECORDED / f"{name}.csv.gz", "rt", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def spikes_of(losses: Sequence[float | None]) -> list[int]:
    """The steps at which a spike is seen."""
    detector = LossSpikeDetector()
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    return [spike.step for row in rows if (spike := detector.read(row))]


def test_no_spike_is_seen_in_ten_thousand_recorded_steps_of_normal_training():
    runs = [recorded(name) for name in ("normal-8x32", "normal-2x32")]
    assert sum(map(len, runs)) == 10_000
    assert [spikes_of(losses) for losses in runs] == [[], []]


@pytest.mark.parametrize("at", [10, 100, 3_000])
@pytest.mark.parametrize("name", ["normal-8x32", "normal-2x32"])
def test_a_threefold_loss_is_noticed_at_once(name, at):
    """F24: five steps of it are one spike."""
    losses = recorded(name)
    losses[at : at + 5] = [3 * (loss or 0) for loss in losses[at : at + 5]]
    assert spikes_of(losses) == [at + 1]


@pytest.mark.parametrize(
    ("usual", "quiet", "loud"),
    [
        ([3.0, 3.1], 4.5, 4.6),  # 1.5 x 3.05 is 4.575
        ([2.5, 3.5], 7.4, 7.5),  # 3 + 6 x 1.4826 x 0.5 is 7.45
    ],
)
def test_a_spike_exceeds_half_again_and_six_deviations_of_the_median(usual, quiet, loud):
    losses: list[float | None] = usual * 150
    losses[50] = None
    losses[150] = quiet
    losses[100] = losses[200] = loud
    assert spikes_of(losses) == [101, 201]


@pytest.mark.parametrize(("known", "spikes"), [(7, []), (8, [9])])
def test_a_spike_needs_eight_losses_before_it(known, spikes):
    assert spikes_of([3.0] * known + [9.0]) == spikes


def test_a_jump_is_a_fifth_above_the_lowest_loss_so_far():
    """Above 3.6, and from the lowest of 2.0 on above 2.4."""
    assert count_jumps([3.0, 3.59, 3.61, 2.0, 2.39, 2.41, 2.5]) == 3
