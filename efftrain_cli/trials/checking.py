"""Two real steps of each distinct recipe of a study, as it is, in a folder that is removed."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from efftrain_cli.run.directory import runs_in
from efftrain_cli.trials.runner import TrialRunner
from efftrain_cli.trials.trial import Trial, check_comparable

STEPS = 2


def check_steps(
    trials: Sequence[Trial],
    device: str,
    devices: int = 1,
) -> list[str]:
    """Train two steps of each trial, with its compilation, memory and data; return a line each.

    Raises:
        EfftrainError: a recipe does not train.
    """
    check_comparable(trials)
    lines = []
    with tempfile.TemporaryDirectory(prefix="efftrain-check-") as folder, runs_in(Path(folder)):
        runner = TrialRunner(Path(folder), device=device, devices=devices)
        for trial in trials:
            if trial.trunk is not None:
                continue
            (run,) = runner.train([replace(trial, until=STEPS)], f"check of {trial.arm}")
            loss = run.spent("val_loss")
            lines.append(f"{trial.arm}: {STEPS} steps, validation loss {loss:.4f}")
    return lines
