"""A training run, as a comparison sees it, and how it is read from its directory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from efftrain_cli.foundation.console import counted
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.columns import COLUMNS, find_column
from efftrain_cli.run.metrics import last_row, read_metrics
from efftrain_cli.run.names import recipe_name
from efftrain_cli.run.origin import NOT_COMPUTED
from efftrain_cli.run.small_files import read_run
from efftrain_cli.run.stability import count_jumps
from efftrain_cli.run.status import ENDED, status_of

COSTS = {
    "tokens": "tokens",
    "flops": "total_flops",
    "seconds": "train_seconds",
}
"""Cost of training -> its column in metrics.jsonl."""
CURVE = ["step", *COSTS, "val_loss"]
"""Columns of a curve."""
EVALUATED = ["step", *COSTS.values(), "val_loss"]
"""The same columns in metrics.jsonl."""
DRAWN = [column for column in COLUMNS if column.title]
"""Columns of metrics.jsonl, and families of them, that have a figure."""
EXTREMES = tuple(column.name for column in DRAWN if column.is_extreme)
"""Beginnings of the names of those whose spikes must stay visible."""
READ = [*EVALUATED, "loss", "nonfinite", "lr", "mfu", "seconds"]
"""Columns of metrics.jsonl that every run is read with."""
POINTS = 200
"""Most points of a figure's line."""
OPENING = 3
"""Training losses, from the first, that no two seeds share by chance."""
UNSAID = ("optim.decay_shape", "linear")
"""A key and value that a recipe may leave out: it computes the same."""


@dataclass(frozen=True, eq=False)
class Run:
    """A training run: its curve, how it ended, and what could explain both."""

    name: str
    arm: str
    """Name of its recipe, or the label that a study or a table gives it."""
    seed: int
    status: str
    """finished, diverged, running, stopped, crashed or not started."""
    curve: pd.DataFrame
    """A row per evaluation with the columns CURVE; NaN for a cost that is unknown."""
    settings: Mapping[str, Any]
    """Resolved recipe by dotted key, without the seed."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """Origin by dotted key: device, versions, hashes of text and tokenizer."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers by title: updates, peak rate, throughput, zero-shot scores."""
    series: pd.DataFrame = field(default_factory=pd.DataFrame)
    """`tokens`, and the columns of metrics.jsonl that have a figure; at most POINTS rows."""
    opening: tuple[float, ...] = ()
    """The first training losses, by which a copy under another seed is found."""
    notes: tuple[str, ...] = ()

    @property
    def is_pending(self) -> bool:
        """Whether the run may still finish."""
        return self.status not in ENDED

    @property
    def final_loss(self) -> float:
        """Validation loss at the end, nats per token; NaN unless the run finished."""
        if self.status != "finished":
            return math.nan
        return self.spent("val_loss")

    @property
    def budget(self) -> float:
        """Tokens to train; 0 if unknown."""
        return float(self.settings.get("train.tokens", 0))

    @property
    def size(self) -> float:
        """Parameters of blocks and head; 0 if unknown.

        They are counted by shape and without the table of embeddings, so that arms with and without
        norms have the same size.
        """
        width = self.settings.get("model.n_embd", 0)
        blocks = 12 * self.settings.get("model.n_layer", 0) * width**2
        head = width * self.conditions.get("data.vocab_size", 0)
        return float(self.settings.get("size", blocks + head))

    def spent(self, column: str) -> float:
        """Return the last value of a column of the curve; NaN without an evaluation."""
        values = self.curve[column].to_numpy(float)
        return float(values[-1]) if len(values) else math.nan


def load_run(path: Path) -> Run:
    """Read a run directory.

    Raises:
        DataError: a file is missing, damaged or of another format.
    """
    files = read_run(path)
    last = last_row(path)
    drawn = [name for name in last if find_column(name) in DRAWN]
    columns = dict.fromkeys([*READ, *drawn])
    metrics = read_metrics(path, list(columns))
    rows = metrics.frame
    curve = rows.dropna(subset="val_loss")
    curve = curve[EVALUATED].fillna(0.0)
    curve.columns = CURVE
    status = status_of(path, last)
    origin = flatten(files.origin)
    parent = origin.get("grown_from.run") or origin.get("imported.directory")
    notes = []
    if status != "finished":
        notes.append(f"{status} at step {max(rows.step, default=0)}")
    if parent is not None:
        notes.append(f"began with the weights of {parent}: seeds differ less")
    if metrics.corrupt:
        notes.append(f"{counted(len(metrics.corrupt), 'damaged line')} left out")
    notes += resume_notes(files.events)
    # The first rows of a grown run are its parent's, whatever its seed.
    own = rows[rows.step > grown_step(origin)]
    facts = facts_of(own, origin)
    if facts and "branch.step" in origin:
        flops = rows.total_flops
        before = flops[rows.step <= origin["branch.step"]]
        facts["FLOPs of the branch"] = flops.max() - before.max()
    series = thin(rows[["tokens", *drawn]])
    return Run(
        name=files.name,
        arm=recipe_name(files.origin, files.name),
        seed=int(files.recipe.get("seed", -1)),
        status=status,
        curve=curve,
        settings=computed_values(files.recipe),
        conditions=origin,
        facts=facts,
        series=series.dropna(axis="columns", how="all"),
        opening=tuple(own.loss.dropna()[:OPENING]),
        notes=tuple(notes),
    )


def thin(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per stretch of rows: of EXTREMES its largest value, else its first."""
    count = len(rows)
    stretches = np.arange(count) * POINTS // max(POINTS, count)
    shown = {}
    for name in rows:
        is_extreme = str(name).startswith(EXTREMES)
        shown[name] = "max" if is_extreme else "first"
    return rows.groupby(stretches).agg(shown)


def resume_notes(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes about the resumes of a run, and what had changed at one."""
    notes = []
    kinds = [event.get("event") for event in events]
    resumes = kinds.count("resume")
    if resumes:
        notes.append(f"resumed {resumes}x")
    for event in events:
        changed = event.get("changed")
        if isinstance(changed, list) and changed:
            names = ", ".join(map(str, changed))
            notes.append(f"continued with {names}")
    if "override" in kinds:
        notes.append("continued although what decides it had changed")
    return notes


def computed_values(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe that decide what it computes, by dotted key, but the seed."""
    values = {}
    for key, value in flatten(recipe).items():
        if key.startswith(("seed", *NOT_COMPUTED)):
            continue
        if (key, value) != UNSAID:
            values[key] = value
    return values


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between settings by dotted key."""
    distinct = pd.DataFrame(settings).astype(str).nunique(dropna=False)
    return list(distinct.index[distinct > 1])


def grown_step(origin: Mapping[str, Any]) -> int:
    """Return the step up to which a grown run's rows are its parent's; -1 if it was not grown."""
    checkpoint = str(origin.get("grown_from.checkpoint"))
    digits = checkpoint.removeprefix("step-")
    return int(digits) if digits.isdigit() else -1


def facts_of(rows: pd.DataFrame, origin: Mapping[str, Any]) -> dict[str, float]:
    """Return the further numbers of a run; none before its first row, no losses before its first
    evaluation."""
    if rows.empty:
        return {}
    facts = {}
    losses = rows.val_loss.dropna()
    if len(losses):
        loss = losses.iloc[-1]
        bits = loss / math.log(2)
        bytes_per_token = origin.get("data.valid_bytes_per_token") or math.nan
        facts = {
            "perplexity": math.exp(min(loss, 700.0)),
            "bits per byte": bits / bytes_per_token,
            "best loss": losses.min(),
            "validation jumps": count_jumps(losses),
        }
    last = rows.iloc[-1]
    peak = rows.lr.max()
    used = rows.mfu * rows.seconds
    at_peak = rows.tokens[rows.lr >= peak * (1 - 1e-9)]
    return facts | {
        "updates": last.step,
        "tokens": last.tokens,
        "FLOPs": last.total_flops,
        "training seconds": last.train_seconds,
        "warmup tokens": at_peak.min(),
        "peak rate": peak,
        "MFU": used.sum(min_count=1) / rows.seconds.sum(),
    }
