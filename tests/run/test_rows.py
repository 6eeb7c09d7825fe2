"""Rows that count, torn lines, replaced segments, formats."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from efftrain_cli.foundation.errors import DataError, RunLockedError
from efftrain_cli.run.lines import parse, sealed, split_lines
from efftrain_cli.run.lock import take_lock
from efftrain_cli.run.metrics import latest_rows, read_metrics
from efftrain_cli.run.reading import load_run
from efftrain_cli.run.small_files import read_recipe_values
from efftrain_cli.run_show import verify_run
from tests.damage import flips
from tests.fake_runs import rows_of, write_run, write_sealed


def steps_of(folder: Path) -> list[float]:
    return list(read_metrics(folder, ("step",)).frame["step"])


def damage_of(path: Path) -> list[str]:
    """What `runs verify` says is damaged, line by line."""
    try:
        verify_run(path)
    except DataError as error:
        return str(error).splitlines()
    return []


def with_lines(folder: Path, changed: dict[int, str]) -> Path:
    """A run of 101 rows, in which these lines (from 0) stand in the place of their rows."""
    path = write_run(folder, "r", 0) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    for number, line in changed.items():
        lines[number] = line
    path.write_text("\n".join(lines) + "\n")
    return path


def row(at: int, **changed: object) -> str:
    """The line of a step (from 0) of such a run."""
    return sealed(rows_of(100, 0)[at] | changed)


def test_both_readers_equal_json_on_awkward_numbers(tmp_path):
    draw = random.Random(1)
    reals = [None, 0.1 + 0.2, -0.0, 5e-324, 1.7e308]
    reals += [draw.uniform(-1, 1) * 10 ** draw.randrange(-300, 300) for _ in range(1000)]
    rows = [
        {
            "step": i,
            "segment": 0,
            "whole": draw.choice([None, draw.randrange(-(2**53), 2**53)]),
            "real": draw.choice(reals),
            "mixed": draw.choice([1, 2.5, None]),
            "late": None if i < 4000 else 0.5,
            "empty": None,
        }
        for i in range(5000)
    ]
    rows[9]["text"] = "long" * (1 << 19)
    write_sealed(tmp_path / "metrics.jsonl", rows)
    names = ["step", "whole", "real", "mixed", "late", "empty", "nowhere"]
    fast = read_metrics(tmp_path, names)
    for name in names:
        expected = [np.nan if row.get(name) is None else float(row[name]) for row in rows]
        np.testing.assert_array_equal(fast.frame[name], expected)
    assert fast.corrupt == () and latest_rows(tmp_path) == rows
    nested = sealed({"loss": math.nan, "norms": {"h.0": (1.0, math.inf)}})
    assert parse(nested.encode()) == {"loss": None, "norms": {"h.0": [1.0, None]}}


# --- damage ---------------------------------------------------------------------------------------


def test_two_hundred_flipped_bits_of_the_rows_are_all_found(tmp_path):
    """F59: whatever bit of whatever line; and every row but the damaged one is read as it was."""
    path = write_run(tmp_path, "r", 0, steps=20) / "metrics.jsonl"
    valid, expected = path.read_bytes(), latest_rows(path.parent)
    by_step = {row["step"]: row for row in expected}
    for _ in flips(path, 200, spared=1):
        rows = latest_rows(path.parent)
        assert all(by_step.get(row["step"]) == row for row in rows), "a number changed unnoticed"
        # A newline may be hit: two rows then.
        assert len(expected) - len(rows) in (0, 1, 2)
        assert read_metrics(path.parent, ("step", "loss")).corrupt
        assert any("metrics.jsonl, line" in problem for problem in damage_of(path.parent))
    path.write_bytes(valid[:-1] + b"\x0b")
    assert split_lines(path.read_bytes()).torn
    assert "ends inside a line" in damage_of(path.parent)[0]


@pytest.mark.parametrize(
    "line",
    [
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        "null",
        "\ufffd",
    ],
    ids=lambda line: line[:24],
)
def test_an_odd_row_is_named_and_left_out(tmp_path, line):
    """F62."""
    path = with_lines(tmp_path, {30: f"{line}\n{row(30)}"})
    read = read_metrics(path.parent, ("step", "loss"))
    assert list(read.frame["step"]) == list(range(101))
    assert read.corrupt == (31,)
    assert len(latest_rows(path.parent)) == 101


@pytest.mark.parametrize("cut", [2, 300])
def test_torn_last_line_costs_one_row(tmp_path, cut):
    """F30."""
    path = write_run(tmp_path, "r", 0) / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert steps_of(path.parent) == list(range(100))
    assert split_lines(path.read_bytes()).torn


def test_of_a_step_written_twice_the_later_row_counts(tmp_path):
    """A stop during the evaluation of step 40: the resumed run writes the step again, with its
    loss, first."""
    first = rows_of(40, 0)
    late = first[40] | {"segment": 1, "val_loss": 4.5}
    first[40]["val_loss"] = None
    path = write_run(tmp_path, "r", 0, rows=[*first, late, *rows_of(60, 0, segment=1, first=41)])
    columns = read_metrics(path, ["step", "val_loss", "loss", "segment"]).frame
    assert list(columns["step"]) == list(range(61))
    assert [columns[name][40] for name in ("val_loss", "segment")] == [4.5, 1]
    assert columns["loss"][40] == first[40]["loss"]
    assert latest_rows(path)[40] == late


def test_more_damage_than_the_kills_explain_is_refused(tmp_path):
    """The run was started once, so a kill may have torn one line; another is without its check."""
    path = with_lines(tmp_path, {20: "{broken", 50: json.dumps(rows_of(100, 0)[50])})
    with pytest.raises(DataError, match=r"2 lines are not rows.*line 21 is the first"):
        read_metrics(path.parent, ["step"])


def test_one_damaged_row_without_a_valid_one_is_left_out(tmp_path):
    path = write_run(tmp_path, "r", 0, rows=[])
    (path / "metrics.jsonl").write_text("{broken\n")
    assert load_run(path).notes[-1] == "1 damaged line left out"


def test_messages_quote_the_beginning_of_foreign_text(tmp_path):
    """Of a lock's owner 300 characters, of a TOML error 200."""
    path = write_run(tmp_path, "r", 0)
    lock = path / "lock"
    with take_lock(lock), pytest.raises(RunLockedError) as locked:
        lock.write_text("a" * 301)
        take_lock(lock)
    assert f"is owned by {'a' * 300}\n" in str(locked.value)
    (path / "recipe.toml").write_text(2 * f"[{'b' * 201}]\n")
    with pytest.raises(DataError) as error:
        read_recipe_values(path)
    assert "b" * 100 in str(error.value) and "b" * 200 not in str(error.value)


def test_empty_and_missing_files(tmp_path):
    path = write_run(tmp_path, "r", 0, rows=[])
    assert len(read_metrics(path, ["loss"]).frame["loss"]) == 0
    (path / "metrics.jsonl").unlink()
    found = read_metrics(path, ["loss"])
    assert (list(found.frame), len(found.frame)) == (["loss"], 0)
    assert len(read_metrics(path).frame) == 0
    assert load_run(path).notes == ("not started at step 0",)


def test_a_line_of_a_figure_has_200_points_and_keeps_its_spikes(tmp_path):
    """Of the rows of steps 0 to 499 the first point stands for steps 0 to 2, the second for 3 and
    4; step 0 has no rate."""
    spiky = ["grad_norm", "loss_ratio", "adam_sqrt_v_max"]
    spiky += ["grad_norm_h.0", "attention_logit_max_h.0"]
    smooth = ["std_kl_h.0", "residual_rms_h.0", "update_ratio_h.0", "standardization_loss"]
    rows = rows_of(499, 0, **dict.fromkeys([*spiky, *smooth], 1.0))
    rows[2] |= dict.fromkeys([*spiky, *smooth], 99.0)
    series = load_run(write_run(tmp_path, "small", 0, steps=499, rows=rows)).series
    assert len(series) == 200
    assert series[spiky].iloc[0].tolist() == [99] * 5 and series[smooth].iloc[0].tolist() == [1] * 4
    assert series[["tokens", "lr"]][:2].to_numpy().tolist() == [[0, 1e-4], [3072, 3e-4]]


def test_numbers_of_a_run_by_hand(tmp_path):
    """Three steps of 1,024 tokens of 0.05, 0.1 and 0.1 s; 2.5 bytes a token."""
    rows = rows_of(3, 0, every=1)
    losses = [6.0, 3.0, 4.0, 3.5]
    # A warmup may end at a rate that is rounded down.
    rates = [0, 1, 2 - 1e-12, 2]
    for row, loss, lr, mfu in zip(rows, losses, rates, (None, 0.3, 0.6, 0.9), strict=True):
        row |= {"val_loss": loss, "lr": lr, "mfu": mfu, "seconds": 0.1}
    rows[1]["seconds"] = 0.05
    run = load_run(write_run(tmp_path, "small", 0, steps=3, rows=rows))
    assert run.facts == pytest.approx(
        {
            "perplexity": math.exp(3.5),
            "bits per byte": 3.5 / math.log(2) / 2.5,
            "best loss": 3.0,
            "validation jumps": 1,
            "updates": 3,
            "tokens": 3072,
            "FLOPs": 3072 * 6e5,
            "training seconds": 0.15,
            "warmup tokens": 2048,
            "peak rate": 2,
            "MFU": (0.3 * 0.05 + 0.6 * 0.1 + 0.9 * 0.1) / 0.35,
        }
    )
    assert run.size == 12 * 2 * 64**2 + 64 * 512
