"""The reading side of run directories: events, recipe and origin, without owning the run.

Nothing here writes, locks or imports torch, so a run can be read while it trains, on another machine, or half copied.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.console import printable
from efftrain_cli.foundation.errors import DataError, NewerFormatError
from efftrain_cli.run.lines import read_lines
from efftrain_cli.run.lock import is_locked

SCHEMA_VERSION = 1
"""Format of a run directory."""
NOT_COMPUTED = ("checkpoint.", "wandb.", "eval.sample")
"""Recipe keys that change nothing of what a run computes: a continued run, or another, may differ in them."""


@dataclass(frozen=True)
class RunDirectory:
    """What a run's small files say."""

    name: str
    path: Path
    recipe: dict[str, Any]
    """The resolved recipe, as in recipe.toml."""
    origin: dict[str, Any]
    events: tuple[dict[str, Any], ...]
    locked: bool
    """A living process owns the run."""


def read_run(path: Path) -> RunDirectory:
    """Reads a run's recipe, origin and events.

    Raises:
        DataError: a file is missing or damaged, or the directory has a format that this version does not read.
    """
    file = path / "recipe.toml"
    try:
        recipe = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is not a run directory: it has no recipe.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{file} is damaged: {error}. {_RESTORE}") from None
    except OSError as error:
        raise unreadable(file, error) from None
    return RunDirectory(
        printable(path.name),
        path,
        recipe,
        cleaned(read_origin(path)),
        read_events(path),
        is_locked(path / "lock"),
    )


def unreadable(path: Path, error: OSError) -> DataError:
    """The error of a file or folder of a run that the system does not let us read."""
    return DataError(
        f"{path} cannot be read: {error.strerror}. Make it readable, or restore it from a copy"
    )


def check_schema(values: dict[str, Any], path: Path) -> None:
    """Accepts the current format and the one before it, to read.

    Raises:
        DataError: another format; the message says which and what to do.
    """
    version = values.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise DataError(
            f"{path} has no schema_version; it was not written by efftrain, or is damaged"
        )
    if version > SCHEMA_VERSION:
        written_by = printable(str(values.get("efftrain") or "unknown"))
        raise NewerFormatError(
            f"{path} has format {version}, this efftrain reads formats up to {SCHEMA_VERSION}. It was written by efftrain "
            f"{written_by}: install a newer efftrain. Nothing was changed"
        )
    if version < SCHEMA_VERSION - 1:
        raise DataError(
            f"{path} has format {version}; this efftrain reads formats {SCHEMA_VERSION - 1} and {SCHEMA_VERSION}. "
            "Read it with the efftrain version named in its origin.json"
        )


def read_events(path: Path) -> tuple[dict[str, Any], ...]:
    """The events of a run, oldest first; torn and damaged lines are left out."""
    return tuple(cleaned(event) for event in read_lines(path / "events.jsonl"))


# --- small files -----------------------------------------------------------------------------------------------------


def read_origin(path: Path) -> dict[str, Any]:
    """What origin.json of the run in this directory says.

    Raises:
        DataError: it is missing or damaged, or the run has a format that this version does not read.
    """
    file = path / "origin.json"
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{file} is missing: without it nobody can say what the run was trained on. {_RESTORE}"
        ) from None
    except OSError as error:
        raise unreadable(file, error) from None
    except (ValueError, RecursionError) as error:
        reason = (
            "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)[:200]
        )
        raise DataError(f"{file} is damaged: {reason}. {_RESTORE}") from None
    if not isinstance(value, dict):
        raise DataError(f"{file} is damaged: it holds no JSON object. {_RESTORE}")
    check_schema(value, file)
    return value


_RESTORE = "Restore it from a copy of the run, or remove the run with `efftrain runs rm`"


def origin_data(path: Path) -> dict[str, Any]:
    """What origin.json says of the data: hashes and the vocabulary's size.

    Raises:
        DataError: as `read_origin`, or it says nothing of them.
    """
    data = read_origin(path).get("data")
    needed = ("tokenizer_hash", "vocab_size", "train_hash", "valid_hash")
    if not isinstance(data, dict) or any(name not in data for name in needed):
        raise DataError(
            f"{path / 'origin.json'} is damaged: its `data` does not say {', '.join(needed)}. {_RESTORE}"
        )
    return data


def cleaned(value: Any) -> Any:
    """`value` with all control characters escaped: a run may come from anywhere, and what it says is printed."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): cleaned(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [cleaned(entry) for entry in value]
    return value
