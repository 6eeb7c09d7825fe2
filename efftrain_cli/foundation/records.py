"""Small files that efftrain writes and reads back: one pydantic model each."""

from __future__ import annotations

import hashlib
import json
import math
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from efftrain_cli.foundation.console import printable
from efftrain_cli.foundation.errors import DamagedError, NewerFormatError
from efftrain_cli.foundation.files import write_whole

LARGEST = 64 << 20
"""Bytes of the largest file that is read whole."""


def utc_now() -> str:
    """Return the time as ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Part(BaseModel):
    """Fields inside a small file. Fields that this version does not know are kept."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class Record(Part):
    """The fields of a small file."""

    newest: ClassVar[int] = 1
    """Format that this version writes and reads."""
    restore: ClassVar[str] = "restore it from a copy"
    """What to do about a damaged file."""

    schema_version: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return the fields that were given, as JSON values."""
        return {"schema_version": self.schema_version, **self.model_dump(exclude_unset=True)}


R = TypeVar("R", bound=Record)


def read_record(path: Path, kind: type[R]) -> R:
    """Read a file of one record.

    Raises:
        FileNotFoundError: there is no file.
        NewerFormatError: a newer efftrain wrote it.
        DamagedError: a field has a wrong type; the message names file and field.
    """
    return check_record(path, read_json(path, kind.restore), kind)


def write_record(path: Path, record: Record, first: bool = False) -> None:
    """Write a file of one record, as `write_whole`."""
    write_whole(path, json.dumps(record.to_json(), indent=1, allow_nan=False), first)


def check_record(path: Path, values: object, kind: type[R]) -> R:
    """Return the values of a file, or of one of its entries, as a record.

    Raises:
        NewerFormatError: a newer efftrain wrote it.
        DamagedError: a field has a wrong type, or the file another format.
    """
    if not isinstance(values, dict):
        raise damaged(path, "it holds no JSON object", kind.restore)
    version = values.get("schema_version", kind.model_fields["schema_version"].get_default())
    if type(version) is not int:
        fault = "it has no schema_version; it was not written by efftrain, or is changed"
        raise damaged(path, fault, kind.restore)
    if version > kind.newest:
        raise newer_format(path, version, kind.newest, values.get("efftrain"))
    if version < kind.newest:
        raise damaged(path, f"it has format {version}, not {kind.newest}", kind.restore)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise damaged(path, first_fault(error), kind.restore) from None


def first_fault(error: ValidationError) -> str:
    """Return "field: fault" of the first mistake, or the fault alone."""
    entry = error.errors(include_url=False)[0]
    return ": ".join((*filter(None, [".".join(map(str, entry["loc"]))]), entry["msg"]))


def newer_format(path: Path, version: object, newest: int, written_by: object) -> NewerFormatError:
    """Return the error of a file in a format that this version does not know."""
    by = f"efftrain {written_by}" if written_by else "another one"
    return NewerFormatError(
        f"{path} has format {version}, this efftrain reads formats up to {newest}."
        f" It was written by {by}, which is newer: update efftrain. Nothing was changed"
    )


def read_json(path: Path, restore: str = "") -> Any:
    """Return the JSON value in a small file, with the errors of its reader and its parser."""
    return parse_json(path, read_small_text(path, restore), restore)


def parse_json(path: Path, text: str, restore: str) -> Any:
    """Return the JSON value that a file holds.

    Raises:
        DamagedError: it is not JSON or nested too deeply, or a number is not finite or has more
            than 63 bits.
    """
    try:
        values = json.loads(text)
        wrong = _find_unusable_number(values, "")
    except RecursionError:
        raise damaged(path, "its values are nested too deeply", restore) from None
    except ValueError as error:
        raise damaged(path, str(error)[:200], restore) from None
    if wrong:
        raise damaged(path, f"{wrong}: not a number of at most 63 bits", restore)
    return values


def _find_unusable_number(value: object, field: str) -> str:
    """Return the dotted name of the first number that `parse_json` does not accept, or ""."""
    if isinstance(value, int) and value.bit_length() > 63:
        return field
    if isinstance(value, float) and not math.isfinite(value):
        return field
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return ""
    for key, entry in value.items():
        wrong = _find_unusable_number(entry, f"{field}.{key}".removeprefix("."))
        if wrong:
            return wrong
    return ""


def digest_of(value: Any) -> str:
    """Return the hex sha256 of a value's JSON, whatever the order of its keys."""
    return text_digest(json.dumps(value, sort_keys=True))


def text_digest(text: str) -> str:
    """Return the hex sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_small_text(path: Path, restore: str) -> str:
    """Return the text of an ordinary file of at most LARGEST bytes.

    Raises:
        FileNotFoundError: there is no file.
        DamagedError: it cannot be read, is larger, is not an ordinary file, or is not UTF-8.
    """
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise damaged(path, "it is not an ordinary file", restore)
        if state.st_size > LARGEST:
            raise damaged(path, f"it has {state.st_size:,} bytes", restore)
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(
            f"{path} cannot be read: {error.strerror}. Make it readable, or restore it from a copy"
        ) from None
    except UnicodeDecodeError as error:
        raise damaged(path, f"it is not UTF-8 text (byte {error.start})", restore) from None


def damaged(path: Path, fault: str, restore: str) -> DamagedError:
    """Return the error of a damaged file.

    Args:
        fault: what is wrong with it.
        restore: what the user can do; "" if nothing is known.
    """
    named = f"{printable(str(path))} is damaged: {printable(fault)}"
    return DamagedError(f"{named}\n  {restore}" if restore else named)
