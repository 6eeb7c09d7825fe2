"""Runs of a wandb project, read through wandb's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import pandas as pd

from efftrain_cli.compare.tables import runs_of
from efftrain_cli.foundation.errors import DataError, UsageError
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.reading import Run

STEP = "_step"
"""Column of wandb's history with the number of the step."""
FAILED = ("failed", "crashed")
"""States of a wandb run that did not end by itself."""


class WandbRun(Protocol):
    """What is read of a run of wandb's API."""

    name: str
    id: str
    state: str
    config: Mapping[str, Any]

    def scan_history(self) -> Iterable[Mapping[str, Any]]:
        """Return all rows, where `history` returns a sample."""


def read_wandb(project: str, columns: Mapping[str, str] | None = None) -> list[Run]:
    """Read the runs of a project.

    Args:
        project: ENTITY/PROJECT.
        columns: see `runs_of`; `arm` and `seed` may name keys of a run's config.

    Raises:
        UsageError: wandb is not installed, or the project does not hold runs.
        DataError: wandb does not answer.
    """
    try:
        import wandb
    except ImportError:
        raise UsageError("wandb is not installed\n  pip install wandb") from None
    try:
        return read_api(wandb.Api().runs(project), project, columns)
    except (wandb.errors.Error, ValueError, OSError) as error:
        raise DataError(f"wandb:{project} cannot be read: {error}") from None


def read_api(
    runs: Iterable[WandbRun],
    project: str,
    columns: Mapping[str, str] | None = None,
) -> list[Run]:
    """Return the runs of wandb's API as `runs_of`.

    Keys of a config are columns; without one for it, the arm is the name of the run.
    """
    names = {"step": STEP, **(columns or {})}
    rows: list[dict[str, Any]] = []
    for run in runs:
        config = flatten(dict(run.config))
        fixed = {
            **config,
            "run": run.id,
            "failed": run.state in FAILED,
        }
        fixed.setdefault("arm", run.name)
        rows += [{**fixed, **row} for row in run.scan_history()]
    if not rows:
        raise UsageError(f"wandb:{project} has no rows\n  give ENTITY/PROJECT of finished runs")
    return runs_of(pd.DataFrame(rows), f"wandb:{project}", names)
