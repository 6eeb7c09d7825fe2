"""Numbers and folders that environment variables hold, each with its range."""

from __future__ import annotations

import os
import re
from pathlib import Path

from efftrain_cli.foundation.errors import UsageError

_PROCESSES = 1 << 20
RANGES = {
    "WORLD_SIZE": (1, _PROCESSES),
    "RANK": (0, _PROCESSES - 1),
    "LOCAL_RANK": (0, _PROCESSES - 1),
    "LOCAL_WORLD_SIZE": (1, _PROCESSES),
    "MASTER_PORT": (1, 65_535),
    "SLURM_STEP_NUM_TASKS": (1, _PROCESSES),
    "SLURM_PROCID": (0, _PROCESSES - 1),
    "SLURM_LOCALID": (0, _PROCESSES - 1),
    "SLURM_JOB_ID": (0, 1 << 40),
    "EFFTRAIN_JOBS": (1, _PROCESSES),
    "SOURCE_DATE_EPOCH": (0, 1 << 32),
}
"""Variable -> its smallest and its largest whole number. matplotlib and numpy read
SOURCE_DATE_EPOCH too."""


def usable_cores() -> int:
    """Return how many processor threads this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def environment_number(name: str, default: int) -> int:
    """Read a variable of `RANGES`; an unset or empty one is `default`.

    Raises:
        UsageError: it is no whole number, or out of range.
    """
    text = os.environ.get(name, "")
    least, most = RANGES[name]
    if not text:
        return default
    is_number = re.fullmatch("[0-9]{1,19}", text)
    if not is_number or not least <= int(text) <= most:
        raise UsageError(
            f"the environment variable {name} = {text[:40]!r} is not usable\n"
            f"set it to a whole number from {least:,} to {most:,}, or unset it"
        )
    return int(text)


def check_environment() -> None:
    """Read every variable of `RANGES`, before an import or a run does.

    Raises:
        UsageError: one is no whole number, or out of range.
    """
    for name in RANGES:
        environment_number(name, 0)


def planned_device(device: str) -> str:
    """Return "cpu" for "auto" if PyTorch will find no CUDA device, or `device`. Import no PyTorch.

    It finds none if CUDA_VISIBLE_DEVICES names none or it was built for CPUs.
    """
    from importlib.metadata import PackageNotFoundError, version

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").partition(",")[0].strip()
    try:
        for_cpus = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        for_cpus = True
    if device == "auto" and (for_cpus or visible in ("", "-1", "NoDevFiles")):
        return "cpu"
    return device


def environment_folder(name: str, default: str) -> Path:
    """Return the folder that a variable names, ~ expanded; an unset or empty one is `default`.

    Raises:
        UsageError: no home directory of that user is known.
    """
    text = os.environ.get(name) or default
    return expanded(text, f"set {name} to a folder without ~")


def cache_root() -> Path:
    """Return EFFTRAIN_CACHE, or efftrain in the user's cache folder."""
    standard = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return environment_folder("EFFTRAIN_CACHE", f"{standard}/efftrain")


def expanded(text: str, way_out: str) -> Path:
    """Return a path with a leading ~ or ~user replaced by that user's home directory.

    Args:
        way_out: second line of the message, if there is none.

    Raises:
        UsageError: no home directory of that user is known.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{text}: no home directory of that user is known\n{way_out}") from None
