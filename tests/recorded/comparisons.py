"""Comparisons of made runs, one for each way in which a verdict may be reached or withheld.

Recorded are estimate and interval of the final loss and of the costs to match it, and the p-value
of the final loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from efftrain_cli.compare.comparison import Comparison, compare
from efftrain_cli.run.reading import Run
from tests.compare.runs import make_run
from tests.fake_runs import TOKENS_PER_STEP, val_loss

MEASURES = ("final_loss", "tokens_to_match", "flops_to_match", "seconds_to_match")
BUDGET = 100.0 * TOKENS_PER_STEP
DEAD: dict[str, Any] = {"steps": 30, "status": "diverged", "train.tokens": BUDGET}
"""Options of `run`: it diverged at step 30 of 100."""


def record() -> dict[str, Any]:
    """Return the judged rows of each comparison by its name, the measure and the arm."""
    return {name: judged(compare(runs)) for name, runs in COMPARISONS.items()}


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


def run(
    arm: str,
    seed: int,
    speed: float = 1.0,
    steps: int = 100,
    losses: list[float] | None = None,
    **options: Any,
) -> Run:
    """A run of 6e5 FLOPs a token that learns `speed` times as fast, evaluated every 10 steps."""
    if losses is None:
        losses = [val_loss(step, seed, speed) for step in range(0, steps + 1, 10)]
    return make_run(
        arm, seed, losses, **{"tokens": float(steps * TOKENS_PER_STEP), "flops": 6e5, **options}
    )


def small(seeds: Iterable[int], **options: Any) -> list[Run]:
    return [run("small", seed, **options) for seed in seeds]


def slw(seeds: Iterable[int], arm: str = "small-slw", **options: Any) -> list[Run]:
    """Runs of a method, 1.3 times as fast unless the options say otherwise."""
    made = {"speed": 1.3, "seq_len_warmup.start": 8, **options}
    return [run(arm, seed, **made) for seed in seeds]


def without_spread(seed: int) -> Run:
    """A run 0.125 below the baseline's of the same seed, from the first step on."""
    first, *losses = small([seed])[0].curve.val_loss
    return run("small-slw", seed, losses=[first, *(loss - 0.125 for loss in losses)])


COMPARISONS: dict[str, list[Run]] = {
    "3 pairs": small(range(3)) + slw(range(3)),
    "5 pairs": small(range(5)) + slw(range(5)),
    "10 pairs": small(range(10)) + slw(range(10)),
    "10 pairs, little difference": small(range(10)) + slw(range(10), speed=1.01),
    "one of five failed": small(range(5)) + slw([0], **DEAD) + slw(range(1, 5)),
    "one of five of the baseline failed": small([0], **DEAD) + small(range(1, 5)) + slw(range(5)),
    "three of five failed": small(range(5)) + slw(range(3), **DEAD) + slw(range(3, 5)),
    "three of five of the baseline failed": (
        small(range(3), **DEAD) + small(range(3, 5)) + slw(range(5))
    ),
    "all failed": small(range(5)) + slw(range(5), **DEAD),
    "all stuck": (
        # At the loss of token frequencies.
        small(range(5)) + [run("small-slw", i, losses=[5.9 + i / 1000] * 11) for i in range(5)]
    ),
    "one seed": small([0]) + slw([0]),
    "no spread": small(range(3)) + [without_spread(seed) for seed in range(3)],
    "no shared seeds": small(range(4)) + slw(range(10, 14)),
    "three arms": [
        *small(range(5)),
        *slw(range(5)),
        *(run("slower", i, 0.9, **{"progressive_layer_drop.theta": 0.5}) for i in range(5)),
    ],
    "pending": (
        small(range(3))
        + slw(range(3))
        + slw([3], steps=50, status="crashed", **{"train.tokens": BUDGET})
    ),
    "other budgets, equal FLOPs": small(range(3), steps=50) + slw(range(3), "long", flops=3e5),
    "other budgets": small(range(3), steps=50) + slw(range(3), "long", speed=1.0),
    "other decay": small(range(3)) + slw(range(3), **{"optim.decay_tokens": 200_000}),
    "other evaluations": (
        small(range(3), **{"eval.every": 10}) + slw(range(3), **{"eval.every": 15})
    ),
    "few evaluations": [
        *(run("base", i, losses=[6.0, 5.0, 4.0 + i / 100]) for i in range(3)),
        *(run("method", i, losses=[6.0, 3.5, 3.4 + i / 200]) for i in range(3)),
    ],
    "settings of one recipe": [
        *(replace(each, name=f"fast-{each.seed}") for each in small(range(3), lr=2)),
        *small(range(3)),
    ],
}
