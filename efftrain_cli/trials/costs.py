"""What the runs of a sweep or study still cost: tokens, time and disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from efftrain_cli.foundation.console import human_bytes, human_count, human_seconds
from efftrain_cli.foundation.files import free_bytes
from efftrain_cli.plan.cost import disk_bytes
from efftrain_cli.run.directory import runs_root
from efftrain_cli.run.rates import seconds_left
from efftrain_cli.trials.runner import tokens_so_far
from efftrain_cli.trials.trial import ENDED, Trial, recipe_of

Costs = Sequence[Mapping[str, Any]]
"""Runs with their `state` and `needs_of`."""


def needs_of(trial: Trial, state: str) -> dict[str, Any]:
    """Return what a trial in this state still needs: tokens, seconds (None if nothing was measured
    here), and bytes of disk."""
    recipe = recipe_of(trial)
    left = needed = 0
    if state not in ENDED:
        needed = disk_bytes(recipe)
        left = max(0, recipe.train.tokens - tokens_so_far(trial.name))
    return {
        "tokens_left": left,
        "seconds_left": seconds_left(recipe, left),
        "disk_bytes": needed,
    }


def total_of(rows: Costs) -> dict[str, Any]:
    """Return what runs need together; unknown seconds of one make the sum unknown."""
    totals: dict[str, Any] = {
        "runs": len(rows),
        "done": sum(row["state"] in ENDED for row in rows),
    }
    for key in ("tokens_left", "seconds_left", "disk_bytes"):
        values = [row[key] for row in rows]
        totals[key] = None if None in values else sum(values)
    return totals


def total_lines(rows: Costs, jobs: int) -> list[str]:
    """Say what runs need together, one run after the other, and whether their disk has room."""
    total = total_of(rows)
    left = total["runs"] - total["done"]
    if not left:
        return [f"0 of {len(rows)} runs to train"]
    line = (
        f"{left} of {len(rows)} runs to train, at most {human_count(total['tokens_left'])} tokens"
    )
    if total["seconds_left"] is None:
        line += "; time unknown: nothing was measured here yet"
    else:
        line += f", about {human_seconds(total['seconds_left'])} one run after the other, "
        line += "by the nearest measurements here, scaled by FLOPs"
    if jobs > 1:
        line += f"; --jobs {jobs} divides the processor among as many runs"
    needed = total["disk_bytes"]
    free = free_bytes(runs_root())
    lines = [line, f"disk: {human_bytes(needed)} needed at most, {human_bytes(free)} free"]
    if needed > free:
        fix = "lower checkpoint.keep, or set EFFTRAIN_RUNS to another disk"
        lines.append(f"warning: that does not fit; {fix}")
    return lines
