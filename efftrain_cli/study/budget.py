"""What a study costs, and what of it is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from efftrain_cli.study.conduct import all_trials
from efftrain_cli.study.file import StudyFile
from efftrain_cli.sweep.needs import START_SECONDS, disk_bytes, speed_of
from efftrain_cli.sweep.runner import tokens_so_far
from efftrain_cli.sweep.trials import recipe_of, state_of


@dataclass(frozen=True)
class Phase:
    """The runs of one arm in one phase."""

    name: str
    """"tuning", "confirmation" or "learning rates"."""
    arm: str
    runs: int
    done: int
    tokens_left: int
    seconds: float | None
    """Of wall time that is left, one run after the other, by earlier runs of the same model; None where there are none."""
    disk: int
    """Bytes that its runs keep, those done included."""


class Left(NamedTuple):
    """What all phases together still need."""

    runs: int
    tokens: int
    seconds: float | None
    disk: int


def phases_of(file: StudyFile) -> list[Phase]:
    """The study's phases by arm.

    Raises:
        UsageError: a run's name is taken by a run with another recipe.
    """
    found: dict[tuple[str, str], Phase] = {}
    speeds: dict[tuple[str, tuple[str, ...]], float | None] = {}
    for phase, (arm, trial) in all_trials(file):
        recipe = recipe_of(trial)
        # What tuning chooses is not known yet, and changes neither size nor time unless it is tuned itself.
        known = phase == "tuning" or file.study.tuning is None
        done = state_of(trial) in ("finished", "diverged") if known else tokens_so_far(trial.name) >= recipe.train.tokens
        left = 0 if done else max(0, recipe.train.tokens - tokens_so_far(trial.name))
        key = (trial.recipe, trial.settings)
        if key not in speeds:
            speeds[key] = speed_of(recipe)
        speed = speeds[key]
        seconds = None if speed is None else left / speed + START_SECONDS * (left > 0)
        before = found.get((phase, arm), Phase(phase, arm, 0, 0, 0, 0.0, 0))
        found[phase, arm] = Phase(
            phase,
            arm,
            before.runs + 1,
            before.done + done,
            before.tokens_left + left,
            None if seconds is None or before.seconds is None else before.seconds + seconds,
            before.disk + disk_bytes(recipe),
        )
    return list(found.values())


def left_of(phases: Sequence[Phase]) -> Left:
    """What is left of all phases."""
    seconds = [phase.seconds for phase in phases]
    known = [value for value in seconds if value is not None]
    return Left(
        sum(phase.runs - phase.done for phase in phases),
        sum(phase.tokens_left for phase in phases),
        sum(known) if len(known) == len(seconds) else None,
        sum(phase.disk for phase in phases),
    )
