"""Group runs: those of one recipe over several seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from efftrain_cli.compare.formats import format_value
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.run.directory import run_names, runs_root
from efftrain_cli.run.names import runs_by_recipe
from efftrain_cli.run.small_files import NOT_COMPUTED

DEVICES = "devices"
"""Stands beside the recipe's keys for the number of devices that a run was trained on."""
SETTINGS_SHOWN = 3
"""Most settings in a group's name, unless more are needed to tell groups apart."""


@dataclass(frozen=True)
class Timing:
    """What a calibration says of a group."""

    command: str
    """Command that would calibrate all groups compared."""
    blocks: tuple[float, ...] = ()
    """Calibrated seconds of a finished run, mean over the runs, by block of the calibration; empty
    without one."""


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, one per seed, ordered by seed."""

    label: str
    runs: tuple[RunNumbers, ...]
    timing: Timing | None = None
    """What a calibration says of its runs' seconds; None if none was looked for."""

    @property
    def blocks(self) -> tuple[float, ...]:
        """Calibrated seconds by block, as `Timing.blocks`; empty if the seconds of its runs are not
        calibrated."""
        return self.timing.blocks if self.timing else ()

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, in the order of the runs."""
        return tuple(self.by_seed)

    @property
    def by_seed(self) -> dict[int, list[RunNumbers]]:
        """Runs by seed: one each, or one per learning rate where sensitivity to it is judged."""
        return runs_by_seed(self.runs)

    @property
    def recipe_name(self) -> str:
        """As the command line named the recipe."""
        return self.runs[0].recipe_name

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe as dotted keys, without its seed."""
        return {key: value for key, value in self.runs[0].recipe.items() if key != "seed"}

    @property
    def budget(self) -> float:
        """Tokens to train."""
        return float(self.recipe.get("train.tokens", 0))

    @property
    def devices(self) -> int:
        """How many the runs were begun on."""
        return self.runs[0].origin.get("world_size", 1)

    @property
    def conditions(self) -> dict[str, Any]:
        """The recipe, and the number of devices, which is part of what was done."""
        return self.recipe | {DEVICES: self.devices}


def runs_of(groups: Iterable[Group]) -> list[RunNumbers]:
    """Return the runs of all groups."""
    return list(chain.from_iterable(group.runs for group in groups))


def finished_runs(runs: Iterable[RunNumbers]) -> list[RunNumbers]:
    """Return the runs that used up their budget; the last step of each is evaluated."""
    return [run for run in runs if run.status == "finished"]


def runs_by_seed(runs: Iterable[RunNumbers]) -> dict[int, list[RunNumbers]]:
    """Return runs by seed, in their order."""
    by_seed: dict[int, list[RunNumbers]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
    return by_seed


def count_sisters(chosen: Sequence[Path]) -> dict[str, int]:
    """Return how many runs of the chosen runs' recipes were not chosen, by recipe; recipes with
    none left out."""
    root = runs_root().resolve()
    names = {path.name for path in chosen if path.resolve().parent == root}
    sisters = {}
    for recipe, runs in runs_by_recipe(run_names()).items():
        others = [run for run in runs if run not in names]
        if 0 < len(others) < len(runs):
            sisters[recipe] = len(others)
    return sisters


def group_runs(runs: Sequence[RunNumbers], allow: bool = False) -> list[Group]:
    """Group runs of one recipe name whose resolved recipes are equal but for the seed, in order of
    first appearance.

    Args:
        allow: of several runs of one recipe and seed, take the one that started last instead of
            refusing.

    Raises:
        UsageError: a recipe has two runs of one seed, and `allow` is False.
    """
    by_recipe: dict[str, list[RunNumbers]] = {}
    for run in runs:
        by_recipe.setdefault(_identity(run), []).append(run)

    groups = []
    for members in by_recipe.values():
        by_seed = runs_by_seed(members)
        latest = []
        for same in by_seed.values():
            latest.append(max(same, key=lambda run: str(run.origin.get("started"))))
        if len(latest) < len(members) and not allow:
            older = {run.name for run in members} - {run.name for run in latest}
            names = [run.name for run in runs if run.name not in older]
            raise UsageError(_twice(by_seed, names))
        ordered = sorted(latest, key=lambda run: run.seed)
        groups.append(Group(members[0].recipe_name, tuple(ordered)))
    return [replace(group, label=_label(group, groups)) for group in groups]


def _identity(run: RunNumbers) -> str:
    """Return what the runs of a group share: the recipe's name, its values but the seed, and the
    number of devices."""
    conditions = Group("", (run,)).conditions
    computed = {key: conditions[key] for key in conditions if not key.startswith(NOT_COMPUTED)}
    # Two names for one recipe are two arms: of another version of the code, say, or another device.
    return json.dumps([run.recipe_name, computed], sort_keys=True, default=str)


def _twice(by_seed: Mapping[int, Sequence[RunNumbers]], names: Sequence[str]) -> str:
    """Say which runs are copies of each other, and how to compare the others, `names`."""
    copies: list[str] = []
    for same in by_seed.values():
        if len(same) > 1:
            copies += [run.name for run in same]
    listed = " ".join(names) if len(names) <= 12 else "RUN..."
    return (
        f"{', '.join(copies)} have the same recipe and seed: not independent samples\n"
        f"  name one of each seed: efftrain compare {listed}\n"
        "  or pass --allow for the newest"
    )


def _label(group: Group, groups: Sequence[Group]) -> str:
    """Name a group so that no other has the name: by its recipe and, if other groups share that, by
    the run that `--name` named, or the first settings that differ, or its first run."""
    same = [other for other in groups if other.recipe_name == group.recipe_name]
    if len(same) == 1:
        return group.recipe_name
    keys = differing_keys([other.conditions for other in same])
    named = [not other.runs[0].name.startswith(group.recipe_name) for other in same]
    if all(len(other.runs) == 1 for other in same) and (len(keys) > SETTINGS_SHOWN or all(named)):
        return group.runs[0].name

    for most in range(min(SETTINGS_SHOWN, len(keys)), len(keys) + 1):
        if len({_settings(other, keys[:most]) for other in same}) == len(same):
            words = [group.recipe_name, *_settings(group, keys[:most])]
            if len(keys) > most:
                words.append(f"and {len(keys) - most} more")
            return " ".join(words)
    # Their values differ, but not as they are written.
    return group.runs[0].name


def _settings(group: Group, keys: Sequence[str]) -> tuple[str, ...]:
    """Return `key=value` of a group's keys."""
    return tuple(f"{key}={format_value(group.conditions.get(key))}" for key in keys)


@dataclass(frozen=True)
class TriedSetting:
    """One of several settings of a recipe, and its result."""

    label: str
    recipe_name: str
    mean_final_loss: float | None
    """Over the runs that finished, nats per token."""
    unfinished: int
    """Runs that failed or have not finished."""
    seeds: tuple[int, ...]
    chosen: bool


BEST_RULE = "the setting with the fewest unfinished runs; of those, the lowest mean final loss"
"""How a recipe's own best setting is chosen."""


def best_settings(groups: Sequence[Group]) -> tuple[list[Group], list[TriedSetting]]:
    """Return each recipe at its own best setting by BEST_RULE, in the order of the groups, and all
    the settings tried.

    Settings with other budgets are other recipes: the longest run would always be the best.
    Where every group is a setting of one recipe all of them stay: they are what is compared.
    """
    if len({group.recipe_name for group in groups}) in (1, len(groups)):
        return list(groups), []
    alike: dict[tuple[str, object], list[Group]] = {}
    for group in groups:
        alike.setdefault((group.recipe_name, group.budget), []).append(group)
    best = [min(settings, key=rank_of) for settings in alike.values()]

    trials = []
    for group in groups:
        if len(alike[group.recipe_name, group.budget]) == 1:
            continue
        unfinished, mean = rank_of(group)
        trial = TriedSetting(
            label=group.label,
            recipe_name=group.recipe_name,
            mean_final_loss=mean if math.isfinite(mean) else None,
            unfinished=unfinished,
            seeds=group.seeds,
            chosen=group in best,
        )
        trials.append(trial)
    return best, trials


def rank_of(group: Group) -> tuple[int, float]:
    """Return a group's place by BEST_RULE."""
    return rank([run.final_loss for run in group.runs])


def rank(losses: Sequence[float | None]) -> tuple[int, float]:
    """Return the place of a setting by its final losses: how many are missing, then their mean;
    lower wins."""
    known = [loss for loss in losses if loss is not None]
    missing = len(losses) - len(known)
    return missing, sum(known) / len(known) if known else math.inf


def differing_keys(recipes: Sequence[dict[str, Any]], but: Sequence[str] = ("seed",)) -> list[str]:
    """Return the dotted keys on which not all recipes agree, in the recipes' order; `but` are left
    out."""
    missing = object()
    differing = []
    for key in dict.fromkeys(chain.from_iterable(recipes)):
        values = [recipe.get(key, missing) for recipe in recipes]
        is_asked = key not in but and not key.startswith(NOT_COMPUTED)
        if is_asked and any(value != values[0] for value in values):
            differing.append(key)
    return differing
