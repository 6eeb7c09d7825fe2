"""`efftrain runs show`, `checkpoints` and `verify`: one run in a few lines or as values, what it
saved, and what of it is damaged."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.console import counted, human, human_seconds, printable
from efftrain_cli.foundation.errors import CheckpointError, DataError, EfftrainError
from efftrain_cli.foundation.records import read_record
from efftrain_cli.plan.describe import LABEL
from efftrain_cli.recipe.draft import shown_path
from efftrain_cli.run.directory import checkpoints_of
from efftrain_cli.run.lines import read_file
from efftrain_cli.run.manifest import verify_checkpoint
from efftrain_cli.run.metrics import all_rows
from efftrain_cli.run.origin import read_origin
from efftrain_cli.run.reading import Run, load_run
from efftrain_cli.run.small_files import read_recipe_values, read_run
from efftrain_cli.run_list import size_of, written_at
from efftrain_cli.study.registration import Registration
from efftrain_cli.zeroshot.results import read_results

PARTS = {
    "train": "seconds",
    "eval": "eval_seconds",
    "checkpoint": "checkpoint_seconds",
    "compile": "compile_seconds",
    "other": "other_seconds",
}
"""Part of a run's wall time -> its column in metrics.jsonl."""


def lines_of_run(path: Path) -> list[str]:
    """Return what a run is and what came of it, each number once.

    Raises:
        DataError: a file is missing or damaged.
    """
    run = load_run(path)
    when = f"{datetime.fromtimestamp(written_at(path)).astimezone():%Y-%m-%d %H:%M}"
    what = "running, last row" if run.status == "running" else run.status
    lines = [f"{run.name}, {what} {when}"]
    lines += [f"{label:{LABEL}}{text}" for label, text in _facts(run) if text]
    if (path / "zeroshot.json").exists():
        lines.append(f"{'scores':{LABEL}}in zeroshot.json")
    lines.append(f"{'disk':{LABEL}}{human(size_of(path), 'B')} in {shown_path(path)}")
    return lines


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of the lines between the first and the last."""
    facts = run.facts
    yield "result", _result(run)
    if facts:
        tokens = human(facts["tokens"])
        if facts["tokens"] < run.budget:
            tokens += f" of {human(run.budget)}"
        yield (
            "spent",
            f"{counted(int(facts['updates']), 'step')}, {tokens} tokens,"
            f" {human(facts['FLOPs'], 'FLOP')}s, {human_seconds(facts['training seconds'])}"
            f" on {run.conditions.get('device')}",
        )
    parent = run.conditions.get("branch.parent")
    if facts and parent is not None:
        own = human(facts["FLOPs of the branch"], "FLOP")
        yield "branch", f"of {parent} at step {run.conditions['branch.step']}; {own}s of its own"
    if "loss_ratio" in run.series:
        jumps = counted(int(facts.get("validation jumps", 0)), "jump")
        yield "stable", f"largest loss ratio {run.series['loss_ratio'].max():.2f}; {jumps}"
    yield "recipe", f"{run.arm}, seed {run.seed}, {_changes(run.conditions.get('command'))}"
    yield "text", _text(run.settings)
    # The status is in the first line.
    yield "notes", "; ".join(note for note in run.notes if not note.startswith(run.status))


def _result(run: Run) -> str:
    if run.curve.empty:
        return "no validation loss yet"
    text = f"val loss {run.spent('val_loss'):.4f} nats/token"
    bits = run.facts.get("bits per byte", math.nan)
    if not math.isnan(bits):
        text += f", {bits:.2f} bits/byte"
    if run.spent("step") < run.facts.get("updates", 0):
        text += f" after step {run.spent('step'):,.0f}"
    return text


def _text(settings: Mapping[str, Any]) -> str:
    """Return the training text and the tokenizer as the recipe names them."""
    names = [source.get("path") for source in settings.get("data.sources", ())]
    if not names:
        text = settings.get("data.train", "stdlib")
        names = text if isinstance(text, list) else [text]
    tokenizer = settings.get("data.tokenizer", "gpt2")
    return printable(", ".join(map(str, [*names, tokenizer])))


def _changes(command: object) -> str:
    """Return what the command line that began a run changed of its recipe."""
    words = [str(word) for word in command] if isinstance(command, list) else []
    changes = [after for word, after in pairwise(words) if word == "--set"]
    changes += [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
    return ", ".join(changes) or "no changes"


def seconds_of(path: Path) -> dict[str, float]:
    """Return the seconds of each part of a run's wall time, replaced steps included; the last
    checkpoint's are in its event."""
    rows = all_rows(path)
    seconds = {}
    for part, column in PARTS.items():
        known = [row[column] for row in rows if isinstance(row.get(column), int | float)]
        if known:
            seconds[part] = math.fsum(known)
    return seconds


def values_of_run(path: Path) -> dict[str, Any]:
    """Return one run as values: seconds, tokens, nats per token, not rounded.

    Raises:
        DataError: a file is missing or damaged.
    """
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


# --- checkpoints ----------------------------------------------------------------------------------


def describe_checkpoints(run: Path) -> list[str]:
    """Return a line for each checkpoint of a run, oldest first, and for what lies among them."""
    lines = []
    checkpoints = checkpoints_of(run)
    for path in checkpoints:
        # A run that trains may just have removed it.
        with contextlib.suppress(FileNotFoundError):
            written = datetime.fromtimestamp(path.stat().st_mtime).astimezone()
            size = human(size_of(path), "B")
            lines.append(f"{path.name}  {size:>9}  {written:%Y-%m-%d %H:%M:%S}")
    others = set((run / "checkpoints").glob("*")) - set(checkpoints)
    lines += [f"{'no checkpoint':<15}  {path}" for path in sorted(others)]
    return lines or [f"run {run.name!r} has no checkpoint yet"]


# --- damage ---------------------------------------------------------------------------------------


def verify_run(path: Path) -> str:
    """Read the small files of a run or study, and compare rows, events and checkpoints with their
    check values; return the counts of valid ones in words.

    Raises:
        DataError: a line or file is damaged; the message names each.
    """
    problems = []
    readers: dict[str, Callable[[Path], object]] = {
        "recipe.toml": read_recipe_values,
        "origin.json": read_origin,
        "plan.json": lambda path: read_record(path / "plan.json", Registration),
        "zeroshot.json": read_results,
    }
    for name, read in readers.items():
        try:
            if (path / name).exists():
                read(path)
        except EfftrainError as error:
            problems.append(str(error))
    checkpoints = checkpoints_of(path)
    for checkpoint in checkpoints:
        try:
            verify_checkpoint(checkpoint)
        except CheckpointError as error:
            problems.append(str(error))
    counts = []
    for name, noun in (("metrics.jsonl", "row"), ("events.jsonl", "event")):
        file = path / name
        try:
            lines = read_file(file)
        except OSError as error:
            problems.append(f"{file} cannot be read: {error.strerror}")
        else:
            for number in lines.corrupt:
                problems.append(f"{file}, line {number}: it does not match its check value")
            if lines.torn:
                problems.append(
                    f"{file} ends inside a line, which is left out:"
                    " the run was killed, or is writing now"
                )
            counts.append(counted(len(lines.texts), noun))
    if problems:
        raise DataError("\n".join(problems))
    counts.append(counted(len(checkpoints), "checkpoint"))
    return f"{path.name}: {', '.join(counts)}: no damage"
