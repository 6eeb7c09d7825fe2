"""A study's plan as it stood before its first run, and what became of it.

runs/<study>-study/
  plan.json       the study's values and their hash, the file's text, when it was registered, what was changed since
  receipts.csv    one row per run: phase, arm, settings, seed, how it ended, final loss, tokens, seconds
  looks.csv       one row per look, primary measure and arm: estimate, interval, p, verdict
  logs/           what each run printed
  claims/         which process trains which run
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from efftrain_cli import __version__
from efftrain_cli.foundation.errors import DataError, UsageError
from efftrain_cli.foundation.files import write_whole
from efftrain_cli.run.directory import run_path
from efftrain_cli.run.rows import SCHEMA_VERSION
from efftrain_cli.study.file import StudyFile, hash_of
from efftrain_cli.study.phases import all_trials


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
        early = sorted(
            trial.name for _, (_, trial) in all_trials(file) if run_path(trial.name).exists()
        )
        if early and not allow:
            raise UsageError(
                f"{len(early)} runs of study {file.name!r} exist already, {early[0]} for one, but it was never registered: "
                f"nobody could rule out that they were looked at first\n"
                f"  remove them (efftrain runs rm), rename the study file, or give --allow: the study is then exploratory"
            )
        reason = f"{len(early)} of its runs are older than its registration"
        plan = {
            "schema_version": SCHEMA_VERSION,
            "study": file.name,
            "registered": _now(),
            "efftrain": __version__,
            "sha256": file.sha256,
            "values": file.values(),
            "text": file.path.read_text(encoding="utf-8"),
            "changes": [],
            "exploratory": [reason] if early else [],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f"plan.{os.uname().nodename}.{os.getpid()}.tmp")
        try:
            written.write_text(json.dumps(plan, indent=1), encoding="utf-8")
            os.link(written, path)  # of two machines that begin at once, one registers
        except FileExistsError:
            pass
        finally:
            written.unlink(missing_ok=True)
    return check_registered(file, allow, record=True)


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
    plan = _read(path)
    values = file.values()
    known, since = plan["values"], f"its registration on {plan['registered']}"
    if plan["changes"]:
        last = plan["changes"][-1]
        known, since = last["values"], f"--allow accepted a change on {last['time']}"
    reasons = list(plan["exploratory"])
    if hash_of(values) != hash_of(known):
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
            change = {
                "time": _now(),
                "sha256": hash_of(values),
                "differing": differing,
                "values": values,
            }
            plan = {**plan, "changes": [*plan["changes"], change], "exploratory": reasons}
            write_whole(path, json.dumps(plan, indent=1))
    return Registration(path.parent, plan["registered"], plan["sha256"], tuple(reasons))


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


def _read(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        if plan["schema_version"] > SCHEMA_VERSION:
            raise DataError(f"{path} has format {plan['schema_version']}; install a newer efftrain")
        if hash_of(plan["values"]) != plan["sha256"]:
            raise DataError(
                f"{path} was edited: its values do not have the hash it names; restore it, or begin a new study"
            )
        plan["changes"], plan["exploratory"], plan["registered"]
        return plan
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is damaged ({error!r}); restore it, or begin a new study under another name"
        ) from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
