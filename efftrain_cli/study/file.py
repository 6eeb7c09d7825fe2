"""The study file: arms, seeds, primary measures and looks, checked as a whole before anything is trained.

A study says beforehand what would count as an answer. Its meaning, the arms' resolved recipes included, is hashed when
its first run starts; comments and the order of keys are free to change, everything else is not.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from efftrain_cli.compare.sequential import schedule
from efftrain_cli.foundation.environment import expanded
from efftrain_cli.foundation.errors import Problem, RecipeError, UsageError
from efftrain_cli.foundation.section import SECTION, Text
from efftrain_cli.recipe.check import Check, report
from efftrain_cli.recipe.file import (
    find_recipe,
    is_path,
    read_recipe_file,
    read_toml_file,
    shown_path,
)
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.recipe.toml import flatten, toml_value
from efftrain_cli.run.directory import run_path
from efftrain_cli.run.rows import NOT_COMPUTED
from efftrain_cli.study.phases import confirmation, over_rates, tuning
from efftrain_cli.sweep.trials import check_comparable, parse_seeds, recipe_of

COSTS = ("tokens_to_target", "flops_to_target", "seconds_to_target")
"""Measures of cost: compared as ratios, so a margin is a share."""
LOSSES = ("final_loss", "lr_sensitivity")
"""Measures in nats per token: compared as differences."""
LONGEST_NAME = 40
"""Of study and arm together, so that the names of their runs stay readable and allowed."""


def _seeds(value: Any) -> Any:
    """Seeds as text, "0..4" or "1,3"; one whole number or a list of them is accepted too."""
    numbers = value if isinstance(value, tuple) else (value,)
    if numbers and all(isinstance(seed, int) and not isinstance(seed, bool) for seed in numbers):
        value = ",".join(map(str, numbers))
    if isinstance(value, str):
        try:
            parse_seeds(value)
        except UsageError as error:
            raise ValueError(str(error).removeprefix("--seeds ")) from None
    return value


def _grid(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {
        key: tuple(values) if isinstance(values, list | tuple) else values
        for key, values in value.items()
    }


Seeds = Annotated[str, BeforeValidator(_seeds)]
Grid = Annotated[
    dict[str, Annotated[tuple[bool | int | float | str, ...], Field(min_length=1)]],
    BeforeValidator(_grid),
]


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Primary:
    """A measure that the study is judged by."""

    measure: Literal[
        "final_loss", "lr_sensitivity", "tokens_to_target", "flops_to_target", "seconds_to_target"
    ]
    """final_loss: validation loss when the budget is used up. lr_sensitivity: how much that depends on the learning
    rate. A cost: tokens, FLOPs or seconds to reach a loss."""
    direction: Literal["better", "different", "noninferior", "equivalent"]
    """What the arm must be shown to be, against the baseline."""
    margin: float | None = Field(default=None, gt=0)
    """For noninferior and equivalent: how much worse, or how far apart, still does not matter; nats per token, or for a
    cost a share (0.05 is 5 %)."""
    target: float | None = Field(default=None, gt=0)
    """For a cost: the loss to reach, nats per token; without it, of each pair of runs, the worse run's final loss."""
    rates: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """For lr_sensitivity: the learning rates, rising, that every arm is trained with by every seed."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Tuning:
    """Every arm is trained with each of these settings on separate seeds; the best is then used for the study's
    seeds."""

    seeds: Seeds
    """Seeds for choosing: "0..1", "3" or "1,2". None of them may be one of the study's seeds."""
    grid: Grid
    """Recipe key -> values to try: { "optim.lr" = [1e-3, 2e-3, 4e-3] }. Several keys are combined with each other."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Arm:
    """One of the recipes that are compared."""

    name: Text
    """Short name, part of the names of its runs."""
    recipe: Text
    """Name of a recipe, or the path of one as seen from the study file."""
    set: tuple[Text, ...] = ()
    """Changes of the recipe: ["optim.lr=2e-3"]."""
    grid: Grid | None = None
    """Tuning grid of this arm where it is another than [tuning]'s; {} where the arm is not tuned."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Study:
    """A whole study, as its file says."""

    question: str = ""
    """What the study is for, in one sentence."""
    seeds: Seeds
    """Seeds that every arm is trained with, in the order of their look: "10..14" (both included)."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance of one or more false claims where nothing differs, over all primaries, arms and looks."""
    looks: int = Field(default=1, ge=1, le=20)
    """How often the study is judged, evenly spread over its seeds; it ends early where everything is decided."""
    baseline: Text
    """Name of the arm that the others are compared with."""
    primary: Annotated[tuple[Primary, ...], Field(min_length=1)]
    """Measures that the study is judged by; all others are exploratory."""
    tuning: Tuning | None = None
    arms: Annotated[tuple[Arm, ...], Field(min_length=2)]
    """The recipes that are compared, the baseline among them."""
    set: tuple[Text, ...] = ()
    """Changes of every arm's recipe, before the arm's own."""


class StudyFile:
    """A study with its place: what the file says, the recipes that it means, and its hash."""

    def __init__(self, path: Path, study: Study) -> None:
        self.path = path
        self.name = path.stem
        self.study = study

    @property
    def seeds(self) -> tuple[int, ...]:
        """The study's seeds, in the order in which they are trained."""
        return parse_seeds(self.study.seeds)

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """Seeds of the tuning phase; empty without one."""
        return parse_seeds(self.study.tuning.seeds) if self.study.tuning else ()

    @property
    def rates(self) -> tuple[float, ...]:
        """Learning rates of the primary lr_sensitivity; empty without one."""
        return next(
            (
                primary.rates or ()
                for primary in self.study.primary
                if primary.measure == "lr_sensitivity"
            ),
            (),
        )

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of seeds at which the study is judged."""
        return schedule(len(self.seeds), self.study.looks)

    @property
    def comparisons(self) -> int:
        """Number of verdicts: every primary of every arm but the baseline."""
        return len(self.study.primary) * (len(self.study.arms) - 1)

    def grid_of(self, arm: Arm) -> dict[str, tuple[Any, ...]]:
        """Recipe key -> values that the arm is tuned over; empty where it is not tuned."""
        if self.study.tuning is None:
            return {}
        return self.study.tuning.grid if arm.grid is None else arm.grid

    def recipe_path(self, arm: Arm) -> str:
        """What --recipe is given: a name stays a name; a file is looked for beside the study."""
        found = find_recipe(arm.recipe, beside=self.path)
        return (
            shown_path(found)
            if is_path(arm.recipe) or found.parent == self.path.parent
            else arm.recipe
        )

    def settings_of(self, arm: Arm) -> tuple[str, ...]:
        """`key=value` overrides of the arm, before any tuning."""
        return (*self.study.set, *arm.set)

    def values(self) -> dict[str, Any]:
        """What the hash is taken of: all that decides what is trained and how it is judged, as dotted keys.

        Recipes stand as they are written, bases and changes included, but without their defaults: a later version of
        the program may know keys more.
        """
        found = dict(_flat(self.study))
        for arm in self.study.arms:
            written = read_recipe_file(self.recipe_path(arm), self.settings_of(arm)).values
            for key, value in flatten(written).items():
                if key != "seed" and not key.startswith(NOT_COMPUTED):
                    found[f"recipe of {arm.name}: {key}"] = value
        return json.loads(json.dumps(found))

    @property
    def sha256(self) -> str:
        """Hash of `values`."""
        return hash_of(self.values())


def hash_of(values: Mapping[str, Any]) -> str:
    """Hex sha256 of a study's values, whatever their order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _flat(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields(section):
        value = getattr(section, field.name)
        if field.name in ("question", "recipe"):
            continue  # words; and an arm's recipe counts by what it says
        if isinstance(value, Tuning):
            yield from _flat(value, f"{prefix}{field.name}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], Primary | Arm):
            for i, item in enumerate(value):
                name = item.name if isinstance(item, Arm) else str(i)
                yield from _flat(item, f"{prefix}{field.name}.{name}.")
        elif value is not None:
            yield f"{prefix}{field.name}", value


def read_study(path: Path) -> StudyFile:
    """Reads a study file and checks everything that can be known before training.

    Raises:
        RecipeError: it breaks any rule; the message lists every breach at once.
    """
    path = expanded(str(path), "write the path without ~")
    if path.suffix != ".toml":
        raise UsageError(f"{path}: a study is a TOML file; its name ends in .toml")
    if not path.is_file():
        raise UsageError(f"there is no study file {path}")
    draft = read_toml_file(path)
    check = Check(draft, Study)
    valid = check.result()
    _check_numbers(check, valid)
    _check_arms(check, valid, path)
    _check_tuning(check, valid)
    _check_recipes(check, valid, path)
    if not check.problems:
        study = StudyFile(path, Study(**valid))
        _check_runs(check, study)
        if not check.problems:
            return study
    raise RecipeError(report(path.stem, check.problems, "study"), check.problems)


def _check_numbers(check: Check, valid: Mapping[str, Any]) -> None:
    seeds = parse_seeds(valid["seeds"]) if "seeds" in valid else ()
    if seeds and len(seeds) < 2:
        check.add("seeds", "needs two seeds or more: one seed supports no claim", valid["seeds"])
    elif seeds and "looks" in valid:
        try:
            schedule(len(seeds), valid["looks"])
        except ValueError as error:
            check.add("looks", str(error), valid["looks"])
    if (
        seeds
        and (tuning := valid.get("tuning"))
        and (both := sorted({*seeds} & {*parse_seeds(tuning.seeds)}))
    ):
        rule = "has seeds of the study itself: a setting chosen on the judged runs flatters them"
        check.add("tuning.seeds", f"{rule} ({', '.join(map(str, both))})", tuning.seeds)
    for i, primary in enumerate(valid.get("primary", ())):
        if primary.direction in ("noninferior", "equivalent") and primary.margin is None:
            rule = f"is required for {primary.direction}: how large a difference still does not matter?"
            check.add(f"primary.{i}.margin", rule)
        if primary.direction in ("better", "different") and primary.margin is not None:
            check.add(
                f"primary.{i}.margin", f"has no meaning for {primary.direction}", primary.margin
            )
        if primary.target is not None and primary.measure not in COSTS:
            check.add(
                f"primary.{i}.target", "is for a cost, such as tokens_to_target", primary.target
            )
        if primary.rates and primary.measure != "lr_sensitivity":
            check.add(f"primary.{i}.rates", "is for lr_sensitivity", list(primary.rates))
        rates = primary.rates or ()
        rising = all(later > rate for rate, later in itertools.pairwise(rates))
        if primary.measure == "lr_sensitivity" and (len(rates) < 2 or not rising):
            check.add(
                f"primary.{i}.rates",
                "needs two or more learning rates, in rising order",
                list(rates),
            )
    kinds = [(primary.measure, primary.target) for primary in valid.get("primary", ())]
    for i, kind in enumerate(kinds):
        if kind in kinds[:i]:
            check.add(f"primary.{i}.measure", "is judged already by a [[primary]] above", kind[0])


def _check_arms(check: Check, valid: Mapping[str, Any], path: Path) -> None:
    arms = valid.get("arms", ())
    names = [arm.name for arm in arms]
    for i, name in enumerate(names):
        if name in names[:i]:
            check.add(f"arms.{i}.name", "is also the name of another arm", name)
        try:
            run_path(f"{path.stem}-{name}")
        except UsageError:
            rule = "may hold letters, digits, '.', '_' and '-': it is part of the names of runs"
            check.add(f"arms.{i}.name", rule, name)
        if len(f"{path.stem}-{name}") > LONGEST_NAME:
            rule = f"is too long beside the study's name {path.stem!r}: {LONGEST_NAME - 1} characters for both"
            check.add(f"arms.{i}.name", rule, name)
    if names and "baseline" in valid and valid["baseline"] not in names:
        check.add("baseline", f"must be one of the arms: {', '.join(names)}", valid["baseline"])


def _check_tuning(check: Check, valid: Mapping[str, Any]) -> None:
    grids = [("tuning.grid", valid["tuning"].grid)] if valid.get("tuning") else []
    for i, arm in enumerate(valid.get("arms", ())):
        if arm.grid is not None:
            if not valid.get("tuning"):
                check.add(f"arms.{i}.grid", "needs a [tuning] section with the seeds to tune on")
            grids.append((f"arms.{i}.grid", arm.grid))
    for key, grid in grids:
        for name, values in grid.items():
            if name in ("seed", "base") or name.startswith(NOT_COMPUTED):
                check.add(
                    key, f"{name} cannot be tuned: it does not change what a recipe computes", None
                )
            if len(set(map(toml_value, values))) < len(values):
                check.add(key, f"{name} has a value twice", list(values))


def _check_recipes(check: Check, valid: Mapping[str, Any], path: Path) -> None:
    for i, arm in enumerate(valid.get("arms", ())):
        try:
            load_recipe(
                str(find_recipe(arm.recipe, beside=path)), (*valid.get("set", ()), *arm.set)
            )
        except RecipeError as error:
            _wrong_recipe(check, i, arm.recipe, error)


def _wrong_recipe(check: Check, i: int, recipe: str, error: RecipeError) -> None:
    text = str(error).replace("\n", "\n    ")
    check.problems.append(
        Problem(
            f"arms.{i}.recipe", text, toml_value(recipe), check.draft.origin(f"arms.{i}.recipe")
        )
    )


def _check_runs(check: Check, file: StudyFile) -> None:
    """Every point of every arm's grid must be a recipe, and all must be validated on the same text."""
    runs = [*confirmation(file, {}), *over_rates(file, {}), *tuning(file)]
    trials = []
    for i, arm in enumerate(file.study.arms):
        of_arm = [trial for name, trial in runs if name == arm.name]
        trials += of_arm
        for trial in {trial.settings: trial for trial in reversed(of_arm)}.values():
            try:
                recipe_of(trial)
            except RecipeError as error:
                _wrong_recipe(check, i, arm.recipe, error)
    if not check.problems:
        try:
            check_comparable(trials)
        except UsageError as error:
            text = str(error).partition("\nMake them equal")[0].replace("\n", "\n    ")
            check.problems.append(Problem("arms", text, None, check.draft.origin("arms.0")))
