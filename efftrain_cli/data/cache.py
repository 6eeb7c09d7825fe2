"""The cache of prepared data: its folder, its locks, and the stored hashes of unchanged files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from efftrain_cli.foundation.console import printable
from efftrain_cli.foundation.environment import environment_folder
from efftrain_cli.foundation.errors import DataError, DiskError, UsageError
from efftrain_cli.foundation.files import free_bytes, open_to_write, sha256_of, write_whole
from efftrain_cli.foundation.records import digest_of, read_json

_SETTLED_SECONDS = 2.0
"""Age of a change, in seconds, from which on a file's hash is stored.

A younger file may change again within the resolution of its time stamp.
"""


def cache_root() -> Path:
    """Return EFFTRAIN_CACHE, or efftrain in the user's cache folder."""
    standard = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return environment_folder("EFFTRAIN_CACHE", f"{standard}/efftrain")


@contextmanager
def disk_errors(folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turn a full disk into a `DiskError` with bytes needed and free, and a refused write into a
    `UsageError`.

    Args:
        needed: bytes that all of the writing takes; None if unknown.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = "an unknown number of" if needed is None else f"about {needed:,}"
            raise DiskError(
                f"the disk of the cache {folder} is full:"
                f" {need} bytes needed, {free_bytes(folder):,} bytes free\n"
                "  make room, or set EFFTRAIN_CACHE to a folder on another disk"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UsageError(
                f"the cache {folder} cannot be written: {error.strerror}\n"
                "set EFFTRAIN_CACHE to a writable folder"
            ) from error
        raise


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`; create its folder.

    The operating system releases the lock when the process ends, also when it is killed.

    Args:
        waiting: called once if another process holds the lock.
    """
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(open_to_write(path, os.O_WRONLY), "w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def hash_files(paths: list[Path], *, afresh: bool = False) -> list[str]:
    """Return the sha256 of each file's content.

    A file of unchanged size and time stamp is not read: the cache stores its hash.

    Args:
        afresh: read every file, as other bytes may have the old size and time stamp.
    """
    names = [str(path) for path in paths]
    stored = cache_root() / "hashes" / f"{digest_of(names)[:32]}.json"
    try:
        known = dict(read_json(stored))
    except (DataError, OSError, TypeError, ValueError):
        # Without stored hashes every file is read; nothing else is lost.
        known = {}
    hashes = []
    entries = {}
    now = time.time_ns()
    for path in paths:
        try:
            stat = path.stat()
            key = f"{path} {stat.st_size} {stat.st_mtime_ns}"
            digest = known.get(key)
            if afresh or digest is None:
                digest = sha256_of(path)
        except OSError as error:
            raise DataError(f"{printable(str(path))}: cannot be read: {error.strerror}") from error
        hashes.append(digest)
        if now - stat.st_mtime_ns > _SETTLED_SECONDS * 1e9:
            entries[key] = digest
    if entries != known:
        with disk_errors(stored.parent):
            stored.parent.mkdir(parents=True, exist_ok=True)
            write_whole(stored, json.dumps(entries))
    return hashes
