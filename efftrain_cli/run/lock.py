"""Who owns a run: a lock that dies with its process, and beside it a file that names the owner to
other machines.

The lock (flock) may be known to one machine only. The file, owner.json, names host and process and
is removed at every orderly end. One that a killed process left is replaced, of another machine too:
a requeue on another node needs that, and whether that machine works on cannot be known from here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ValidationError

from efftrain_cli.foundation.console import printable
from efftrain_cli.foundation.errors import RunLockedError
from efftrain_cli.foundation.files import open_to_write, temporary_beside
from efftrain_cli.foundation.records import Part

OWNER = "owner.json"


class Owner(Part):
    """The process that trains a run; owner.json."""

    host: Annotated[str, AfterValidator(printable)]
    pid: int
    began: str
    """When that process began, as its machine counts: a process number is used again. "" if that is
    unknown."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Owner:
    """Return the owner that this process is."""
    return Owner(host=os.uname().nodename, pid=os.getpid(), began=_began(os.getpid()))


def owner_of(run: Path) -> Owner | None:
    """Return who owns a run directory by its owner.json; None if nobody does.

    It is whole before it has its name, so one that names nobody is what a power failure left.
    """
    try:
        return Owner.model_validate_json((run / OWNER).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    except OSError:
        return Owner(host="unknown", pid=-1, began="")


@dataclass(frozen=True)
class RunLock:
    """The ownership of a run directory, until it is closed."""

    descriptor: int
    run: Path

    def close(self) -> None:
        """Remove owner.json if it is this process's, and release the lock."""
        if owner_of(self.run) == this_process():
            with contextlib.suppress(OSError):
                (self.run / OWNER).unlink(missing_ok=True)
        os.close(self.descriptor)


def take_lock(path: Path) -> RunLock:
    """Take the lock file of a run.

    Raises:
        RunLockedError: another process owns the run.
        CheckpointError: the lock file is a link.
    """
    run = path.parent
    lock = RunLock(open_to_write(path, os.O_RDWR), run)
    try:
        fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(lock.descriptor)
        owner = owner_of(run) or "another process"
        raise RunLockedError(
            f"run {run.name!r} is owned by {owner}\n  wait for it to end, or stop it with Ctrl-C"
        ) from None
    # On a full disk, the lock holds without its owner's name.
    with contextlib.suppress(OSError):
        _write_owner(run)
    return lock


def _write_owner(run: Path) -> None:
    path = run / OWNER
    # Not flushed: after a power failure nobody owns the run.
    temporary = temporary_beside(path)
    try:
        temporary.write_text(this_process().model_dump_json(), "utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _began(pid: int) -> str:
    try:
        # After the name, which may hold anything but ends with the last bracket, it is the 20th
        # field.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
