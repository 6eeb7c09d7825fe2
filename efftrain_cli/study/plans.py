"""Plans: what would count as an answer, fixed before the first run, by a study file or a race."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.records import digest_of
from efftrain_cli.recipe.check import validated
from efftrain_cli.recipe.draft import find_recipe, read_recipe_file, read_toml_file
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.directory import run_path
from efftrain_cli.run.reading import computed_values
from efftrain_cli.study.file import Grid, Study
from efftrain_cli.study.sizes import Size, check_sizes, settings_of_size, size_of
from efftrain_cli.trials.command import check_command, check_metric
from efftrain_cli.trials.trial import Trial, Trunk, parse_seeds, run_name, setting_word

UNEQUAL = "tuned over another number of settings than the baseline: no p"
"""Why an arm is not judged."""
Settings = tuple[str, ...]
"""Overrides of a recipe, `key=value`."""


@dataclass(frozen=True, kw_only=True)
class PlannedArm:
    """A recipe or command that is compared."""

    name: str
    recipe: str
    """Path of a recipe; of a foreign arm a command."""
    prefix: str
    """Beginning of the names of its runs."""
    seeds: tuple[int, ...]
    settings: Settings = ()
    grid: Grid = field(default_factory=dict)
    """What the arm is tuned over."""
    size: Size | None = None
    """Size at which the arm is trained, in a study of several."""

    @property
    def label(self) -> str:
        """Name of what is tuned: the arm, at its size."""
        return f"{self.name} {self.size.name}" if self.size is not None else self.name

    @property
    def points(self) -> int:
        """Number of settings that the arm is tuned over; 1 if it is not tuned."""
        return math.prod(map(len, self.grid.values()))

    def trial(
        self,
        seed: int,
        point: Settings = (),
        more: Settings = (),
        word: str = "",
    ) -> Trial:
        """Return a run.

        Args:
            point: settings of the grid, which its name says.
            more: further settings.
            word: part of its name.
        """
        overrides = (*self.settings, *point, *more)
        words = [self.prefix, *map(setting_word, point), word, f"seed{seed}"]
        name = run_name([*filter(None, words)], overrides)
        return Trial(
            self.recipe,
            overrides,
            seed,
            name,
            arm=self.name,
        )

    def trials(
        self,
        seed: int,
        point: Settings = (),
    ) -> Iterator[Trial]:
        """Yield the runs of a seed: one, or at a size its trunk and the branches of it."""
        if self.size is None:
            yield self.trial(seed, point)
            return
        *shorter, longest = self.size.budgets
        kept = [each.step for each in self.size.points]
        more = (f"train.tokens={longest}", f"checkpoint.at={kept}")
        trunk = self.trial(
            seed,
            point,
            more,
            "trunk",
        )
        yield trunk
        for budget, start in zip(shorter, self.size.points, strict=True):
            branch = self.trial(
                seed,
                point,
                (f"train.tokens={budget}",),
                f"at{start.step}",
            )
            yield replace(branch, trunk=Trunk(trunk.name, *start))


@dataclass(frozen=True)
class Plan:
    """What is trained, and what counts as an answer."""

    name: str
    study: Study
    arms: tuple[PlannedArm, ...]
    """Arms, the baseline first; in a study of several sizes, each arm at each size."""
    values: dict[str, Any]
    """What is registered, by dotted key: the file, and its recipes as written."""
    is_race: bool = False
    """Whether the tool made the plan: its runs belong to all races of their arms."""

    @property
    def folder(self) -> Path:
        """Where registration, looks and logs are."""
        return run_path(self.name if self.is_race else f"{self.name}-study")

    @property
    def runs_folder(self) -> Path:
        """Where the runs of a command are kept: races of one command share them."""
        if not self.is_race:
            return self.folder / "commands"
        digest = digest_of([self.study.command, self.study.metric])
        return run_path(f"race-commands-{digest[:6]}")

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of pairs at which the claims are judged."""
        return self.study.looks or (len(parse_seeds(self.study.seeds)),)

    @property
    def names(self) -> list[str]:
        """Names of the arms, the baseline first."""
        return list(dict.fromkeys(arm.name for arm in self.arms))

    def of(self, name: str) -> list[PlannedArm]:
        """Return an arm, at each size."""
        return [arm for arm in self.arms if arm.name == name]

    def is_judged(self, name: str) -> bool:
        """Return whether an arm is tuned over as many settings as the baseline, at each size."""
        points = [arm.points for arm in self.of(name)]
        return points == [arm.points for arm in self.of(self.study.baseline)]

    @property
    def varied(self) -> set[str]:
        """Keys that tuning varies."""
        return {key for arm in self.arms for key in arm.grid}

    def trials(
        self,
        pairs: int,
        points: Mapping[str, Settings] = {},
        arms: Sequence[PlannedArm] | None = None,
    ) -> list[Trial]:
        """Return the runs of arms for so many pairs, seed by seed.

        Args:
            points: label of an arm -> what it was tuned to.
            arms: default: all.
        """
        trials: list[Trial] = []
        for number, arm in itertools.product(range(pairs), arms or self.arms):
            for seed in arm.seeds[number : number + 1]:
                trials += arm.trials(seed, points.get(arm.label, ()))
        return trials


def read_study(path: Path) -> Plan:
    """Read a study file.

    Raises:
        RecipeError: it breaks rules; the message lists every breach at once.
        UsageError: command or metric cannot be used.
    """
    return plan_of(validated(read_toml_file(path), Study), path.stem, path)


def plan_of(
    study: Study,
    name: str,
    path: Path | None = None,
) -> Plan:
    """Return the plan of a study of this name.

    Args:
        path: its file, beside which recipes are looked for too.
    """
    values = flatten(asdict(study))
    values.pop("question")
    if not study.maximize:
        del values["maximize"]
    if not study.sizes:
        del values["sizes"], values["tokens_per_parameter"], values["branches"]
        values.pop("tuning.sizes", None)
    if study.command:
        check_command(study.command)
        check_metric(study.metric)
    arms: list[PlannedArm] = []
    for arm in sorted(study.arms, key=lambda arm: arm.name != study.baseline):
        settings = (*study.set, *arm.set)
        recipe = study.command
        if not study.command:
            recipe = str(find_recipe(arm.recipe, beside=path))
            for key, value in read_values(recipe, settings).items():
                values[f"recipe of {arm.name}: {key}"] = value
        grid: Grid = {}
        if study.tuning is not None:
            grid = study.tuning.grid if arm.grid is None else arm.grid
        planned = PlannedArm(
            name=arm.name,
            recipe=recipe,
            prefix=f"{name}-{arm.name}",
            seeds=parse_seeds(study.seeds),
            settings=settings,
            grid=grid,
        )
        if study.sizes:
            first = arms[0].recipe if arms else recipe
            arms += arms_at_sizes(
                study,
                arm.set,
                planned,
                first,
            )
        else:
            arms.append(planned)
    for each in arms:
        if each.size is not None:
            values[f"size of {each.label}"] = [*each.settings, *each.size.budgets]
    plan = Plan(
        name,
        study,
        tuple(arms),
        values,
    )
    check_sizes([arm.size for arm in plan.of(study.baseline) if arm.size is not None])
    return plan


def read_values(recipe: str, settings: Settings) -> dict[str, Any]:
    """Return a recipe as it is written, with its bases and overrides, by dotted key.

    Raises:
        RecipeError: the recipe breaks its rules.
    """
    load_recipe(recipe, settings)
    return computed_values(read_recipe_file(recipe, settings).values)


def arms_at_sizes(
    study: Study,
    own: Settings,
    arm: PlannedArm,
    baseline: str,
) -> Iterator[PlannedArm]:
    """Yield an arm at each size of a study.

    Args:
        own: changes of the arm's recipe, which win over those of a size.
        baseline: recipe of the baseline.

    Raises:
        UsageError: its budgets cannot branch off one run.
    """
    for size in study.each_size:
        of_size = settings_of_size(
            size,
            baseline,
            study.set,
            study.tokens_per_parameter,
        )
        settings = (*study.set, *of_size, *own)
        is_tuned = not study.tuned_sizes or size.name in study.tuned_sizes
        yield replace(
            arm,
            prefix=f"{arm.prefix}-{size.name}",
            seeds=parse_seeds(size.seeds or study.seeds),
            settings=settings,
            grid=arm.grid if is_tuned else {},
            size=size_of(
                size,
                arm.recipe,
                settings,
                study.tokens_per_parameter,
                study.branches,
            ),
        )
