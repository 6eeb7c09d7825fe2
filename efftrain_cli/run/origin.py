"""origin.json of a run: command line, versions, device, data and parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from efftrain_cli.foundation.errors import DataError, UsageError
from efftrain_cli.foundation.records import Part, Record, damaged, read_record, write_record

ORIGIN = "origin.json"
RESTORE = "Restore it from a copy of the run, or remove the run with `efftrain runs rm`"
NOT_COMPUTED = ("checkpoint.", "wandb.", "eval.sample")
"""Recipe keys that change nothing of what a run computes: a continued run, or another, may differ
in them."""


class OriginData(Part):
    """The data of a run; hashes are null until an imported run is trained here."""

    train_hash: str | None = None
    valid_hash: str | None = None
    tokenizer_hash: str | None = None
    vocab_size: int | None = None
    valid_bytes_per_token: float | None = None
    corpus: str | None = None
    """Key of the corpus that the run goes on with."""


class Parent(Part):
    """The run or directory that the weights of a run's first checkpoint come from."""

    run: str | None = None
    directory: str | None = None
    source: str | None = None
    names_text: bool | None = None


class BranchPoint(Part):
    """The checkpoint that a branch began with."""

    parent: str
    step: int
    sha256: str
    """Of the checkpoint's manifest."""


class Origin(Record):
    """What could explain a difference between two runs; fields that no code reads are not named."""

    restore: ClassVar[str] = RESTORE

    schema_version: int
    recipe: str | None = None
    command: list[str] | None = None
    folder: str | None = None
    """Where the run was started: what relative paths of its recipe are relative to."""
    started: str | None = None
    device: str | None = None
    study: str | None = None
    data: OriginData | None = None
    imported: Parent | None = None
    grown_from: Parent | None = None
    branch: BranchPoint | None = None


def read_origin(path: Path) -> dict[str, Any]:
    """Read what origin.json of the run in this directory says.

    Raises:
        DataError: it is missing or damaged, or the run has a format that this version does not
            read.
    """
    return _read(path).to_json()


def _read(path: Path) -> Origin:
    try:
        return read_record(path / ORIGIN, Origin)
    except FileNotFoundError:
        raise DataError(
            f"{path / ORIGIN} is missing: without it nobody can say what the run was trained on."
            f" {RESTORE}"
        ) from None


def write_origin(path: Path, values: Mapping[str, object]) -> None:
    """Write origin.json of the run in this directory."""
    write_record(path / ORIGIN, Origin.model_validate({"schema_version": Origin.newest, **values}))


def origin_data(path: Path) -> dict[str, Any]:
    """Read what origin.json says of the data: hashes and the vocabulary's size.

    Raises:
        DataError: as `read_origin`, or it says nothing of them.
    """
    data = read_origin(path).get("data") or {}
    needed = ("tokenizer_hash", "vocab_size", "train_hash", "valid_hash")
    if any(name not in data for name in needed):
        raise damaged(path / ORIGIN, f"its `data` does not say {', '.join(needed)}", RESTORE)
    return data


def check_text_is_named(path: Path, overrides: Sequence[str], option: str) -> None:
    """Check that the text that an imported run is first trained on was named: nobody may have read
    its recipe.

    Args:
        option: of `pretrain`, that goes on from the run.

    Raises:
        UsageError: it was not named, neither at the import nor now.
    """
    text_keys = ("data.train", "data.sources")
    if any(override.strip().startswith(text_keys) for override in overrides):
        return
    imported = _read(path).imported
    is_unnamed = imported is not None and imported.names_text is False
    if is_unnamed and origin_data(path)["train_hash"] is None:
        raise UsageError(
            f"run {path.name!r} was imported without text to train on\n"
            f"  name it, as `efftrain pretrain {option} --set data.train=my.txt"
            " --set data.repeat=true` (data.train=stdlib for the source of Python's library)"
        )
