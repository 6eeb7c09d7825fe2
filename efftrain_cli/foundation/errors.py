"""The errors that end a command, each with its exit code.

A message names the thing, its value, the rule and what to do. Exit code 1 with a traceback is a
defect; with a message it is a failure of processes on several devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class EfftrainError(Exception):
    """An error that the user can act on: printed without a traceback."""

    exit_code = 1


@dataclass
class Problem:
    """One breach of a recipe's rules."""

    key: str
    """Dotted key; "" for the file as a whole."""
    rule: str
    """What is wrong and what would be right."""
    value: str | None = None
    """The value as TOML; None if no value is shown."""
    source: str = ""
    """Place of the value: "file:line" or "--set key=value"."""


class Breaches(ValueError):
    """Broken rules between the sections of a recipe, as (dotted key, rule)."""

    def __init__(self, breaches: Sequence[tuple[str, str]]) -> None:
        super().__init__("\n".join(f"{key}: {rule}" for key, rule in breaches))
        self.breaches = tuple(breaches)


def nearest(name: str, names: Iterable[str], most: int = 3, cutoff: float = 0.5) -> str:
    """Return "did you mean X or Y?" of the names that are most like `name`, or ""."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(names), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else ""


class UsageError(EfftrainError):
    """An option, name or combination that cannot work."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe that breaks its rules; the message lists all of `problems`."""

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class DataError(EfftrainError):
    """Text, tokens or tokenizer that are missing, damaged or do not fit; the message names file,
    row or line."""

    exit_code = 3


class CheckpointError(EfftrainError):
    """A checkpoint that is damaged or does not fit what is asked of it."""

    exit_code = 3


class DivergedError(EfftrainError):
    """The loss or a gradient was not finite; the update was not applied."""

    exit_code = 4


class UnsoundError(DivergedError):
    """A state with weights, moments or a validation loss that are not finite; it is not saved."""


class OutOfMemoryError(EfftrainError):
    """The device or host has too little memory for the planned shapes."""

    exit_code = 5


class DamagedError(CheckpointError, DataError):
    """A file that efftrain wrote and that was damaged; the message names file and field."""


class NewerFormatError(CheckpointError, DataError):
    """A valid file of a newer efftrain, in a format that this one cannot read."""


class DiskError(EfftrainError):
    """The disk is full, or refuses to be read or written."""

    exit_code = 6


class RunLockedError(EfftrainError):
    """Another process owns the run directory."""

    exit_code = 7


class LostProcessError(EfftrainError):
    """Another process of a run on several devices has ended, so this one cannot go on."""


class ReplicaError(EfftrainError):
    """Copies of the model that must be equal differ."""


class StoppedError(EfftrainError):
    """Stopped by a signal after saving; the run can be resumed."""

    exit_code = 75
