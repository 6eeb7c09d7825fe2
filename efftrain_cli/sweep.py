"""`efftrain sweep`: a grid of recipes, settings and seeds, trained and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from efftrain_cli.foundation.console import table_lines
from efftrain_cli.foundation.files import make_folder
from efftrain_cli.foundation.records import digest_of
from efftrain_cli.run.directory import runs_root
from efftrain_cli.run.lock import take_lock
from efftrain_cli.trials.trial import Runner, Trial, recipe_of, run_name, state_of

if TYPE_CHECKING:
    from efftrain_cli.compare.comparison import Comparison
    from efftrain_cli.run.reading import Run

NOT_GRIDS = ("train.tokens",)
"""Keys whose values are rungs of a ladder, not settings of which one is best."""
Rows = Sequence[Mapping[str, object]]


def folder_of(trials: Sequence[Trial], name: str | None) -> Path:
    """Return the folder of a sweep: without a name, one of its own for each list of runs."""
    if name:
        return runs_root() / f"{name}-sweep"
    arms = "-".join(dict.fromkeys(trial.arm for trial in trials))
    digest = digest_of([trial.name for trial in trials])
    return runs_root() / "sweeps" / run_name([arms, digest[:6]], ())


def train_sweep(trials: Sequence[Trial], folder: Path, runner: Runner) -> list[Run]:
    """Train the runs of a sweep.

    Raises:
        RunLockedError: another process does.
        EfftrainError: as `Runner.train`.
    """
    make_folder(folder)
    with take_lock(folder / "lock"):
        return runner.train(trials, "sweep")


def compare_sweep(
    runs: Sequence[Run],
    baseline: str | None,
    target: float | None,
) -> Comparison | None:
    """Compare what a sweep trained; None if there is one recipe, and no setting to judge by."""
    from efftrain_cli.compare.arms import group_runs
    from efftrain_cli.compare.comparison import compare

    recipes = {run.arm for run in runs}
    is_one_recipe = len(recipes) == 1 and baseline is None
    if is_one_recipe or len(group_runs(runs)) < 2:
        return None
    return compare(runs, baseline=baseline, target=target)


def grid_text(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    """Return the losses of the grid as a table, and how to widen it where the best is at an edge.

    Args:
        keys: those with several values.
    """
    from efftrain_cli.compare.arms import group_runs
    from efftrain_cli.compare.grids import edge_notes, grid_frame
    from efftrain_cli.compare.show import grid_lines

    tried = [key for key in keys if key not in NOT_GRIDS]
    frame = grid_frame(group_runs(runs), tried)
    notes = [f"note: {note}" for note in edge_notes(frame)]
    return grid_lines(frame) + notes


def planned_rows(trials: Sequence[Trial]) -> Rows:
    """Return a row per run to train: its name, state and tokens."""
    rows = []
    for trial in trials:
        row = {
            "run": trial.name,
            "state": state_of(trial),
            "tokens": recipe_of(trial).train.tokens,
        }
        rows.append(row)
    return rows


def ended_rows(runs: Sequence[Run]) -> Rows:
    """Return a row per trained run: how it ended, and its final loss in nats per token, None if it
    has none."""
    rows = []
    for run in runs:
        row = {
            "run": run.name,
            "status": run.status,
            "final_loss": run.final_loss if run.status == "finished" else None,
        }
        rows.append(row)
    return rows


def row_lines(rows: Rows) -> list[str]:
    """Return rows as a table."""
    cells = [tuple(map(cell_text, row.values())) for row in rows]
    return table_lines(tuple(rows[0]), cells)


def cell_text(value: object) -> str:
    """Return a value as a cell: a loss with four decimals, "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}"
    return str(value)
