"""List and verify a run's checkpoints (`efftrain checkpoint`), without torch: at once, even while
the run trains."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.console import human_bytes
from efftrain_cli.foundation.errors import CheckpointError
from efftrain_cli.run.directory import checkpoint_step, checkpoints_of
from efftrain_cli.run.manifest import verify_checkpoint


def list_checkpoints(run: Path) -> list[dict[str, Any]]:
    """Return the checkpoints of a run, oldest first: step, bytes, time, path."""
    checkpoints = []
    for path in checkpoints_of(run):
        try:
            size = sum(file.stat().st_size for file in path.iterdir())
            written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        except FileNotFoundError:  # the run is training, and has just removed it
            continue
        checkpoints.append(
            {
                "step": checkpoint_step(path),
                "bytes": size,
                "written": written.isoformat(timespec="seconds"),
                "path": str(path),
            }
        )
    return checkpoints


def describe_checkpoints(run: Path) -> list[str]:
    """Return a line for each checkpoint of a run, oldest first, and for what lies among them."""
    lines = []
    for each in list_checkpoints(run):
        when = f"{datetime.fromisoformat(each['written']).astimezone():%Y-%m-%d %H:%M:%S}"
        name = Path(each["path"]).name
        lines.append(f"{name}  {human_bytes(each['bytes']):>9}  {when}")
    others = set((run / "checkpoints").glob("*")) - set(checkpoints_of(run))
    lines += [f"{'no checkpoint':<15}  {path}" for path in sorted(others)]
    return lines or [f"run {run.name!r} has no checkpoint yet"]


def verify_checkpoints(run: Path) -> list[dict[str, Any]]:
    """Verify each checkpoint of a run.

    Returns:
        `checkpoint`, `sound`, `files` (None if it is damaged) and `problem` (None if it is not) of
        each.
    """
    verified: list[dict[str, Any]] = []
    for path in checkpoints_of(run):
        entry = {"checkpoint": path.name, "sound": True, "files": None, "problem": None}
        try:
            entry["files"] = len(verify_checkpoint(path))
        except CheckpointError as error:
            entry |= {"sound": False, "problem": str(error)}
        verified.append(entry)
    return verified


def describe_verified(verified: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each entry of `verify_checkpoints`."""
    lines = []
    for each in verified:
        state = "ok" if each["sound"] else "DAMAGED"
        what = each["problem"] or f"{each['files']} files"
        lines.append(f"{state:<9}{each['checkpoint']}  {what}")
    return lines or ["no checkpoint yet"]
