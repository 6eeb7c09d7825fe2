"""Calibrations of made runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from efftrain_cli.compare.reading import read_numbers
from efftrain_cli.run.calibrations import (
    ArmTimes,
    Calibration,
    StepTimes,
    digest_of_recipe,
    write_calibration,
)

STEP = 1024 * 6e5
"""FLOPs of every step of the fake runs."""


def arm(times: dict[float, list[float]], kind: int = 0, **more: Any) -> ArmTimes:
    """A recipe whose steps of so many FLOPs took so many seconds in each block."""
    steps = [StepTimes(kind=kind, flops=flops, seconds=each) for flops, each in times.items()]
    named = {"recipe": "r", "digest": "d", "run": "r-seed0", "dtype": "fp32"}
    return ArmTimes(**{**named, "steps": steps, **more})


def calibration_of(arms: list[ArmTimes], **more: Any) -> Calibration:
    """A calibration on the fake runs' machine."""
    values = {
        "schema_version": 1,
        "time": "2026-11-23T08:00:00+00:00",
        "efftrain": "0.1.0",
        "torch": "2.13.0+cpu",
        "python": "3.11.7",
        "device": "Some CPU",
        "device_kind": "cpu",
        "devices": 1,
        "threads": 2,
        "arms": arms,
    }
    return Calibration(**{**values, **more})


def calibrated(root: Path, seconds: dict[str, list[float]], **more: Any) -> Path:
    """Write a calibration in which a step of each recipe took so many seconds in each block."""
    arms = []
    for name, each in seconds.items():
        recipe = read_numbers(root / f"{name}-seed0").recipe
        arms.append(arm({STEP: each}, recipe=name, digest=digest_of_recipe(recipe)))
    return write_calibration(calibration_of(arms, **more))
