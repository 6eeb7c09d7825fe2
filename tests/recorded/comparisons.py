"""Comparisons of made runs: estimate and interval of the final loss and of the costs to match it,
and the p-value of the final loss."""

from __future__ import annotations

import math
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from efftrain_cli.compare.comparison import Comparison
from tests.compare import made
from tests.compare.known_runs import DEAD, SLW, of, write_pair
from tests.fake_runs import rows_of, val_loss, write_run

MEASURES = ("final_loss", "tokens_to_match", "flops_to_match", "seconds_to_match")


def record() -> dict[str, Any]:
    """Return the judged rows of each comparison by its name, the measure and the arm."""
    found = {}
    for name, make in COMPARISONS.items():
        with TemporaryDirectory() as folder, patch.dict(os.environ, EFFTRAIN_RUNS=folder):
            found[name] = judged(make(Path(folder)))
    return found


def judged(comparison: Comparison) -> dict[str, Any]:
    """Return numbers and verdict of each row; None: blank."""
    rows = {}
    for row in comparison.rows:
        if row.measure not in MEASURES:
            continue
        numbers = {"estimate": row.estimate, "low": row.low, "high": row.high}
        if row.measure == "final_loss":
            numbers["p"] = row.p
        known = {name: None if math.isnan(value) else value for name, value in numbers.items()}
        rows[f"{row.measure} of {row.arm}"] = {**known, "outcome": row.verdict or None}
    return rows


def pairs(count: int, speed: float = 1.3) -> made.Make:
    """Make so many pairs, the method's runs learning `speed` times as fast."""

    def make(root: Path) -> Comparison:
        for seed in range(count):
            write_run(root, "small", seed)
            write_run(root, "small-slw", seed, speed=speed, more=SLW)
        return of("small", "small-slw")

    return make


def failures(count: int, of_baseline: int, of_method: int) -> made.Make:
    """Make so many pairs, the first runs of each side diverged."""

    def make(root: Path) -> Comparison:
        for seed in range(count):
            write_run(root, "small", seed, **(DEAD if seed < of_baseline else {}))
            options = DEAD if seed < of_method else {"speed": 1.3}
            write_run(root, "small-slw", seed, more=SLW, **options)
        return of("small", "small-slw")

    return make


def stuck(root: Path) -> Comparison:
    """The method's runs stay at the loss of token frequencies."""
    for seed in range(5):
        write_run(root, "small", seed)
        rows = rows_of(100, seed)
        for row in rows:
            if row["val_loss"] is not None:
                row["val_loss"] = 5.9 + seed / 1000
        write_run(root, "small-slw", seed, rows=rows, more=SLW)
    return of("small", "small-slw")


def without_spread(root: Path) -> Comparison:
    """Every pair of runs differs by the same amount."""
    for seed in range(3):
        write_run(root, "small", seed)
        rows = rows_of(100, seed)
        for row in rows:
            if row["val_loss"] is not None and row["step"]:
                row["val_loss"] = val_loss(row["step"], seed, 1.0) - 0.125
        write_run(root, "small-slw", seed, rows=rows, more=SLW)
    return of("small", "small-slw")


def unshared(root: Path) -> Comparison:
    for seed in range(4):
        write_run(root, "small", seed)
        write_run(root, "small-slw", seed + 10, speed=1.3, more=SLW)
    return of("small", "small-slw")


def three_arms(root: Path) -> Comparison:
    write_pair(root, 5)
    for seed in range(5):
        write_run(root, "slower", seed, speed=0.9, more="\n[progressive_layer_drop]\ntheta = 0.5\n")
    return of("small", "small-slw", "slower", baseline="small")


COMPARISONS: dict[str, made.Make] = {
    "3 pairs": pairs(3),
    "5 pairs": pairs(5),
    "10 pairs": pairs(10),
    "10 pairs, little difference": pairs(10, speed=1.01),
    "one of five failed": failures(5, 0, 1),
    "one of five of the baseline failed": failures(5, 1, 0),
    "three of five failed": failures(5, 0, 3),
    "three of five of the baseline failed": failures(5, 3, 0),
    "all failed": failures(5, 0, 5),
    "all stuck": stuck,
    "one seed": pairs(1),
    "no spread": without_spread,
    "no shared seeds": unshared,
    "three arms": three_arms,
    "pending": made.pending,
    "other budgets, equal FLOPs": made.longer,
    "other budgets": made.much_longer,
    "other decay": made.half_decayed,
    "other evaluations": made.other_evaluations,
    "few evaluations": made.sparse,
    "settings of one recipe": made.settings,
}
