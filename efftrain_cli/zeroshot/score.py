"""Score one task of lm-evaluation-harness with a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import lm_eval
from lm_eval.api.metrics import mean, mean_stderr, perplexity
from lm_eval.api.task import ConfigurableTask

from efftrain_cli.foundation.errors import DataError
from efftrain_cli.zeroshot.model import HarnessModel

Sample = dict[str, Any]
"""What the harness logs of an item under one of the task's filters."""


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """A task's metrics, and every item's share in them."""

    metrics: dict[str, dict[str, float | None]]
    """Metric -> its value and standard error; None: the harness has no formula for the error."""
    items: list[Sample]
    """Per item and filter: doc_id, doc_hash (sha256 of the item) and its share in each metric."""
    total: int
    """Items that the task has; more than are scored under a limit."""
    unscored: list[int]
    """Items left out, because an answer has no tokens, or more than the context."""


def score_task(
    task: ConfigurableTask,
    model: HarnessModel,
    limit: int | None,
) -> TaskScore:
    """Score the first `limit` items of a task, or all.

    Raises:
        DataError: no item can be scored.
    """
    name = task.task_name
    model.truncated = 0
    model.boundary_mismatches = 0
    # The bootstrap takes most of a minute for an error that has a closed form.
    results = lm_eval.evaluate(
        model,
        {"tasks": {name: task}},
        limit=limit,
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    unscored = {sample["doc_id"] for sample in samples if _is_unscored(sample)}
    kept = [sample for sample in samples if sample["doc_id"] not in unscored]
    if not kept:
        raise DataError(f"{name}: no item fits {model.context_length} tokens")

    metrics = {}
    for metric, shares in _shares(kept).items():
        aggregate = task.aggregation().get(metric.split(",")[0], mean)
        metrics[metric] = {
            "value": float(aggregate(shares)),
            "stderr": _stderr(aggregate, shares),
        }
    keys = ("doc_id", "doc_hash", "filter", *kept[0]["metrics"])
    return TaskScore(
        metrics=metrics,
        items=[{key: sample[key] for key in keys} for sample in kept],
        total=len(task.eval_docs),
        unscored=sorted(unscored),
    )


def _is_unscored(sample: Sample) -> bool:
    """Return whether an answer of the item has no log-probability."""
    for first, *_ in sample["resps"]:
        if isinstance(first, tuple) and isnan(first[0]):
            return True
    return False


def _shares(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return all items' shares in each metric: "acc", or "acc,FILTER" if there are filters."""
    filters = {sample["filter"] for sample in samples}
    shares: dict[str, list[Any]] = {}
    for sample in samples:
        suffix = f",{sample['filter']}" if len(filters) > 1 else ""
        for metric in sample["metrics"]:
            of_metric = shares.setdefault(metric + suffix, [])
            of_metric.append(sample[metric])
    return shares


def _stderr(aggregate: Any, shares: list[Any]) -> float | None:
    """Return the standard error s / sqrt(n) of a mean, by the delta method of a perplexity."""
    if len(shares) < 2 or aggregate not in (mean, perplexity):
        return None
    error = float(mean_stderr(shares))
    if aggregate is mean:
        return error
    return error * float(perplexity(shares))
