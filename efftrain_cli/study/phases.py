"""The runs of a study, phase by phase: tuning on seeds of its own, then confirmation, look by look."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from efftrain_cli.recipe.toml import toml_value
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
    """The runs that the study is judged by, with the settings chosen for each arm; seeds outermost. None where the only primary is
    lr_sensitivity, which is judged by `over_rates`.

    Args:
        seeds: those of one look; default: all.
    """
    if all(primary.measure == "lr_sensitivity" for primary in file.study.primary):
        return []
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


def over_rates(
    file: StudyFile,
    chosen: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
) -> list[NamedTrial]:
    """The runs that the primary lr_sensitivity is judged by, each arm at each of its rates; seeds outermost, rates innermost.

    Args:
        seeds: those of one look; default: all.
        rates: some of its learning rates; default: all.
    """
    found = []
    for seed in file.seeds if seeds is None else seeds:
        for arm in file.study.arms:
            for rate in file.rates if rates is None else rates:
                settings = (*file.settings_of(arm), *chosen.get(arm.name, ()), f"optim.lr={toml_value(rate)}")
                name = run_name([f"{file.name}-{arm.name}", setting_word("optim.lr", toml_value(rate)), f"seed{seed}"], ())
                found.append((arm.name, Trial(file.recipe_path(arm), settings, seed, name)))
    return found
