"""Small files that efftrain writes and reads back: one pydantic model each."""

from __future__ import annotations

import hashlib
import json
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

    model_config = ConfigDict(
        extra="allow",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
    )


class Record(Part):
    """The fields of a small file."""

    newest: ClassVar[int] = 1
    """Format that this version writes and reads."""
    restore: ClassVar[str] = "restore it from a copy"
    """What to do about a damaged file."""

    schema_version: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return the fields that were given, as JSON values."""
        given = self.model_dump(exclude_unset=True)
        return {"schema_version": self.schema_version, **given}


R = TypeVar("R", bound=Record)


def read_record(path: Path, kind: type[R]) -> R:
    """Read a file of one record.

    Raises:
        OSError: it cannot be read.
        NewerFormatError: a newer efftrain wrote it.
        DamagedError: a field has a wrong type; the message names file and field.
    """
    values = read_json(path, kind.restore)
    return check_record(path, values, kind)


def check_record(path: Path, values: Any, kind: type[R]) -> R:
    """Return the values of a file, or of an entry of it, as a record; errors as `read_record`."""
    if not isinstance(values, dict):
        raise damaged(path, "it holds no JSON object", kind.restore)
    try:
        version = Record.model_validate(values).schema_version
        if version > kind.newest:
            raise NewerFormatError(
                f"{path} has format {version}, this efftrain reads formats up to {kind.newest}\n"
                "  update efftrain; nothing was changed"
            )
        if version < kind.newest:
            raise damaged(path, f"it has format {version}, not {kind.newest}", kind.restore)
        return kind.model_validate(values)
    except ValidationError as error:
        raise damaged(path, first_fault(error), kind.restore) from None


def write_record(path: Path, record: Record) -> None:
    """Write a file of one record, as `write_whole`."""
    text = json.dumps(record.to_json(), indent=1, allow_nan=False)
    write_whole(path, text)


def first_fault(error: ValidationError) -> str:
    """Return "field: fault" of the first mistake, or the fault alone."""
    entry = error.errors(include_url=False)[0]
    field = ".".join(map(str, entry["loc"]))
    if not field:
        return entry["msg"]
    return f"{field}: {entry['msg']}"


def read_json(path: Path, restore: str = "") -> Any:
    """Return the JSON value in a small file; errors as `read_small_text`."""
    try:
        # pydantic's own parser refuses file names that are not UTF-8.
        return json.loads(read_small_text(path, restore))
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error), restore) from None


def digest_of(value: Any) -> str:
    """Return the hex sha256 of a value's JSON, whatever the order of its keys."""
    return text_digest(json.dumps(value, sort_keys=True))


def text_digest(text: str) -> str:
    """Return the hex sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_small_text(path: Path, restore: str) -> str:
    """Return the text of an ordinary file of at most LARGEST bytes.

    Raises:
        OSError: it cannot be read.
        DamagedError: it is larger, is not an ordinary file, or is not UTF-8.
    """
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        raise damaged(path, "it is not an ordinary file", restore)
    if state.st_size > LARGEST:
        raise damaged(path, f"it has {state.st_size:,} bytes", restore)
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, f"it is not UTF-8 text (byte {error.start})", restore) from None


def damaged(path: Path, fault: str, restore: str) -> DamagedError:
    """Return the error of a damaged file.

    Args:
        fault: what is wrong with it.
        restore: what the user can do; "" if nothing is known.
    """
    message = f"{printable(path)} is damaged: {printable(fault)}"
    if restore:
        message += f"\n  {restore}"
    return DamagedError(message)
