"""Hold the score of one task: values with standard errors, and every item's share in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.console import perplexity


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Values, items and counts of one task."""

    values: dict[str, float]
    """Metric -> value; accuracies as fractions."""
    items: list[dict[str, Any]]
    """Per item: doc_id, doc_hash (sha256 of the item) and its share in each metric, for paired
    comparison."""
    scored: int
    """Items (for texts: documents) that were scored."""
    total: int
    """Items that the whole task has; more than `scored` under --limit."""
    protocol: str
    """Exact name of the measurement: scores of different protocols are different measurements."""
    stderr: dict[str, float | None] = field(default_factory=dict)
    """Metric -> standard error of the value; absent or None if there is no closed form."""
    requests: int = 0
    """Continuations scored or written."""
    truncated: int = 0
    """Requests whose context was cut from the left."""
    boundary_mismatches: int = 0
    """Requests whose context's tokens are not how the whole text begins."""
    left_out: tuple[str, ...] = ()
    """Items that were not scored because an answer of theirs alone is longer than the context."""
    files: tuple[Path, ...] = ()
    """Local files or folders that the items come from; () if they are the Hub's or the run's
    own."""


def without(left_out: int, context_length: int) -> str:
    """Return the part of a protocol's name about items that do not fit: without them it is another
    measurement."""
    return f" without {left_out} items that do not fit {context_length} tokens" if left_out else ""


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error s / sqrt(n); None for n = 1."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, math.sqrt(variance / n)


def perplexity_and_error(logprobs: Sequence[float]) -> tuple[float, float | None]:
    """Return exp(-mean log p) and its delta-method standard error, exp(-mean) s / sqrt(n)."""
    mean, error = mean_and_error(logprobs)
    value = perplexity(-mean)
    return value, None if error is None else value * error
