"""Reading a study file: all that can be known before training is checked at once."""

from __future__ import annotations

from pathlib import Path

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
from efftrain_cli.recipe.toml import flatten, toml_value
from efftrain_cli.run.directory import run_path
from efftrain_cli.run.small_files import NOT_COMPUTED
from efftrain_cli.study.file import (
    BLOCKS,
    DRAWN,
    LONGEST_NAME,
    MARGINS,
    MEASURES,
    Study,
    StudyFile,
    parse_given,
)
from efftrain_cli.study.phases import all_trials, widest, with_tuning
from efftrain_cli.study.registration import draw_seeds
from efftrain_cli.trials.trial import check_comparable, recipe_of


def read_study(path: Path) -> StudyFile:
    """Reads a study file and checks everything that can be known before training.

    Raises:
        RecipeError: it breaks any rule; the message lists every breach at once.
    """
    path = expanded(str(path), "write the path without ~")
    if path.suffix != ".toml":
        raise UsageError(f"{path} is no study\n  name a TOML file, such as mine.toml")
    if not path.is_file():
        raise UsageError(f"there is no study file {path}")
    draft = read_toml_file(path)
    check = Check(draft, Study)
    _check_seeds(check)
    _check_primaries(check)
    _check_arms(check, path)
    _check_tuning(check)
    _check_recipes(check, path)
    if not check.problems:
        study = draw_seeds(StudyFile(path, Study(**check.valid)))
        _check_runs(check, study)
        if not check.problems:
            return with_tuning(study)
    raise RecipeError(report(path.stem, check.problems, "study"), check.problems)


EXCLUSIVE = (
    ("n_seeds", "seeds"),
    ("tuning.n_seeds", "tuning.seeds"),
    ("seeds", "blocks"),
    ("n_seeds", "blocks"),
    ("tuning.seeds", "blocks"),
)
"""Keys that have no meaning beside another."""


def _check_seeds(check: Check) -> None:
    valid = check.valid
    given = flatten(check.draft.values)
    for key, other in EXCLUSIVE:
        if key in given and other in given:
            check.add(key, f"has no meaning beside {other}: give one of them", given[key])
    blocks = valid.get("blocks")
    tuning = valid.get("tuning")
    if blocks and "tuning" not in check.draft.values:
        check.add("blocks", "needs a [tuning] section: each is tuned by itself", blocks)
    if blocks and blocks < BLOCKS:
        check.add("blocks", f"needs {BLOCKS} or more: each gives one difference", blocks)
    seeds = parse_given(valid.get("seeds"))
    if len(seeds) == 1:
        check.add("seeds", "needs two seeds or more: one seed supports no claim", valid["seeds"])
    elif "looks" in valid:
        _check_looks(check, blocks or len(seeds) or valid.get("n_seeds") or DRAWN)
    both = sorted({*seeds} & {*parse_given(tuning and tuning.seeds)})
    if both:
        rule = "has seeds of the study itself: a setting chosen on the judged runs flatters them"
        listed = ", ".join(map(str, both))
        check.add("tuning.seeds", f"{rule} ({listed})", given["tuning.seeds"])


def _check_looks(check: Check, number: int) -> None:
    """Check that so many seeds or blocks can be judged at the looks."""
    looks = check.valid["looks"]
    try:
        first = schedule(number, looks)[0]
    except ValueError as error:
        check.add("looks", str(error), looks)
        return
    if check.valid.get("blocks", 0) > first < BLOCKS:
        rule = (
            f"has the first look at {first} blocks, which needs {BLOCKS}:"
            " plan more blocks or fewer looks"
        )
        check.add("looks", rule, looks)


def _check_primaries(check: Check) -> None:
    primaries = check.valid.get("primary", ())
    for i, primary in enumerate(primaries):
        place = f"primary.{i}"
        direction = primary.direction
        if direction in MARGINS and primary.margin is None:
            rule = f"is required for {direction}: how large a difference still does not matter?"
            check.add(f"{place}.margin", rule)
        if direction not in MARGINS and primary.margin is not None:
            check.add(f"{place}.margin", f"has no meaning for {direction}", primary.margin)
        question = MEASURES[primary.measure]
        rates = [*(primary.rates or ())]
        if primary.target is not None and not question.axis:
            rule = "is for a cost, such as tokens_to_target"
            check.add(f"{place}.target", rule, primary.target)
        if rates and not question.over_rates:
            check.add(f"{place}.rates", "is for lr_sensitivity", rates)
        # In rising order and without a second of any.
        if question.over_rates and (len(rates) < 2 or rates != sorted({*rates})):
            rule = "needs two or more learning rates, in rising order"
            check.add(f"{place}.rates", rule, rates)
    kinds = [(primary.measure, primary.target) for primary in primaries]
    for i, kind in enumerate(kinds):
        if kind in kinds[:i]:
            check.add(f"primary.{i}.measure", "is judged already by a [[primary]] above", kind[0])


def _check_arms(check: Check, path: Path) -> None:
    names = [arm.name for arm in check.valid.get("arms", ())]
    baseline = check.valid.get("baseline")
    for i, name in enumerate(names):
        if name in names[:i]:
            check.add(f"arms.{i}.name", "is also the name of another arm", name)
        try:
            run_path(f"{path.stem}-{name}")
        except UsageError:
            rule = "may hold letters, digits, '.', '_' and '-': it is part of the names of runs"
            check.add(f"arms.{i}.name", rule, name)
        if len(f"{path.stem}-{name}") > LONGEST_NAME:
            rule = (
                f"is too long beside the study's name {path.stem!r}:"
                f" {LONGEST_NAME - 1} characters for both"
            )
            check.add(f"arms.{i}.name", rule, name)
    if names and baseline and baseline not in names:
        check.add("baseline", f"must be one of the arms: {', '.join(names)}", baseline)


def _check_tuning(check: Check) -> None:
    tuning = check.valid.get("tuning")
    grids = {"tuning.grid": tuning.grid} if tuning else {}
    for i, arm in enumerate(check.valid.get("arms", ())):
        if arm.grid is not None:
            grids[f"arms.{i}.grid"] = arm.grid
            if not tuning:
                check.add(f"arms.{i}.grid", "needs a [tuning] section with the seeds to tune on")
    for key, grid in grids.items():
        for name, values in grid.items():
            if name == "train.tokens":
                check.add(key, f"{name} cannot be tuned: the longest run would always be best")
            elif name in ("seed", "base") or name.startswith(NOT_COMPUTED):
                check.add(key, f"{name} cannot be tuned: it does not change what a recipe computes")
            if len(set(map(toml_value, values))) < len(values):
                check.add(key, f"{name} has a value twice", list(values))


def _check_recipes(check: Check, path: Path) -> None:
    for i, arm in enumerate(check.valid.get("arms", ())):
        settings = (*check.valid.get("set", ()), *arm.set)
        try:
            load_recipe(str(find_recipe(arm.recipe, beside=path)), settings)
        except RecipeError as error:
            _add_problem(check, f"arms.{i}.recipe", str(error), toml_value(arm.recipe))


def _add_problem(
    check: Check, key: str, text: str, value: str | None = None, place: str = ""
) -> None:
    """Record what another check found, its lines below each other; `place` is the key in the file
    if it is another."""
    rule = text.replace("\n", "\n    ")
    check.problems.append(Problem(key, rule, value, check.draft.origin(place or key)))


def _check_runs(check: Check, file: StudyFile) -> None:
    """Check that every point of every arm's grid, grown as far as it may, is a recipe, and that all
    are validated on the same text."""
    runs = all_trials(widest(file))
    for i, arm in enumerate(file.study.arms):
        settings = {each.trial.settings: each for each in runs if each.arm == arm.name}
        for each in settings.values():
            try:
                recipe_of(each.trial)
            except RecipeError as error:
                _add_problem(check, f"arms.{i}.recipe", str(error), toml_value(arm.recipe))
    if not check.problems:
        try:
            check_comparable([each.trial for each in runs])
        except UsageError as error:
            text = str(error).partition("\nMake them equal")[0]
            _add_problem(check, "arms", text, place="arms.0")
