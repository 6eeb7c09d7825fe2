"""Group runs: those of one recipe over several seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from efftrain_cli.compare.formats import format_value
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.run.small_files import NOT_COMPUTED

DEVICES = "devices"
"""Key of `Group.conditions` for the number of devices that a run was trained on."""
SETTINGS_SHOWN = 3
"""Most settings in a group's name, unless more are needed to tell groups apart."""


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, one per seed, ordered by seed."""

    label: str
    runs: tuple[RunNumbers, ...]

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
        """Name of the recipe on the command line."""
        return self.runs[0].recipe_name

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe as dotted keys, without its seed."""
        first = self.runs[0]
        return {key: value for key, value in first.recipe.items() if key != "seed"}

    @property
    def budget(self) -> float:
        """Tokens to train."""
        return float(self.recipe.get("train.tokens", 0))

    @property
    def devices(self) -> int:
        """Number of devices that the runs were started on."""
        return self.runs[0].origin.get("world_size", 1)

    @property
    def conditions(self) -> dict[str, Any]:
        """The recipe as dotted keys, and under DEVICES the number of devices."""
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


def group_runs(runs: Sequence[RunNumbers], allow: bool = False) -> list[Group]:
    """Group the runs of one recipe name whose resolved recipes differ in the seed alone.

    Groups come in the order of their first run.

    Args:
        allow: take the newest of several runs of one recipe and seed, instead of an error.

    Raises:
        UsageError: a recipe has two runs of one seed, and `allow` is False.
    """
    by_recipe: dict[str, list[RunNumbers]] = {}
    for run in runs:
        by_recipe.setdefault(_identity(run), []).append(run)

    groups = []
    for members in by_recipe.values():
        by_seed = runs_by_seed(members)
        newest = []
        for copies in by_seed.values():
            newest.append(max(copies, key=lambda run: str(run.origin.get("started"))))
        if len(newest) < len(members) and not allow:
            older = {run.name for run in members} - {run.name for run in newest}
            names = [run.name for run in runs if run.name not in older]
            raise UsageError(_twice(by_seed, names))
        ordered = sorted(newest, key=lambda run: run.seed)
        groups.append(Group(members[0].recipe_name, tuple(ordered)))
    return [replace(group, label=_label(group, groups)) for group in groups]


def _identity(run: RunNumbers) -> str:
    """Return the recipe's name, its values without the seed, and the number of devices as text.

    Runs with the same text are one group.
    """
    conditions = Group("", (run,)).conditions
    computed = {key: conditions[key] for key in conditions if not key.startswith(NOT_COMPUTED)}
    # The name counts: two names for one recipe may be two versions of the code, or two devices.
    return json.dumps([run.recipe_name, computed], sort_keys=True, default=str)


def _twice(by_seed: Mapping[int, Sequence[RunNumbers]], names: Sequence[str]) -> str:
    """Return the message for runs of one recipe and seed.

    Args:
        names: runs that can be compared, one per seed.
    """
    copies = []
    for of_seed in by_seed.values():
        if len(of_seed) > 1:
            copies += [run.name for run in of_seed]
    listed = " ".join(names) if len(names) <= 12 else "RUN..."
    return (
        f"{', '.join(copies)} have the same recipe and seed: not independent samples\n"
        f"  name one of each seed: efftrain compare {listed}\n"
        "  or pass --allow for the newest"
    )


def _label(group: Group, groups: Sequence[Group]) -> str:
    """Return a name of the group that no other group has.

    It is the name of the recipe. If several groups share that, it is the name of the only run, or
    the first settings that tell the groups apart follow, or it is the name of the first run.
    """
    namesakes = [other for other in groups if other.recipe_name == group.recipe_name]
    if len(namesakes) == 1:
        return group.recipe_name
    first_run = group.runs[0].name
    keys = differing_keys([other.conditions for other in namesakes])
    if all(len(other.runs) == 1 for other in namesakes):
        # A run that `--name` named does not begin with its recipe's name.
        are_named = [not other.runs[0].name.startswith(group.recipe_name) for other in namesakes]
        if len(keys) > SETTINGS_SHOWN or all(are_named):
            return first_run

    fewest = min(SETTINGS_SHOWN, len(keys))
    for n_shown in range(fewest, len(keys) + 1):
        labels = {settings_of(other, keys[:n_shown]) for other in namesakes}
        if len(labels) == len(namesakes):
            shown = settings_of(group, keys[:n_shown])
            words = [group.recipe_name, *shown]
            n_more = len(settings_of(group, keys)) - len(shown)
            if n_more:
                words.append(f"and {n_more} more")
            return " ".join(words)
    # The values differ, but their texts are equal.
    return first_run


def settings_of(group: Group, keys: Sequence[str]) -> tuple[str, ...]:
    """Return `key=value` for each of the keys that the group has."""
    values = group.conditions
    return tuple(
        f"{key}={format_value(values[key])}" for key in keys if values.get(key) is not None
    )


@dataclass(frozen=True)
class TriedSetting:
    """One of several settings of a recipe, and its result."""

    label: str
    recipe_name: str
    mean_final_loss: float | None
    """Mean over the runs that finished, nats per token."""
    unfinished: int
    """Number of runs that failed or have not finished."""
    seeds: tuple[int, ...]
    chosen: bool


BEST_RULE = "the setting with the fewest unfinished runs; of those, the lowest mean final loss"
"""How a recipe's own best setting is chosen."""


def best_settings(groups: Sequence[Group]) -> tuple[list[Group], list[TriedSetting]]:
    """Return each recipe at its own best setting by BEST_RULE, and all the settings tried.

    A recipe is tuned for each budget: else the longest run would always be the best. If all groups
    are settings of one recipe, all are returned, as they are what is compared.
    """
    recipes = {group.recipe_name for group in groups}
    if len(recipes) in (1, len(groups)):
        return list(groups), []
    settings_of: dict[tuple[str, object], list[Group]] = {}
    for group in groups:
        settings_of.setdefault((group.recipe_name, group.budget), []).append(group)
    best = [min(settings, key=rank_of) for settings in settings_of.values()]

    trials = []
    for group in groups:
        settings = settings_of[group.recipe_name, group.budget]
        if len(settings) == 1:
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
    """Return the sort key of a group by BEST_RULE."""
    return rank([run.final_loss for run in group.runs])


def rank(losses: Sequence[float | None]) -> tuple[int, float]:
    """Return the sort key of a setting: (number of missing losses, mean of the others)."""
    known = [loss for loss in losses if loss is not None]
    missing = len(losses) - len(known)
    if not known:
        return missing, math.inf
    return missing, sum(known) / len(known)


def differing_keys(recipes: Sequence[dict[str, Any]], but: Sequence[str] = ("seed",)) -> list[str]:
    """Return the dotted keys whose values differ between recipes, except `but`, in their order."""
    missing = object()
    differing = []
    for key in dict.fromkeys(chain.from_iterable(recipes)):
        values = [recipe.get(key, missing) for recipe in recipes]
        is_asked = key not in but and not key.startswith(NOT_COMPUTED)
        if is_asked and any(value != values[0] for value in values):
            differing.append(key)
    return differing
