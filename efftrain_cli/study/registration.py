"""Registering a study when its first run starts, and comparing it with what was registered ever after."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from efftrain_cli import __version__
from efftrain_cli.compare.measures import is_same_budget
from efftrain_cli.foundation.console import human_count
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.files import make_folder
from efftrain_cli.foundation.records import digest_of, write_record
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.run.directory import run_path
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.ledger import seen_by_runs, seen_by_studies
from efftrain_cli.study.phases import all_trials
from efftrain_cli.study.records import Change, Plan, read_plan, study_folder


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


def register(file: StudyFile, allow: bool) -> Registration:
    """Register a study whose first run is about to start, or check that it is the one that was registered.

    Raises:
        UsageError: the study was changed since, or has runs from before it was registered, and `allow` is False.
    """
    path = study_folder(file.name) / "plan.json"
    if path.exists():
        return check_registered(file, allow, record=True)
    fault = why_not_registered(file)
    if fault:
        raise UsageError(fault)
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
    plan = Plan(
        schema_version=Plan.newest,
        study=file.name,
        registered=_now(),
        efftrain=__version__,
        sha256=file.sha256,
        values=file.values(),
        drawn=file.drawn,
        text=file.path.read_text(encoding="utf-8"),
        changes=[],
        exploratory=[*reasons, *seen_by_studies(file), *seen_by_runs(file)],
    )
    make_folder(path.parent)
    # Of two machines that begin at once, one registers.
    with contextlib.suppress(FileExistsError):
        write_record(path, plan, first=True)
    return check_registered(file, allow, record=True)


def why_not_registered(file: StudyFile) -> str:
    """Return why a new study cannot be registered: its arms differ in tokens, and it does not state what they have in
    common; "" if it can."""
    tokens = {
        arm.name: load_recipe(file.recipe_path(arm), file.settings_of(arm)).train.tokens
        for arm in file.study.arms
    }
    if file.study.equal is not None or is_same_budget(max(tokens.values()) / min(tokens.values())):
        return ""
    each = ", ".join(f"{name} {human_count(count)}" for name, count in tokens.items())
    return (
        f"the arms of study {file.name!r} train different tokens: {each}\n"
        '  say what they have in common: equal = "flops" (or "seconds"); or give them the same train.tokens'
    )


def check_registered(file: StudyFile, allow: bool, record: bool = False) -> Registration:
    """Compare a study with what was registered.

    Args:
        record: write an allowed change into plan.json, so that the study stays exploratory.

    Raises:
        UsageError: it was never registered, or was changed since and `allow` is False.
    """
    folder = study_folder(file.name)
    plan = read_plan(file.name)
    if plan is None:
        raise UsageError(
            f"study {file.name!r} has no run yet\n  train it first: efftrain study {file.path}"
        )
    values, known = file.values(), plan.latest.values
    reasons = list(plan.exploratory)
    if digest_of(values) != digest_of(known):
        differing = differences(known, values)
        since = f"its registration on {plan.registered}"
        if plan.changes:
            since = f"--allow accepted a change on {plan.changes[-1].time}"
        if not allow:
            raise UsageError(
                f"study {file.name!r} was changed since {since}: {_shown(differing)}\n"
                f"  restore these values ({folder / 'plan.json'} holds all of them), give the file a new name to begin a "
                "new study, or give --allow: its verdicts are exploratory from then on"
            )
        reasons.append(f"it was changed after its registration: {_shown(differing)}")
        if record:
            change = Change(
                time=_now(),
                sha256=digest_of(values),
                differing=differing,
                values=values,
                drawn=file.drawn,
            )
            changed = {"changes": [*plan.changes, change], "exploratory": reasons}
            write_record(folder / "plan.json", plan.model_copy(update=changed))
    return Registration(folder, plan.registered, plan.sha256, tuple(reasons))


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[list[Any]]:
    """Return [key, before, after] of what differs; None for a key that is absent."""
    keys = dict.fromkeys((*before, *after))
    return [
        [key, before.get(key), after.get(key)] for key in keys if before.get(key) != after.get(key)
    ]


def _shown(differing: list[list[Any]], most: int = 4) -> str:
    """Return the first differences in words, and how many more there are."""
    parts = [f"{key} was {_word(old)}, is {_word(new)}" for key, old, new in differing[:most]]
    if len(differing) > most:
        parts.append(f"and {len(differing) - most} more")
    return "; ".join(parts)


def _word(value: Any) -> str:
    return "absent" if value is None else json.dumps(value)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
