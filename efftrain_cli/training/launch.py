"""`--devices N`: N processes of this program on one machine, each with a rank in its environment,
as torchrun would start them.

This process trains nothing. It passes signals on, waits, and ends with the exit code of the cause,
which torchrun does not.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.environment import environment_number, usable_cores
from efftrain_cli.foundation.errors import LostProcessError, StoppedError, UsageError
from efftrain_cli.foundation.signals import STOPPABLE, describe_end, end_with

PARENT = "EFFTRAIN_PARENT"
"""Environment variable that names the launching process in those that it started."""
PATIENCE = 60.0
"""Seconds in which the others must end once one process has failed."""
HALTED = 5.0
"""Seconds in which the others must end once a rank hangs: a process that was halted (SIGSTOP)
cannot end."""
LOST, HUNG = 96, 97
"""Exit codes between a rank and this launcher: it lost another rank, whose end the launcher
reports; a rank hangs. The run's own is 1."""
FOLLOWING = (0, LostProcessError.exit_code, LOST, HUNG)
"""Exit codes of a rank that is not the cause of the run's end."""


def launch(devices: int, arguments: Sequence[str]) -> int:
    """Run `efftrain ARGUMENTS` in `devices` processes; return the exit code of the one that ended
    the run.

    Raises:
        UsageError: this process was started by a launcher itself.
    """
    if is_one_of_several():
        raise UsageError(
            "--devices cannot be combined with torchrun or srun\n"
            "  remove it: the environment sets the world size"
        )
    environment = _rank_environment(devices)
    children: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        asked.append(number)
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    handlers = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup a hangup stays ignored
            handlers[number] = signal.signal(number, pass_on)
    try:
        for rank in range(devices):
            output = None
            # NCCL writes the messages of NCCL_DEBUG to standard output.
            if rank and "NCCL_DEBUG" not in environment:
                output = subprocess.DEVNULL
            # A session of its own: Ctrl-C in the terminal then arrives once, from this process.
            child = subprocess.Popen(
                [sys.executable, "-m", "efftrain_cli", *arguments],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                start_new_session=True,
            )
            children.append(child)
            if asked:
                child.send_signal(asked[0])
        code = _wait(children, asked)
        # A signal in the first moments may end a process before it listens.
        codes = {child.returncode for child in children}
        if asked and codes <= {LostProcessError.exit_code, 0, 75, -asked[0], LOST}:
            if set(arguments[:1]) & set(STOPPABLE):
                return StoppedError.exit_code
            return 128 + asked[0]
        return code
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _rank_environment(devices: int) -> dict[str, str]:
    """Return the environment of every rank, but for its rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // devices))
    return {
        # PyTorch's report of a lost connection is a page of C++ frames; ours is a line.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "LOCAL_WORLD_SIZE": str(devices),
        "WORLD_SIZE": str(devices),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        PARENT: str(os.getpid()),
    }


def _wait(children: Sequence[subprocess.Popen[bytes]], asked: Sequence[int] = ()) -> int:
    """Wait for all children; return the exit code of the cause. `asked`: signals that were passed
    on to them."""
    codes: dict[int, int] = {}  # by rank, in the order of their ends
    killed: set[int] = set()
    deadline = math.inf
    while len(codes) < len(children):
        for rank, child in enumerate(children):
            code = child.poll()
            if code is not None and rank not in codes:
                codes[rank] = code
                if code == HUNG:
                    deadline = min(deadline, time.monotonic() + HALTED)
                elif code:
                    deadline = min(deadline, time.monotonic() + PATIENCE)

        ends = set(codes.values())
        stuck = set(range(len(children))) - codes.keys() - killed
        if HUNG not in ends:
            # Rank 0 saves after the others have stopped, however long that takes. A hang is
            # reported by rank 0 itself, or it is what hangs.
            stuck.discard(0)
        if stuck and time.monotonic() > deadline:
            if HUNG not in ends:  # else the message is out
                names = ", ".join(map(str, sorted(stuck)))
                what = f"did not end within {PATIENCE:.0f} s of another and was killed"
                say(f"error: rank {names} {what}")
            for rank in stuck:
                children[rank].kill()
            killed |= stuck
        time.sleep(0.02)

    causes = {}
    for rank, code in codes.items():
        if code not in FOLLOWING and rank not in killed:
            causes[rank] = code
    for rank, code in causes.items():
        if code < 0 and -code not in asked:
            how = describe_end(code)[0]
            say(
                f"error: rank {rank} {how}; the others have stopped\n"
                "  resume the run from its last checkpoint"
            )
    if causes:
        cause = causes.get(0) or next(iter(causes.values()))
        return describe_end(cause)[1]

    ends = set(codes.values())
    if ends == {0}:
        return 0
    if ends <= {0, LOST}:
        say("error: the processes lost their connection to each other")
    return LostProcessError.exit_code


def check_devices(device: str, devices: int, jobs: int = 1) -> None:
    """Check that `--devices` is not combined with what excludes it: `--device cuda:1`, `--jobs 2`.

    Raises:
        UsageError: it is.
    """
    if devices > 1 and jobs > 1:
        both = f"--jobs {jobs} and --devices {devices}"
        raise UsageError(f"{both}: runs side by side take one device each\ngive one of the two")
    if devices > 1 and device not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"--devices {devices} counts devices and --device {device} names one\n"
            "give one of the two"
        )


def is_one_of_several() -> bool:
    """Return whether torchrun, srun or `--devices` has started this process as one of several."""
    started = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    return any(environment_number(name, 1) > 1 for name in started)


def is_by_srun() -> bool:
    """Return whether a step of srun has started this process as one of several, and no other
    launcher set its rank."""
    return environment_number("SLURM_STEP_NUM_TASKS", 1) > 1 and "RANK" not in os.environ


ALONE = ("race", "sweep", "tune-warmup", "verify-resume", "study", "grow")
"""Commands of one process."""


def refuse_several(command: str) -> None:
    """Check that a command of one process is not run as one of several: all would do the same in
    one folder.

    Raises:
        UsageError: torchrun or srun has started several.
    """
    if command in ALONE and is_one_of_several():
        raise UsageError(
            f"{command} is one process, and was started as one of several by torchrun or srun\n"
            "start it once: on this machine as it is, under Slurm with --ntasks=1;"
            " if it trains, --devices N shares each run"
        )


def process_rank() -> int:
    """Return this process's rank by its environment; 0 if it was started alone."""
    if is_by_srun():
        return environment_number("SLURM_PROCID", 0)
    return environment_number("RANK", 0)


def should_log() -> bool:
    """Return whether this process prints warnings before training: with `--devices` only the
    launcher does."""
    return process_rank() == 0 and PARENT not in os.environ


def end_with_parent() -> None:
    """On Linux, have the system send SIGTERM to this process when the one that launched it ends."""
    if PARENT in os.environ:
        end_with(int(os.environ[PARENT]))
