"""The run directory: the only place a run writes to, and the one thing that every other command reads.

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

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO

from efftrain_cli.errors import CheckpointError, RunLockedError, UsageError

SCHEMA_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WINDOWS_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(1, 10))}
_CHECKPOINT = re.compile(r"step-(\d{8,})")


def runs_root() -> Path:
    """The folder of all runs: EFFTRAIN_RUNS, or ./runs."""
    return Path(os.environ.get("EFFTRAIN_RUNS") or "runs")


def run_path(name: str) -> Path:
    """The directory of run `name`, whether or not it exists.

    Raises:
        UsageError: the name could leave the folder of runs, or is no portable file name.
    """
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"run name {name!r}: use 1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    if name.split(".")[0].lower() in _WINDOWS_DEVICES:
        raise UsageError(f"run name {name!r} is a device name on Windows; choose another")
    path = runs_root() / name
    if path.is_symlink():
        raise UsageError(f"{path} is a symbolic link; a run must be a directory of its own")
    return path


def run_names() -> list[str]:
    """Names of the runs that exist, sorted."""
    root = runs_root()
    if not root.is_dir():
        return []
    return sorted(path.name for path in root.iterdir() if (path / "recipe.toml").is_file())


def existing_run(name: str) -> Path:
    """The directory of a run that exists.

    Raises:
        UsageError: it does not; the message names the nearest ones.
    """
    path = run_path(name)
    if not (path / "recipe.toml").is_file():
        from difflib import get_close_matches

        near = get_close_matches(name, run_names(), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; `efftrain runs list` shows all"
        raise UsageError(f"there is no run {name!r} in {runs_root()}{hint}")
    return path


def unused_name(name: str) -> str:
    """`name`-2, `name`-3, ...: the first that is free."""
    number = 2
    while run_path(f"{name}-{number}").exists():
        number += 1
    return f"{name}-{number}"


class Run:
    """A run directory that this process owns. Use as a context manager: leaving it flushes and unlocks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self._lock = _take_lock(path / "lock")
        self._metrics = _open_for_rows(path / "metrics.jsonl")
        self._events = _open_for_rows(path / "events.jsonl")
        self._last_fsync = time.monotonic()

    @classmethod
    def create(cls, name: str, recipe_toml: str, origin: Mapping[str, object], tokenizer: Path | None = None) -> Run:
        """Makes a new run directory.

        Raises:
            UsageError: the name is taken or not allowed. Nothing is ever overwritten.
        """
        path = run_path(name)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise UsageError(
                f"run {name!r} exists already in {runs_root()}; continue it with --resume {name}, "
                f"or give another --name, for example {unused_name(name)}"
            ) from None
        run = cls(path)
        (path / "origin.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION, **origin}, indent=1))
        if tokenizer is not None:
            shutil.copyfile(tokenizer, path / "tokenizer.json")
        # Last: a directory with a recipe.toml is a run.
        (path / "recipe.toml").write_text(recipe_toml)
        return run

    @classmethod
    def open(cls, name: str) -> Run:
        """Takes ownership of an existing run.

        Raises:
            UsageError: there is no such run.
            RunLockedError: another process owns it.
        """
        return cls(existing_run(name))

    def log(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Appends rows to metrics.jsonl."""
        if rows:
            self._metrics.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
            self._metrics.flush()
            if time.monotonic() - self._last_fsync > 10:
                self.sync()

    def event(self, kind: str, fields: Mapping[str, object]) -> None:
        """Appends to events.jsonl what is not a step, with the time of day."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._events.write(json.dumps({"event": kind, "time": now, **fields}, allow_nan=False) + "\n")
        self._events.flush()

    def next_segment(self) -> int:
        """The number of this start: one more than all starts and resumes that events.jsonl holds, counted from 0."""
        lines = (self.path / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return sum(json.loads(line)["event"] in ("start", "resume") for line in lines)

    def sync(self) -> None:
        """Makes the rows so far survive a power failure."""
        for file in (self._metrics, self._events):
            file.flush()
            os.fsync(file.fileno())
        self._last_fsync = time.monotonic()

    def close(self) -> None:
        """Flushes and gives up ownership."""
        self.sync()
        self._metrics.close()
        self._events.close()
        self._lock.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def purge_checkpoints(self, keep: int) -> None:
        """Removes all but the newest `keep` checkpoints."""
        for path in checkpoints_of(self.path)[:-keep]:
            shutil.rmtree(path)


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` finished steps lies."""
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _CHECKPOINT.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not named step-00000000")
    return int(match[1])


def checkpoints_of(run: Path) -> list[Path]:
    """The run's checkpoints by step, oldest first, whether or not they are valid."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)), key=checkpoint_step)


def _open_for_rows(path: Path) -> IO[str]:
    """Opens a file of JSON lines to append to; a torn last line (a killed writer's) is cut off first."""
    if path.exists():
        with path.open("rb+") as file:
            file.seek(0, os.SEEK_END)
            end = file.tell()
            back = min(end, 1 << 20)
            file.seek(end - back)
            tail = file.read(back)
            if tail and not tail.endswith(b"\n"):
                file.truncate(end - (len(tail) - tail.rfind(b"\n") - 1))
    return path.open("a", encoding="utf-8")


def _take_lock(path: Path) -> IO[str]:
    """An exclusive lock that dies with its process, so that a killed owner never blocks a run."""
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise RunLockedError(
            f"run {path.parent.name!r} is owned by {owner}; wait for it to end, or stop it with Ctrl-C"
        ) from None
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    return file
