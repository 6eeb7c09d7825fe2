"""Runs whose numbers are known, and a comparison of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efftrain_cli.compare.comparison import Comparison, compare, read_valid_runs
from efftrain_cli.compare.engine import (
    ONE_LOOK,
    Verdict,
    answer_by_count,
    answer_by_t,
    correct,
)
from efftrain_cli.compare.inference import Estimate, ExactTest
from efftrain_cli.compare.measures import PRIMARY, Question, Value, final_loss, mean_sd
from efftrain_cli.run.names import select_runs
from tests.fake_runs import rows_of, write_run

SLW = "\n[seq_len_warmup]\nstart = 8\nsteps = 10\n"
PLD = "\n[progressive_layer_drop]\ntheta = 0.5\n"
DEAD: dict[str, Any] = {
    "steps": 30,
    "budget": 102400,
    "events": [{"event": "start"}, {"event": "diverged", "step": 30}],
}
"""Options of `write_run`: the run diverged at step 30 of 100."""


def of(*names: str, **options: object) -> Comparison:
    return compare(read_valid_runs(select_runs(names))[0], **options)  # type: ignore[arg-type]


def verdict_of(key: str, arm: str = "small-slw", base: str = "small", **options: object) -> Verdict:
    """The verdict on a measure of one recipe against another."""
    found = of(base, arm, baseline=base, **options).verdict(key, arm)
    assert found is not None
    return found


def decide(results: Sequence[Estimate | ExactTest], margin: float | None = None) -> list[Verdict]:
    """The verdicts of these tests as one family of one look."""
    question = Question(PRIMARY, "", "", "", final_loss, "difference", margin=margin)
    found = Verdict(question, "method", (), Estimate(math.nan))
    verdicts = []
    for result in results:
        if isinstance(result, ExactTest):
            verdicts.append(answer_by_count(found, result, ONE_LOOK))
        else:
            verdicts.append(answer_by_t(found, [result], ONE_LOOK))
    return correct(verdicts)


def values(comparison: Comparison, key: str, label: str) -> dict[int, Value]:
    """A group's values of a measure by seed."""
    (question,) = [each for each in comparison.questions if each.key == key]
    (group,) = [each for each in comparison.groups if each.label == label]
    return question.values(group)


def mean(comparison: Comparison, key: str, label: str) -> float | None:
    """A group's mean of a measure; None where a seed has no number."""
    return mean_sd(values(comparison, key, label).values())[0]


def scores(comparison: Comparison) -> list[Verdict]:
    """The verdicts on zero-shot scores."""
    return [found for found in comparison.verdicts if found.question.tested == "score"]


def write_pair(root: Path, seeds: int = 3) -> None:
    """Two recipes of as many seeds; the second learns 1.3 times as fast."""
    for seed in range(seeds):
        write_run(root, "small", seed)
        write_run(root, "small-slw", seed, speed=1.3, more=SLW)


def curve(
    root: Path, losses: list[float], name: str = "c", seed: int = 0, **options: object
) -> Path:
    """A run whose evaluated losses are given, one per 10 steps of 1024 tokens, 6e5 FLOPs a token
    and 0.05 s a step."""
    rows = rows_of(10 * (len(losses) - 1), seed)
    for row in rows:
        row["val_loss"] = losses[row["step"] // 10] if row["step"] % 10 == 0 else None
    return write_run(root, name, seed, steps=10 * (len(losses) - 1), rows=rows, **options)  # type: ignore[arg-type]
