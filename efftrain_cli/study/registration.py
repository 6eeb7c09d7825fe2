"""A study's plan as it stood before its first run, and what became of it.

runs/<study>-study/
  plan.json       the study's values and their hash, the file's text, when it was registered, what was changed since
  receipts.csv    one row per run: phase, arm, settings, seed, how it ended, final loss, tokens, seconds
  looks.csv       one row per look, primary measure and arm: estimate, interval, p, verdict
  logs/           what each run printed
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from efftrain_cli import __version__
from efftrain_cli.compare.groups import differing_keys
from efftrain_cli.compare.measures import is_same_budget
from efftrain_cli.foundation.console import human_count
from efftrain_cli.foundation.errors import DataError, RecipeError, UsageError
from efftrain_cli.foundation.files import make_folder
from efftrain_cli.foundation.records import (
    Part,
    Record,
    damaged,
    digest_of,
    read_record,
    read_small_text,
    write_record,
)
from efftrain_cli.recipe.recipe import flat_values, load_recipe
from efftrain_cli.run.directory import run_names, run_path, runs_root
from efftrain_cli.study.file import StudyFile, seeds_of
from efftrain_cli.study.phases import all_trials

LOOKS = (
    "look",
    "seeds",
    "measure",
    "direction",
    "margin",
    "arm",
    "estimate",
    "low",
    "high",
    "p",
    "p_holm",
    "outcome",
)
"""Columns of looks.csv."""


class Change(Part):
    """A change of a registered study that was allowed."""

    time: str
    sha256: str
    differing: list[list[Any]]
    """[key, before, after]."""
    values: dict[str, Any]


class Plan(Record):
    """plan.json of a study."""

    seal: ClassVar[str] = "file_sha256"
    restore: ClassVar[str] = "restore it, or begin a new study under another name"

    schema_version: int
    study: str
    registered: str
    efftrain: str
    sha256: str
    """Of the values that were registered first."""
    values: dict[str, Any]
    text: str
    changes: list[Change]
    exploratory: list[str]

    @model_validator(mode="after")
    def _is_as_registered(self) -> Self:
        if digest_of(self.values) != self.sha256:
            raise ValueError("it was edited: its values do not have the hash it names")
        return self


@dataclass(frozen=True)
class Registration:
    """How far a study may be believed."""

    folder: Path
    registered: str
    """When, as its machine's clock said."""
    sha256: str
    """Of the values that were registered first."""
    exploratory: tuple[str, ...]
    """Why its verdicts are exploratory; empty where the study is as it was registered before its first run."""


def study_folder(name: str) -> Path:
    """Where a study keeps its state."""
    return run_path(f"{name}-study")


def register(file: StudyFile, allow: bool) -> Registration:
    """Registers a study whose first run is about to start, or checks that it is the one that was registered.

    Raises:
        UsageError: the study was changed since, or has runs from before it was registered, and `allow` is False.
    """
    path = study_folder(file.name) / "plan.json"
    if not path.exists():
        _require_budgets(file)
        early = sorted(
            trial.name for _, (_, trial) in all_trials(file) if run_path(trial.name).exists()
        )
        if early and not allow:
            raise UsageError(
                f"{len(early)} runs of study {file.name!r} exist already, {early[0]} for one, but it was never registered: "
                f"nobody could rule out that they were looked at first\n"
                f"  remove them (efftrain runs rm), rename the study file, or give --allow: the study is then exploratory"
            )
        reasons = [f"{len(early)} of its runs are older than its registration"] if early else []
        reasons += [*_seen_by_studies(file), *_seen_by_runs(file)]
        plan = Plan(
            schema_version=Plan.newest,
            study=file.name,
            registered=_now(),
            efftrain=__version__,
            sha256=file.sha256,
            values=file.values(),
            text=file.path.read_text(encoding="utf-8"),
            changes=[],
            exploratory=reasons,
        )
        make_folder(path.parent)
        with contextlib.suppress(
            FileExistsError
        ):  # of two machines that begin at once, one registers
            write_record(path, plan, first=True)
    return check_registered(file, allow, record=True)


def registered_hash(name: str) -> str | None:
    """Return the hash that a study was registered with; None if it was not."""
    path = study_folder(name) / "plan.json"
    return read_record(path, Plan).sha256 if path.exists() else None


def _seen_by_studies(file: StudyFile) -> list[str]:
    """Say which registrations saw seeds of this study's arms, or asked what it asks, and what they found.

    The registrations in the folder of runs are the ledger of seeds; a study's new name changes nothing in it.
    """
    values, found = file.values(), []
    for path in sorted(runs_root().glob("*-study/plan.json")):
        try:
            plan = read_record(path, Plan)
        except DataError as error:
            found.append(
                f"which seeds an earlier study saw is unknown: {str(error).splitlines()[0]}"
            )
            continue
        if plan.study == file.name:
            continue
        theirs = _arms_in(plan.values)
        same = [name for name, recipe in _arms_in(values).items() if recipe in theirs.values()]
        seeds = sorted({*file.seeds} & {*seeds_of(plan.values)})
        if same and seeds:
            listed = ", ".join(map(str, seeds))
            found.append(f"seeds {listed} of {', '.join(same)} were seen by study {plan.study!r}")
        if len(same) == len(theirs) == len(file.study.arms) and _primaries_in(
            values
        ) == _primaries_in(plan.values):
            found.append(
                f"study {plan.study!r}, registered {plan.registered}, asked the same of the same arms: {_last_look(path.parent)}"
            )
    return found


def _seen_by_runs(file: StudyFile) -> list[str]:
    """Say which runs on disk have the recipe of an arm, tuned keys aside, and one of the study's seeds."""
    own = {trial.name for _, (_, trial) in all_trials(file)}
    arms = [
        (arm, flat_values(load_recipe(file.recipe_path(arm), file.settings_of(arm))))
        for arm in file.study.arms
    ]
    found = []
    for name in run_names():
        path = run_path(name) / "recipe.toml"
        if name in own or not path.is_file():
            continue
        try:
            there = flat_values(load_recipe(str(path)))
        except (RecipeError, DataError):
            continue
        for arm, recipe in arms:
            tuned = ("seed", *file.grid_of(arm))
            if there["seed"] in file.seeds and not differing_keys([recipe, there], tuned):
                found.append(name)
    if not found:
        return []
    return [
        f"{len(found)} earlier runs have an arm's recipe and a seed of the study, such as {found[0]}"
    ]


def _arms_in(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each arm's recipe among a study's values."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith("recipe of "):
            name, _, of_recipe = key.removeprefix("recipe of ").partition(": ")
            found.setdefault(name, {})[of_recipe] = value
    return found


def _primaries_in(values: Mapping[str, Any]) -> set[str]:
    """What a study is judged by: measures and targets, whatever the direction."""
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


def read_looks(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a study's looks.csv; empty if there is none.

    Raises:
        DataError: it is not a table of looks.
    """
    path = folder / "looks.csv"
    restore = "delete it: efftrain study writes the last look again"
    try:
        rows = list(csv.DictReader(read_small_text(path, restore).splitlines()))
    except FileNotFoundError:
        return []
    except csv.Error as error:
        raise damaged(path, str(error), restore) from None
    for row in rows:
        if not row.keys() >= set(LOOKS) or not (row["look"] or "").isdecimal():
            raise damaged(path, "it is not a table of looks", restore)
    return rows


def _require_budgets(file: StudyFile) -> None:
    """Check that a study whose arms differ in tokens states what they have in common.

    Raises:
        UsageError: it does not.
    """
    tokens = {
        arm.name: load_recipe(file.recipe_path(arm), file.settings_of(arm)).train.tokens
        for arm in file.study.arms
    }
    if file.study.equal is not None or is_same_budget(max(tokens.values()) / min(tokens.values())):
        return
    each = ", ".join(f"{name} {human_count(count)}" for name, count in tokens.items())
    raise UsageError(
        f"the arms of study {file.name!r} train different tokens: {each}\n"
        '  say what they have in common: equal = "flops" (or "seconds"); or give them the same train.tokens'
    )


def check_registered(file: StudyFile, allow: bool, record: bool = False) -> Registration:
    """Compares a study with what was registered.

    Args:
        record: write an allowed change into plan.json, so that the study stays exploratory.

    Raises:
        UsageError: it was never registered, or was changed since and `allow` is False.
    """
    path = study_folder(file.name) / "plan.json"
    if not path.exists():
        raise UsageError(
            f"study {file.name!r} has no run yet\n  train it first: efftrain study {file.path}"
        )
    plan = read_record(path, Plan)
    values = file.values()
    known, since = plan.values, f"its registration on {plan.registered}"
    if plan.changes:
        last = plan.changes[-1]
        known, since = last.values, f"--allow accepted a change on {last.time}"
    reasons = list(plan.exploratory)
    if digest_of(values) != digest_of(known):
        differing = differences(known, values)
        if not allow:
            raise UsageError(
                f"study {file.name!r} was changed since {since}: {_shown(differing)}\n"
                f"  restore these values ({path} holds all of them), give the file a new name to begin a new study, or give "
                "--allow: its verdicts are exploratory from then on"
            )
        reason = f"it was changed after its registration: {_shown(differing)}"
        reasons.append(reason)
        if record:
            change = Change(
                time=_now(), sha256=digest_of(values), differing=differing, values=values
            )
            changed = {"changes": [*plan.changes, change], "exploratory": reasons}
            write_record(path, plan.model_copy(update=changed))
    return Registration(path.parent, plan.registered, plan.sha256, tuple(reasons))


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[list[Any]]:
    """[key, before, after] of what differs; None where a key is absent."""
    keys = dict.fromkeys((*before, *after))
    return [
        [key, before.get(key), after.get(key)] for key in keys if before.get(key) != after.get(key)
    ]


def _shown(differing: list[list[Any]], most: int = 4) -> str:
    parts = [f"{key} was {_word(old)}, is {_word(new)}" for key, old, new in differing[:most]]
    more = len(differing) - most
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _word(value: Any) -> str:
    return "absent" if value is None else json.dumps(value)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
