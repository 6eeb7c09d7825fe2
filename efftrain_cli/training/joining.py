"""Finding the other processes of a run: those that torchrun, srun or `--devices` started."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from efftrain_cli.foundation.environment import environment_number
from efftrain_cli.foundation.errors import LostProcessError, UsageError
from efftrain_cli.training.launch import end_with_parent, is_by_srun
from efftrain_cli.training.ranks import (
    ALONE,
    LONG,
    Ranks,
    answer_within,
    limit_seconds,
)

JOINING = timedelta(minutes=2)
"""Time that the ranks wait for each other to start."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Set for each process by torchrun, and by `--devices`."""


def ranks_wanted() -> tuple[int, int, int, str, int] | None:
    """Return (rank, world size, local rank, master address, port) by the environment of torchrun or
    of a step of srun.

    None if this process was started alone.

    Raises:
        UsageError: the environment is incomplete or makes no sense.
    """
    environment = os.environ
    if is_by_srun():
        head = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        # Jobs that share a node need ports of their own.
        port = 20000 + environment_number("SLURM_JOB_ID", 0) % 20000
        values = {
            "RANK": environment.get("SLURM_PROCID"),
            "WORLD_SIZE": environment.get("SLURM_STEP_NUM_TASKS"),
            "LOCAL_RANK": environment.get("SLURM_LOCALID"),
            "MASTER_ADDR": environment.get("MASTER_ADDR") or _first_host(head),
            "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
        }
    elif environment_number("WORLD_SIZE", 1) > 1:
        values = {name: environment.get(name) for name in TORCHRUN}
    else:
        return None
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise UsageError(
            f"several processes are wanted, but the environment lacks {', '.join(missing)}\n"
            "start them with --devices N, torchrun or srun, which set it"
        )
    rank, world_size, local_rank, port = (
        int(str(values[name])) for name in (*TORCHRUN[:3], "MASTER_PORT")
    )
    if not 0 <= rank < world_size:
        what = f"RANK = {rank} is not below WORLD_SIZE = {world_size}"
        raise UsageError(f"{what}\nstart the processes with --devices N, torchrun or srun")
    return rank, world_size, local_rank, str(values["MASTER_ADDR"]), port


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's compressed list: "gpu[03-05,9],login" -> "gpu03"."""
    name, _, rest = nodes.partition("[")
    if "," in name or not rest:
        return name.split(",")[0]
    return name + rest.replace("]", ",").replace("-", ",").split(",")[0]


def _open_store(address: str, port: int, world_size: int, rank: int) -> dist.Store:
    """Open the store in which ranks leave each other messages: torchrun's own if its agent has one.

    Each restart of torchrun's begins with empty keys.
    """
    waits_for: int | None = world_size
    is_master = rank == 0
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        waits_for = None
        is_master = False
    store = dist.TCPStore(address, port, waits_for, is_master=is_master, timeout=JOINING)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"efftrain/{restart}", store)


def source_hash() -> str:
    """Return a hash of this package's Python files: the version does not change with edits."""
    package = Path(__file__).resolve().parent.parent
    sha = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sha.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return sha.hexdigest()[:16]


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the ranks of this run: those that torchrun, srun or `--devices` started, or this process
    alone.

    Raises:
        UsageError: the environment is wrong, the others were not reached within `JOINING`, or one
            runs another command or another source of this package.
        LostProcessError: rank 0 has found that.
    """
    wanted = ranks_wanted()
    if wanted is None:
        yield ALONE
        return
    end_with_parent()
    rank, world_size, local_rank, address, port = wanted
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
    limit = limit_seconds()
    try:
        store = answer_within(
            JOINING.total_seconds(), lambda: _open_store(address, port, world_size, rank)
        )
        # From here on the ranks wait for each other as long as within a step only.
        store.set(f"joined/{rank}", "")
        store.wait([f"joined/{other}" for other in range(world_size)], JOINING)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=limit),
        )
        patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=LONG * limit))
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"rank {rank} of {world_size} cannot reach the others at {address}:{port}:"
            f" {str(error).splitlines()[0]}\n"
            "check MASTER_ADDR and MASTER_PORT,"
            " that all processes were started, and that the port is free;\n"
            "on nodes with several networks set GLOO_SOCKET_IFNAME"
            " and NCCL_SOCKET_IFNAME to the shared one (ip addr)"
        ) from None
    ranks = Ranks(rank, world_size, local_rank, store, patient)
    leave = dist.destroy_process_group
    try:
        ranks.check_alike({"command": sys.argv[1:], "source": source_hash()})
        yield ranks
    except LostProcessError:
        # With NCCL the usual end would wait for the lost rank.
        leave = dist.distributed_c10d._abort_process_group
        raise
    finally:
        leave()
