"""Calibrations: steps of several recipes timed side by side on one machine, one file each in
runs/calibrations/.

`efftrain calibrate` writes them; `compare` and studies only read them. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from efftrain_cli.foundation.errors import EfftrainError
from efftrain_cli.foundation.files import make_folder
from efftrain_cli.foundation.records import Part, Record, digest_of, read_record, write_record
from efftrain_cli.run.directory import runs_root
from efftrain_cli.run.small_files import NOT_COMPUTED

Seconds = Annotated[float, Field(gt=0)]


class StepTimes(Part):
    """A step that was timed once in every block."""

    kind: int
    """As `kinds_of_steps` numbers it."""
    flops: Seconds
    seconds: list[Seconds]
    """By block."""


class ArmTimes(Part):
    """The timed steps of a recipe."""

    recipe: str
    """As the command line named it."""
    digest: str
    """As `digest_of_recipe`."""
    run: str
    """Run whose steps were timed."""
    dtype: str
    steps: list[StepTimes]
    """In the order of kind and FLOPs."""


class Calibration(Record):
    """Times of steps of several recipes, measured in the same minutes."""

    restore: ClassVar[str] = "remove it, and give `efftrain calibrate` again"

    time: str
    """When it ended, UTC."""
    efftrain: str
    torch: str
    python: str
    device: str
    device_kind: str
    devices: int
    threads: int
    arms: list[ArmTimes]


def digest_of_recipe(recipe: Mapping[str, Any]) -> str:
    """Return the hash of what dotted keys make a run compute, whatever its seed."""
    kept = {}
    for key, value in recipe.items():
        if key != "seed" and not key.startswith(NOT_COMPUTED):
            kept[key] = value
    return digest_of(kept)


def calibrations_folder() -> Path:
    """Return the folder of calibrations."""
    return runs_root() / "calibrations"


def write_calibration(calibration: Calibration) -> Path:
    """Write a calibration under its time and the hash of its recipes; return the file."""
    name = calibration.time.replace(":", "").replace("+0000", "Z")
    arms = digest_of([arm.digest for arm in calibration.arms])
    path = calibrations_folder() / f"{name}-{arms[:8]}.json"
    make_folder(path.parent)
    write_record(path, calibration)
    return path


class Calibrations(NamedTuple):
    """What runs/calibrations/ holds."""

    valid: Sequence[Calibration] = ()
    """Newest first."""
    faults: Sequence[str] = ()
    """Why each other file is left out."""


NO_CALIBRATIONS = Calibrations()


def read_calibrations() -> Calibrations:
    """Read the calibrations that there are."""
    calibrations = []
    faults = []
    for path in sorted(calibrations_folder().glob("*.json")):
        try:
            calibrations.append(read_record(path, Calibration))
        except (EfftrainError, FileNotFoundError) as error:
            faults.append(str(error))
    calibrations.sort(key=lambda each: each.time, reverse=True)
    return Calibrations(calibrations, faults)
