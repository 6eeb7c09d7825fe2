"""Runs of a wandb project, read through wandb's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from efftrain_cli.compare.tables import runs_of
from efftrain_cli.foundation.errors import DataError, UsageError
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.reading import Run

STEP = "_step"
"""Column of wandb's history with the number of the step."""
FAILED = ("failed", "crashed")
"""States of a wandb run that did not end by itself."""


def read_wandb(project: str, columns: Mapping[str, str] | None = None) -> list[Run]:
    """Read the runs of a project as `runs_of`.

    Keys of a run's config are columns; without one for it, the arm is the name of the run.

    Args:
        project: ENTITY/PROJECT.
        columns: see `runs_of`.

    Raises:
        UsageError: wandb is not installed, or the project does not hold runs.
        DataError: wandb does not answer.
    """
    try:
        import wandb
    except ImportError:
        raise UsageError("wandb is not installed\n  pip install wandb") from None
    rows: list[dict[str, Any]] = []
    try:
        for run in wandb.Api().runs(project):
            config = flatten(dict(run.config))
            fixed = {"arm": run.name, **config, "run": run.id, "failed": run.state in FAILED}
            # All rows: `history` would return a sample.
            rows += [{**fixed, **row} for row in run.scan_history()]
    except (wandb.errors.Error, ValueError, OSError) as error:
        raise DataError(f"wandb:{project} cannot be read: {error}") from None
    if not rows:
        raise UsageError(f"wandb:{project} has no rows\n  give ENTITY/PROJECT of finished runs")
    names = {"step": STEP, **(columns or {})}
    return runs_of(pd.DataFrame(rows), f"wandb:{project}", names)
