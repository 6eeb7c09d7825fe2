"""Who owns a run: a lock that dies with its process, and in its file the owner's name.

The lock (flock) may be known to one machine only: a requeue on another node takes it over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import TextIO

from efftrain_cli.foundation.console import printable
from efftrain_cli.foundation.errors import RunLockedError


def take_lock(path: Path) -> TextIO:
    """Take the lock file of a run; closing it releases the run.

    Raises:
        RunLockedError: another process owns the run.
    """
    file = path.open("a+", encoding="utf-8", errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        owner = file.read(300) or "another process"
        file.close()
        raise RunLockedError(
            f"run {path.parent.name!r} is owned by {printable(owner)}\n"
            "  wait for it to end, or stop it with Ctrl-C"
        ) from None
    # On a full disk, the lock holds without its owner's name.
    with contextlib.suppress(OSError):
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {os.uname().nodename}".encode())
    return file
