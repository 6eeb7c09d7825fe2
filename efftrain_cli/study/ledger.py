"""Which seeds earlier studies and runs have seen: the registrations and runs in the folder of runs are the ledger.

Seeds that the tool draws are none of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from efftrain_cli.compare.groups import differing_keys
from efftrain_cli.foundation.errors import DataError, RecipeError
from efftrain_cli.foundation.records import digest_of, read_record
from efftrain_cli.recipe.recipe import flat_values, load_recipe
from efftrain_cli.run.directory import run_names, run_path, runs_root
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.phases import all_trials
from efftrain_cli.study.records import Change, Plan, read_looks, read_plan
from efftrain_cli.trials.trial import parse_seeds

DRAWN_BELOW = 1_000_000
"""Drawn seeds are smaller: they are part of the names of runs."""


def draw_seeds(file: StudyFile) -> StudyFile:
    """Return the study with its seeds where its file gives only how many.

    A registered study keeps the seeds of its registration. Others follow from the study's values, without those that a
    registration or a run here has seen.

    Raises:
        DataError: the study's registration is damaged.
    """
    sections = file.sections_to_draw
    if not sections:
        return file
    plan = read_plan(file.name)
    registered = plan.latest.drawn if plan else {}
    given = {*file.seeds, *file.tuning_seeds}
    drawn, missing = {}, False
    for key, section in sections.items():
        kept = parse_seeds(registered[key]) if key in registered else ()
        drawn[key] = [seed for seed in kept if seed not in given][: section.n_seeds]
        missing |= len(drawn[key]) < (section.n_seeds or 0)
    if missing:
        taken = {*given, *itertools.chain(*drawn.values()), *_seen_seeds()}
        fresh = _fresh_seeds(file.sha256, taken)
        for key, section in sections.items():
            drawn[key] += itertools.islice(fresh, (section.n_seeds or 0) - len(drawn[key]))
    return file.with_seeds({key: ",".join(map(str, seeds)) for key, seeds in drawn.items()})


def _fresh_seeds(text: str, taken: set[int]) -> Iterator[int]:
    """Draw seeds that follow from `text` alone, each once and none of `taken`."""
    for i in itertools.count():
        seed = int(digest_of([text, i])[:12], 16) % DRAWN_BELOW
        if seed not in taken:
            taken.add(seed)
            yield seed


def _seen_seeds() -> set[int]:
    """Return the seeds of all registrations and runs here, whatever their recipes."""
    plans, _ = _read_plans()
    seen = set().union(*map(_seeds_of, plans.values()))
    for name in run_names():
        recipe = _recipe_of(name)
        if recipe is not None:
            seen.add(recipe["seed"])
    return seen


def seen_by_studies(file: StudyFile) -> list[str]:
    """Say which registrations saw seeds of this study's arms, or asked what it asks, and what they showed."""
    values = file.values()
    recipes, primaries = _arms_in(values), _primaries_in(values)
    plans, reasons = _read_plans()
    for path, plan in plans.items():
        if plan.study == file.name:
            continue
        theirs = _arms_in(plan.values)
        same = [name for name, recipe in recipes.items() if recipe in theirs.values()]
        seeds = sorted({*file.seeds} & _seeds_of(plan))
        if same and seeds:
            listed = ", ".join(map(str, seeds))
            reasons.append(f"seeds {listed} of {', '.join(same)} were seen by study {plan.study!r}")
        all_arms = len(same) == len(theirs) == len(file.study.arms)
        if all_arms and primaries == _primaries_in(plan.values):
            reasons.append(
                f"study {plan.study!r}, registered {plan.registered}, asked the same of the same arms: "
                f"{_last_look(path.parent)}"
            )
    return reasons


def seen_by_runs(file: StudyFile) -> list[str]:
    """Say which runs on disk have the recipe of an arm, tuned keys aside, and one of the study's seeds."""
    trials = {trial.name for _, (_, trial) in all_trials(file)}
    arms = []
    for arm in file.study.arms:
        recipe = flat_values(load_recipe(file.recipe_path(arm), file.settings_of(arm)))
        arms.append((recipe, ("seed", *file.grid_of(arm))))
    seen = []
    for name in run_names():
        theirs = None if name in trials else _recipe_of(name)
        if theirs is None or theirs["seed"] not in file.seeds:
            continue
        seen += [name for recipe, tuned in arms if not differing_keys([recipe, theirs], tuned)]
    if not seen:
        return []
    return [
        f"{len(seen)} earlier runs have an arm's recipe and a seed of the study, such as {seen[0]}"
    ]


def _read_plans() -> tuple[dict[Path, Plan], list[str]]:
    """Return the registrations here by their files, and what is unknown because one cannot be read."""
    plans, unknown = {}, []
    for path in sorted(runs_root().glob("*-study/plan.json")):
        try:
            plans[path] = read_record(path, Plan)
        except DataError as error:
            reason = str(error).splitlines()[0]
            unknown.append(f"which seeds an earlier study saw is unknown: {reason}")
    return plans, unknown


def _seeds_of(plan: Plan) -> set[int]:
    """Return the seeds of a registration and its changes, those of tuning included."""
    versions: list[Plan | Change] = [plan, *plan.changes]
    seeds: set[int] = set()
    for version in versions:
        values = version.values | version.drawn
        for key in ("seeds", "tuning.seeds"):
            if key in values:
                seeds.update(parse_seeds(values[key]))
    return seeds


def _recipe_of(name: str) -> dict[str, Any] | None:
    """Return a run's recipe by dotted keys; None if it cannot be read."""
    path = run_path(name) / "recipe.toml"
    try:
        return flat_values(load_recipe(str(path))) if path.is_file() else None
    except (RecipeError, DataError):
        return None


def _arms_in(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each arm's recipe among a study's values."""
    arms: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith("recipe of "):
            name, _, of_recipe = key.removeprefix("recipe of ").partition(": ")
            arms.setdefault(name, {})[of_recipe] = value
    return arms


def _primaries_in(values: Mapping[str, Any]) -> set[str]:
    """Return the measures and targets that a study is judged by, whatever the direction."""
    return {
        f"{key.rsplit('.', 1)[1]} {value}"
        for key, value in values.items()
        if key.startswith("primary.") and key.endswith((".measure", ".target"))
    }


def _last_look(folder: Path) -> str:
    """Return the verdicts of a study's last look in words."""
    try:
        rows = read_looks(folder)
    except DataError as error:
        return f"its verdicts are unknown: {str(error).splitlines()[0]}"
    if not rows:
        return "no look yet"
    last = [row for row in rows if row["look"] == rows[-1]["look"]]
    return "; ".join(f"{row['arm']} {row['outcome']} in {row['measure']}" for row in last)
