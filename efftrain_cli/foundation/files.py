"""Files that appear whole or not at all, flushed to disk, known by their sha256."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from efftrain_cli.foundation.errors import DiskError

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Where a container finds the limits of its own control group."""


def disk_error(error: OSError) -> DiskError:
    """Return the error to show for an operation that the system refused: "file: reason"."""
    file = error.filename or "standard output, or a file"
    fix = "make room, or make it readable and writable; then give the command again"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        fix = "raise the limit that `ulimit -n` shows"
    return DiskError(f"{file}: {error.strerror}\n  {fix}")


def sha256_of(path: Path) -> str:
    """Return the hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file or directory to disk, so that it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_beside(path: Path) -> Path:
    """Return where this process makes `path`: beside it, with efftrain and the process in its
    name."""
    return path.with_name(f".{path.name[:64]}.efftrain-{os.getpid()}.tmp")


def abandoned_in(folder: Path, name: str = "*") -> list[Path]:
    """List what was left half made of `name` in a folder; of all names if nobody else writes to
    it."""
    return [*folder.glob(f".{name}.efftrain-*.tmp")]


def discard(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it; nothing may be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def made_beside(path: Path) -> Iterator[Path]:
    """Yield where to make the file or folder `path`; after the block it is flushed and renamed.

    So it appears whole or not at all. Of several processes each makes its own, and the last one's
    file stays.

    Raises:
        OSError: the disk refused, and the error names `path`. What was there before is untouched.
    """
    temporary = temporary_beside(path)
    try:
        discard(temporary)
        yield temporary
        is_folder = temporary.is_dir()
        inner = [*temporary.rglob("*"), temporary]
        # At once: each waits for the disk, some milliseconds.
        with ThreadPoolExecutor() as pool:
            list(pool.map(fsync, inner))
        os.rename(temporary, path)
        try:
            fsync(path.parent)
        except OSError:
            if is_folder:
                discard(path)  # a new name that a power failure may take away
            raise
    except OSError as error:
        named = str(error.filename or temporary)
        if str(temporary) in named:
            error.filename = named.replace(str(temporary), str(path))
            error.filename2 = None
        raise
    finally:
        discard(temporary)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it has either its old content or all of the new, as `made_beside`."""
    with made_beside(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def make_folder(path: Path) -> None:
    """Make a folder to write to, and those above it, where they are missing."""
    path.mkdir(parents=True, exist_ok=True)


def is_locked(path: Path) -> bool:
    """Return whether a living process here holds the lock file; False if there is no file."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def free_bytes(folder: Path) -> int:
    """Return the bytes that may still be written on the disk of a folder, existing or not."""
    places = (folder, *folder.absolute().parents)
    return shutil.disk_usage(next(place for place in places if place.exists())).free


def machine_memory() -> int | None:
    """Return the bytes of memory of this machine, or of its container, in all; None if the system
    does not say."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limits.append(int((CONTROL_GROUP / "memory.max").read_text(encoding="ascii")))
    return min(limits, default=None)
