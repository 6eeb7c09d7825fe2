"""Training the runs of a sweep or study: several at once, each in its own process, resumable and
never twice.

Finished runs are not trained again, unfinished ones are resumed. Ctrl-C and SIGTERM end every run
saved. A run's process asks the system for SIGTERM when its parent dies, so that after `kill -9` too
every run saves and ends; where a system knows no such signal, the next start waits for the runs
that are still going.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from efftrain_cli.foundation.console import (
    counted,
    human_seconds,
    listed,
    say,
    silent,
    steady_output,
)
from efftrain_cli.foundation.environment import planned_device, usable_cores
from efftrain_cli.foundation.errors import (
    DivergedError,
    EfftrainError,
    RunLockedError,
    StoppedError,
    UsageError,
)
from efftrain_cli.foundation.files import make_folder, write_whole
from efftrain_cli.foundation.progress import REDRAWN, show_progress
from efftrain_cli.foundation.signals import (
    describe_end,
    stop_asked,
    stop_on_signals,
    stop_reason,
)
from efftrain_cli.plan.cost import check_memory
from efftrain_cli.run.directory import run_path, runs_root
from efftrain_cli.run.metrics import last_row
from efftrain_cli.run.names import MEMBERS
from efftrain_cli.run.stability import PROBE
from efftrain_cli.run.status import ENDED
from efftrain_cli.training.launch import check_devices
from efftrain_cli.trials.costs import tokens_left
from efftrain_cli.trials.processes import Child, ForkServer, Launch, launch_cold
from efftrain_cli.trials.trial import Trial, check_trials, last_lines, recipe_of, state_of

if TYPE_CHECKING:
    from efftrain_cli.run.reading import Run

TICK = 0.02
"""Seconds between two looks at the processes."""
STATUS_EVERY = 30.0
"""Seconds between two lines about the runs under way, where the output is not a terminal."""
SAVED = "every run is saved\n  give the same command again to continue"


@dataclass
class _Slot:
    trial: Trial
    child: Child
    started: float


def pretrain_arguments(
    trial: Trial,
    state: str,
    device: str,
    devices: int,
) -> list[str]:
    """Return the arguments of `efftrain` that train a trial."""
    command = ["pretrain", "--device", device, "--devices", str(devices)]
    if trial.until is not None:
        command += ["--steps", str(trial.until)]
    # On a CPU `check_memory` has looked at all of them.
    if trial.until is not None or planned_device(device) == "cpu":
        command.append("--no-probe")
    if state == "unfinished":
        return [*command, "--resume", trial.name, "--from-start"]
    return [*command, *begin_arguments(trial)]


def begin_arguments(trial: Trial) -> list[str]:
    """Return the options of `pretrain` that begin a trial's run."""
    options = ["--recipe", trial.recipe, "--seed", str(trial.seed), "--name", trial.name]
    if trial.trunk is not None:
        options += ["--from", f"{trial.trunk.run}@{trial.trunk.step}"]
    for setting in trial.settings:
        options += ["--set", setting]
    return options


def environments(jobs: int, device: str) -> list[tuple[str, dict[str, str]]]:
    """Return (device, changes of the environment) of each of `jobs` places: processor threads are
    divided, GPUs dealt out in turn.

    Raises:
        UsageError: more jobs than processor threads.
    """
    if jobs == 1:
        return [(device, {})]
    cores = usable_cores()
    if jobs > cores:
        raise UsageError(
            f"--jobs {jobs}: there are {cores} processor threads here, and each run needs one\n"
            f"  use --jobs {cores} or fewer"
        )
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    each = cores // jobs
    if wanted.isdecimal() and int(wanted):
        each = min(each, int(wanted))
    # A run says how many it ran beside: its seconds are comparable with those of as many only.
    threads = {"OMP_NUM_THREADS": str(each), "EFFTRAIN_JOBS": str(jobs)}
    gpus = 0
    if planned_device(device) in ("auto", "cuda"):
        gpus = _gpus()
    if gpus:
        return [(f"cuda:{place % gpus}", threads) for place in range(jobs)]
    return [(device, threads)] * jobs


def _gpus() -> int:
    """Return the number of CUDA devices, without torch: its import takes seconds."""
    devices = list(Path("/dev").glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices and visible is not None:
        return len(list(filter(None, visible.split(","))))
    return len(devices)


@dataclass
class TrialRunner:
    """Trains trials, at most `jobs` at once."""

    folder: Path
    """Where logs go."""
    _: KW_ONLY
    device: str = "auto"
    jobs: int = 1
    devices: int = 1
    """Devices that each run trains on."""
    study: str = ""
    """Name of the study, race or sweep that the runs answer to; "": to their recipes'."""
    launch: Launch | None = None
    """Starts the processes; None: by forks, where the system and the number of devices allow."""

    def __post_init__(self) -> None:
        check_devices(self.device, self.devices, self.jobs)
        self.places = environments(self.jobs, self.device)
        if self.launch is None:
            # macOS has fork, but its libraries do not work in a forked child.
            can_fork = sys.platform == "linux" and self.devices == 1
            server = ForkServer(self.log_of("forkserver"))
            self.launch = server.launch if can_fork else launch_cold

    def log_of(self, name: str) -> Path:
        """Return the file for the output of a process."""
        return self.folder / "logs" / f"{name}.log"

    def train(
        self,
        trials: Sequence[Trial],
        title: str = "runs",
    ) -> list[Run]:
        """Train what is not trained yet; return the run of each trial, in their order.

        Each ended in one of `ENDED`. A run that another process trains is waited for.

        Args:
            title: what these runs are, said first if any is to train.

        Raises:
            StoppedError: a signal came; all runs are saved, and the same command continues.
            OutOfMemoryError: so many runs at once do not fit into memory; none was started.
            EfftrainError: a run failed; the others are saved; the exit code is its own.
        """
        # All are looked at before the first is trained: a wrong recipe or a taken name costs
        # nothing.
        states = check_trials(trials)
        left = [trial for trial in trials if states[trial.name] not in ENDED]
        if not any(device.startswith("cuda") for device, _ in self.places):
            check_memory([recipe_of(trial) for trial in left], len(self.places))
        if self.study:
            add_members(self.folder, trials)
        if left:
            heading = f"{title}: {len(left)} of {counted(len(trials), 'run')} to train"
            with steady_output(), stop_on_signals():
                self._train_left(left, len(trials), heading)
        return list(map(read_trial, trials))

    def _train_left(
        self,
        left: list[Trial],
        runs: int,
        heading: str,
    ) -> None:
        """Train what is left of so many runs."""
        console = Console(
            stderr=True, quiet=silent(), markup=False, highlight=False, soft_wrap=True
        )
        tokens = {trial.name: tokens_left(trial) for trial in left}
        total = sum(tokens.values())
        done = 0
        began = shown = time.monotonic()
        active: dict[int, _Slot] = {}
        with show_progress(console, heading, STATUS_EVERY) as report, _saved(active):
            while left or active:
                self._fill(left, active)
                # Once, while the first run imports PyTorch.
                importlib.import_module("efftrain_cli.compare.comparison")
                if left and not active:
                    names = listed([trial.name for trial in left])
                    report(f"waiting for {names}: another process trains them", 0)
                time.sleep(TICK if active else 50 * TICK)
                for place, slot in list(active.items()):
                    code = slot.child.poll()
                    if code is None:
                        continue
                    del active[place]
                    state = self._end_of(slot, code)
                    if state not in ENDED:
                        left.append(slot.trial)
                        continue
                    done += tokens[slot.trial.name]
                    ended = runs - len(left) - len(active)
                    text = f"[{ended}/{runs}] {result_text(slot, state)}"
                    if 0 < done < total:
                        seconds = (total - done) / done * (time.monotonic() - began)
                        text += f"; about {human_seconds(seconds)} left"
                    if silent() and state == "diverged" and slot.trial.threshold is None:
                        say(text)
                    console.print(text)
                if stop_asked():
                    raise StoppedError(f"stopped by {stop_reason()}; {SAVED}")
                if active and time.monotonic() - shown >= REDRAWN:
                    shown = time.monotonic()
                    now = done
                    for slot in active.values():
                        now += tokens[slot.trial.name] - tokens_left(slot.trial)
                    if now:
                        report(f"tokens of {total:,}", now)

    def _fill(self, left: list[Trial], active: dict[int, _Slot]) -> None:
        """Start runs in free places, but for those that another process trains."""
        for trial in list(left):
            free = [place for place in range(len(self.places)) if place not in active]
            if not free or stop_asked():
                return
            state = state_of(trial)
            if state == "running":
                continue
            left.remove(trial)
            if state not in ENDED:  # by another process, since
                active[free[0]] = self._start(trial, state, *self.places[free[0]])

    def _start(
        self,
        trial: Trial,
        state: str,
        device: str,
        environment: dict[str, str],
    ) -> _Slot:
        environment = {**environment, "EFFTRAIN_STUDY": self.study}
        if trial.threshold is not None:
            environment[PROBE] = str(trial.threshold)
        arguments = pretrain_arguments(trial, state, device, self.devices)
        assert self.launch is not None
        child = self.launch(arguments, environment, self.log_of(trial.name))
        return _Slot(trial, child, time.monotonic())

    def _end_of(self, slot: _Slot, code: int) -> str:
        """Return the state of a trial whose process has ended.

        Raises:
            StoppedError: somebody stopped the run: the whole is stopped too.
            EfftrainError: it failed.
        """
        name = slot.trial.name
        if code in (StoppedError.exit_code, -signal.SIGTERM):
            raise StoppedError(f"{name} was stopped; {SAVED}")
        state = state_of(slot.trial)
        if code in (0, DivergedError.exit_code) and state in ENDED:
            return state
        was_refused = code in (RunLockedError.exit_code, UsageError.exit_code)
        if was_refused and state in ("running", *ENDED):
            return state  # another process was first
        how, exit_code = describe_end(code)
        log = self.log_of(name)
        output = log.read_text("utf-8", errors="replace")
        error = EfftrainError(
            f"{name} {how}; the other runs are saved, the same command continues\n"
            f"  its output is in {log} and ends with:\n{last_lines(output)}"
        )
        error.exit_code = exit_code
        raise error


@contextlib.contextmanager
def _saved(active: dict[int, _Slot]) -> Iterator[None]:
    """End runs that are under way after the block saved, and wait for that."""
    try:
        yield
    finally:
        for slot in active.values():
            slot.child.send_signal(signal.SIGTERM)
        if active:
            names = [slot.trial.name for slot in active.values()]
            say(f"stopping: {listed(names)} will be saved ...")
        for slot in active.values():
            slot.child.wait()


def add_members(folder: Path, trials: Sequence[Trial]) -> None:
    """Write the names of trials into the list of runs that answer to a study's name."""
    path = folder / MEMBERS
    names = path.read_text("utf-8").split() if path.exists() else []
    names += [trial.name for trial in trials]
    make_folder(folder)
    write_whole(path, "".join(f"{name}\n" for name in dict.fromkeys(names)))


def read_trial(trial: Trial) -> Run:
    """Read the run of a trial, under the trial's label."""
    from efftrain_cli.run.reading import load_run

    run = load_run(run_path(trial.name))
    return replace(run, arm=trial.arm or run.arm, status=state_of(trial))


def result_text(slot: _Slot, state: str) -> str:
    """Return what became of a run: its loss, its seconds."""
    name = slot.trial.name
    loss = last_row(runs_root() / name).get("val_loss")
    if state == "finished" and loss is not None:
        state = f"val loss {loss:.4f}"
    return f"{name}: {state}, {human_seconds(time.monotonic() - slot.started)}"
