"""Reduce a run directory to the numbers that a comparison needs, a few hundred kilobytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.why import Why
from efftrain_cli.methods.standardization_loss import StandardizationLoss
from efftrain_cli.optim.facts import OPTIMIZERS
from efftrain_cli.recipe.recipe import with_defaults
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.columns import COLUMNS, find_column
from efftrain_cli.run.metrics import Metrics, read_metrics
from efftrain_cli.run.names import recipe_name
from efftrain_cli.run.small_files import SmallFiles, read_run
from efftrain_cli.run.stability import Stability, measure
from efftrain_cli.zeroshot.results import ITEMS, key_of, read_items, read_results

if TYPE_CHECKING:
    from efftrain_cli.run.metrics import Columns

READ = tuple(
    column.name for column in COLUMNS if column.compared or (column.title and not column.by)
)
"""Columns that every run is read with: their names do not depend on the recipe."""
SITE = "std_kl_"
"""Prefix of the columns of the standardization loss; the site follows, such as "h.0.mlp.c_fc"."""
POINTS = 200
"""Most points of a figure's curve.

Of more steps it keeps the extreme of each stretch, or evenly spread ones.
"""
AXES = {"tokens": "tokens", "flops": "total_flops", "seconds": "train_seconds"}
"""Cost against which a loss is plotted and compared -> its column."""


@dataclass(frozen=True)
class Series:
    """A per-step quantity, thinned to at most POINTS points for plotting."""

    tokens: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class ZeroShot:
    """One metric of one result of zeroshot.json."""

    key: tuple[str, str, str, str]
    """Task, protocol, limit ("" for none) and metric: only equal ones may be compared."""
    score: float
    checkpoint: str
    """Name of the checkpoint that was evaluated."""
    tokens: float | None = None
    """Tokens trained at that checkpoint; None if its step is not in metrics.jsonl."""
    items: Mapping[str, float] = field(default_factory=dict)
    """Score by item; empty if the scores of items were not kept."""


@dataclass(frozen=True)
class RunNumbers:
    """The numbers of one run that `compare` needs."""

    name: str
    recipe_name: str
    """Name of the recipe on the command line."""
    seed: int
    recipe: dict[str, Any]
    """The resolved recipe as dotted keys, seed included."""
    origin: dict[str, Any]
    status: str
    marks: tuple[Why, ...]
    """Remarks on the run: resumed, diverged, crashed, unfinished, damaged lines."""
    evaluated: dict[str, np.ndarray]
    """Columns of the rows with a validation loss, in order.

    `step`, `tokens`, `flops`, `seconds` and `val_loss`.
    """
    step: int
    tokens: float
    flops: float
    seconds: float
    """Training seconds: without evaluation, checkpoints and compilation."""
    stability: Stability
    nonfinite_stops: int
    mfu: float | None
    spent: dict[str, float]
    """Logged seconds by column: training, evaluation, checkpoints, compilation, processor, wall.

    Wall seconds are from the first to the last row of each segment, without replaced steps.
    """
    series: dict[str, Series]
    zero_shot: tuple[ZeroShot, ...]
    peak_lr: float = 0.0
    """Largest learning rate of a step."""
    warmup_tokens: float = 0.0
    """Tokens after the first step at the largest learning rate."""
    flops_lack_optimizer: bool = False
    """Whether a run with Muon has rows without the FLOPs of its Newton-Schulz iterations."""

    @property
    def failed(self) -> bool:
        """Whether the run ended without a result, as its loss diverged or was not finite."""
        return self.status == "diverged"

    @property
    def pending(self) -> bool:
        """Whether the run may still finish: it is running, paused, crashed or not started."""
        return self.status not in ("finished", "diverged")

    @property
    def final_loss(self) -> float | None:
        """Validation loss of the last evaluation, nats per token.

        None if the run has not finished or was never evaluated.
        """
        losses = self.evaluated["val_loss"]
        if self.status != "finished" or not len(losses):
            return None
        return float(losses[-1])

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens over training seconds; None if there are no training seconds."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def grown_at(self) -> int:
        """Step up to which a grown run's rows are its parent's; -1 for a run that was not grown."""
        grown = self.origin.get("grown_from")
        if not isinstance(grown, dict):
            return -1
        checkpoint = str(grown.get("checkpoint"))
        digits = checkpoint.removeprefix("step-")
        return int(digits) if digits.isdigit() else -1

    def parts(self, family: str) -> dict[str, Series]:
        """Return the series of a family of columns, by part of the model such as "h.0"."""
        return {
            name.removeprefix(family): series
            for name, series in self.series.items()
            if name.startswith(family)
        }

    @property
    def has_diverged(self) -> bool:
        """Whether the run failed, or diverged and was continued."""
        return self.failed or self.nonfinite_stops > 0


def read_numbers(path: Path, zero_shot: bool = True) -> RunNumbers:
    """Read a run, with its zero-shot results if `zero_shot`.

    The columns of a run that has not logged a step are empty.

    Raises:
        DataError: a file is missing, damaged or of another format.
    """
    run = read_run(path)
    names = (*READ, *_columns_by_part(run.recipe))
    rows = read_metrics(path, names)
    status = status_of(run, rows)
    columns = rows.columns
    step = int(_last(columns["step"]))
    seconds = _last(columns["train_seconds"])

    # A row counts the checkpoints before it: the seconds of the last one are only in its event.
    last_save = 0.0
    for event in _events(run, "checkpoint"):
        saved = event.get("seconds")
        if event.get("step") == step and isinstance(saved, int | float):
            last_save = float(saved)
    spent = {"train_seconds": seconds}
    for name in _SECONDS:
        if np.isfinite(columns[name]).any():
            spent[name] = float(np.nansum(columns[name]))
    if "checkpoint_seconds" in spent:
        spent["checkpoint_seconds"] += last_save
    # Each segment has its own clock, which starts at 0.
    clocks = columns["wall_seconds"]
    if np.isfinite(clocks).any():
        wall = 0.0
        for segment in np.unique(columns["segment"]):
            wall += float(np.nanmax(clocks[columns["segment"] == segment], initial=0.0))
        spent["wall_seconds"] = wall + last_save

    mfu = None
    weighted = columns["mfu"] * columns["seconds"]
    timed = np.isfinite(weighted)
    total = columns["seconds"][timed].sum()
    if total > 0:
        mfu = float(weighted[timed].sum() / total)
    peak_lr = float(np.nanmax(columns["lr"], initial=0.0))
    # Equal up to rounding.
    at_peak = columns["tokens"][columns["lr"] >= peak_lr * (1 - 1e-9)]
    optimizer = OPTIMIZERS[run.recipe.get("optim", {}).get("name", "adamw")]
    uncounted = np.isfinite(columns["lr"]) & np.isnan(columns["optimizer_flops"])
    return RunNumbers(
        name=run.name,
        recipe_name=recipe_name(run.origin, run.name),
        seed=int(run.recipe.get("seed", -1)),
        recipe=with_defaults(flatten(run.recipe)),
        origin=run.origin,
        status=status,
        marks=_marks(run, rows, status, step),
        evaluated=_evaluated(columns),
        step=step,
        tokens=_last(columns["tokens"]),
        flops=_last(columns["total_flops"]),
        flops_lack_optimizer=optimizer.counts_flops and bool(uncounted.any()),
        seconds=seconds,
        spent=spent,
        peak_lr=peak_lr,
        warmup_tokens=float(at_peak[0]) if len(at_peak) else 0.0,
        stability=measure(rows.columns),
        nonfinite_stops=rows.nonfinite_segments,
        mfu=mfu,
        series=_series(columns),
        zero_shot=_zero_shot(path, columns) if zero_shot else (),
    )


_SECONDS = ("eval_seconds", "checkpoint_seconds", "compile_seconds", "cpu_seconds")


def _events(run: SmallFiles, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event.get("event") in kinds]


def status_of(run: SmallFiles, rows: Metrics) -> str:
    """Return "running", "finished", "stopped", "diverged", "not started" or "crashed".

    A run is finished if its budget is used up and its last step has a finite validation loss. A run
    that was stopped in its last evaluation does not have it yet. A run crashed if no process holds
    its lock and its events do not say how it ended.
    """
    if run.locked:
        return "running"
    tokens = rows.columns["tokens"]
    if not len(tokens):
        return "not started"
    budget = run.recipe.get("train", {}).get("tokens", math.inf)
    last_nonfinite = rows.columns["nonfinite"][-1] > 0
    is_evaluated = math.isfinite(rows.columns["val_loss"][-1])
    if _last(tokens) >= budget and is_evaluated and not last_nonfinite:
        return "finished"
    end = _end(run)
    if last_nonfinite or end == "diverged":
        return "diverged"
    return "stopped" if end in ("paused", "stopped", "signal", "finished") else "crashed"


def _end(run: SmallFiles) -> str:
    """Return how the last segment ended, by its events; "" if they do not say."""
    for event in reversed(run.events):
        match event.get("event"):
            case "end":
                return str(event.get("status"))
            case "diverged" | "signal" as kind:
                return str(kind)
            case "start" | "resume":
                break
    return ""


def _marks(run: SmallFiles, rows: Metrics, status: str, step: int) -> tuple[Why, ...]:
    """Return `RunNumbers.marks`."""
    marks = []
    if status != "finished":
        text = status
        end = _end(run)
        if end and status == "crashed":
            text += f" ({end})"
        if status != "diverged":
            text = f"unfinished: {text}"
        if step:
            text += f" at step {step}"
        budget = run.recipe.get("train", {}).get("tokens")
        if budget and step:
            text += f" ({100 * _last(rows.columns['tokens']) / budget:.0f} % of its tokens)"
        marks.append(Why("unfinished", text))

    times = {
        "resumed": max(rows.segments - 1, len(_events(run, "resume"))),
        "non-finite": 0 if status == "diverged" else rows.nonfinite_segments,
    }
    for what, count in times.items():
        if count > 0:
            marks.append(Why(what, f"{what} {counted(count, 'time')}"))
    starts = _events(run, "start", "resume")
    for key, text in _MOVED.items():
        # Older versions wrote these values, except the devices, only to the origin.
        sources = starts if key in ("device", "devices") else [run.origin, *starts]
        values = dict.fromkeys(str(source[key]) for source in sources if key in source)
        if len(values) > 1:
            marks.append(Why("moved", text.format(" and ".join(values))))
    for event in _events(run, "override"):
        changed = event.get("differences")
        entries = changed if isinstance(changed, list) else []
        keys = [str(entry[0]) for entry in entries if isinstance(entry, list) and entry]
        changes = ", ".join(keys) or "unknown"
        marks.append(Why("changed", f"continued although what decides it had changed ({changes})"))

    steps = rows.columns["step"]
    gap = 0
    if len(steps):
        gap = int(steps[-1] - steps[0]) + 1 - len(steps)
    if gap > 0:
        marks.append(Why("gap", f"{counted(gap, 'step')} missing in metrics.jsonl"))
    if rows.corrupt:
        text = f"{counted(len(rows.corrupt), 'damaged line')} of metrics.jsonl left out"
        marks.append(Why("damaged", text))
    return tuple(marks)


_MOVED = {
    "device": "ran on {}",
    "devices": "ran on {} devices",
    "threads": "ran with threads {}",
    "dtype": "ran with dtype {}",
    "torch": "ran with PyTorch {}",
    "efftrain": "ran with efftrain {}",
}
"""Key of an origin and of a start's event -> the mark of a run with several values of it."""


def _last(values: np.ndarray) -> float:
    """Return the last value that is not missing; 0 if all are."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else 0.0


def _evaluated(columns: Columns) -> Columns:
    """Return `RunNumbers.evaluated`."""
    rows = np.isfinite(columns["val_loss"])
    # The row of step 0 may lack its counts, which are 0.
    names = {"step": "step", "val_loss": "val_loss"} | AXES
    return {name: np.nan_to_num(columns[column][rows]) for name, column in names.items()}


def _columns_by_part(recipe: dict[str, Any]) -> tuple[str, ...]:
    """Return the columns by site and by block that the rows of a recipe have."""
    section = recipe.get("standardization_loss")
    layers = recipe.get("model", {}).get("n_layer")
    if not isinstance(layers, int):
        return ()
    columns = []
    if isinstance(section, dict):
        loss = StandardizationLoss(weight=0.0, sites=section.get("sites", "preact"))
        columns = [f"{SITE}{site}" for site in loss.sites_of(layers)]
    if recipe.get("eval", {}).get("internals"):
        families = [column.name for column in COLUMNS if column.by == "block"]
        columns += [f"{family}h.{n}" for family, n in product(families, range(layers))]
    return tuple(columns)


def _series(columns: Columns) -> dict[str, Series]:
    """Return `RunNumbers.series`: each column that has a title, thinned."""
    series = {}
    for name in columns:
        column = find_column(name)
        if column is None or not column.title:
            continue
        finite = np.isfinite(columns[name])
        tokens = np.nan_to_num(columns["tokens"][finite])
        values = columns[name][finite]
        if len(values) > POINTS:
            edges = np.linspace(0, len(values), POINTS + 1).astype(int)[:-1]
            if column.is_extreme:
                # A spike of one step must stay visible.
                values = np.maximum.reduceat(values, edges)
            else:
                edges = np.unique(np.append(edges, len(values) - 1))
                values = values[edges]
            tokens = tokens[edges]
        if len(values):
            series[name] = Series(tokens, values)
    return series


def _zero_shot(path: Path, columns: Columns) -> tuple[ZeroShot, ...]:
    """Return `RunNumbers.zero_shot`."""
    items: dict[tuple[object, ...], dict[str, float]] = {}
    try:
        for row in read_items(path):
            item = f"{row['doc_id']} {row.get('doc_hash')}"
            for name, score in row.items():
                # Only accuracies: an item of a perplexity is a log-probability, whose mean is not
                # the task's score.
                if name.startswith(("acc", "exact_match")) and isinstance(score, int | float):
                    items.setdefault((*key_of(row), name), {})[item] = float(score)
    except (ValueError, KeyError) as error:
        raise DataError(f"{path / ITEMS} is damaged ({error!r}); evaluate again") from None

    tokens = {}
    for step, spent in zip(columns["step"], columns["tokens"], strict=True):
        if math.isfinite(spent):
            tokens[f"step-{int(step):08}"] = spent
    results = []
    for entry in read_results(path):
        checkpoint = str(entry.get("checkpoint", ""))
        limit = entry["limit"]
        limit = "" if limit is None else str(limit)
        task = (str(entry["task"]), str(entry["protocol"]), limit)
        for name, metric in entry.get("metrics", {}).items():
            if metric.get("value") is not None:
                result = ZeroShot(
                    key=(*task, name),
                    score=float(metric["value"]),
                    checkpoint=checkpoint,
                    tokens=tokens.get(checkpoint),
                    items=items.get((*key_of(entry), name), {}),
                )
                results.append(result)
    return tuple(results)
