"""List and verify a run's checkpoints, for `efftrain runs`, without torch: at once, even while the
run trains."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.console import human
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
        lines.append(f"{name}  {human(each['bytes'], 'B'):>9}  {when}")
    others = set((run / "checkpoints").glob("*")) - set(checkpoints_of(run))
    lines += [f"{'no checkpoint':<15}  {path}" for path in sorted(others)]
    return lines or [f"run {run.name!r} has no checkpoint yet"]


def verify_checkpoints(run: Path) -> tuple[int, list[str]]:
    """Compare every file of every checkpoint with the sha256 written beside it; return the number
    of checkpoints, and what is wrong with them."""
    paths = checkpoints_of(run)
    problems = []
    for path in paths:
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
    return len(paths), problems
