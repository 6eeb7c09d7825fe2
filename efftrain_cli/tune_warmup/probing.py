"""One probe of `efftrain tune-warmup`: a trial that ends as soon as its verdict is clear, with its receipt."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from efftrain_cli.foundation.files import make_folder, write_whole
from efftrain_cli.foundation.records import write_record
from efftrain_cli.recipe.recipe import dump_recipe
from efftrain_cli.run.directory import runs_in
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.stability import fluctuation, validation_curve
from efftrain_cli.trials.runner import TrialRunner
from efftrain_cli.trials.trial import Trial
from efftrain_cli.tune_warmup.search import Probe, Receipt, Search


def run_probe(
    folder: Path, search: Search, probe: Probe, runner: TrialRunner, recipe_name: str
) -> Receipt:
    """Train a probe, or what is left of it, until its verdict is clear; write and return its receipt."""
    probes = folder / "probes"
    make_folder(probes)
    recipe = probes / f"{recipe_name}.toml"
    write_whole(recipe, dump_recipe(search.recipe_of(probe)))
    trial = Trial(
        str(recipe), (), probe.seed, probe.name, until=probe.horizon, threshold=search.threshold
    )
    with runs_in(probes):
        (end,) = runner.train([trial])

    rows = latest_rows(probes / probe.name)
    if rows[-1].get("nonfinite"):
        rows.pop()  # its update was not applied
    curve = validation_curve(rows)
    if end == "diverged" and fluctuation(curve)[0] <= search.threshold:
        # A loss, a weight or a validation loss that is not finite is in no row.
        curve.append((rows[-1]["step"] + 1, math.inf))
    worst, at = fluctuation(curve)

    def largest(column: str) -> float | None:
        return max((row[column] for row in rows if row.get(column) is not None), default=None)

    receipt = Receipt(
        probe=probe,
        stable=worst <= search.threshold,
        max_fluctuation=worst,
        fluctuation_step=at,
        stopped_at_step=rows[-1]["step"],
        tokens=rows[-1]["tokens"],
        seconds=sum(row.get("seconds", 0.0) + row["eval_seconds"] for row in rows),
        curve=tuple(curve),
        max_grad_norm=largest("grad_norm"),
        max_adam_sqrt_v=largest("adam_sqrt_v_max"),
        max_loss_ratio=largest("loss_ratio"),
    )
    write_record(probes / probe.name / "probe.json", receipt)
    # The search may ask a survivor for more, which needs its checkpoint then.
    if not receipt.stable or probe.horizon >= search.grid.horizon(probe.start, probe.steps):
        forget_checkpoints(probes / probe.name)
    return receipt


def forget_checkpoints(path: Path) -> None:
    """Remove the checkpoints of a probe that will not be continued."""
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
