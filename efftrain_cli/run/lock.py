"""A run's lock file: taken by the process that owns the run. It dies with its process, so that a killed owner never
blocks a run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import IO

from efftrain_cli.foundation.console import printable
from efftrain_cli.foundation.errors import RunLockedError
from efftrain_cli.foundation.files import open_to_write


def take_lock(path: Path) -> IO[str]:
    """The lock, until the file is closed.

    Raises:
        RunLockedError: another process owns the run.
        CheckpointError: the lock file is a link.
    """
    file = os.fdopen(
        open_to_write(path, os.O_RDWR | os.O_APPEND), "a+", encoding="utf-8", errors="replace"
    )
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = printable(file.read(200).strip()) or "another process"
        file.close()
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise RunLockedError(
            f"run {path.parent.name!r} is owned by {owner}; wait for it to end, or stop it with Ctrl-C"
        ) from None
    with contextlib.suppress(OSError):  # a full disk: the lock holds without its owner's name
        os.ftruncate(file.fileno(), 0)
        os.pwrite(file.fileno(), f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
    return file
