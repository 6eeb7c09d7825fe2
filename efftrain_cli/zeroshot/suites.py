"""The tasks, the one metric that counts for each, and the suites that are averaged, as tasks.toml
lists them.

Nothing here imports torch or lm_eval.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from efftrain_cli.foundation.errors import UsageError, nearest


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task and the meaning of its score."""

    name: str
    metric: str
    """The metric that is reported first and enters means."""
    metrics: Sequence[str]
    """All metrics that are kept."""
    chance: float | None = None
    """Score of guessing, as a fraction; None if guessing scores nothing or the metric is a
    perplexity."""
    definition: str | None = None
    """File of the definition inside lm_eval/tasks; None for our own tasks."""
    hub: str | None = None
    """Dataset on the Hugging Face Hub, "owner/name"."""
    file: str | None = None
    """Name of its file in a --data-dir."""
    form: dict[str, str] = field(default_factory=dict)
    """Fields of a line of that file and their kinds. "choice" is an index into the line's texts."""
    local: dict[str, str] = field(default_factory=dict)
    """What replaces the definition's settings for that file; {} if its fields are those of the
    Hub."""
    same_as_hub: bool = False
    """Whether prompts from that file equal those from the Hub, so that scores share a protocol.
    Otherwise they differ in small ways (docs/zeroshot.md), and the protocol's name carries
    "local"."""
    items_of: str | None = None
    """The task whose items our own task reads."""


_TABLES = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text("utf-8"))
TASKS: dict[str, Task] = {
    name: Task(name=name, **settings) for name, settings in _TABLES["tasks"].items()
}
SUITES: dict[str, list[str]] = _TABLES["suites"]
AVERAGED = ("slw-11", "gpt3")
"""Suites with an unweighted mean over their tasks' own metrics; the others mix accuracies and
perplexities."""


def task_names(wanted: Iterable[str]) -> list[str]:
    """Return the tasks that names of tasks and suites stand for, each once, in the order given.

    Raises:
        UsageError: names that are neither, each with the nearest ones.
    """
    found: dict[str, None] = {}
    unknown = []
    for name in wanted:
        if name in SUITES or name in TASKS:
            found |= dict.fromkeys(SUITES.get(name, (name,)))
        else:
            hint = nearest(name, [*SUITES, *TASKS], cutoff=0.4)
            unknown.append(f"{name!r} ({hint})" if hint else repr(name))
    if unknown:
        raise UsageError(
            f"unknown task {', '.join(unknown)}."
            f" Suites: {', '.join(SUITES)}. Tasks: {', '.join(TASKS)}"
        )
    return list(found)


def suite_mean(suite: str, scores: dict[str, float]) -> float:
    """Return the unweighted mean of the suite's tasks.

    Args:
        scores: the value of each task's own metric.

    Raises:
        ValueError: the suite is not averaged, or a task is missing: a mean over fewer tasks is
            another number.
    """
    if suite not in AVERAGED:
        raise ValueError(f"{suite} mixes accuracies and perplexities and has no mean")
    missing = [name for name in SUITES[suite] if name not in scores]
    if missing:
        raise ValueError(f"no mean of {suite}: {', '.join(missing)} missing")
    return sum(scores[name] for name in SUITES[suite]) / len(SUITES[suite])
