"""The runs of a study, phase by phase: tuning on seeds of its own, then confirmation, look by look; and what tuning
found."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from efftrain_cli.recipe.toml import toml_value
from efftrain_cli.sweep.trials import Choice, Trial, run_name, setting_word

if TYPE_CHECKING:
    from efftrain_cli.study.file import StudyFile

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


def all_trials(file: StudyFile, chosen: Mapping[str, Sequence[str]] | None = None) -> list[tuple[str, NamedTrial]]:
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
            grid = [[(key, toml_value(value)) for value in values] for key, values in file.grid_of(arm).items()]
            for point in itertools.product(*grid) if grid else ():
                tried = tuple(f"{key}={value}" for key, value in point)
                words = [
                    f"{file.name}-{arm.name}",
                    *(setting_word(*setting) for setting in point),
                    "tune",
                    f"seed{seed}",
                ]
                name = run_name(words, tried)
                found.append((arm.name, Trial(file.recipe_path(arm), (*file.settings_of(arm), *tried), seed, name)))
    return found


def confirmation(
    file: StudyFile, chosen: Mapping[str, Sequence[str]], seeds: Sequence[int] | None = None
) -> list[NamedTrial]:
    """The runs that the study is judged by, with the settings chosen for each arm; seeds outermost. None where the only
    primary is lr_sensitivity, which is judged by `over_rates`.

    Args:
        seeds: those of one look; default: all.
    """
    only_rates = all(primary.measure == "lr_sensitivity" for primary in file.study.primary)
    return [] if only_rates else _judged(file, chosen, seeds, ((),))


def over_rates(
    file: StudyFile,
    chosen: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
) -> list[NamedTrial]:
    """The runs that the primary lr_sensitivity is judged by, each arm at each of its rates; seeds outermost, rates
    innermost.

    Args:
        seeds: those of one look; default: all.
        rates: some of its learning rates; default: all.
    """
    return _judged(file, chosen, seeds, [(toml_value(rate),) for rate in (file.rates if rates is None else rates)])


def _judged(
    file: StudyFile, chosen: Mapping[str, Sequence[str]], seeds: Sequence[int] | None, rates: Sequence[tuple[str, ...]]
) -> list[NamedTrial]:
    """A run of every arm by every seed at each of `rates`: one optim.lr, or none where the recipe's own stays."""
    found = []
    for seed in file.seeds if seeds is None else seeds:
        for arm in file.study.arms:
            for rate in rates:
                settings = (*file.settings_of(arm), *chosen.get(arm.name, ()), *(f"optim.lr={value}" for value in rate))
                words = [f"{file.name}-{arm.name}", *(setting_word("optim.lr", value) for value in rate), f"seed{seed}"]
                found.append((arm.name, Trial(file.recipe_path(arm), settings, seed, run_name(words, ()))))
    return found
