"""`efftrain runs show`: one run in full."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from efftrain_cli.compare.groups import shown
from efftrain_cli.compare.measures import Costs, duration, human, measures
from efftrain_cli.compare.reading import RunNumbers, read_numbers
from efftrain_cli.compare.tables import Table, number_text
from efftrain_cli.run.directory import checkpoints_of
from efftrain_cli.run.rows import RunDirectory, read_run

SITE_POINTS = 6
"""Points of training at which the divergence of each site is shown."""


def tables_of_run(path: Path) -> list[Table]:
    """Status, measures, time, zero-shot scores, events, checkpoints, recipe and origin of a run, as tables.

    Raises:
        DataError: a file is missing or damaged.
    """
    small = read_run(path)
    tables = [Table(path.name, ("", ""), (("status", "not started"),))]
    if (path / "metrics.jsonl").exists():
        run = read_numbers(path)
        tables = [_status(path, run), _measures(run), _time(run), *_sites(run), *_zero_shot(run)]
        small = replace(small, recipe=run.recipe)
    return [*tables, *_small_files(small)]


def values_of_run(path: Path) -> dict[str, Any]:
    """What `tables_of_run` shows, as values for other programs: seconds, tokens, nats per token and shares in percent,
    not rounded. A measure that does not exist is left out; a run without rows has no measures.

    Raises:
        DataError: a file is missing or damaged.
    """
    small = read_run(path)
    values: dict[str, Any] = {"name": path.name, "folder": str(path), "status": "not started"}
    if (path / "metrics.jsonl").exists():
        run = read_numbers(path)
        questions = measures(Costs(), True, {}, None, several=False)
        measured = {question.key: question.read(run) for question in questions}
        values |= {
            "status": run.status,
            "marks": [mark.text for mark in run.marks],
            "recipe_name": run.recipe_name,
            "seed": run.seed,
            "steps": run.step,
            "tokens": run.tokens,
            "measures": {
                key: value
                for key, value in measured.items()
                if isinstance(value, float) and math.isfinite(value)
            },
            "seconds": run.all_seconds,
            "zero_shot": [
                dict(zip(("task", "protocol", "limit"), result.key, strict=True))
                | {"checkpoint": result.checkpoint, "metrics": result.metrics}
                for result in run.zero_shot
            ],
        }
    return values | {
        "events": small.events,
        "checkpoints": [checkpoint.name for checkpoint in checkpoints_of(path)],
        "recipe": small.recipe,
        "origin": small.origin,
    }


def _status(path: Path, run: RunNumbers) -> Table:
    budget = run.recipe.get("train.tokens")
    rows = [
        ("status", run.status),
        ("marks", "; ".join(mark.text for mark in run.marks) or "-"),
        ("recipe", run.recipe_name),
        ("seed", str(run.seed)),
        ("steps", str(run.step)),
        ("tokens", f"{human(run.tokens)} of {human(budget)}" if budget else human(run.tokens)),
        ("folder", str(path)),
    ]
    return Table(run.name, ("", ""), tuple(rows))


def _measures(run: RunNumbers) -> Table:
    with_bits = bool((run.origin.get("data") or {}).get("valid_bytes_per_token"))
    rows = []
    for measure in measures(Costs(), with_bits, {}, None, several=False):
        value = measure.read(run)
        text = number_text(measure, value) if isinstance(value, float) else value.text
        section = "" if measure.section != "Validation loss" else "validation loss, "
        rows.append(
            (f"{section}{measure.title}{f', {measure.unit}' if measure.unit else ''}", text)
        )
    return Table("Measures", ("", ""), tuple(rows))


def _time(run: RunNumbers) -> Table:
    parts = {"training": run.seconds}
    parts |= {name.removesuffix("_seconds"): value for name, value in run.other_seconds.items()}
    named = sum(parts.values())
    total = max(named, run.wall_seconds or 0.0)
    parts["other"] = total - named
    rows = [
        (name, duration(value), f"{100 * value / total:.1f} %" if total else "-")
        for name, value in parts.items()
    ]
    return Table("Time", ("", "time", "share"), (*rows, ("wall", duration(total), "")))


def _sites(run: RunNumbers) -> list[Table]:
    """The standardization loss of each site at a few points of training, nats per channel."""
    longest = max((series.tokens for series in run.sites.values()), key=len, default=None)
    if longest is None:
        return []
    at = longest[np.unique(np.linspace(0, len(longest) - 1, SITE_POINTS).round().astype(int))]
    rows = []
    for site, series in run.sites.items():
        values = dict(zip(series.tokens.tolist(), series.values.tolist(), strict=True))
        rows.append(
            (
                site,
                *(f"{values[tokens]:.3g}" if tokens in values else "-" for tokens in at.tolist()),
            )
        )
    head = ("after tokens", *map(human, at))
    return [Table("Divergence from N(0, 1) by site, nats per channel", head, tuple(rows))]


def _zero_shot(run: RunNumbers) -> list[Table]:
    rows = [
        (task, protocol, limit or "all", metric, f"{value:.4g}", result.checkpoint)
        for result in run.zero_shot
        for task, protocol, limit in [result.key]
        for metric, value in result.metrics.items()
    ]
    head = ("task", "protocol", "items", "metric", "score", "checkpoint")
    return [Table("Zero-shot", head, tuple(rows))] if rows else []


def _small_files(run: RunDirectory) -> list[Table]:
    from efftrain_cli.recipe.toml import flatten

    events = []
    for event in run.events:
        if event.get("event") != "checkpoint":
            what = ", ".join(
                f"{key} {_text(value)}"
                for key, value in event.items()
                if key not in ("time", "event")
            )
            events.append((str(event.get("time", "-")), str(event.get("event")), what))
    checkpoints = ", ".join(checkpoint.name for checkpoint in checkpoints_of(run.path))
    command = run.origin.get("command")
    words = shlex.join(map(str, command)) if isinstance(command, list) else str(command or "-")
    origin = [
        ("command", words),
        *((k, _text(v)) for k, v in flatten(run.origin).items() if k != "command"),
    ]
    recipe = tuple((key, shown(value)) for key, value in flatten(run.recipe).items())
    return [
        *([Table("Events", ("time", "event", "what"), tuple(events))] if events else []),
        Table("Checkpoints", ("", ""), (("kept", checkpoints or "none"),)),
        Table("Recipe", ("key", "value"), recipe),
        Table("Origin", ("", ""), tuple(origin)),
    ]


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)
