"""What a line of `runs list` says of a run: by origin.json, the last event and the last row alone.

No numpy, and no file is read whole but origin.json, so that a thousand runs take a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.console import counted, printable
from efftrain_cli.foundation.errors import EfftrainError
from efftrain_cli.foundation.files import is_locked
from efftrain_cli.foundation.records import damaged
from efftrain_cli.run.lines import Values, last_lines
from efftrain_cli.run.names import RunGroup
from efftrain_cli.run.origin import RESTORE, read_origin
from efftrain_cli.run.small_files import read_recipe_values

ENDS = {
    "finished": "finished",
    "diverged": "diverged",
    "unsound": "diverged",
    "paused": "stopped",
    "stopped": "stopped",
    "signal": "stopped",
}
"""How a run ended, by its last event -> its status; any other end is a crash."""


@dataclass(frozen=True, kw_only=True)
class Glance:
    """A run at a glance."""

    name: str
    status: str
    """"finished", "54 %" (running), "stopped", "diverged", "crashed", "not started" or
    "unreadable"."""
    tokens: int = 0
    val_loss: float | None = None
    """Last validation loss among the last rows, nats per token."""
    written: float
    """When a row was last written, seconds since the epoch."""
    problem: str = ""
    """Why it cannot be read."""
    is_group: bool = False
    """The line of a study, race, sweep or search."""


def glance(path: Path) -> Glance:
    """Look at the run in a directory."""
    written = written_at(path)
    try:
        read_origin(path)
        metrics = path / "metrics.jsonl"
        rows = last_lines(metrics)
        if not rows and metrics.exists() and metrics.stat().st_size:
            raise damaged(metrics, "none of its last lines is whole", RESTORE)
        row = rows[-1] if rows else {}
        status = _status(path, row)
    except Exception as error:  # one run that nobody can read must not hide the others
        return Glance(
            name=printable(path.name),
            status="unreadable",
            written=written,
            problem=fault_of(path, error),
        )
    losses = [row["val_loss"] for row in rows if _is_number(row.get("val_loss"))]
    return Glance(
        name=printable(path.name),
        status=status,
        tokens=_tokens(row),
        val_loss=losses[-1] if losses else None,
        written=written,
    )


def fault_of(path: Path, error: Exception) -> str:
    """Return why a run cannot be read, in printable lines."""
    fault = str(error) if isinstance(error, EfftrainError) else f"{path}: {error!r}"
    return "\n".join(map(printable, fault.split("\n")))


def glance_at_group(root: Path, group: RunGroup, written: float) -> Glance:
    """Look at a study, race, sweep or search: how many of its runs have ended."""
    statuses = [glance(root / run).status for run in group.runs]
    ended = sum(status in ("finished", "diverged") for status in statuses)
    status = f"{group.kind}, {ended} of {counted(len(statuses), 'run')}"
    return Glance(
        name=group.name,
        status=status,
        written=written,
        is_group=True,
    )


def written_at(path: Path) -> float:
    """Return when a run was last written to, seconds since the epoch; 0 if it has gone."""
    for name in ("metrics.jsonl", "recipe.toml"):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _status(path: Path, row: Values) -> str:
    if is_locked(path / "lock"):
        return f"{100 * min(1.0, _tokens(row) / _budget(path)):.0f} %"
    events = last_lines(path / "events.jsonl")
    return status_of(events, row, lambda: _budget(path))


def status_of(
    events: Sequence[Values],
    last: Values,
    budget: Callable[[], float],
) -> str:
    """Return how a run that no process holds ended, by its events and its last row; crashed if
    neither says so.

    Args:
        last: empty if no step was logged.
        budget: gives the tokens that the run trains, if that decides.
    """
    if not last:
        return "not started"
    end = "crashed"
    for event in events:
        match event.get("event"):
            case "start" | "resume":
                end = "crashed"
            case "end":
                end = ENDS.get(str(event.get("status")), "crashed")
            case "diverged" | "signal" as kind:
                end = ENDS[kind]
    if (last.get("nonfinite") or 0) > 0:
        return "diverged"
    if end in ("finished", "diverged"):
        return end
    loss = last.get("val_loss")
    is_evaluated = loss is not None and math.isfinite(loss)
    return "finished" if is_evaluated and _tokens(last) >= budget() else end


def _tokens(row: Values) -> int:
    """Return the tokens of a row; 0 if it does not say."""
    return int(row["tokens"]) if _is_number(row.get("tokens")) else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e30


def _budget(path: Path) -> int:
    """Return the tokens that the recipe of a run trains.

    Raises:
        DataError: it is missing or damaged.
    """
    train: Any = read_recipe_values(path).get("train")
    tokens = train.get("tokens") if isinstance(train, dict) else None
    if not isinstance(tokens, int) or tokens < 1:
        raise damaged(path / "recipe.toml", "it has no train.tokens", RESTORE)
    return tokens
