"""`efftrain runs show`: one run in a few lines, in full as tables, or as values for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.console import counted, human, human_seconds, printable, table_lines
from efftrain_cli.plan.describe import LABEL
from efftrain_cli.recipe.draft import shown_path
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.directory import checkpoints_of
from efftrain_cli.run.glance import glance, written_at
from efftrain_cli.run.lines import Values, read_file
from efftrain_cli.run.metrics import all_rows, latest_rows, to_float
from efftrain_cli.run.names import recipe_name
from efftrain_cli.run.small_files import SmallFiles, read_run
from efftrain_cli.run.stability import count_jumps, validation_curve
from efftrain_cli.run_list import size_of

PARTS = ("train", "eval", "checkpoint", "compile", "other")
"""Seconds of metrics.jsonl that the wall time of a run consists of."""


def lines_of_run(path: Path) -> list[str]:
    """Return what a run is and what came of it, each number once.

    Raises:
        DataError: a file is missing or damaged.
    """
    run = read_run(path)
    rows = latest_rows(path)
    status = glance(path).status
    when = f"{datetime.fromtimestamp(written_at(path)).astimezone():%Y-%m-%d %H:%M}"
    what = "running, last row" if status.endswith("%") else status
    lines = [f"{run.name}, {what} {when}"]
    lines += [f"{label:{LABEL}}{text}" for label, text in _facts(run, rows) if text]
    lines.append(f"{'disk':{LABEL}}{human(size_of(path), 'B')} in {shown_path(path)}")
    return lines


def _facts(run: SmallFiles, rows: Sequence[Values]) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of the lines between the first and the last."""
    yield "result", _result(run, rows)
    last = rows[-1] if rows else {}
    step = last.get("step", 0)
    resumes = sum(event.get("event") == "resume" for event in run.events)
    budget = run.recipe.get("train", {}).get("tokens")
    of_budget = ""
    if isinstance(budget, int) and last.get("tokens", 0) < budget:
        of_budget = f" of {human(budget)}"
    yield (
        "spent",
        f"{counted(step, 'step')}, {human(last.get('tokens') or 0)}{of_budget} tokens,"
        f" {human(last.get('total_flops') or 0.0, 'FLOP')}s,"
        f" {human_seconds(last.get('train_seconds') or 0.0)} on {run.origin.get('device')};"
        f" {counted(resumes, 'resume') if resumes else 'no resume'}",
    )
    yield "branch", _branch(run.origin.get("branch"), rows)
    yield "stable", _stability(rows)
    seed = run.recipe.get("seed")
    changes = _changes(run.origin.get("command"))
    yield "recipe", f"{recipe_name(run.origin, run.name)}, seed {seed}, {changes}"
    yield "text", _text(run.recipe.get("data", {}))
    damage = len(read_file(run.path / "metrics.jsonl").corrupt)
    if damage:
        yield "damage", f"{counted(damage, 'line')} of metrics.jsonl left out: `runs verify`"
    if (run.path / "zeroshot.json").exists():
        yield "scores", "in zeroshot.json"


def _branch(origin: Values | None, rows: Sequence[Values]) -> str:
    """Return where a branch began, and what it spent itself; "" for any other run."""
    if not origin:
        return ""
    step = origin["step"]
    flops = [row.get("total_flops") or 0.0 for row in rows]
    before = [row.get("total_flops") or 0.0 for row in rows if row["step"] <= step]
    own = human(max(flops, default=0.0) - max(before, default=0.0), "FLOP")
    return f"of {origin['parent']} at step {step:,}; {own}s of its own"


def _text(data: Values) -> str:
    """Return the training text and the tokenizer as the recipe names them."""
    names = [source.get("path") for source in data.get("sources", ())]
    if not names:
        text = data.get("train", "stdlib")
        names = text if isinstance(text, list) else [text]
    tokenizer = data.get("tokenizer", "gpt2")
    return printable(", ".join(map(str, [*names, tokenizer])))


def _result(run: SmallFiles, rows: Sequence[Values]) -> str:
    curve = validation_curve(rows)
    if not curve:
        return "no validation loss yet"
    step, loss = curve[-1]
    text = f"val loss {loss:.4f} nats/token"
    bytes_per_target = flatten(run.origin).get("data.valid_bytes_per_token")
    if bytes_per_target:
        text += f", {loss / math.log(2) / bytes_per_target:.2f} bits/byte"
    if step < rows[-1]["step"]:
        text += f" after step {step:,}"
    return text


def _stability(rows: Sequence[Values]) -> str:
    """Return the largest loss ratio and the number of jumps of the validation loss; "" before the
    second step."""
    ratios = [to_float(row.get("loss_ratio")) for row in rows]
    known = [ratio for ratio in ratios if math.isfinite(ratio)]
    if not known:
        return ""
    jumps = count_jumps(loss for _, loss in validation_curve(rows))
    text = f"largest loss ratio {max(known):.2f}; {counted(jumps, 'jump') if jumps else 'no jump'}"
    for row in rows:
        if row.get("nonfinite"):
            return f"{text}; not finite at step {row['step']:,}"
    return text


def _changes(command: object) -> str:
    """Return what the command line that began a run changed of its recipe."""
    words = [str(word) for word in command] if isinstance(command, list) else []
    changes = [after for word, after in pairwise(words) if word == "--set"]
    changes += [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
    return ", ".join(changes) or "no changes"


def details_of_run(path: Path) -> list[str]:
    """Return where the time of a run went, its events, recipe and origin, as lines.

    Raises:
        DataError: a file is missing or damaged.
    """
    run = read_run(path)
    lines = []
    times = [(name, human_seconds(seconds)) for name, seconds in seconds_of(path).items()]
    events = []
    for event in run.events:
        if event.get("event") != "checkpoint":
            fields = dict(event)
            time = str(fields.pop("time", None))
            kind = str(fields.pop("event", None))
            what = ", ".join(f"{key} {value}" for key, value in fields.items())
            events.append((time, kind, what))
    kept = [(checkpoint.name,) for checkpoint in checkpoints_of(path)]
    for title, header, rows in (
        ("Time", ("part", "time"), times),
        ("Events", ("time", "event", "what"), events),
        ("Checkpoints", ("kept",), kept),
        ("Recipe", ("key", "value"), _pairs(run.recipe)),
        ("Origin", ("key", "value"), _pairs(run.origin)),
    ):
        if rows:
            lines += ["", title, *table_lines(header, rows)]
    return lines


def _pairs(values: Values) -> list[tuple[str, str]]:
    return [(key, str(value)) for key, value in flatten(values).items() if value is not None]


def seconds_of(path: Path) -> dict[str, float]:
    """Return the seconds of each part of a run's wall time, replaced steps included; the last
    checkpoint's are in its event."""
    rows = all_rows(path)
    seconds = {}
    for part in PARTS:
        column = "seconds" if part == "train" else f"{part}_seconds"
        known = [row[column] for row in rows if isinstance(row.get(column), int | float)]
        if known:
            seconds[part] = math.fsum(known)
    return seconds


def values_of_run(path: Path) -> dict[str, Any]:
    """Return one run as values: seconds, tokens, nats per token, not rounded.

    Raises:
        DataError: a file is missing or damaged.
    """
    # pandas takes a second, and lines need none.
    from efftrain_cli.run.reading import load_run
    from efftrain_cli.zeroshot.results import read_results

    run = load_run(path)
    files = read_run(path)
    return {
        "name": path.name,
        "folder": str(path),
        "status": run.status,
        "notes": list(run.notes),
        "recipe_name": run.arm,
        "seed": run.seed,
        "facts": {title: float(value) for title, value in run.facts.items()},
        "curve": run.curve.to_dict("list"),
        "seconds": seconds_of(path),
        "zero_shot": read_results(path),
        "events": files.events,
        "checkpoints": [checkpoint.name for checkpoint in checkpoints_of(path)],
        "recipe": files.recipe,
        "origin": files.origin,
    }
