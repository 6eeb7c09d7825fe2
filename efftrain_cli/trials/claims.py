"""Who trains which run, where several processes or machines work on one sweep or study.

A claim is a file made with O_EXCL, which holds on network file systems too, where the lock inside a run directory may
be known to one machine only. It names host and process and is touched as long as its owner lives. A claim of this host
whose process has gone is taken over. A claim of another host is never taken over by itself: whether that machine is
dead or only silent cannot be known from here, so it is named. Silence is measured on this machine's own clock, between
two looks at the file: clocks of two machines may differ by an hour.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from efftrain_cli.foundation.files import is_running, make_folder, write_whole

BEAT = 20.0
"""Seconds between two touches of a claim."""
SILENT = 300.0
"""Seconds without a touch after which the owner of another host is called silent."""


@dataclass(frozen=True)
class Owner:
    """Who holds a claim."""

    host: str
    pid: int
    began: str
    """When that process began, as its machine counts: a process number is used again. "" where that is unknown."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Owner:
    """The owner that claims made here name."""
    return Owner(os.uname().nodename, os.getpid(), _began(os.getpid()))


class Claims:
    """The claims of one sweep or study, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mine: set[str] = set()
        self._last_beat = time.monotonic()
        self._seen: dict[
            str, tuple[int, float]
        ] = {}  # run -> (mtime, our clock when it last changed)

    def take(self, run: str) -> Owner | None:
        """Claims a run; returns None where that worked, else who has it."""
        make_folder(self.folder)
        me = this_process()
        while True:
            try:
                write_whole(self._path(run), json.dumps(asdict(me)), first=True)
            except FileExistsError:
                owner = self.owner(run)
                if owner is not None and owner != me and not _is_gone(owner):
                    return owner
                if owner is not None:
                    self._remove_dead(run, owner)
            else:
                self.mine.add(run)
                return None

    def owner(self, run: str) -> Owner | None:
        """Who holds the claim on a run; None where nobody does."""
        try:
            return _read(self._path(run))
        except FileNotFoundError:
            return None

    def give_back(self, run: str) -> None:
        """Ends a claim of this process."""
        if run in self.mine:
            self.mine.discard(run)
            self._path(run).unlink(missing_ok=True)

    def beat(self) -> None:
        """Touches this process' claims, every BEAT seconds."""
        if time.monotonic() - self._last_beat >= BEAT:
            self._last_beat = time.monotonic()
            for run in self.mine:
                with contextlib.suppress(OSError):
                    os.utime(self._path(run))

    def silent_for(self, run: str) -> float:
        """Seconds on this machine's clock for which the claim has not been touched, counted from the first look at
        it."""
        try:
            changed = self._path(run).stat().st_mtime_ns
        except FileNotFoundError:
            return 0.0
        now = time.monotonic()
        if run not in self._seen or self._seen[run][0] != changed:
            self._seen[run] = (changed, now)
        return now - self._seen[run][1]

    def take_over(self, host: str) -> list[str]:
        """Removes all claims of a host, because the user says that it is gone; returns the runs."""
        runs = (
            [path.stem for path in sorted(self.folder.glob("*.json"))]
            if self.folder.is_dir()
            else []
        )
        gone = [
            run for run in runs if (owner := self.owner(run)) is not None and owner.host == host
        ]
        for run in gone:
            self._path(run).unlink(missing_ok=True)
        return gone

    def _path(self, run: str) -> Path:
        return self.folder / f"{run}.json"

    def _remove_dead(self, run: str, owner: Owner) -> None:
        # Renamed first: of two processes that find the same dead claim, one wins, and neither removes the other's new
        # one.
        aside = self.folder / f"{run}.{os.getpid()}.gone"
        with contextlib.suppress(FileNotFoundError):
            self._path(run).rename(aside)
            if _read(aside) != owner:
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self._path(run))
            aside.unlink(missing_ok=True)


def _read(path: Path) -> Owner:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Owner(str(found["host"]), int(found["pid"]), str(found.get("began", "")))
    except (ValueError, KeyError, TypeError):
        return Owner("an unknown host", -1, "")


def _is_gone(owner: Owner) -> bool:
    """Whether a process of this host does not exist any more; of another host nobody can say."""
    if owner.host != os.uname().nodename:
        return False
    began = _began(owner.pid)
    return not is_running(owner.pid) or (began != "" and owner.began != began)


def _began(pid: int) -> str:
    try:
        # After the name, which may hold anything but ends with the last bracket, it is the 20th field.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
