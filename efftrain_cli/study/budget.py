"""What a study costs, and what of it is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from efftrain_cli.study.conduct import all_trials
from efftrain_cli.study.file import StudyFile
from efftrain_cli.sweep.needs import disk_bytes, seconds_left
from efftrain_cli.sweep.runner import tokens_so_far
from efftrain_cli.sweep.trials import recipe_of, state_of


@dataclass(frozen=True)
class Phase:
    """The runs of one arm in one phase."""

    phase: str
    """"tuning", "confirmation" or "learning rates"."""
    arm: str
    runs: int
    done: int
    tokens_left: int
    seconds_left: float | None
    """Of wall time that is left, one run after the other, by earlier runs of the same model; None where there are
    none."""
    disk_bytes: int
    """Bytes that its runs keep, those done included."""


class Left(NamedTuple):
    """What all phases together still need."""

    runs_left: int
    tokens_left: int
    seconds_left: float | None
    disk_bytes: int


def phases_of(file: StudyFile) -> list[Phase]:
    """The study's phases by arm.

    Raises:
        UsageError: a run's name is taken by a run with another recipe.
    """
    found: dict[tuple[str, str], Phase] = {}
    speeds: dict[tuple[object, int], float | None] = {}
    for phase, (arm, trial) in all_trials(file):
        recipe = recipe_of(trial)
        # What tuning chooses is not known yet, and changes neither size nor time unless it is tuned itself.
        known = phase == "tuning" or file.study.tuning is None
        done = (
            state_of(trial) in ("finished", "diverged") if known else tokens_so_far(trial.name) >= recipe.train.tokens
        )
        left = 0 if done else max(0, recipe.train.tokens - tokens_so_far(trial.name))
        seconds = seconds_left(recipe, left, speeds)
        before = found.get((phase, arm), Phase(phase, arm, 0, 0, 0, 0.0, 0))
        found[phase, arm] = Phase(
            phase,
            arm,
            before.runs + 1,
            before.done + done,
            before.tokens_left + left,
            None if seconds is None or before.seconds_left is None else before.seconds_left + seconds,
            before.disk_bytes + disk_bytes(recipe),
        )
    return list(found.values())


def left_of(phases: Sequence[Phase]) -> Left:
    """What is left of all phases."""
    seconds = [phase.seconds_left for phase in phases]
    known = [value for value in seconds if value is not None]
    return Left(
        sum(phase.runs - phase.done for phase in phases),
        sum(phase.tokens_left for phase in phases),
        sum(known) if len(known) == len(seconds) else None,
        sum(phase.disk_bytes for phase in phases),
    )
