"""`--devices N`: this command in N processes, started by torchrun's agent. No torch at import."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.environment import environment_number, usable_cores
from efftrain_cli.foundation.errors import StoppedError, UsageError
from efftrain_cli.foundation.signals import end_with

PARENT = "EFFTRAIN_PARENT"
"""Environment variable that names the launching process in those that it started."""
SAVING = "600"
"""Seconds that the agent gives its processes to save and end, before it kills them."""


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


def world_size_started() -> int:
    """Return how many processes torchrun, srun or `--devices` has started this one among."""
    return environment_number("WORLD_SIZE", environment_number("SLURM_STEP_NUM_TASKS", 1))


def needs_launch(devices: int) -> bool:
    """Return whether this process is to start `devices` processes and is not one of them.

    Raises:
        UsageError: torchrun or srun has started another number of them.
    """
    world_size = world_size_started()
    if 1 < world_size != devices > 1:
        raise UsageError(
            f"--devices {devices}, and torchrun or srun has started {world_size} processes\n"
            "  leave --devices out: the environment sets their number"
        )
    return devices > world_size


ALONE = ("race", "sweep", "tune-warmup", "verify-resume", "study", "grow")
"""Commands of one process."""


def refuse_several(command: str) -> None:
    """Check that a command of one process is not run as one of several: all would do the same in
    one folder.

    Raises:
        UsageError: torchrun or srun has started several.
    """
    if command in ALONE and world_size_started() > 1:
        raise UsageError(
            f"{command} is one process, and was started as one of several by torchrun or srun\n"
            "start it once: on this machine as it is, under Slurm with --ntasks=1;"
            " if it trains, --devices N shares each run"
        )


def process_rank() -> int:
    """Return this process's rank by its environment; 0 if it was started alone."""
    return environment_number("RANK", environment_number("SLURM_PROCID", 0))


def should_log() -> bool:
    """Return whether this process prints warnings before training: with `--devices` only the
    launcher does."""
    return process_rank() == 0 and PARENT not in os.environ


def end_with_launcher() -> None:
    """Have the system send SIGTERM to this process if its launcher is killed."""
    if PARENT in os.environ:
        end_with(int(os.environ[PARENT]))


def launch(devices: int, arguments: Sequence[str]) -> int:
    """Run `efftrain ARGUMENTS` in `devices` processes; return the exit code of the first to fail,
    or 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The processes print their own errors.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // devices)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVING)
    os.environ[PARENT] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id="efftrain",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "efftrain_cli", *arguments)
    except SignalException:
        return StoppedError.exit_code
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code >= 0:
            return code
        name = signal.Signals(-code).name
        say(f"error: rank {rank} was ended by {name}\n  resume the run from its last checkpoint")
        return 128 - code
    return 0
