"""Files that survive: whole or not at all, flushed, known by their sha256, and never written through a link."""

from __future__ import annotations

import csv
import errno
import glob
import hashlib
import io
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from efftrain_cli.foundation.errors import CheckpointError, DiskError

_REFUSALS = frozenset(
    (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM, errno.ENOTDIR,
        errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT,
        errno.EREMOTEIO, errno.ENOTCONN, errno.EHOSTDOWN, errno.EBUSY, errno.ETXTBSY,
    )
)  # fmt: skip


def disk_error(error: OSError) -> DiskError | None:
    """What to tell a user of an operation that the disk refused; None where the fault is not the disk's."""
    if error.errno not in _REFUSALS:
        return None
    what = error.filename if isinstance(error.filename, str) else "standard output, or a file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(f"{what}: the disk is full; make room and give the command again")
    return DiskError(
        f"{what}: {error.strerror}; check that it is mounted and that you may read and write it"
    )


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Makes a file or directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file so that it has either its old content or all of the new; where `path` is a link, the link is
    replaced. Several processes may write it: each writes its own copy, and the last one wins.

    Raises:
        OSError: the disk is full or not writable; the old content is untouched then.
    """
    here = os.uname().nodename
    for left in path.parent.glob(f"{glob.escape(f'{path.name}.{here}.')}*.tmp"):
        if not is_running(left.name.split(".")[-2]):  # of a writer that was killed
            left.unlink(missing_ok=True)
    temporary = path.with_name(f"{path.name}.{here}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # a link laid out for us
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def csv_text(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table as CSV, each line ended by a newline alone."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue()


def is_running(process: int | str) -> bool:
    """Whether there is a process of this number on this machine."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(
        next(place for place in (folder, *folder.absolute().parents) if place.exists())
    ).free


def open_to_write(path: Path, flags: int) -> int:
    """Opens a file for writing without ever following a link, and makes it where it is missing.

    Raises:
        CheckpointError: it is a link, or no ordinary file.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(
            path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666
        )
    except OSError:
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a symbolic link: nothing is written through it; remove it"
            ) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not an ordinary file: move it away")
    return descriptor
