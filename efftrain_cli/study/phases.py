"""The runs of a study, phase by phase: tuning on seeds of its own, then confirmation, look by look."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from efftrain_cli.recipe.file import toml_value
from efftrain_cli.sweep.trials import Trial, run_name, setting_word

if TYPE_CHECKING:
    from efftrain_cli.study.file import StudyFile

NamedTrial = tuple[str, Trial]
"""An arm's name and one of its runs."""


def tuning(file: StudyFile) -> list[NamedTrial]:
    """The runs that choose each arm's settings; seeds outermost."""
    found = []
    for seed in file.tuning_seeds:
        for arm in file.study.arms:
            grid = file.grid_of(arm)
            if not grid:
                continue
            for values in itertools.product(*grid.values()):
                tried = tuple(f"{key}={toml_value(value)}" for key, value in zip(grid, values, strict=True))
                words = [setting_word(key, toml_value(value)) for key, value in zip(grid, values, strict=True)]
                name = run_name([f"{file.name}-{arm.name}", *words, "tune", f"seed{seed}"], tried)
                found.append((arm.name, Trial(file.recipe_path(arm), (*file.settings_of(arm), *tried), seed, name)))
    return found


def tried_settings(file: StudyFile, arm_name: str) -> list[tuple[str, ...]]:
    """Every point of an arm's grid as overrides, in the grid's order; one empty point where it is not tuned."""
    arm = next(arm for arm in file.study.arms if arm.name == arm_name)
    grid = file.grid_of(arm)
    return [
        tuple(f"{key}={toml_value(value)}" for key, value in zip(grid, values, strict=True))
        for values in itertools.product(*grid.values())
    ]


def confirmation(file: StudyFile, chosen: Mapping[str, Sequence[str]], seeds: Sequence[int] | None = None) -> list[NamedTrial]:
    """The runs that the study is judged by, with the settings chosen for each arm; seeds outermost.

    Args:
        seeds: those of one look; default: all.
    """
    return [
        (
            arm.name,
            Trial(
                file.recipe_path(arm),
                (*file.settings_of(arm), *chosen.get(arm.name, ())),
                seed,
                run_name([f"{file.name}-{arm.name}", f"seed{seed}"], ()),
            ),
        )
        for seed in (file.seeds if seeds is None else seeds)
        for arm in file.study.arms
    ]
