"""The reading side of run directories: events, recipe and origin, without owning the run.

Nothing here writes, locks or imports torch, so a run can be read while it trains, on another
machine, or half copied.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from efftrain_cli.foundation.console import printable
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.records import damaged, read_small_text
from efftrain_cli.run.lines import Values, read_lines
from efftrain_cli.run.origin import RESTORE, read_origin


class SmallFiles(NamedTuple):
    """What a run's small files say."""

    name: str
    path: Path
    recipe: Values
    """The resolved recipe, as in recipe.toml."""
    origin: Values
    events: list[Values]


def read_run(path: Path) -> SmallFiles:
    """Read a run's recipe, origin and events.

    Raises:
        DataError: a file is missing or damaged, or the directory has a format that this version
            does not read.
    """
    recipe = read_recipe_values(path)
    return SmallFiles(
        printable(path.name),
        path,
        recipe,
        cleaned(read_origin(path)),
        # Torn and damaged lines are left out.
        cleaned(read_lines(path / "events.jsonl")),
    )


def read_recipe_values(path: Path) -> Values:
    """Read the values of a run's recipe.toml as they are written there.

    Raises:
        DataError: it is missing or damaged.
    """
    file = path / "recipe.toml"
    try:
        return tomllib.loads(read_small_text(file, RESTORE))
    except FileNotFoundError:
        raise DataError(f"{path} is not a run directory: it has no recipe.toml") from None
    except (ValueError, RecursionError) as error:
        raise damaged(file, str(error)[:200], RESTORE) from None


def cleaned(value: Any) -> Any:
    """Return `value` with all control characters escaped: a run may come from anywhere, and what it
    says is printed."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): cleaned(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [cleaned(entry) for entry in value]
    return value
