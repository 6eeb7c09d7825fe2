"""Runs whose numbers are known, and a comparison of them."""

from __future__ import annotations

from pathlib import Path

from efftrain_cli.compare.comparison import Comparison, compare, read_sound
from efftrain_cli.compare.groups import select_runs
from tests.fake_runs import rows_of, write_run

SLW = "\n[seq_len_warmup]\nstart = 8\nsteps = 10\n"
PLD = "\n[progressive_layer_drop]\ntheta = 0.5\n"


def of(*names: str, **options: object) -> Comparison:
    return compare(read_sound(select_runs(names))[0], **options)  # type: ignore[arg-type]


def pair(root: Path, seeds: int = 3) -> None:
    for seed in range(seeds):
        write_run(root, "small", seed)
        write_run(root, "small-slw", seed, speed=1.3, more=SLW)


def curve(
    root: Path, losses: list[float], name: str = "c", seed: int = 0, **options: object
) -> Path:
    """A run whose evaluated losses are given, one per 10 steps of 1024 tokens, 6e5 FLOPs a token and 0.05 s a step."""
    rows = rows_of(10 * (len(losses) - 1), seed)
    for row in rows:
        row["val_loss"] = losses[row["step"] // 10] if row["step"] % 10 == 0 else None
    return write_run(root, name, seed, steps=10 * (len(losses) - 1), rows=rows, **options)  # type: ignore[arg-type]
