"""Runs whose numbers are known, and a comparison of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from efftrain_cli.compare.comparison import Comparison, compare
from efftrain_cli.compare.judge import Result
from efftrain_cli.compare.sources import load_named_runs
from tests.fake_runs import rows_of, write_run

SLW = "\n[seq_len_warmup]\nstart = 8\nsteps = 10\n"
DEAD: dict[str, Any] = {
    "steps": 30,
    "budget": 102400,
    "events": [{"event": "start"}, {"event": "diverged", "step": 30}],
}
"""Options of `write_run`: the run diverged at step 30 of 100."""


def of(*names: str, **options: Any) -> Comparison:
    """The comparison of these runs of the folder of all runs."""
    return compare(load_named_runs(names)[0], **options)


def row_of(comparison: Comparison, measure: str = "final_loss", arm: str = "small-slw") -> Result:
    """The row of a measure and arm."""
    (row,) = [row for row in comparison.rows if row.key == (measure, arm)]
    return row


def write_pair(root: Path, seeds: int = 3) -> None:
    """Two recipes of as many seeds; the second learns 1.3 times as fast."""
    for seed in range(seeds):
        write_run(root, "small", seed)
        write_run(root, "small-slw", seed, speed=1.3, more=SLW)


def curve(root: Path, losses: list[float], name: str = "c", seed: int = 0, **options: Any) -> Path:
    """A run whose evaluated losses are given, one per 10 steps of 1024 tokens, 6e5 FLOPs a token
    and 0.05 s a step."""
    rows = rows_of(10 * (len(losses) - 1), seed)
    for row in rows:
        row["val_loss"] = losses[row["step"] // 10] if row["step"] % 10 == 0 else None
    return write_run(root, name, seed, steps=10 * (len(losses) - 1), rows=rows, **options)
