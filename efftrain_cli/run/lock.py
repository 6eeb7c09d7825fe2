"""Who owns a run: a lock that dies with its process, and in its file the owner's name.

The lock (flock) may be known to one machine only: a requeue on another node takes it over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from efftrain_cli.foundation.console import printable
from efftrain_cli.foundation.errors import RunLockedError
from efftrain_cli.foundation.files import open_to_write


@dataclass(frozen=True)
class RunLock:
    """The ownership of a run directory, until it is closed."""

    descriptor: int

    def close(self) -> None:
        """Release the lock."""
        os.close(self.descriptor)


def take_lock(path: Path) -> RunLock:
    """Take the lock file of a run.

    Raises:
        RunLockedError: another process owns the run.
    """
    descriptor = open_to_write(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.pread(descriptor, 300, 0).decode(errors="replace") or "another process"
        os.close(descriptor)
        raise RunLockedError(
            f"run {path.parent.name!r} is owned by {printable(owner)}\n"
            "  wait for it to end, or stop it with Ctrl-C"
        ) from None
    # On a full disk, the lock holds without its owner's name.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
    return RunLock(descriptor)
