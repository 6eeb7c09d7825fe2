"""The runs of a study, phase by phase: tuning on seeds of its own, then confirmation, look by look; and what all of
them cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from efftrain_cli.plan.cost import disk_bytes
from efftrain_cli.recipe.toml import toml_value
from efftrain_cli.run.rates import seconds_left
from efftrain_cli.study.file import Arm, Edge, StudyFile
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


class StudyTrial(NamedTuple):
    """One run of a study."""

    phase: str
    """"tuning", "confirmation" or "learning rates"."""
    arm: str
    trial: Trial
    rate: float | None = None
    """Learning rate of a run that a primary over learning rates is judged by; None of others."""
    tried: tuple[str, ...] = ()
    """`key=value` of a point of the arm's grid; empty after tuning."""


@dataclass(frozen=True)
class Tuned:
    """What the tuning phase showed for one arm."""

    arm: str
    settings: tuple[str, ...] = ()
    """`key=value` overrides that its confirmation runs get; empty if the arm is not tuned."""
    tried: tuple[Choice, ...] = ()
    """Every point of the grid with its losses by seed."""
    warnings: tuple[str, ...] = ()
    edges: tuple[Edge, ...] = ()
    """Sides of its grid at which the best value is: the true optimum may lie beyond."""


def all_trials(
    file: StudyFile, chosen: Mapping[str, Sequence[str]] | None = None
) -> list[StudyTrial]:
    """Return every run of the study, with the settings chosen for each arm by its name."""
    return [*tuning(file), *judged_trials(file, chosen or {})]


def tuning(file: StudyFile) -> list[StudyTrial]:
    """Return the runs that choose each arm's settings; seeds outermost."""
    trials = []
    for seed in file.tuning_seeds:
        for arm in file.study.arms:
            grid = []
            for key, values in file.grid_of(arm).items():
                grid.append([(key, toml_value(value)) for value in values])
            # An arm without a grid has no point; the product of no grids would be one.
            for point in itertools.product(*grid) if grid else ():
                tried = tuple(f"{key}={value}" for key, value in point)
                words = [setting_word(key, value) for key, value in point]
                trial = _trial(
                    file,
                    arm,
                    seed,
                    tried,
                    *words,
                    "tune",
                )
                trials.append(
                    StudyTrial(
                        "tuning",
                        arm.name,
                        trial,
                        None,
                        tried,
                    )
                )
    return trials


def judged_trials(
    file: StudyFile,
    chosen: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None = None,
) -> list[StudyTrial]:
    """Return the runs that the study is judged by, with the settings chosen for each arm: those with
    its own learning rate, unless every primary is over learning rates, then those over them; seeds
    outermost.

    Args:
        seeds: those of one look; default: all.
    """
    if seeds is None:
        seeds = file.seeds
    phases: list[tuple[str, tuple[float | None, ...]]] = [("learning rates", file.rates)]
    if not all(primary.question.over_rates for primary in file.study.primary):
        phases.insert(0, ("confirmation", (None,)))
    trials = []
    for phase, rates in phases:
        for seed, arm, rate in itertools.product(seeds, file.study.arms, rates):
            settings, words = [*chosen.get(arm.name, ())], []
            if rate is not None:
                value = toml_value(rate)
                settings.append(f"optim.lr={value}")
                words.append(setting_word("optim.lr", value))
            trial = _trial(file, arm, seed, settings, *words)
            trials.append(StudyTrial(phase, arm.name, trial, rate))
    return trials


def _trial(
    file: StudyFile,
    arm: Arm,
    seed: int,
    settings: Sequence[str],
    *words: str,
) -> Trial:
    """Return the run of an arm with settings besides its own; `words` tell its name from others."""
    name = run_name([f"{file.name}-{arm.name}", *words, f"seed{seed}"], settings)
    every = (*file.settings_of(arm), *settings)
    return Trial(
        file.recipe_path(arm),
        every,
        seed,
        name,
    )


# --- what they cost ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """The runs of one arm in one phase, or of all."""

    phase: str
    arm: str
    runs: int
    done: int
    tokens_left: int
    seconds_left: float | None
    """Wall time that is left, one run after the other, by earlier runs of the same model; None if
    there are none."""
    disk_bytes: int
    """Bytes that its runs keep, those done included."""

    @property
    def runs_left(self) -> int:
        """Runs that have not ended."""
        return self.runs - self.done


def phases_of(file: StudyFile) -> list[Phase]:
    """Return the study's phases by arm.

    Raises:
        UsageError: a run's name is taken by a run with another recipe.
    """
    runs: dict[tuple[str, str], list[Phase]] = {}
    speeds: dict[tuple[object, int], float | None] = {}
    for phase, arm, trial, *_ in all_trials(file):
        recipe = recipe_of(trial)
        left = max(0, recipe.train.tokens - tokens_so_far(trial.name))
        done = not left
        # What tuning chooses is not known yet; it changes neither size nor time unless it is tuned itself.
        if phase == "tuning" or file.study.tuning is None:
            done = state_of(trial) in ENDED
        if done:
            left = 0
        needs = (left, seconds_left(recipe, left, speeds), disk_bytes(recipe))
        runs.setdefault((phase, arm), []).append(
            Phase(
                phase,
                arm,
                1,
                int(done),
                *needs,
            )
        )
    return [sum_phases(phase, arm, each) for (phase, arm), each in runs.items()]


def sum_phases(phase: str, arm: str, parts: Sequence[Phase]) -> Phase:
    """Return what phases need together, as one of this name."""
    seconds = [each.seconds_left for each in parts if each.seconds_left is not None]
    return Phase(
        phase,
        arm,
        runs=sum(each.runs for each in parts),
        done=sum(each.done for each in parts),
        tokens_left=sum(each.tokens_left for each in parts),
        seconds_left=sum(seconds) if len(seconds) == len(parts) else None,
        disk_bytes=sum(each.disk_bytes for each in parts),
    )
