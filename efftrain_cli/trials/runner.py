"""Training the runs of a sweep or study: several at once, each in its own process, resumable and
never twice.

Finished runs are not trained again, unfinished ones are resumed. Ctrl-C and SIGTERM end every run
saved. A run's process asks the system for SIGTERM when its parent dies, so that after `kill -9` too
every run saves and ends; where a system knows no such signal, the next start waits for the runs
that are still going.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from efftrain_cli.foundation.console import counted, human_seconds, listed, say, silent
from efftrain_cli.foundation.environment import usable_cores
from efftrain_cli.foundation.errors import (
    DivergedError,
    EfftrainError,
    RunLockedError,
    StoppedError,
    UsageError,
)
from efftrain_cli.foundation.files import make_folder, write_whole
from efftrain_cli.foundation.signals import SECOND_CTRL_C, describe_end
from efftrain_cli.plan.cost import check_memory
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.run.directory import run_path, runs_root
from efftrain_cli.run.metrics import last_row
from efftrain_cli.run.names import MEMBERS
from efftrain_cli.run.reading import ENDED, Run, load_run
from efftrain_cli.run.stability import PROBE
from efftrain_cli.training.launch import check_devices
from efftrain_cli.trials.processes import Child, ForkServer, Launch, launch_cold
from efftrain_cli.trials.trial import (
    Trial,
    check_comparable,
    check_names,
    check_texts,
    recipe_of,
    state_of,
)

TICK = 0.1
"""Seconds between two looks at the processes."""
STATUS_EVERY = 30.0
"""Seconds between two lines about the runs under way, where the output is not a terminal."""


@dataclass
class _Slot:
    trial: Trial
    child: Child
    log: Path
    started: float
    tokens_before: int


def pretrain_arguments(
    trial: Trial,
    state: str,
    device: str,
    devices: int = 1,
) -> list[str]:
    """Return the arguments of `efftrain` that train a trial."""
    command = ["pretrain", "--device", device]
    if devices > 1:
        command += ["--devices", str(devices)]
    if trial.until is not None:
        command += ["--steps", str(trial.until), "--no-probe"]
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
    if device in ("auto", "cuda"):
        gpus = _gpus()
    if gpus:
        return [(f"cuda:{place % gpus}", threads) for place in range(jobs)]
    return [(device, threads)] * jobs


def _gpus() -> int:
    """Return the number of CUDA devices, without torch: its import takes seconds."""
    devices = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(devices)
    return len(list(filter(None, visible.split(",")))) if devices else 0


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
    say: Callable[[str], None] = say
    """Prints one line."""
    launch: Launch | None = None
    """Starts the processes; None: by forks, where the system and the number of devices allow."""

    def __post_init__(self) -> None:
        check_devices(self.device, self.devices, self.jobs)
        self.places = [
            (place, {**changes, "EFFTRAIN_STUDY": self.study})
            for place, changes in environments(self.jobs, self.device)
        ]
        if self.launch is None:
            # macOS has fork, but its libraries do not work in a forked child.
            can_fork = sys.platform == "linux" and self.devices == 1
            server = ForkServer(self.folder / "logs" / "forkserver.log")
            self.launch = server.launch if can_fork else launch_cold
        self._active: dict[int, _Slot] = {}
        self._elsewhere: dict[str, Trial] = {}  # another process trains them
        self._stopping: str | None = None
        self._last_ctrl_c = -SECOND_CTRL_C - 1
        self._last_status = time.monotonic()
        self._began = time.monotonic()
        self._tokens_done = 0
        self._status_shown = False

    def train(
        self,
        trials: Sequence[Trial],
        title: str = "",
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
        check_names(trials)
        check_comparable(trials)
        check_texts(trials)
        recipes = [recipe_of(trial) for trial in trials]
        self._ends: dict[str, str] = {}  # run -> one of ENDED
        self._tokens: dict[str, int] = {}  # run -> its budget
        for trial, recipe in zip(trials, recipes, strict=True):
            state = state_of(trial)
            if state in ENDED:
                self._ends[trial.name] = state
            self._tokens[trial.name] = recipe.train.tokens
            if trial.until is not None:
                self._tokens[trial.name] = summarize_plan(recipe, until=trial.until).tokens
        if not any(device.startswith("cuda") for device, _ in self.places):
            check_memory(recipes, len(self.places))

        if self.study:
            add_members(self.folder, trials)
        self._waiting = [trial for trial in trials if trial.name not in self._ends]
        if self._waiting and self._ends:
            already = f"{len(self._ends)} of {len(trials)} trained already"
            self._progress(f"{title or 'runs'}, {already}")
        elif self._waiting and title:
            self._progress(f"{title}, {counted(len(trials), 'run')}; time left is for these")
        with self._signals():
            try:
                self._work()
            finally:
                self._end_all()
        return [read_trial(trial, self._ends[trial.name]) for trial in trials]

    def _work(self) -> None:
        while self._waiting or self._active or self._elsewhere:
            self._fill()
            self._show_status()
            time.sleep(TICK)
            for place, slot in list(self._active.items()):
                code = slot.child.poll()
                if code is not None:
                    del self._active[place]
                    self._ended(slot, code)
            if self._stopping is not None:
                raise StoppedError(
                    f"stopped by {self._stopping}; every run is saved\n"
                    "  give the same command again to continue"
                )
            if self._elsewhere and not self._waiting and not self._active:
                time.sleep(9 * TICK)
                self._look_elsewhere()

    def _fill(self) -> None:
        """Start runs in free places."""
        while self._waiting and len(self._active) < len(self.places) and self._stopping is None:
            trial = self._waiting.pop(0)
            state = state_of(trial)  # another process may have trained it meanwhile
            if state in ENDED:
                self._ends[trial.name] = state
                continue
            if state == "running":
                self._elsewhere[trial.name] = trial
                continue
            place = next(i for i in range(len(self.places)) if i not in self._active)
            device, environment = self.places[place]
            if trial.threshold is not None:
                environment = {**environment, PROBE: str(trial.threshold)}
            log = self.folder / "logs" / f"{trial.name}.log"
            assert self.launch is not None
            child = self.launch(
                pretrain_arguments(
                    trial,
                    state,
                    device,
                    self.devices,
                ),
                environment,
                log,
            )
            self._active[place] = _Slot(trial, child, log, time.monotonic(), tokens_so_far(trial))

    def _ended(
        self,
        slot: _Slot,
        code: int,
    ) -> None:
        name = slot.trial.name
        seconds = time.monotonic() - slot.started
        if code in (StoppedError.exit_code, -signal.SIGTERM):
            # Somebody stopped this run; where it was not us, the whole is stopped too.
            self._stopping = self._stopping or f"{name} was stopped"
            return
        was_refused = code in (RunLockedError.exit_code, UsageError.exit_code)
        if was_refused and state_of(slot.trial) in ("running", *ENDED):
            self._elsewhere[name] = slot.trial  # another process was first
            return
        if code not in (0, DivergedError.exit_code):
            how, exit_code = describe_end(code)
            error = EfftrainError(
                f"{name} {how}; the other runs are saved, the same command continues\n"
                f"  its output is in {slot.log} and ends with:\n{_tail(slot.log)}"
            )
            error.exit_code = exit_code
            raise error
        status = state_of(slot.trial)
        if status not in ENDED:
            raise EfftrainError(
                f"{name} ended before its budget was used up\n"
                f"  the same command continues; its output: {slot.log}"
            )
        self._ends[name] = status
        self._tokens_done += tokens_so_far(slot.trial) - slot.tokens_before
        is_expected = status == "finished" or slot.trial.threshold is not None
        if is_expected and silent():
            return
        loss = last_loss(name)
        result = status
        if status == "finished" and loss is not None:
            result = f"val loss {loss:.4f}"
        line = f"[{len(self._ends)}/{len(self._tokens)}] {name}: {result}, {human_seconds(seconds)}"
        self._line(line + self._eta())

    def _eta(self) -> str:
        """Say how long the rest takes at the speed so far; "" if nothing is left or the speed is
        unknown.

        Runs that wait are expected at the speed of all so far, starts included. If none waits, the
        runs under way go on at their own speed, whose seconds begin after the start.
        """
        elapsed = time.monotonic() - self._began
        if not self._tokens_done and elapsed <= 60:
            # Until a run has ended, the first minute is mostly its start.
            return ""
        done = self._tokens_done
        left = sum(self._tokens[trial.name] - tokens_so_far(trial) for trial in self._waiting)
        seconds = 0.0
        for slot in self._active.values():
            row = last_row(runs_root() / slot.trial.name)
            tokens = row.get("tokens") or 0
            trained = tokens - slot.tokens_before
            rest = max(0, self._tokens[slot.trial.name] - tokens)
            done += trained
            left += rest
            if trained:
                seconds = max(seconds, rest / trained * (row.get("wall_seconds") or 0.0))
        if self._waiting and done:
            seconds = left / done * elapsed
        return f"; about {human_seconds(seconds)} left" if seconds else ""

    def _look_elsewhere(self) -> None:
        """Wait for what other processes train, once nothing is left here, and continue what they
        give back."""
        for name, trial in list(self._elsewhere.items()):
            state = state_of(trial)
            if state in ENDED:
                del self._elsewhere[name]
                self._ends[name] = state
            elif state != "running":
                del self._elsewhere[name]
                self._waiting.append(trial)
        if self._elsewhere and time.monotonic() - self._last_status > STATUS_EVERY:
            self._last_status = time.monotonic()
            self._progress(f"waiting for {listed(list(self._elsewhere))}: another process's")

    def _show_status(self) -> None:
        terminal = sys.stderr.isatty()
        every = 1.0 if terminal else STATUS_EVERY
        if silent() or not self._active or time.monotonic() - self._last_status < every:
            return
        self._last_status = time.monotonic()
        shares = []
        for slot in self._active.values():
            name = slot.trial.name
            share = min(100.0, 100 * tokens_so_far(slot.trial) / self._tokens[name])
            shares.append(f"{name} {share:.0f} %")
        text = f"training {', '.join(shares)}{self._eta()}"
        if terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K{text[:width]}")
            sys.stderr.flush()
            self._status_shown = True
        else:
            self.say(text)

    def _progress(self, text: str) -> None:
        if not silent():
            self._line(text)

    def _line(self, text: str) -> None:
        if self._status_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._status_shown = False
        self.say(text)

    # --- stopping ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Have signals end the runs under way instead of this process; a second Ctrl-C ends
        everything at once."""

        def handle(number: int, frame: object) -> None:
            now = time.monotonic()
            if number == signal.SIGINT:
                if now - self._last_ctrl_c <= SECOND_CTRL_C:
                    for slot in self._active.values():
                        slot.child.send_signal(signal.SIGKILL)
                    os._exit(130)
                self._last_ctrl_c = now
            self._stopping = self._stopping or signal.Signals(number).name

        numbers = [signal.SIGINT, signal.SIGTERM]
        if (
            signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        ):  # `nohup` asked to go on without a terminal
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_all(self) -> None:
        """End the runs under way saved, and wait for that."""
        slots = list(self._active.values())
        for slot in slots:
            slot.child.send_signal(signal.SIGTERM)
        if slots:
            names = ", ".join(slot.trial.name for slot in slots)
            self._line(f"stopping: {names} will be saved ...")
        for slot in slots:
            slot.child.wait()
        self._active.clear()


def add_members(folder: Path, trials: Sequence[Trial]) -> None:
    """Write the names of trials into the list of runs that answer to a study's name."""
    path = folder / MEMBERS
    names = path.read_text("utf-8").split() if path.exists() else []
    names += [trial.name for trial in trials]
    make_folder(folder)
    write_whole(path, "".join(f"{name}\n" for name in dict.fromkeys(names)))


def read_trial(trial: Trial, status: str) -> Run:
    """Read the run of a trial that ended so, under the trial's label."""
    run = load_run(run_path(trial.name))
    return replace(run, arm=trial.arm or run.arm, status=status)


def tokens_so_far(trial: Trial) -> int:
    """Return the tokens of a run's last row; of one that has none, those it begins with."""
    return int(last_row(runs_root() / trial.name).get("tokens") or trial.begun)


def last_loss(name: str) -> float | None:
    """Return the validation loss of a run's last row, nats per token."""
    value = last_row(runs_root() / name).get("val_loss")
    return float(value) if isinstance(value, int | float) else None


def _tail(log: Path) -> str:
    lines = []
    if log.exists():
        lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-5:]) or "    (nothing)"
