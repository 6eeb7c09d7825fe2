"""`efftrain checkpoint`: a run's checkpoints in words. No torch, so that it answers at once, even while the run trains.
A run that does not exist is a `UsageError`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from efftrain_cli.foundation.console import human_bytes
from efftrain_cli.foundation.errors import CheckpointError
from efftrain_cli.run.directory import checkpoint_step, checkpoints_of, existing_run
from efftrain_cli.run.manifest import verify_checkpoint


def list_checkpoints(name: str) -> list[dict[str, Any]]:
    """The checkpoints of run `name` for other programs, oldest first: step, bytes, time, path."""
    found = []
    for path in checkpoints_of(existing_run(name)):
        try:
            size = sum(file.stat().st_size for file in path.iterdir())
            written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        except FileNotFoundError:  # the run is training, and has just removed it
            continue
        when = written.isoformat(timespec="seconds")
        found.append(
            {"step": checkpoint_step(path), "bytes": size, "written": when, "path": str(path)}
        )
    return found


def describe_checkpoints(name: str) -> list[str]:
    """A line for each checkpoint of run `name`, oldest first, and for what else lies among them."""
    lines = []
    for each in list_checkpoints(name):
        when = f"{datetime.fromisoformat(each['written']).astimezone():%Y-%m-%d %H:%M:%S}"
        lines.append(
            f"step {each['step']:>10,}  {human_bytes(each['bytes']):>9}  {when}  {each['path']}"
        )
    run = existing_run(name)
    folder = run / "checkpoints"
    others = sorted(set(folder.iterdir()) - set(checkpoints_of(run))) if folder.is_dir() else []
    lines += [f"{'no checkpoint':<15}  {path}" for path in others]
    return lines or [f"run {name!r} has no checkpoint yet"]


def verify_checkpoints(name: str) -> list[dict[str, Any]]:
    """Each checkpoint of run `name`: `checkpoint`, `sound`, `files` (None where it is damaged) and `problem` (None
    where it is not)."""
    found: list[dict[str, Any]] = []
    for path in checkpoints_of(existing_run(name)):
        try:
            files, problem = len(verify_checkpoint(path)), None
        except CheckpointError as error:
            files, problem = None, str(error)
        found.append(
            {"checkpoint": path.name, "sound": problem is None, "files": files, "problem": problem}
        )
    return found


def describe_verified(found: list[dict[str, Any]]) -> list[str]:
    """The same as lines for people."""
    return [
        f"ok       {each['checkpoint']}  {each['files']} files"
        if each["sound"]
        else f"DAMAGED  {each['checkpoint']}  {each['problem']}"
        for each in found
    ] or ["no checkpoint yet"]
