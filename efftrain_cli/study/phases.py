"""The runs of a study, phase by phase: tuning on seeds of its own, then confirmation, look by look; what tuning found,
and what all of them cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from efftrain_cli.plan.cost import disk_bytes
from efftrain_cli.recipe.toml import toml_value
from efftrain_cli.run.rates import seconds_left
from efftrain_cli.study.file import StudyFile
from efftrain_cli.trials.runner import tokens_so_far
from efftrain_cli.trials.trial import (
    ENDED,
    Choice,
    Trial,
    recipe_of,
    run_name,
    setting_word,
    state_of,
)

NamedTrial = tuple[str, Trial]
"""An arm's name and one of its runs."""


@dataclass(frozen=True)
class Tuned:
    """What the tuning phase found for one arm."""

    arm: str
    settings: tuple[str, ...]
    """`key=value` overrides that its confirmation runs get; empty where the arm is not tuned."""
    tried: tuple[Choice, ...]
    """Every point of the grid with its losses by seed."""
    warnings: tuple[str, ...]


def all_trials(
    file: StudyFile, chosen: Mapping[str, Sequence[str]] | None = None
) -> list[tuple[str, NamedTrial]]:
    """(phase, (arm, trial)) of every run of the study."""
    return [
        *(("tuning", trial) for trial in tuning(file)),
        *(("confirmation", trial) for trial in confirmation(file, chosen or {})),
        *(("learning rates", trial) for trial in over_rates(file, chosen or {})),
    ]


def tuning(file: StudyFile) -> list[NamedTrial]:
    """The runs that choose each arm's settings; seeds outermost."""
    found = []
    for seed in file.tuning_seeds:
        for arm in file.study.arms:
            grid = [
                [(key, toml_value(value)) for value in values]
                for key, values in file.grid_of(arm).items()
            ]
            for point in itertools.product(*grid) if grid else ():
                tried = tuple(f"{key}={value}" for key, value in point)
                words = [
                    f"{file.name}-{arm.name}",
                    *(setting_word(*setting) for setting in point),
                    "tune",
                    f"seed{seed}",
                ]
                name = run_name(words, tried)
                found.append(
                    (
                        arm.name,
                        Trial(file.recipe_path(arm), (*file.settings_of(arm), *tried), seed, name),
                    )
                )
    return found


def confirmation(
    file: StudyFile, chosen: Mapping[str, Sequence[str]], seeds: Sequence[int] | None = None
) -> list[NamedTrial]:
    """The runs that the study is judged by, with the settings chosen for each arm; seeds outermost. No runs if every
    primary is judged over learning rates, by `over_rates`.

    Args:
        seeds: those of one look; default: all.
    """
    only_rates = all(primary.question.over_rates for primary in file.study.primary)
    return [] if only_rates else _judged(file, chosen, seeds, ((),))


def over_rates(
    file: StudyFile,
    chosen: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
) -> list[NamedTrial]:
    """The runs of the primary that is judged over learning rates, each arm at each of them; seeds outermost, rates
    innermost.

    Args:
        seeds: those of one look; default: all.
        rates: some of its learning rates; default: all.
    """
    return _judged(
        file,
        chosen,
        seeds,
        [(toml_value(rate),) for rate in (file.rates if rates is None else rates)],
    )


def _judged(
    file: StudyFile,
    chosen: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None,
    rates: Sequence[tuple[str, ...]],
) -> list[NamedTrial]:
    """A run of every arm by every seed at each of `rates`: one optim.lr, or none where the recipe's own stays."""
    found = []
    for seed in file.seeds if seeds is None else seeds:
        for arm in file.study.arms:
            for rate in rates:
                settings = (
                    *file.settings_of(arm),
                    *chosen.get(arm.name, ()),
                    *(f"optim.lr={value}" for value in rate),
                )
                words = [
                    f"{file.name}-{arm.name}",
                    *(setting_word("optim.lr", value) for value in rate),
                    f"seed{seed}",
                ]
                found.append(
                    (arm.name, Trial(file.recipe_path(arm), settings, seed, run_name(words, ())))
                )
    return found


# --- what they cost ---------------------------------------------------------------------------------------------------


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
        of.seconds_left = (
            None if seconds is None or of.seconds_left is None else of.seconds_left + seconds
        )
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
