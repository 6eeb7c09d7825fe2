"""`efftrain sweep`: a grid of recipes, settings and seeds, trained and compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from efftrain_cli.compare.arms import group_runs
from efftrain_cli.compare.comparison import Comparison, compare
from efftrain_cli.compare.grids import edge_notes, grid_frame, grid_lines
from efftrain_cli.foundation.console import table_lines
from efftrain_cli.foundation.records import digest_of
from efftrain_cli.run.directory import runs_root
from efftrain_cli.run.reading import Run
from efftrain_cli.trials.costs import costs_of, disk_lines
from efftrain_cli.trials.trial import Trial, recipe_of, state_of

NOT_GRIDS = ("train.tokens",)
"""Keys whose values are rungs of a ladder, not settings of which one is best."""


def folder_of(trials: Sequence[Trial], name: str | None) -> Path:
    """Return the folder of a sweep: without a name, one of its own for each list of runs."""
    if name:
        return runs_root() / f"{name}-sweep"
    arms = "-".join(dict.fromkeys(trial.arm for trial in trials))
    digest = digest_of([trial.name for trial in trials])
    return runs_root() / "sweeps" / f"{arms[:40]}-{digest[:6]}"


def plan_rows(trials: Sequence[Trial]) -> list[dict[str, object]]:
    """Return a row per run: its name, state and tokens."""
    rows = []
    for trial in trials:
        row: dict[str, object] = {
            "run": trial.name,
            "state": state_of(trial),
            "tokens": recipe_of(trial).train.tokens,
        }
        rows.append(row)
    return rows


def plan_lines(trials: Sequence[Trial]) -> list[str]:
    """Return the runs of a sweep, and what they still cost."""
    rows = []
    for row in plan_rows(trials):
        cells = (
            str(row["run"]),
            str(row["state"]),
            f"{row['tokens']:,}",
        )
        rows.append(cells)
    costs = costs_of(trials)
    table = table_lines(("run", "state", "tokens"), rows)
    return [*table, str(costs), *disk_lines(costs)]


def compare_sweep(
    runs: Sequence[Run],
    baseline: str | None = None,
    target: float | None = None,
) -> Comparison | None:
    """Compare what a sweep trained; None if there is one recipe, and no setting to judge by."""
    if len(group_runs(runs)) < 2:
        return None
    recipes = {run.arm for run in runs}
    if len(recipes) == 1 and baseline is None:
        return None
    return compare(runs, baseline=baseline, target=target)


def grid_text(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    """Return the losses of the grid as a table, and how to widen it where the best is at an edge.

    Args:
        keys: those with several values.
    """
    keys = [key for key in keys if key not in NOT_GRIDS]
    if not keys:
        return []
    groups = group_runs(runs)
    frame = grid_frame(groups, keys)
    return [*grid_lines(frame), *(f"note: {note}" for note in edge_notes(frame))]


def run_rows(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Return a row per run: how it ended, and its final loss, None if it has none."""
    rows: list[dict[str, object]] = []
    for run in runs:
        loss = run.final_loss if run.status == "finished" else None
        rows.append(
            {
                "run": run.name,
                "status": run.status,
                "final_loss": loss,
            }
        )
    return rows


def run_lines(runs: Sequence[Run]) -> list[str]:
    """Return a line per run: how it ended."""
    lines = []
    for run in runs:
        line = f"{run.name}: {run.status}"
        if run.status == "finished":
            line += f", val loss {run.final_loss:.4f} nats/token"
        lines.append(line)
    return lines
