"""Each rank's watcher: a thread that tells the other ranks where this one is, and ends the run if one makes no
progress.

A process that dies is noticed by those that exchange something with it. One that hangs is not: it would hold all the
others forever. So every rank states its step and phase in the group's store, and the first two ranks read what all
have stated. A rank whose work makes no progress for a minute, outside of phases that may take long, is named in one
message, and all ranks end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from efftrain_cli.foundation.environment import environment_number
from efftrain_cli.training.launch import HUNG, HUNG_FIRST, PARENT

if TYPE_CHECKING:
    from torch.distributed import Store

LIMIT = "EFFTRAIN_HANG_SECONDS"
"""Environment variable: seconds without progress after which a rank counts as hung."""
FIRST = "first step"
"""Phase in which a session learns how long its work takes here."""
UNLIMITED = frozenset({"prepare", FIRST, "compile", "evaluate", "save", "end"})
"""Phases that may take as long as they do."""
WAITING = frozenset({"exchange", "sum"})
"""Phases in which a rank waits for others."""
LONGEST = 10
"""A slow machine's work is given so many times as long as it has needed before."""


@dataclass(frozen=True)
class Place:
    """Where a rank says it is."""

    beat: int
    """Grows while the rank's watcher runs."""
    step: int
    phase: str
    seconds: float
    """Since it came there."""
    limit: float
    """Seconds that it may stay."""


def limit_seconds() -> float:
    """Seconds without progress after which a rank counts as hung.

    Raises:
        UsageError: the environment says no whole number above 0.
    """
    return environment_number(LIMIT, 60)


class Watch:
    """Where this rank is, for the others to read; and, on the first two ranks, the judge of all."""

    def __init__(self, rank: int, world_size: int, open_store: Callable[[], Store]) -> None:
        """`open_store` makes a connection of the watcher's own: that of the main thread may be waiting in it."""
        self.verdict: str | None = None
        """What has ended the run, once a rank is found to hang."""
        self._rank, self._world_size = rank, world_size
        self._limit = limit_seconds()
        self._step, self._phase, self._since, self._longest, self._beat = (
            0,
            "prepare",
            time.monotonic(),
            0.0,
            0,
        )
        self._store = open_store()
        self._ended = threading.Event()
        self._tell()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._answered = time.monotonic()
        """When the store was heard last."""

    def start(self) -> None:
        """Begins to watch, once all ranks are there."""
        self._thread.start()
        threading.Thread(target=self._guard, daemon=True).start()

    def stop(self) -> None:
        """The rank has ended by itself."""
        self.enter("end")
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
            with contextlib.suppress(RuntimeError):  # rank 0 may have ended before
                self._tell()  # else this rank would seem to be silent

    def enter(self, phase: str, step: int | None = None) -> None:
        """The main thread begins something: progress has been made."""
        now = time.monotonic()
        if self._phase == FIRST or self._phase not in UNLIMITED | WAITING:
            self._longest = max(self._longest, now - self._since)
        self._step, self._phase, self._since = self._step if step is None else step, phase, now

    @property
    def phase(self) -> str:
        """What the main thread is at."""
        return self._phase

    def _tell(self) -> None:
        self._beat += 1
        seconds = time.monotonic() - self._since
        place = [
            self._beat,
            self._step,
            self._phase,
            seconds,
            max(self._limit, LONGEST * self._longest),
        ]
        self._store.set(f"place/{self._rank}", json.dumps(place))

    def _run(self) -> None:
        beats: dict[int, tuple[int, float]] = {}
        while not self._ended.wait(min(2.0, self._limit / 6)):
            try:
                self._tell()
                if self._rank < 2 and (found := self._judge(beats)) is not None:
                    self._store.compare_set("verdict", "", json.dumps([self._rank, *found]))
                if self._store.check(["verdict"]):
                    self._end(*json.loads(self._store.get("verdict")))
            except (
                RuntimeError
            ):  # the store's process has died: the main thread will find out by itself
                self._ended.set()
            self._answered = time.monotonic()

    def _guard(self) -> None:
        """Ends this rank where the store stays silent: its process, which is rank 0 or torchrun's agent, was halted."""
        while not self._ended.wait(min(2.0, self._limit / 6)):
            silent = time.monotonic() - self._answered
            if silent > self._limit and self._phase not in UNLIMITED:
                if self._rank == 1:
                    what = "rank 0, which keeps what the ranks tell each other, has not answered"
                    _say(f"the run hangs: {what} for {silent:.0f} s")
                os._exit(HUNG_FIRST if PARENT in os.environ else 1)

    def _judge(self, beats: dict[int, tuple[int, float]]) -> tuple[list[int], str] | None:
        """The ranks that hang, and what to say; None while all is well."""
        values = self._store.multi_get([f"place/{rank}" for rank in range(self._world_size)])
        places = {rank: Place(*json.loads(value)) for rank, value in enumerate(values)}
        now = time.monotonic()
        silent = {}
        for rank, place in places.items():
            if rank not in beats or beats[rank][0] != place.beat:
                beats[rank] = place.beat, now
            silent[rank] = now - beats[rank][1]
        return judge(places, silent, self._limit)

    def _end(self, judge: int, hung: list[int], text: str) -> None:
        """Ends this rank. Rank 0 says why, where it can, and saves what it has; else the rank that found out says
        it."""
        self.verdict = text
        code = (HUNG_FIRST if 0 in hung else HUNG) if PARENT in os.environ else 1
        if self._rank:
            if self._rank == judge and not self._heard():
                _say(text)
            os._exit(code)
        self._store.set("heard", "yes")
        # The others' end breaks off what the main thread is waiting in; it then saves the last step and says the
        # verdict itself.
        patience = time.monotonic() + (0 if 0 in hung else min(30.0, self._limit))
        while not self._ended.is_set() and (
            self._phase in UNLIMITED or time.monotonic() < patience
        ):
            time.sleep(0.05)
        if not self._ended.is_set():
            _say(text)
            os._exit(code)

    def _heard(self) -> bool:
        """Whether rank 0 knows, and says it."""
        try:
            self._store.wait(["heard"], timedelta(seconds=min(5.0, self._limit)))
        except RuntimeError:
            return False
        return True


def judge(
    places: Mapping[int, Place], silent: Mapping[int, float], limit: float
) -> tuple[list[int], str] | None:
    """The ranks that hang, and a message that names rank, step and phase; None while all is well. `silent`: seconds
    since each rank's watcher was heard last."""
    limited = {rank: place for rank, place in places.items() if place.phase not in UNLIMITED}
    still = {rank for rank in limited if silent[rank] > limit}
    hung = still | {
        rank for rank, p in limited.items() if p.phase not in WAITING and p.seconds > p.limit
    }
    if not hung and all(
        place.phase in WAITING and place.seconds > limit for place in places.values()
    ):
        hung = set(places)  # nobody works, and nobody's sum arrives
    if not hung:
        return None
    named = sorted(hung)[:4]
    said = ", ".join(
        f"rank {rank} (step {places[rank].step:,}, {places[rank].phase}, "
        + (
            f"silent for {silent[rank]:.0f} s)"
            if rank in still
            else f"for {places[rank].seconds:.0f} s)"
        )
        for rank in named
    )
    more = f" and {len(hung) - len(named)} more" if len(hung) > len(named) else ""
    return sorted(hung), (
        f"the run hangs: no progress of {said}{more}; all {len(places)} processes end\n"
        f"resume the run from its last checkpoint; where a machine is that slow, set {LIMIT} (now {limit:.0f})"
    )


def _say(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)
