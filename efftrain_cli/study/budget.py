"""What a study costs, and what of it is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.phases import all_trials
from efftrain_cli.sweep.needs import disk_bytes, seconds_left
from efftrain_cli.sweep.runner import tokens_so_far
from efftrain_cli.sweep.trials import ENDED, recipe_of, state_of


@dataclass
class Phase:
    """The runs of one arm in one phase."""

    phase: str
    """"tuning", "confirmation" or "learning rates"."""
    arm: str
    runs: int = 0
    done: int = 0
    tokens_left: int = 0
    seconds_left: float | None = 0.0
    """Of wall time that is left, one run after the other, by earlier runs of the same model; None where there are
    none."""
    disk_bytes: int = 0
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
        left = max(0, recipe.train.tokens - tokens_so_far(trial.name))
        done = state_of(trial) in ENDED if known else not left
        left = 0 if done else left
        seconds = seconds_left(recipe, left, speeds)
        of = found.setdefault((phase, arm), Phase(phase, arm))
        of.runs += 1
        of.done += done
        of.tokens_left += left
        of.seconds_left = None if seconds is None or of.seconds_left is None else of.seconds_left + seconds
        of.disk_bytes += disk_bytes(recipe)
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
