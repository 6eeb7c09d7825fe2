"""Runs whose numbers are known, and a comparison of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from efftrain_cli.compare.comparison import Comparison, compare
from efftrain_cli.compare.judge import Result
from efftrain_cli.compare.sources import load_named_runs
from tests.fake_runs import write_run

SLW = "\n[seq_len_warmup]\nstart = 8\nsteps = 10\n"


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
