"""How a run ended, by its events and its last row, of which only the ends are read.

No numpy, so that a thousand runs take a second.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.files import is_locked
from efftrain_cli.foundation.records import damaged
from efftrain_cli.run.lines import Values, newest_lines
from efftrain_cli.run.metrics import to_float
from efftrain_cli.run.origin import RESTORE
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
ENDED = ("finished", "diverged")
"""Statuses of a run that is not trained any more: a run that diverges is a result."""


def status_of(path: Path, last: Values) -> str:
    """Return the status of the run in a directory.

    It is running if a process holds it, not started before its first step, else finished, diverged
    or stopped, or crashed if neither events nor rows say how it ended.

    Args:
        last: the last row; empty if no step was logged.

    Raises:
        DataError: the recipe, which then decides, is missing or damaged.
    """
    if is_locked(path / "lock"):
        return "running"
    if not last:
        return "not started"
    end = "crashed"
    for event in newest_lines(path / "events.jsonl"):
        kind = event.get("event")
        if kind in ("start", "resume", "end", "diverged", "signal"):
            how = event.get("status") if kind == "end" else kind
            end = ENDS.get(str(how), "crashed")
            break
    if last.get("nonfinite") is True:
        return "diverged"
    if end in ENDED or math.isnan(to_float(last.get("val_loss"))):
        return end
    return "finished" if to_float(last.get("tokens")) >= budget_of(path) else end


def budget_of(path: Path) -> int:
    """Return the tokens that the recipe of a run trains.

    Raises:
        DataError: it is missing or damaged.
    """
    train: Any = read_recipe_values(path).get("train")
    tokens = train.get("tokens") if isinstance(train, dict) else None
    if not isinstance(tokens, int) or tokens < 1:
        raise damaged(path / "recipe.toml", "it has no train.tokens", RESTORE)
    return tokens
