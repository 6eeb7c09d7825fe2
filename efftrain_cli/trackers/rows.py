"""A run's rows as trackers take them: as they are written, and by grouped names."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from efftrain_cli.recipe.check import methods_in
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.run.columns import find_column
from efftrain_cli.run.lines import Values, parse, split_lines

POLL_SECONDS = 1.0
"""Seconds between two looks at a run that is followed."""
METHODS = {method.prefix or name: name for name, method in methods_in(Recipe).items()}
"""Prefix of a method's columns -> its section."""


def follow_run(run: Path) -> Iterator[Values]:
    """Yield each row that another process writes to a run, until standard input closes; damaged
    ones are left out."""
    path = run / "metrics.jsonl"
    position = 0
    closed = False
    while True:
        content = b""
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(position)
            content = file.read()
        # Only whole lines are read past: a resume cuts a torn last one off, and may write others
        # in its place.
        content = content[: content.rfind(b"\n") + 1]
        position += len(content)
        for text in split_lines(content).texts:
            row = parse(text)
            if row:
                yield row
        if closed:
            return
        closed = _is_input_closed(POLL_SECONDS)


def _is_input_closed(seconds: float) -> bool:
    """Wait for at most `seconds`; return True as soon as standard input has ended."""
    try:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return bool(ready) and not os.read(sys.stdin.fileno(), 4096)
    except (OSError, ValueError):
        time.sleep(seconds)
        return True


def series_of(name: str) -> str:
    """Return the grouped name of a column: "loss" is "train/loss", "pld_theta" "theta" of the
    method so abbreviated."""
    column = find_column(name)
    if column is not None:
        return column.series + name.removeprefix(column.name)
    prefix, _, rest = name.partition("_")
    if rest and prefix in METHODS:
        return f"{METHODS[prefix]}/{rest}"
    return f"other/{name}"


def grouped(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of metrics.jsonl under grouped names, without what is null."""
    return {series_of(column): value for column, value in row.items() if value is not None}
