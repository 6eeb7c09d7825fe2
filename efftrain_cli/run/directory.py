"""The run directory: the only place a run writes to, and the one thing that every other command
reads.

runs/<name>/
  recipe.toml       the resolved recipe: everything needed to run it again
  origin.json       command line, versions, device, data hashes, start time
  tokenizer.json    the tokenizer, so that the run can be sampled and evaluated anywhere
  metrics.jsonl     one row per step; after a resume the highest segment of a step counts
  events.jsonl      what is not a step: start, resume, signal, divergence, fallback
  checkpoints/      step-00000100/ and so on
  lock              held by the process that owns the run
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from efftrain_cli.foundation.environment import environment_folder
from efftrain_cli.foundation.errors import (
    CheckpointError,
    DiskError,
    UsageError,
    nearest,
)
from efftrain_cli.foundation.files import (
    abandoned_in,
    discard,
    is_locked,
    made_beside,
    make_folder,
    temporary_beside,
)
from efftrain_cli.foundation.records import utc_now
from efftrain_cli.run.lines import Fields, JsonLines, Values
from efftrain_cli.run.lock import take_lock
from efftrain_cli.run.metrics import all_rows, latest_rows
from efftrain_cli.run.origin import read_origin, write_origin

_NAME = re.compile(
    r"(?!(con|prn|aux|nul|com[1-9]|lpt[1-9])(\.|$))[a-z0-9][a-z0-9._-]{0,63}",
    re.ASCII | re.IGNORECASE,
)
_CHECKPOINT = re.compile(r"step-(\d{8,})")


def runs_root() -> Path:
    """Return the folder of all runs: EFFTRAIN_RUNS, or ./runs."""
    return environment_folder("EFFTRAIN_RUNS", "runs")


@contextlib.contextmanager
def runs_in(folder: Path) -> Iterator[None]:
    """Make `folder` the folder of all runs while the block runs, also of processes that are started
    meanwhile."""
    before = os.environ.get("EFFTRAIN_RUNS")
    os.environ["EFFTRAIN_RUNS"] = str(folder)
    try:
        yield
    finally:
        del os.environ["EFFTRAIN_RUNS"]
        if before is not None:
            os.environ["EFFTRAIN_RUNS"] = before


def run_path(name: str) -> Path:
    """Return the directory of run `name` in the folder of all runs, whether or not it exists.

    Raises:
        UsageError: the name could leave the folder of runs, or is not a portable file name.
    """
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"run name {name!r} is no portable file name\n"
            "  use 1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit;"
            " con and nul are devices on Windows"
        )
    path = runs_root() / name
    if path.is_symlink():
        raise UsageError(f"{path} is a symbolic link; a run must be a real directory")
    return path


def run_names(root: Path | None = None) -> list[str]:
    """Return the names of the runs that exist, sorted; in the folder of all runs without `root`."""
    root = root or runs_root()
    try:
        return sorted(path.name for path in root.iterdir() if _is_run(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_run(path: Path) -> bool:
    try:
        return (path / "recipe.toml").is_file()
    except OSError:  # nobody may look inside: it is listed, and named as unreadable
        return not path.name.startswith(".")


def existing_run(name: str) -> Path:
    """Return the directory of a run that exists and that this version can read.

    Raises:
        UsageError: there is none.
        DataError: its origin.json is missing or damaged, or has a format that this version does not
            read.
    """
    path = run_path(name)
    if not _is_run(path):
        raise missing_run(name)
    read_origin(path)
    return path


def missing_run(name: str) -> UsageError:
    """Return the error of a name that means no run: it names the nearest ones."""
    hint = nearest(name, run_names()) or "`efftrain runs list` shows all"
    return UsageError(f"there is no run {name!r} in {runs_root()}\n  {hint}")


class RunDirectory:
    """A run directory that this process owns. Use as a context manager: leaving it flushes and
    unlocks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._lock = take_lock(path / "lock")
        try:
            self._metrics = JsonLines(path / "metrics.jsonl")
            self._events = JsonLines(path / "events.jsonl")
        except BaseException:
            self._lock.close()
            raise
        self._last_fsync = time.monotonic()
        self.verified: set[Path] = set()
        """Checkpoints that this process wrote, or checked against their manifests."""
        self.corrupt: set[Path] = set()
        """Checkpoints that this process found damaged."""
        self.gone = False
        """The directory was renamed or deleted while this process owned it."""

    @classmethod
    def open(cls, name: str) -> RunDirectory:
        """Take ownership of an existing run, and remove what an interrupted save left behind.

        Raises:
            UsageError: there is no such run.
            RunLockedError: another process owns it.
            OSError: it cannot be written to.
        """
        path = existing_run(name)
        run = cls(path)
        for left in abandoned_in(path / "checkpoints"):
            discard(left)
            run.event("removed", {"path": left.name, "reason": "left by an interrupted save"})
        return run

    def log(self, rows: Sequence[Fields]) -> None:
        """Append rows to metrics.jsonl. If the disk is full they are kept in memory until there is
        room."""
        if rows:
            self._metrics.write(rows)
            if time.monotonic() - self._last_fsync > 10:
                self.sync()

    def event(self, kind: str, fields: Fields) -> None:
        """Append to events.jsonl what is not a step, with the time of day."""
        self._events.write([{"event": kind, "time": utc_now(), **fields}])

    def row_of(self, step: int) -> Values:
        """Return the row of `step` that counts, {} if it is missing."""
        rows = {row["step"]: row for row in latest_rows(self.path)}
        return rows.get(step, {})

    def report_gaps(self, step: int) -> None:
        """Record and warn of each range of steps up to `step` that has no row: a full disk and a
        kill, or damage."""
        written = {row["step"] for row in all_rows(self.path)}
        for before, after in pairwise(sorted({0, *written, step + 1})):
            first = before + 1
            last = after - 1
            if first <= last <= step:
                self.event("gap", {"first": first, "last": last})
                gap = f"rows of steps {first} to {last} are missing"
                print(f"warning: {self.path / 'metrics.jsonl'}: {gap}", file=sys.stderr)

    def next_segment(self, after: int = -1) -> int:
        """Return the segment that this process will write: one more than that of any row, and than
        `after`; from 0."""
        return 1 + max((after, *(row["segment"] for row in all_rows(self.path))))

    def sync(self) -> None:
        """Make the rows so far survive a power failure."""
        self._metrics.sync()
        self._events.sync()
        self._last_fsync = time.monotonic()

    def close(self) -> None:
        """Flush and release the run.

        Raises:
            DiskError: rows or events could not be written until now; the message says how many, and
                where they are.
        """
        with contextlib.ExitStack() as stack:  # each is closed, whatever befalls those after it
            stack.callback(os.close, self._folder)
            for file in (self._lock, self._events, self._metrics):
                stack.callback(file.close)
            self.sync()

    def check_place(self) -> None:
        """Check that the directory still has its name: nothing is ever made anew under it.

        Raises:
            DiskError: it was renamed or deleted while this process owns it.
        """
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._folder)):
                return
        self.gone = True
        now = Path(f"/proc/self/fd/{self._folder}").resolve()
        raise DiskError(
            f"{self.path} was renamed or deleted while the run was training; it is now {now}\n"
            "  resume it under its new name, from its last checkpoint"
        )

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except DiskError as lost:
            if error is None:
                raise
            print(f"warning: {lost}", file=sys.stderr)  # what ends the run is worse

    def purge_checkpoints(self, keep: int, at: Sequence[int] = ()) -> None:
        """Remove all but the newest `keep` valid checkpoints; the newest verified one, corrupt ones
        and those of the steps `at` stay."""
        named = {checkpoint_path(self.path, step) for step in at}
        kept = self.corrupt | named
        valid = [path for path in checkpoints_of(self.path) if path not in kept]
        verified = [path for path in valid if path in self.verified]
        for path in valid[:-keep]:
            if path in verified[-1:]:
                continue
            try:
                # Renamed first: a kill between two files must not leave half a checkpoint under its
                # name.
                shutil.rmtree(path.rename(temporary_beside(path)))
            except OSError as error:
                print(
                    f"warning: {path} could not be removed: {error.strerror}; training goes on",
                    file=sys.stderr,
                )

    def set_aside(self, checkpoint: Path) -> Path:
        """Rename a checkpoint, so that its step can be saved again: one that failed verification to
        step-N.corrupt, any other to step-N.left (or step-N.left-2, ...)."""
        kind = "corrupt" if checkpoint in self.corrupt else "left"
        target = untaken(checkpoint.with_name(f"{checkpoint.name}.{kind}"))
        checkpoint.rename(target)
        self.corrupt.discard(checkpoint)
        self.event("set_aside", {"checkpoint": checkpoint.name, "to": target.name})
        return target


def taken(name: str) -> UsageError:
    """Return the error of a name that a run has already."""
    other = untaken(run_path(name)).name
    return UsageError(
        f"run {name!r} exists already in {runs_root()}\n"
        f"  continue it with `efftrain pretrain --resume {name}`,"
        f" or give another --name, for example {other}"
    )


def untaken(path: Path) -> Path:
    """Return `path`, or if there is such a file the first of path-2, path-3 and so on."""
    number = 1
    found = path
    while os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


@contextlib.contextmanager
def new_run(
    name: str,
    recipe_toml: str,
    origin: Fields,
    tokenizer: Path | None = None,
) -> Iterator[RunDirectory]:
    """Yield a new run, to put into it what it shall begin with; it appears after the block, with
    all of that, or not at all.

    Raises:
        UsageError: the name is taken or not allowed. Nothing is ever overwritten.
        OSError: the disk refused.
    """
    path = run_path(name)
    if os.path.lexists(path):
        raise taken(name)
    make_folder(path.parent)
    for left in abandoned_in(path.parent, name):
        if not is_locked(left / "lock"):
            discard(left)
    try:
        with made_beside(path) as temporary:
            temporary.mkdir()
            with RunDirectory(temporary) as run:
                write_origin(temporary, origin)
                if tokenizer is not None:
                    shutil.copyfile(tokenizer, temporary / "tokenizer.json")
                (temporary / "recipe.toml").write_text(recipe_toml, "utf-8")
                yield run
    except OSError:
        if path.exists():  # another process had the name first
            raise taken(name) from None
        raise


def checkpoint_path(run: Path, step: int) -> Path:
    """Return where the checkpoint after `step` finished steps lies."""
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoint_step(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    match = _CHECKPOINT.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not named step-00000000")
    return int(match[1])


def checkpoints_of(run: Path) -> list[Path]:
    """List the run's checkpoints by step, oldest first, whether or not they are valid. A file or a
    link is none."""
    folder = run / "checkpoints"
    try:
        paths = [path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)]
        folders = [path for path in paths if path.is_dir() and not path.is_symlink()]
    except FileNotFoundError:
        return []
    return sorted(folders, key=checkpoint_step)
