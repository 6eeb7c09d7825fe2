"""Plans: what would count as an answer, fixed before the first run, by a study file or a race."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as checked

from efftrain_cli.compare.judge import Claim
from efftrain_cli.foundation.errors import Breaches
from efftrain_cli.foundation.records import digest_of
from efftrain_cli.foundation.section import SECTION, Text
from efftrain_cli.recipe.check import validated
from efftrain_cli.recipe.draft import (
    find_recipe,
    read_recipe_file,
    read_toml_file,
)
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.reading import computed_values
from efftrain_cli.study.sizes import (
    Size,
    StudySize,
    check_sizes,
    parse_sizes,
    settings_of_size,
    size_of,
)
from efftrain_cli.trials.command import METRIC, check_command, check_metric
from efftrain_cli.trials.trial import Trial, Trunk, parse_seeds, run_name

Grid = dict[str, tuple[bool | int | float | str, ...]]
"""Recipe key -> values to try."""
Settings = tuple[str, ...]
"""Overrides of a recipe, `key=value`."""
RATIOS = ("different", "better")
"""Directions of a cost: a ratio under a decay lies towards 1, so no margin holds for it."""


@dataclass(frozen=True)
class PlannedArm:
    """A recipe or command that is compared."""

    name: str
    recipe: str
    """Name or path of a recipe; of a foreign arm a command."""
    prefix: str
    """Beginning of the names of its runs."""
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
        return math.prod(len(values) for values in self.grid.values())

    def trial(
        self,
        seed: int,
        settings: Settings = (),
        *words: str,
    ) -> Trial:
        """Return a run with further settings; `words` are parts of its name."""
        overrides = (*self.settings, *settings)
        name = run_name([self.prefix, *words, f"seed{seed}"], overrides)
        return Trial(self.recipe, overrides, seed, name, arm=self.name)

    def trials(self, seed: int, settings: Settings = (), *words: str) -> list[Trial]:
        """Return the runs of a seed: one, or at a size its trunk and the branches of it."""
        if self.size is None:
            return [self.trial(seed, settings, *words)]
        *shorter, longest = self.size.budgets
        kept = [point.step for point in self.size.points]
        trunk = self.trial(
            seed,
            (*settings, f"train.tokens={longest}", f"checkpoint.at={kept}"),
            *words,
            "trunk",
        )
        trials = [trunk]
        for budget, point in zip(shorter, self.size.points, strict=True):
            branch = self.trial(
                seed, (*settings, f"train.tokens={budget}"), *words, f"at{point.step}"
            )
            trials.append(replace(branch, trunk=Trunk(trunk.name, *point)))
        return trials


@dataclass(frozen=True)
class Plan:
    """What is trained, and what counts as an answer."""

    name: str
    folder: Path
    """Where registration, looks and logs are."""
    question: str
    arms: tuple[PlannedArm, ...]
    """Arms, the baseline first; in a study of several sizes, each arm at each size."""
    claims: tuple[Claim, ...]
    seeds: tuple[int, ...]
    looks: tuple[int, ...]
    """Numbers of pairs at which the claims are judged."""
    values: Mapping[str, Any]
    """What is registered, by dotted key: the file, and its recipes as written."""
    alpha: float = 0.05
    give_up: float = 1.0
    """p-value above which a claim is given up at an early look of five pairs or more."""
    tuning_seeds: tuple[int, ...] = ()
    command: str = ""
    """Command that trains an arm; "" if the arms are recipes."""
    metric: str = METRIC
    file: str = ""
    """Study file that a race writes into its folder; "" of a study."""

    @property
    def is_race(self) -> bool:
        """Whether the tool made the plan: its runs belong to all races of their arms."""
        return bool(self.file)

    @property
    def runs_folder(self) -> Path:
        """Where the runs of a command are kept: races of one command share them."""
        if not self.is_race:
            return self.folder / "commands"
        digest = digest_of([self.command, self.metric])
        return self.folder.with_name(f"race-commands-{digest[:6]}")

    @property
    def baselines(self) -> list[PlannedArm]:
        """The baseline, at each size."""
        base = self.arms[0].name
        return [arm for arm in self.arms if arm.name == base]

    @property
    def others(self) -> list[PlannedArm]:
        """The other arms, at each size."""
        base = self.arms[0].name
        return [arm for arm in self.arms if arm.name != base]

    def points(self, name: str) -> list[int]:
        """Return the number of settings that an arm is tuned over, at each size."""
        return [arm.points for arm in self.arms if arm.name == name]

    @property
    def varied(self) -> set[str]:
        """Keys that tuning varies."""
        return {key for arm in self.arms for key in arm.grid}

    def trials(
        self,
        pairs: int,
        arms: Sequence[PlannedArm] = (),
        trials_of: Callable[[PlannedArm, int], list[Trial]] = PlannedArm.trials,
    ) -> list[Trial]:
        """Return the runs of arms for so many pairs, seed by seed.

        Args:
            arms: default: all.
            trials_of: gives the runs of an arm and seed, with what tuning adds to them.
        """
        trials = []
        for number, arm in itertools.product(range(pairs), arms or self.arms):
            seeds = self.seeds
            if arm.size is not None and arm.size.seeds:
                seeds = arm.size.seeds
            for seed in seeds[number : number + 1]:
                trials += trials_of(arm, seed)
        return trials


def read_values(recipe: str, settings: Settings) -> dict[str, Any]:
    """Return a recipe as it is written, with its bases and overrides, by dotted key.

    Raises:
        RecipeError: the recipe breaks its rules.
    """
    load_recipe(recipe, settings)
    return computed_values(read_recipe_file(recipe, settings).values)


@checked(frozen=True, kw_only=True, config=SECTION)
class StudyArm:
    """A recipe that is compared."""

    name: Text
    recipe: str = ""
    """Name of a recipe, or its path as seen from the study file; "" with a command."""
    set: tuple[Text, ...] = ()
    """Changes of the recipe: ["optim.lr=2e-3"]."""
    grid: Grid | None = None
    """Tuning grid of this arm if it is another than [tuning]'s; {} if the arm is not tuned."""


@checked(frozen=True, kw_only=True, config=SECTION)
class Tuning:
    """Settings that every arm is trained with on seeds of their own; the best is judged."""

    seeds: Text
    grid: Grid
    sizes: tuple[Text, ...] = ()
    """Sizes at which the arms are tuned; larger ones carry rates on by N^(-1/3). Default: all."""


@checked(frozen=True, kw_only=True, config=SECTION)
class Study:
    """A study, as its file says."""

    question: str = ""
    """What the study is for, in one sentence."""
    baseline: Text
    """Name of the arm that the others are compared with."""
    arms: Annotated[tuple[StudyArm, ...], Field(min_length=2)]
    primary: Annotated[tuple[Claim, ...], Field(min_length=1)]
    """Claims that are judged; every other measure is estimated."""
    seeds: Text
    """Seeds of every arm, in the order of the looks: "10..14", both included."""
    looks: tuple[int, ...] = ()
    """Numbers of pairs at which the study is judged; only at all of them unless set."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance of one or more false claims if nothing differs, over all claims and looks."""
    give_up: float = Field(default=1.0, gt=0, le=1)
    """p-value above which a claim is given up at an early look of five pairs or more."""
    tuning: Tuning | None = None
    set: tuple[Text, ...] = ()
    """Changes of every arm's recipe, before the arm's own."""
    command: str = ""
    """Command that trains an arm, with places for {seed} and {arm}, instead of recipes."""
    metric: str = METRIC
    """With a command: regular expression of a printed loss, whose last match counts."""
    sizes: Text | tuple[StudySize, ...] = ()
    """Sizes at which every arm is trained: "0.1M..1.6M x2", or a table for each."""
    tokens_per_parameter: float = Field(default=20.0, gt=0)
    """Tokens of a size that names none, per parameter of it."""
    branches: Annotated[tuple[float, ...], Field(min_length=2)] = (0.5, 1.0, 2.0)
    """Budgets of a size, in multiples of its tokens."""

    @property
    def each_size(self) -> tuple[StudySize, ...]:
        """The sizes, whichever way they are written.

        Raises:
            ValueError: the text is not of its form.
        """
        return parse_sizes(self.sizes) if isinstance(self.sizes, str) else self.sizes

    @model_validator(mode="after")
    def _rules_between_keys(self) -> Study:
        found = list(breaches(self))
        if found:
            raise Breaches(found)
        return self


def read_study(path: Path) -> Plan:
    """Read a study file.

    Raises:
        RecipeError: it breaks rules; the message lists every breach at once.
        UsageError: command or metric cannot be used.
    """
    return plan_of(validated(read_toml_file(path), Study, "study"), path.stem, path)


def plan_of(
    study: Study,
    name: str,
    path: Path | None = None,
) -> Plan:
    """Return the plan of a study of this name.

    Args:
        path: its file, beside which recipes are looked for too.
    """
    from efftrain_cli.run.directory import run_path

    values = flatten(asdict(study))
    values.pop("question")
    if not study.sizes:
        del values["sizes"], values["tokens_per_parameter"], values["branches"]
        values.pop("tuning.sizes", None)
    if study.command:
        check_command(study.command, len(study.arms))
        check_metric(study.metric)
    arms: list[PlannedArm] = []
    for arm in sorted(study.arms, key=lambda arm: arm.name != study.baseline):
        settings = (*study.set, *arm.set)
        recipe = study.command
        if not study.command:
            recipe = str(find_recipe(arm.recipe, beside=path))
            for key, value in read_values(recipe, settings).items():
                values[f"recipe of {arm.name}: {key}"] = value
        grid = {}
        if study.tuning is not None:
            grid = study.tuning.grid if arm.grid is None else arm.grid
        prefix = f"{name}-{arm.name}"
        planned = PlannedArm(arm.name, recipe, prefix, settings, grid)
        if study.sizes:
            first = arms[0].recipe if arms else recipe
            arms += arms_at_sizes(study, arm.set, planned, first)
        else:
            arms.append(planned)
    sizes = []
    for each in arms:
        if each.size is not None:
            values[f"size of {each.label}"] = [*each.settings, *each.size.budgets]
            if each.name == study.baseline:
                sizes.append(each.size)
    check_sizes(sizes)
    seeds = parse_seeds(study.seeds)
    return Plan(
        name=name,
        folder=run_path(f"{name}-study"),
        question=study.question,
        arms=tuple(arms),
        claims=study.primary,
        seeds=seeds,
        looks=study.looks or (len(seeds),),
        values=values,
        alpha=study.alpha,
        give_up=study.give_up,
        tuning_seeds=parse_seeds(study.tuning.seeds) if study.tuning else (),
        command=study.command,
        metric=study.metric,
    )


def arms_at_sizes(
    study: Study,
    own: Settings,
    arm: PlannedArm,
    baseline: str,
) -> list[PlannedArm]:
    """Return an arm at each size of a study.

    Args:
        own: changes of the arm's recipe, which win over those of a size.
        baseline: recipe of the baseline.

    Raises:
        UsageError: its budgets cannot branch off one run.
    """
    arms = []
    for size in study.each_size:
        of_size = settings_of_size(size, baseline, study.set, study.tokens_per_parameter)
        settings = (*study.set, *of_size, *own)
        resolved = size_of(
            size,
            arm.recipe,
            settings,
            study.tokens_per_parameter,
            study.branches,
            parse_seeds(size.seeds) if size.seeds else (),
        )
        sized = replace(arm, prefix=f"{arm.prefix}-{size.name}", settings=settings, size=resolved)
        tuned = study.tuning.sizes if study.tuning else ()
        if tuned and size.name not in tuned:
            sized = replace(sized, grid={})
        arms.append(sized)
    return arms


def breaches(study: Study) -> Iterator[tuple[str, str]]:
    """Yield key and rule of each mistake that concerns several keys."""
    seeds = {*parse_seeds(study.seeds)}
    names = [arm.name for arm in study.arms]
    if study.baseline not in names or len({*names}) < len(names):
        yield (
            "baseline",
            "must be one of the arms, and each arm needs its own name",
        )
    for number, arm in enumerate(study.arms):
        if bool(arm.recipe) == bool(study.command):
            yield f"arms.{number}.recipe", "is required without a command, and goes with one"
    if study.command and (study.tuning or study.set or study.sizes):
        yield "command", "goes with neither tuning, set nor sizes: write the settings into it"
    try:
        sizes = study.each_size
    except ValueError as error:
        yield "sizes", str(error)
        return
    for number, size in enumerate(sizes):
        own = {*parse_seeds(size.seeds)} if size.seeds else seeds
        if len(own) < 2:
            yield f"sizes.{number}.seeds", "must be two or more: one pair supports no claim"
        seeds |= own
    tuned = study.tuning.sizes if study.tuning else ()
    if tuned and [*tuned] != [size.name for size in sizes[: len(tuned)]]:
        yield "tuning.sizes", "must be the first sizes, in their order: rates are carried upwards"
    if len({size.name for size in sizes}) < len(sizes):
        yield "sizes", "must have a name of their own each"
    if len({*study.branches}) < len(study.branches) or min(study.branches) <= 0:
        yield "branches", "must be positive and differ: they are multiples of a size's tokens"
    has_multiplier = any(claim.measure == "compute_multiplier" for claim in study.primary)
    if has_multiplier and not study.sizes:
        yield "primary", "of a compute multiplier needs sizes"
    if len(seeds) < 2:
        yield "seeds", "must be two or more: one pair supports no claim"
    if study.looks and [*study.looks] != sorted({*study.looks, len(seeds)}):
        yield "looks", f"must rise and end at all {len(seeds)} seeds"
    if study.tuning and seeds & {*parse_seeds(study.tuning.seeds)}:
        yield (
            "tuning.seeds",
            "must be others than the study's, or the tuned arm is flattered",
        )
    measures = {claim.measure for claim in study.primary}
    targets = {claim.target for claim in study.primary if claim.target}
    if len(measures) < len(study.primary) or len(targets) > 1:
        yield (
            "primary",
            "must name each measure once, and one target at most",
        )
    for number, claim in enumerate(study.primary):
        for name, rule in claim_breaches(claim):
            yield f"primary.{number}.{name}", rule


def claim_breaches(claim: Claim) -> Iterator[tuple[str, str]]:
    """Yield key and rule of each mistake of a primary."""
    if claim.measure != "final_loss" and claim.direction not in RATIOS:
        yield "direction", "of a cost must be different or better: its ratio is a bound"
    elif claim.direction not in RATIOS and not claim.margin:
        yield "margin", f"is required for {claim.direction}"
    if claim.measure.endswith("_to_target") and claim.target is None:
        yield "target", "is required for a cost to a target"
