"""Measures of instability, on series whose values can be worked out by hand."""

from __future__ import annotations

import csv
import gzip
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from efftrain_cli.run.stability import (
    LossSpikeDetector,
    Spike,
)


def loss_ratios(losses: Sequence[float | None]) -> list[float | None]:
    """loss / best before it, for each loss in nats; None for the first one and where a loss is
    None."""
    best = math.inf
    ratios: list[float | None] = []
    for loss in losses:
        if loss is None:
            ratios.append(None)
            continue
        ratios.append(loss / best if best < math.inf else None)
        best = min(best, loss)
    return ratios


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


def falling(steps: int, noise: float, seed: int = 0) -> list[float]:
    """A training curve from 6 towards 2 nats with normal noise."""
    draw = random.Random(seed)
    return [2 + 4 / (1 + step / 50) ** 0.5 + draw.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("at", [10, 40, 700])
def test_a_threefold_loss_is_noticed_at_once(at):
    losses = falling(1000, 0.1)
    losses[at : at + 5] = [3 * loss for loss in losses[at : at + 5]]
    alarm = LossSpikeDetector()
    spikes = [spike for row in rows_of(losses) if (spike := alarm.read(row))]
    assert [spike.step for spike in spikes] == [at + 1]


def test_each_jump_is_one_alarm():
    losses = falling(300, 0.05)
    for at in (100, 200):
        losses[at : at + 3] = [9.0, 9.0, 9.0]
    alarm = LossSpikeDetector()
    assert [spike.step for row in rows_of(losses) if (spike := alarm.read(row))] == [101, 201]


@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_noise_alone_raises_no_alarm(noise):
    alarm = LossSpikeDetector()
    assert not any(alarm.read(row) for row in rows_of(falling(10_000, noise)))


def test_what_is_not_finite_is_passed_over():
    detector = LossSpikeDetector()
    last = [
        {"step": 51, "loss": None, "grad_norm": None, "nonfinite": True},
        {"step": 0, "val_loss": 6.0},
    ]
    for row in [*rows_of(falling(50, 0.01)), *last]:
        assert detector.read(row) is None


def test_a_spike_in_one_line():
    spike = Spike(7, 9.0, 3.0)
    assert str(spike) == "spike: step 7: loss 9.000, 3.00 times the usual 3.000"


def recorded(name: str) -> list[dict[str, object]]:
    """Rows of a recorded run: step, loss, grad_norm."""
    with gzip.open(
        Path(__file__).parent.parent / "recorded" / f"{name}.csv.gz", "rt", newline=""
    ) as file:
        return [
            {
                "step": int(row["step"]),
                "loss": float(row["loss"]),
                "grad_norm": float(row["grad_norm"]),
            }
            for row in csv.DictReader(file)
        ]


def test_no_spike_is_seen_in_ten_thousand_recorded_steps_of_normal_training():
    """A GPT of one block at 8 sequences of 32 tokens a step, and at 2, where single batches scatter
    widely."""
    steps = 0
    for name in ("normal-8x32", "normal-2x32"):
        alarm = LossSpikeDetector()
        rows = recorded(name)
        steps += len(rows)
        assert [spike for row in rows if (spike := alarm.read(row))] == []
    assert steps == 10_000


@pytest.mark.parametrize("at", [100, 3_000])
@pytest.mark.parametrize("name", ["normal-8x32", "normal-2x32"])
def test_a_spike_injected_into_a_recorded_run_is_seen_at_once(name, at):
    rows = recorded(name)
    for row in rows[at : at + 5]:
        row["loss"] = 3 * float(str(row["loss"]))
    alarm = LossSpikeDetector()
    assert [spike.step for row in rows if (spike := alarm.read(row))] == [at + 1]
