"""Registering a study when its first run starts, and comparing it with what was registered ever
after.

The registrations and runs in the folder of runs are a ledger of the seeds that were seen: drawn
seeds are none of them.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from efftrain_cli import __version__
from efftrain_cli.compare.measures import is_same_budget
from efftrain_cli.compare.sisters import is_alike
from efftrain_cli.foundation.console import counted, human_count
from efftrain_cli.foundation.errors import DataError, RecipeError, UsageError
from efftrain_cli.foundation.files import make_folder
from efftrain_cli.foundation.records import digest_of, read_record, utc_now, write_record
from efftrain_cli.recipe.recipe import flat_values, load_recipe
from efftrain_cli.run.directory import recipes_seen, removed_recipes, run_path, runs_root
from efftrain_cli.study.file import MEASURES, StudyFile
from efftrain_cli.study.phases import all_trials
from efftrain_cli.study.records import (
    Change,
    Plan,
    list_outcomes,
    read_looks,
    read_plan,
    study_folder,
)
from efftrain_cli.trials.trial import parse_seeds


def register(file: StudyFile, allow: bool) -> Plan:
    """Register a study whose first run is about to start, or check that it is the one that was
    registered.

    Raises:
        UsageError: the study was changed since, or has runs from before it was registered, and
            `allow` is False.
    """
    if read_plan(file.name) is not None:
        return check_registered(file, allow, record=True)
    fault = why_not_registered(file)
    if fault:
        raise UsageError(fault)
    early = []
    for each in all_trials(file):
        if run_path(each.trial.name).exists():
            early.append(each.trial.name)
    early.sort()
    if early and not allow:
        raise UsageError(
            f"{counted(len(early), 'run')} of study {file.name!r} exist already,"
            f" {early[0]} for one, but it was never registered:"
            " nobody could rule out that they were looked at first\n"
            "  remove them (efftrain runs rm), rename the study file, or give --allow:"
            " the study is then exploratory"
        )
    reasons = []
    if early:
        reasons.append(f"it was registered after {counted(len(early), 'run')} of it had begun")
    plan = Plan(
        schema_version=Plan.newest,
        study=file.name,
        registered=utc_now(),
        efftrain=__version__,
        sha256=file.sha256,
        values=file.values(),
        drawn=file.drawn,
        text=file.path.read_text(encoding="utf-8"),
        changes=[],
        exploratory=[*reasons, *_seen_by_studies(file), *_seen_by_runs(file)],
    )
    folder = study_folder(file.name)
    make_folder(folder)
    # Of two machines that begin at once, one registers.
    with contextlib.suppress(FileExistsError):
        write_record(folder / "plan.json", plan, first=True)
    return check_registered(file, allow, record=True)


def why_not_registered(file: StudyFile) -> str:
    """Return why a new study cannot be registered: its arms differ in tokens, and it does not state
    what they have in common; "" if it can."""
    tokens = {arm.name: file.recipe_of(arm).train.tokens for arm in file.study.arms}
    ratio = max(tokens.values()) / min(tokens.values())
    if file.study.equal is not None or is_same_budget(ratio):
        return ""
    each = ", ".join(f"{name} {human_count(count)}" for name, count in tokens.items())
    return (
        f"the arms of study {file.name!r} train different tokens: {each}\n"
        '  say what they have in common: equal = "flops" (or "seconds");'
        " or give them the same train.tokens"
    )


def check_registered(file: StudyFile, allow: bool, record: bool = False) -> Plan:
    """Compare a study with what was registered; return the registration, with all that makes it
    exploratory.

    Args:
        record: write an allowed change into plan.json, so that the study stays exploratory.

    Raises:
        UsageError: it was never registered, or was changed since and `allow` is False.
    """
    plan = read_plan(file.name)
    if plan is None:
        raise UsageError(
            f"study {file.name!r} has no run yet\n  train it first: efftrain study {file.path}"
        )
    values = file.values()
    known = plan.latest.values
    if digest_of(values) == digest_of(known):
        return plan
    keys = dict.fromkeys((*known, *values))
    differing = []
    for key in keys:
        before = known.get(key)
        after = values.get(key)
        if before != after:
            differing.append([key, before, after])
    since = f"its registration on {plan.registered}"
    if plan.changes:
        since = f"--allow accepted a change on {plan.changes[-1].time}"
    path = study_folder(file.name) / "plan.json"
    if not allow:
        raise UsageError(
            f"study {file.name!r} was changed since {since}: {_shown(differing)}\n"
            f"  restore these values ({path} holds all of them), give the file a new name"
            " to begin a new study, or give --allow: its verdicts are exploratory from then on"
        )
    change = Change(
        time=utc_now(),
        sha256=digest_of(values),
        differing=differing,
        values=values,
        drawn=file.drawn,
    )
    reason = f"it was changed after its registration: {_shown(differing)}"
    changed = {"changes": [*plan.changes, change], "exploratory": [*plan.exploratory, reason]}
    plan = plan.model_copy(update=changed)
    if record:
        write_record(path, plan)
    return plan


def _shown(differing: list[list[Any]]) -> str:
    """Return the first four differences in words, and how many more there are."""
    parts = [f"{key} was {_word(old)}, is {_word(new)}" for key, old, new in differing[:4]]
    if len(differing) > 4:
        parts.append(f"and {len(differing) - 4} more")
    return "; ".join(parts)


def _word(value: Any) -> str:
    return "absent" if value is None else json.dumps(value)


# --- the ledger: what registrations and runs in the folder of runs have seen ---------------

DRAWN_BELOW = 1_000_000
"""Drawn seeds are smaller: they are part of the names of runs."""


def draw_seeds(file: StudyFile) -> StudyFile:
    """Return the study with its seeds where its file gives only how many.

    A registered study keeps the seeds of its registration.

    Raises:
        DataError: the study's registration is damaged.
    """
    if not file.seeds_to_draw:
        return file
    # Without seeds that were drawn before: those of the registration take their place.
    file = StudyFile(file.path, file.study)
    plan = read_plan(file.name)
    registered = plan.latest.drawn if plan else {}
    given = (*file.seeds, *file.tuning_seeds)
    fresh = _fresh_seeds(file)
    drawn = {}
    for key, number in file.seeds_to_draw.items():
        before = parse_seeds(registered[key]) if key in registered else ()
        kept = [seed for seed in before if seed not in given][:number]
        seeds = (*kept, *itertools.islice(fresh, number - len(kept)))
        drawn[key] = ",".join(map(str, seeds))
    return StudyFile(file.path, file.study, drawn)


def _fresh_seeds(file: StudyFile) -> Iterator[int]:
    """Draw seeds that follow from the study's values, each once, without its given seeds and those
    that a registration or a run here has seen."""
    taken = {*file.seeds, *file.tuning_seeds, *_seen_seeds()}
    for i in itertools.count():
        seed = int(digest_of([file.sha256, i])[:12], 16) % DRAWN_BELOW
        if seed not in taken:
            taken.add(seed)
            yield seed


def _seen_seeds() -> set[int]:
    """Return the seeds of all registrations and runs here, removed ones too, of any recipe."""
    plans, _ = _read_plans()
    seen = set().union(*map(_seeds_of, plans.values()))
    return seen.union(recipe["seed"] for _, recipe in _seen_recipes())


def _seen_by_studies(file: StudyFile) -> list[str]:
    """Say which registrations saw seeds of this study's arms, or asked what it asks, and what they
    showed."""
    values = file.values()
    recipes = _arms_in(values)
    primaries = _primaries_in(values)
    plans, reasons = _read_plans()
    for path, plan in plans.items():
        if plan.study == file.name:
            continue
        theirs = _arms_in(plan.values)
        same = []
        for name, recipe in recipes.items():
            if any(is_alike(recipe, other) for other in theirs.values()):
                same.append(name)
        seeds = sorted({*file.seeds} & _seeds_of(plan))
        if same and seeds:
            listed = ", ".join(map(str, seeds))
            reasons.append(f"seeds {listed} of {', '.join(same)} were seen by study {plan.study!r}")
        if len(same) > 1 and primaries & _primaries_in(plan.values):
            reasons.append(
                f"study {plan.study!r}, registered {plan.registered},"
                f" asked the same of the same arms: {_last_look(path.parent)}"
            )
    return reasons


def _seen_by_runs(file: StudyFile) -> list[str]:
    """Say which runs, removed ones too, have the recipe of an arm, but for keys that are tuned or
    judged over, and one of the study's seeds."""
    trials = {each.trial.name for each in all_trials(file)}
    arms = []
    for arm in file.study.arms:
        differing = [*file.grid_of(arm)]
        if file.rates:
            differing.append("optim.lr")
        arms.append((flat_values(file.recipe_of(arm)), differing))
    seen = []
    for name, theirs in _seen_recipes():
        if name not in trials and theirs["seed"] in file.seeds:
            seen += [name for recipe, differing in arms if is_alike(recipe, theirs, differing)]
    if not seen:
        return []
    runs = counted(len(seen), "earlier run")
    return [f"{runs} with an arm's recipe and a seed of the study, {seen[0]} for one"]


def removed_since(file: StudyFile, plan: Plan) -> list[str]:
    """Return which of a study's runs were removed after it was registered: whoever trains them
    again has seen them."""
    since = datetime.fromisoformat(plan.registered).timestamp()
    names = {each.trial.name for each in all_trials(file)}
    removed = []
    for path in removed_recipes():
        name, _, nanoseconds = path.stem.rpartition(".")
        if name in names and int(nanoseconds) / 1e9 >= since:
            removed.append(name)
    return removed


def _read_plans() -> tuple[dict[Path, Plan], list[str]]:
    """Return the registrations here by file, and what is unknown because one cannot be read."""
    plans = {}
    unknown = []
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


def _seen_recipes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and recipe, by dotted keys, of every run here, every removed one and every probe
    of `tune-warmup`, if they can be read."""
    paths = recipes_seen()
    for path in runs_root().glob("*/probes/*/recipe.toml"):
        paths[str(path.parent.relative_to(runs_root()))] = path
    for name, path in paths.items():
        with contextlib.suppress(RecipeError, DataError):
            if path.is_file():
                yield name, flat_values(load_recipe(str(path)))


def _arms_in(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each arm's recipe among a study's values."""
    arms: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith("recipe of "):
            name, _, of_recipe = key.removeprefix("recipe of ").partition(": ")
            arms.setdefault(name, {})[of_recipe] = value
    return arms


def _primaries_in(values: Mapping[str, Any]) -> set[str]:
    """Return what a study is judged by, whatever the direction, margin or target; "" of costs and
    the final loss, which say nearly the same."""
    keys = fnmatch.filter(values, "primary.*.measure")
    measures = [MEASURES[values[key]] for key in keys if values[key] in MEASURES]
    return {question.key if question.over_rates else "" for question in measures}


def _last_look(folder: Path) -> str:
    """Return the verdicts of a study's last look in words."""
    try:
        rows = read_looks(folder)
    except DataError as error:
        return f"its verdicts are unknown: {str(error).splitlines()[0]}"
    if not rows:
        return "no look yet"
    return list_outcomes([row for row in rows if row["look"] == rows[-1]["look"]])
