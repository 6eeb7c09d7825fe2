"""Reading a study file: all that can be known before training is checked at once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from efftrain_cli.compare.sequential import schedule
from efftrain_cli.foundation.environment import expanded
from efftrain_cli.foundation.errors import Problem, RecipeError, UsageError
from efftrain_cli.recipe.check import Check
from efftrain_cli.recipe.draft import (
    find_recipe,
    read_toml_file,
    report,
)
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.recipe.toml import toml_value
from efftrain_cli.run.directory import run_path
from efftrain_cli.run.small_files import NOT_COMPUTED
from efftrain_cli.study.file import (
    BLOCKS,
    DRAWN,
    LONGEST_NAME,
    MEASURES,
    Study,
    StudyFile,
)
from efftrain_cli.study.phases import judged_trials, tuning, widened, widest
from efftrain_cli.study.registration import draw_seeds
from efftrain_cli.trials.trial import check_comparable, parse_seeds, recipe_of


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
    valid = check.valid
    _check_seeds(check, valid)
    _check_primaries(check, valid)
    _check_arms(check, valid, path)
    _check_tuning(check, valid)
    _check_recipes(check, valid, path)
    if not check.problems:
        study = draw_seeds(StudyFile(path, Study(**valid)))
        _check_runs(check, study)
        if not check.problems:
            return widened(study)
    raise RecipeError(report(path.stem, check.problems, "study"), check.problems)


def _check_seeds(check: Check, valid: Mapping[str, Any]) -> None:
    seeds = parse_seeds(valid["seeds"]) if "seeds" in valid else ()
    number = valid.get("blocks") or len(seeds) or valid.get("n_seeds") or DRAWN
    first = number
    if len(seeds) == 1:
        check.add("seeds", "needs two seeds or more: one seed supports no claim", valid["seeds"])
    elif "looks" in valid:
        try:
            first = schedule(number, valid["looks"])[0]
        except ValueError as error:
            check.add("looks", str(error), valid["looks"])
    if "blocks" in valid:
        _check_blocks(check, valid, first)

    rule = "has no meaning beside seeds: give the seeds or their number"
    if seeds and valid.get("n_seeds"):
        check.add("n_seeds", rule, valid["n_seeds"])
    tuning = valid.get("tuning")
    if tuning is None or tuning.seeds is None:
        return
    if tuning.n_seeds:
        check.add("tuning.n_seeds", rule, tuning.n_seeds)
    both = sorted({*seeds} & {*parse_seeds(tuning.seeds)})
    if both:
        rule = "has seeds of the study itself: a setting chosen on the judged runs flatters them"
        check.add("tuning.seeds", f"{rule} ({', '.join(map(str, both))})", tuning.seeds)


def _check_blocks(check: Check, valid: Mapping[str, Any], first: int) -> None:
    """Check blocks, so many of which are judged first, and that all their seeds are drawn."""
    if valid["blocks"] < BLOCKS:
        rule = f"needs {BLOCKS} or more: each gives one difference"
        check.add("blocks", rule, valid["blocks"])
    elif first < BLOCKS:
        rule = f"has the first look at {first} blocks, which needs {BLOCKS}: plan more blocks or fewer looks"
        check.add("looks", rule, valid["looks"])
    for key in ("seeds", "n_seeds"):
        if key in valid:
            rule = "has no meaning beside blocks: each is judged by a seed that is drawn"
            check.add(key, rule, valid[key])
    if "tuning" not in check.draft.values:
        check.add("blocks", "needs a [tuning] section: each is tuned by itself", valid["blocks"])
    elif valid.get("tuning") and valid["tuning"].seeds:
        rule = "has no meaning beside blocks: give n_seeds, how many are drawn for each"
        check.add("tuning.seeds", rule, valid["tuning"].seeds)


def _check_primaries(check: Check, valid: Mapping[str, Any]) -> None:
    for i, primary in enumerate(valid.get("primary", ())):
        if primary.direction in ("noninferior", "equivalent") and primary.margin is None:
            rule = f"is required for {primary.direction}: how large a difference still does not matter?"
            check.add(f"primary.{i}.margin", rule)
        if primary.direction in ("better", "different") and primary.margin is not None:
            check.add(
                f"primary.{i}.margin", f"has no meaning for {primary.direction}", primary.margin
            )
        question = MEASURES[primary.measure]
        if primary.target is not None and not question.axis:
            check.add(
                f"primary.{i}.target", "is for a cost, such as tokens_to_target", primary.target
            )
        if primary.rates and not question.over_rates:
            check.add(f"primary.{i}.rates", "is for lr_sensitivity", list(primary.rates))
        rates = primary.rates or ()
        rising = all(later > rate for rate, later in itertools.pairwise(rates))
        if question.over_rates and (len(rates) < 2 or not rising):
            check.add(
                f"primary.{i}.rates",
                "needs two or more learning rates, in rising order",
                list(rates),
            )
    kinds = [(primary.measure, primary.target) for primary in valid.get("primary", ())]
    for i, kind in enumerate(kinds):
        if kind in kinds[:i]:
            check.add(f"primary.{i}.measure", "is judged already by a [[primary]] above", kind[0])


def _check_arms(
    check: Check,
    valid: Mapping[str, Any],
    path: Path,
) -> None:
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
            if name == "train.tokens":
                check.add(
                    key, "train.tokens cannot be tuned: the longest run would always be best", None
                )
            elif name in ("seed", "base") or name.startswith(NOT_COMPUTED):
                check.add(
                    key, f"{name} cannot be tuned: it does not change what a recipe computes", None
                )
            if len(set(map(toml_value, values))) < len(values):
                check.add(key, f"{name} has a value twice", list(values))


def _check_recipes(
    check: Check,
    valid: Mapping[str, Any],
    path: Path,
) -> None:
    for i, arm in enumerate(valid.get("arms", ())):
        try:
            load_recipe(
                str(find_recipe(arm.recipe, beside=path)), (*valid.get("set", ()), *arm.set)
            )
        except RecipeError as error:
            _wrong_recipe(check, i, arm.recipe, error)


def _wrong_recipe(
    check: Check,
    i: int,
    recipe: str,
    error: RecipeError,
) -> None:
    text = str(error).replace("\n", "\n    ")
    check.problems.append(
        Problem(
            f"arms.{i}.recipe",
            text,
            toml_value(recipe),
            check.draft.origin(f"arms.{i}.recipe"),
        )
    )


def _check_runs(check: Check, file: StudyFile) -> None:
    """Check that every point of every arm's grid, grown as far as it may, is a recipe, and that all
    are validated on the same text."""
    runs = [*judged_trials(file), *tuning(widest(file))]
    trials = []
    for i, arm in enumerate(file.study.arms):
        of_arm = [each.trial for each in runs if each.arm == arm.name]
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
            check.problems.append(
                Problem(
                    "arms",
                    text,
                    None,
                    check.draft.origin("arms.0"),
                )
            )
