"""Group runs: those of one recipe over several seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
class Group:
    """Runs of one recipe, one per seed, ordered by seed."""

    label: str
    runs: tuple[RunNumbers, ...]
    settings: tuple[str, ...] = ()
    """`key=value` of the keys that tell it apart from other groups of its recipe's name."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, in the order of the runs."""
        return tuple(self.by_seed)

    @property
    def by_seed(self) -> dict[int, list[RunNumbers]]:
        """Runs by seed: one each, or one per learning rate where sensitivity to it is judged."""
        found: dict[int, list[RunNumbers]] = {}
        for run in self.runs:
            found.setdefault(run.seed, []).append(run)
        return found

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


def count_sisters(chosen: Sequence[Path]) -> dict[str, int]:
    """Return how many runs of the chosen runs' recipes were not chosen, by recipe; recipes with none left out."""
    root = runs_root().resolve()
    names = {path.name for path in chosen if path.resolve().parent == root}
    found = {}
    for recipe, runs in runs_by_recipe(run_names()).items():
        others = [run for run in runs if run not in names]
        if others and len(others) < len(runs):
            found[recipe] = len(others)
    return found


def group_runs(runs: Sequence[RunNumbers], allow: bool = False) -> list[Group]:
    """Runs of one recipe name whose resolved recipes are equal but for the seed, in order of first appearance.

    Args:
        allow: of several runs of one recipe and seed, take the one that started last instead of refusing.

    Raises:
        UsageError: a recipe has two runs of one seed, and `allow` is False.
    """
    by_recipe: dict[str, list[RunNumbers]] = {}
    for run in runs:
        every = _with_devices(run)
        kept = {
            key: value
            for key, value in every.items()
            if key != "seed" and not key.startswith(NOT_COMPUTED)
        }
        # Two names for one recipe are two arms: of another version of the code, say, or another device.
        key = json.dumps([run.recipe_name, kept], sort_keys=True, default=str)
        by_recipe.setdefault(key, []).append(run)
    differing = _settings([members[0] for members in by_recipe.values()])
    groups = []
    for settings, members in zip(differing, by_recipe.values(), strict=True):
        by_seed: dict[int, list[RunNumbers]] = {}
        for run in members:
            by_seed.setdefault(run.seed, []).append(run)
        latest = [
            max(same, key=lambda run: str(run.origin.get("started"))) for same in by_seed.values()
        ]
        if len(latest) < len(members) and not allow:
            older = {run.name for run in members} - {run.name for run in latest}
            raise UsageError(_twice(by_seed, [run.name for run in runs if run.name not in older]))
        runs_of_group = tuple(sorted(latest, key=lambda run: run.seed))
        groups.append(Group(members[0].recipe_name, runs_of_group, settings))
    return [replace(group, label=_label(group, groups)) for group in groups]


def _twice(by_seed: Mapping[int, Sequence[RunNumbers]], names: Sequence[str]) -> str:
    """Say which runs are copies of each other, and how to compare the others, `names`."""
    copies = [run.name for same in by_seed.values() if len(same) > 1 for run in same]
    command = (
        f"efftrain compare {' '.join(names)}" if len(names) <= 12 else "efftrain compare RUN..."
    )
    return (
        f"{', '.join(copies)} have the same recipe and seed: not independent samples\n"
        f"  name one of each seed: {command}\n"
        "  or pass --allow for the newest"
    )


def _label(group: Group, groups: Sequence[Group]) -> str:
    """Name a group so that no other has the name: by its recipe and, if other groups share that, by the run that
    `--name` named, or the first settings that differ."""
    same = [other for other in groups if other.recipe_name == group.recipe_name]
    chosen = [other.runs[0].name for other in same if len(other.runs) == 1]
    few = len(group.settings) <= SETTINGS_SHOWN
    if 1 < len(same) == len(chosen) and not (
        few and any(name.startswith(group.recipe_name) for name in chosen)
    ):
        return group.runs[0].name
    most = SETTINGS_SHOWN
    while len({other.settings[:most] for other in same}) < len(same):
        most += 1
    more = len(group.settings) - most
    words = [group.recipe_name, *group.settings[:most]]
    return " ".join(words) + (f" and {more} more" if more > 0 else "")


def _settings(firsts: Sequence[RunNumbers]) -> list[tuple[str, ...]]:
    """The keys that tell a group apart from others that share its recipe's name, with their values."""
    found = []
    for run in firsts:
        same = [_with_devices(other) for other in firsts if other.recipe_name == run.recipe_name]
        own = _with_devices(run)
        found.append(tuple(f"{key}={format_value(own.get(key))}" for key in differing_keys(same)))
    return found


def _with_devices(run: RunNumbers) -> dict[str, Any]:
    """Over how many devices a recipe was trained is part of what was done, though not of the recipe."""
    return run.recipe | {DEVICES: run.origin.get("world_size", 1)}


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
    """Each recipe at its own best setting by BEST_RULE, in the order of the groups, and all the settings tried.

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
        unfinished, mean = rank_of(group)
        if len(alike[group.recipe_name, group.budget]) > 1:
            loss = None if math.isinf(mean) else mean
            trials.append(
                TriedSetting(
                    group.label, group.recipe_name, loss, unfinished, group.seeds, group in best
                )
            )
    return best, trials


def rank_of(group: Group) -> tuple[int, float]:
    """A group's place by BEST_RULE."""
    return rank([run.final_loss for run in group.runs])


def rank(losses: Sequence[float | None]) -> tuple[int, float]:
    """The place of a setting, by its final losses: how many are missing, then the mean of the others; lower wins."""
    there = [loss for loss in losses if loss is not None]
    return len(losses) - len(there), sum(there) / len(there) if there else math.inf


def differing_keys(recipes: Sequence[dict[str, Any]], but: Sequence[str] = ("seed",)) -> list[str]:
    """Dotted keys on which the recipes do not all agree, in the recipes' order; `but` and their sub-keys left out."""
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    missing = object()
    return [
        key
        for key in keys
        if key not in but
        and not key.startswith(NOT_COMPUTED)
        and any(recipe.get(key, missing) != recipes[0].get(key, missing) for recipe in recipes)
    ]
