"""The frame of a comparison: its columns, its rows, and that every format for programs prints the
same."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest

import efftrain_cli as efftrain
from efftrain_cli.compare.frames import as_json, comma_separated, frame_of
from tests.compare.known_runs import SLW, curve, of

COLUMNS = (
    "section measure unit arm baseline seeds values mean sd estimate low high p p_holm verdict"
    " reason kind"
)


@pytest.fixture
def two(root: Path) -> Path:
    """Final losses 3.0, 3.1, 3.2 against 2.9, 3.0, 3.3; one seed less is shared."""
    for seed, (a, b) in enumerate([(3.0, 2.9), (3.1, 3.0), (3.2, 3.3)]):
        curve(root, [6.0, 4.0, a], "base", seed)
        curve(root, [6.0, 4.0, b], "method", seed, more=SLW)
    return root


def test_a_row_per_measure_and_arm(two):
    frame = efftrain.comparison("base", "method")
    assert list(frame) == COLUMNS.split()
    base, method = (row for _, row in frame[frame.measure == "final_loss"].iterrows())
    assert (base.arm, base.baseline, base.seeds, base["values"]) == (
        "base",
        True,
        [0, 1, 2],
        [3.0, 3.1, 3.2],
    )
    assert (base["mean"], base.sd) == pytest.approx((3.1, 0.1))
    assert pd.isna(base.verdict) and pd.isna(base.estimate)
    # Differences -0.1, -0.1 and 0.1.
    assert method.estimate == pytest.approx(-0.1 / 3) and method.verdict == "undecided"
    assert pd.isna(method.reason)
    seconds = frame[(frame.measure == "seconds_to_match") & (frame.arm == "method")].iloc[0]
    assert seconds["values"] == [] and pd.isna(seconds.verdict) and seconds.kind == "not_judged"
    assert seconds.reason.startswith("not judged: by these machines' clocks")


def test_a_missing_number_is_its_reason(two):
    frame = efftrain.comparison("base", "method", target_loss=3.05)
    row = frame[(frame.measure == "tokens_to_target") & (frame.arm == "base")].iloc[0]
    assert row["values"][1:] == ["not reached", "not reached"] and pd.isna(row["mean"])


def test_the_budget_of_final_losses_is_named_in_python_too(two):
    frame = efftrain.comparison("base", "method", equal="flops")
    pd.testing.assert_frame_equal(frame, frame_of(of("base", "method", equal="flops")))


def test_csv_and_json_print_the_frame(two):
    frame, comparison = efftrain.comparison("base", "method"), of("base", "method")
    table = pd.read_csv(io.StringIO(comma_separated(comparison)))
    for name in ("mean", "sd", "estimate", "low", "high", "p", "p_holm"):
        assert table[name].to_list() == pytest.approx(
            frame[name].astype(float).to_list(), nan_ok=True
        )
    assert list(table.recipe) == list(frame.arm)
    rows = json.loads(json.dumps(as_json(comparison)["rows"], allow_nan=False))
    for row, (_, expected) in zip(rows, frame.iterrows(), strict=True):
        for name in COLUMNS.split():
            missing = row[name] is None and pd.isna(expected[name])
            assert missing or row[name] == expected[name], name
