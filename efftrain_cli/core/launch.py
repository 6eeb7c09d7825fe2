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


def needs_launch(devices: int) -> bool:
    """Return whether this process is to start `devices` processes and is not one of them.

    Raises:
        UsageError: torchrun or srun has started another number of them.
    """
    world_size = environment_number("WORLD_SIZE", environment_number("SLURM_STEP_NUM_TASKS", 1))
    if 1 < world_size != devices > 1:
        raise UsageError(
            f"--devices {devices}, and torchrun or srun has started {world_size} processes\n"
            "leave --devices out: the environment sets their number"
        )
    return devices > world_size


def process_rank() -> int:
    """Return this process's rank by its environment; 0 if it was started alone."""
    return environment_number("RANK", environment_number("SLURM_PROCID", 0))


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
