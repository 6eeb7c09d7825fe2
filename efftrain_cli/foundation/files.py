"""Files that survive: whole or not at all, flushed, known by their sha256."""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import hashlib
import io
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from efftrain_cli.foundation.errors import CheckpointError, DiskError

_REFUSALS = {
    "ENOSPC",
    "EDQUOT",
    "EFBIG",
    "EROFS",
    "EIO",
    "ESTALE",
    "EACCES",
    "EPERM",
    "ENOTDIR",
    "EISDIR",
    "ELOOP",
    "ENAMETOOLONG",
    "EMFILE",
    "ENFILE",
    "ENODEV",
    "ENXIO",
    "ETIMEDOUT",
    "EREMOTEIO",
    "ENOTCONN",
    "EHOSTDOWN",
    "EBUSY",
    "ETXTBSY",
}
"""Names of the errors with which a disk refuses."""
CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Where a container finds the limits of its own control group."""
_TEMPORARY = re.compile(r"\..*\.efftrain-(\d+)@([A-Za-z0-9._-]+)\.tmp", re.DOTALL)


def disk_error(error: OSError) -> DiskError | None:
    """Return the error to show for an operation that the disk refused; None if the fault is not the
    disk's."""
    if errno.errorcode.get(error.errno or 0) not in _REFUSALS:
        return None
    what = error.filename if isinstance(error.filename, str) else "standard output, or a file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(f"{what}: the disk is full; make room and give the command again")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return DiskError(f"{what}: {error.strerror}\n  raise the limit that `ulimit -n` shows")
    return DiskError(
        f"{what}: {error.strerror}; check that it is mounted and that you may read and write it"
    )


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Name the file in an OSError that names none, as those of write and fsync."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


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
    """Return where this process makes `path`: a name beside it with ours, this process and this
    machine."""
    return path.with_name(f".{path.name[:64]}.efftrain-{os.getpid()}@{_machine()}.tmp")


def abandoned_in(folder: Path, any_machine: bool = False) -> list[Path]:
    """List what processes that are gone were making in `folder`.

    Args:
        any_machine: the caller owns the folder, so whoever made something there is gone.
    """
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            made = _TEMPORARY.fullmatch(path.name)
            if made is None or is_locked(path / "lock"):
                continue
            is_gone = any_machine
            if made[2] == _machine():
                is_gone = not is_running(made[1])
            if is_gone:
                found.append(path)
    return found


def discard(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it; nothing may be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def made_beside(path: Path, first: bool = False) -> Iterator[Path]:
    """Yield where to make the file or folder `path`; after the block it is flushed and renamed.

    So it appears whole or not at all. Of several processes each makes its own, and the last one's
    file stays. A link at `path` is replaced, never followed.

    Args:
        first: a file that is there already stays, and is a FileExistsError.

    Raises:
        OSError: the disk refused, and the error names `path`. What was there before is untouched.
    """
    temporary = temporary_beside(path)
    try:
        for left in (*abandoned_in(path.parent), temporary):
            discard(left)
        yield temporary
        _publish(temporary, path, first)
    except OSError as error:
        named = str(error.filename or temporary)
        if str(temporary) in named:
            error.filename = named.replace(str(temporary), str(path))
            error.filename2 = None
        raise
    finally:
        discard(temporary)


def _publish(temporary: Path, path: Path, first: bool) -> None:
    is_folder = temporary.is_dir()
    for inner in temporary.rglob("*"):
        fsync(inner)
    fsync(temporary)
    if first:
        os.link(temporary, path)
    else:
        os.rename(temporary, path)
    try:
        fsync(path.parent)
    except OSError:
        if is_folder:
            discard(path)  # a new name that a power failure may take away
        raise


def write_whole(path: Path, content: str | bytes, first: bool = False) -> None:
    """Write a file so that it has either its old content or all of the new, as `made_beside`."""
    with made_beside(path, first) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def make_folder(path: Path) -> None:
    """Make a folder to write to, and those above it, where they are missing."""
    path.mkdir(parents=True, exist_ok=True)


def _machine() -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "_", os.uname().nodename)


def csv_text(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as CSV, each line ended by a newline alone. A text that a spreadsheet would
    take for a formula gets a leading apostrophe; a number, or numbers with semicolons between them,
    stay as they are."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(map(_not_a_formula, row) for row in rows)
    return out.getvalue()


def _not_a_formula(cell: object) -> object:
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t")):
        return cell
    try:
        for part in cell.split(";"):
            float(part)
    except ValueError:
        return f"'{cell}"
    return cell


def is_running(process: int | str) -> bool:
    """Return whether there is a process of this number on this machine."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


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
    return shutil.disk_usage(
        next(place for place in (folder, *folder.absolute().parents) if place.exists())
    ).free


def open_to_write(path: Path, flags: int) -> int:
    """Open a file for writing; make it if it is missing.

    Raises:
        CheckpointError: it is no ordinary file.
        OSError: it cannot be opened.
    """
    # Without waiting for the other end of a pipe.
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not an ordinary file: move it away")
    return descriptor


def machine_memory() -> int | None:
    """Return the bytes of memory of this machine, or of its container, in all; None if the system
    does not say."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limits.append(int((CONTROL_GROUP / "memory.max").read_text(encoding="ascii")))
    return min(limits, default=None)
