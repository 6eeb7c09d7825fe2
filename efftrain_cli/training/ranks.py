"""The processes of one run on several devices: the rank of this one, and their collectives.

PyTorch's process groups carry it, under torch.distributed's names: NCCL between CUDA devices, gloo
between CPUs and for what the hosts tell each other. Values between hosts are JSON: torch's object
collectives unpickle what a peer sends.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from efftrain_cli.foundation.console import listed
from efftrain_cli.foundation.environment import environment_number
from efftrain_cli.foundation.errors import HungError, LostProcessError, UsageError
from efftrain_cli.foundation.signals import interruptible
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.training.launch import HUNG, PARENT
from efftrain_cli.training.stopwatch import CommStats, Stopwatch

BUCKET = 1 << 24
"""Elements that are added up at once: 64 MiB of fp32 beside the gradients."""
FOREVER = timedelta(days=7)
"""Time that a rank waits for rank 0 to prepare a run."""
LIMIT = "EFFTRAIN_HANG_SECONDS"
"""Environment variable: seconds that a rank waits for the others within a step."""
ANSWER = 5.0
"""Seconds in which the ranks that notice a hang report it."""
LONG = 20
"""Limit of declared phases (first step, compilation, evaluation, saving) as a multiple of the limit
within a step."""
LOST_PEER = ("onnection", "Broken pipe", "imed out", "emote process exit", "ncclRemoteError")
"""Words in the errors of a lost peer, by gloo, the store and NCCL. All other errors are the rank's
own."""


def limit_seconds() -> int:
    """Return the seconds that a rank waits for the others within a step."""
    return environment_number(LIMIT, 300)


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, together as long as they stay below `BUCKET` elements.

    The layout is a function of the tensors' sizes, so it is the same in every step and in every
    process.
    """
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
            size = 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def flatten(bucket: Sequence[Tensor]) -> Tensor:
    """Concatenate the tensors of a bucket into one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def scatter(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    """Copy a bucket's flat tensor back into its tensors."""
    sizes = [tensor.numel() for tensor in bucket]
    for tensor, part in zip(bucket, flat.split(sizes), strict=True):
        tensor.copy_(part.view_as(tensor))


def flat_buckets(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the flat tensor of each bucket, and copy back what the caller has made of it."""
    for bucket in buckets(tensors):
        flat = flatten(bucket)
        yield flat
        scatter(flat, bucket)


@dataclass(frozen=True)
class Ranks:
    """Who this process is among those of its run.

    A method that needs the other ranks raises a LostProcessError if one has ended.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among those on this machine: the index of its CUDA device."""
    store: dist.Store | None = None
    patient: Any = None
    """Process group of declared phases, between hosts."""
    _comm: CommStats = field(default_factory=CommStats)

    @property
    def is_single_process(self) -> bool:
        """Return whether this process is the whole run."""
        return self.world_size == 1

    def share_of(self, count: int) -> range:
        """Return this rank's share of `count` numbered parts; the ranks get theirs in order."""
        return range(
            count * self.rank // self.world_size,
            count * (self.rank + 1) // self.world_size,
        )

    def interruptible(self, rescuable: bool = False) -> AbstractContextManager[None]:
        """Return the context of work that a signal may abandon, or that needs the other ranks.

        Several ranks agree to stop once a step instead.
        """
        if self.is_single_process:
            return interruptible(rescuable)
        return self.peer_errors()

    def pop_comm_stats(self) -> CommStats | None:
        """Return the time this rank has spent on the others since the last call; None for a single
        process."""
        if self.is_single_process:
            return None
        spent = replace(self._comm)
        self._comm.sums = []
        self._comm.wait_seconds = 0.0
        return spent

    @contextmanager
    def timing_sum(self, device: torch.device) -> Iterator[None]:
        """Count the seconds inside, on the device's time line, as gradient all-reduce."""
        watch = Stopwatch(device)
        yield
        self._comm.sums.append(watch.stop())

    def add_wait(self, seconds: float) -> None:
        """Count seconds that the host has waited for the slowest rank."""
        self._comm.wait_seconds += seconds

    # --- collectives ---

    def all_reduce(self, tensors: Sequence[Tensor], group: Any = None) -> None:
        """Replace each tensor by its sum over the ranks, or over a `group` of them, in place."""
        if self.is_single_process:
            return
        with self.peer_errors():
            for flat in flat_buckets(tensors):
                dist.all_reduce(flat, group=group)

    def all_reduce_async(self, flat: Tensor) -> Callable[[], None]:
        """Start an all-reduce of a tensor, in place; return a function that waits for it.

        On CUDA only the device waits.
        """
        with self.peer_errors():
            work = dist.all_reduce(flat, async_op=True)
        return partial(self._wait, work, flat)

    def all_reduce_max(self, tensor: Tensor, patient: bool = False) -> None:
        """Replace the tensor by its elementwise maximum over the ranks, in place.

        With `patient`, wait as long as a declared phase may last; the tensor must be on the host.
        """
        group = None
        if patient:
            group = self.patient
        with self.peer_errors():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)

    def barrier(self) -> None:
        """Wait for all ranks, as long as a declared phase may last."""
        if not self.is_single_process:
            self.all_reduce_max(torch.zeros(1), patient=True)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, all of one shape, on rank 0; an empty list on the others."""
        parts: list[Tensor] = []
        if self.rank == 0:
            parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self.peer_errors():
            dist.gather(tensor, parts or None)
        return parts

    def broadcast(self, tensors: Iterable[Tensor], src: int = 0) -> None:
        """Copy the values of rank `src` to every rank, in place; all ranks give the tensors in one
        order."""
        for tensor in tensors:
            contiguous = tensor.detach().contiguous()
            with self.peer_errors():
                dist.broadcast(contiguous, src)
            with torch.no_grad():
                tensor.copy_(contiguous)

    def new_group(self, members: Sequence[Sequence[int]]) -> Any:
        """Return the process group of this rank's list of `members`; None if the lists have one
        rank each.

        Together the lists are all ranks. All ranks call this with the same lists.
        """
        if len(members[0]) == 1:
            return None
        with self.peer_errors():
            own_group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in members])
        return own_group

    def isend(self, tensor: Tensor, to: int) -> Callable[[], None]:
        """Start sending a tensor on the host; return a function that waits until it is sent."""
        with self.peer_errors():
            work = dist.isend(tensor, to)
        return partial(self._wait, work, tensor)

    def _wait(self, work: Any, tensor: Tensor) -> None:
        """Wait for `work`, which needs the memory of `tensor` until then."""
        with self.peer_errors():
            work.wait()

    def recv(self, tensor: Tensor, src: int) -> None:
        """Fill a tensor on the host with the next one that rank `src` sends."""
        with self.peer_errors():
            dist.recv(tensor, src)

    # --- values between hosts ---

    def store_set(self, key: str, values: Mapping[str, object]) -> None:
        """Store JSON for other ranks to `store_get`; each key once."""
        if self.store is not None:
            self.store.set(key, json.dumps(values))

    def store_get(self, key: str) -> dict[str, Any]:
        """Wait for the JSON that another rank stores under `key`."""
        assert self.store is not None
        try:
            self.store.wait([key], FOREVER)
            return json.loads(self.store.get(key))
        except RuntimeError:
            raise _lost(self.rank) from None

    def all_gather_json(self, value: object) -> list[Any]:
        """Gather a JSON value from every rank, in rank order."""
        if self.is_single_process:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(text)
        with self.peer_errors():
            dist.all_reduce(sizes, group=self.patient)
            # Each rank adds its text to zeros in the places of the others.
            texts = torch.zeros(int(sizes.sum()), dtype=torch.uint8)
            parts = texts.split(sizes.tolist())
            parts[self.rank].copy_(text)
            dist.all_reduce(texts, group=self.patient)
        return [json.loads(part.numpy().tobytes()) for part in parts]

    def check_alike(self, facts: Mapping[str, object]) -> None:
        """Compare facts (versions, hashes), JSON values, that must be the same on every rank.

        Raises:
            UsageError: they are not; the message names rank, fact and values.
            LostProcessError: they are not, on the other ranks.
        """
        # A collective rather than the store: it notices a rank that has ended.
        by_rank = self.all_gather_json(facts)
        different = []
        for rank, of_rank in enumerate(by_rank):
            for name, expected in by_rank[0].items():
                value = of_rank.get(name)
                if value != expected:
                    different.append(f"{name}: {value!r} on rank {rank}, {expected!r} on rank 0")
        if not different:
            return
        if self.rank:
            raise _lost(self.rank, "it says why")
        raise UsageError(
            "the processes of this run differ, so they would not train one model:"
            f" {'; '.join(different)}\n"
            "start all of them by one command, from the same installation, recipe and data"
        )

    # --- lost ranks ---

    @contextmanager
    def peer_errors(self) -> Iterator[None]:
        """Raise a LostProcessError for a lost connection; pass all other errors on."""
        try:
            yield
        except RuntimeError as error:
            if self.is_single_process or not any(word in str(error) for word in LOST_PEER):
                raise
            line = str(error).splitlines()[0]
            if hang := self._find_hang("Timed out" in line):
                raise hang from error
            raise _lost(self.rank, f"see its message, or the system's log ({line})") from error

    def _notice(self, timed_out: bool) -> dict[int, bytes]:
        """Report in the store how this rank noticed a loss; return the reports of the ranks that
        noticed it too."""
        assert self.store is not None
        keys = [f"noticed/{rank}" for rank in range(self.world_size)]
        how = "end"
        seconds = 1.0
        if timed_out:
            how = "hang"
            seconds = ANSWER
        self.store.set(keys[self.rank], how)
        with suppress(RuntimeError):  # a rank that hangs reports nothing
            self.store.wait(keys, timedelta(seconds=seconds))

        noticed = {}
        for rank, key in enumerate(keys):
            if self.store.check([key]):
                noticed[rank] = self.store.get(key)
        return noticed

    def _find_hang(self, timed_out: bool) -> LostProcessError | None:
        """Return the error of a hang that this or another rank has noticed by a time-out; None if
        no rank has.

        Ranks that notice a loss report it in the store; those that do not report hang. The first
        rank to report names them.
        """
        if self.store is None:
            return None
        try:
            # A halted rank 0, which keeps the store, takes connections and never answers.
            noticed = answer_within(3 * ANSWER, lambda: self._notice(timed_out))
        except RuntimeError:
            if timed_out and self.rank == 1:
                return _hung([0], self.world_size)
            return None
        hung = [rank for rank in range(self.world_size) if rank not in noticed]
        if b"hang" not in noticed.values() or not hung or self.rank != min(noticed):
            return None
        return _hung(hung, self.world_size)


def answer_within(seconds: float, work: Callable[[], Any]) -> Any:
    """Run `work` in a thread, which is left behind if it never ends; return its value.

    Raises:
        RuntimeError: it took longer than `seconds`, or raised one.
    """
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise RuntimeError("no answer") from None


def describe_tensors(tensors: Tensors) -> dict[str, tuple[list[int], str]]:
    """Return the shape and type of each tensor, as JSON."""
    return {
        name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }


def empty_tensors(described: Mapping[str, Any], device: torch.device) -> Tensors:
    """Allocate the tensors that `describe_tensors` describes, not filled."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        for name, (shape, dtype) in described.items()
    }


ALONE = Ranks()


def _hung(ranks: Sequence[int], world_size: int) -> HungError:
    error = HungError(
        f"rank {listed(ranks)} did not answer in time; all {world_size} processes end\n"
        "resume the run from its last checkpoint;"
        f" where a machine is that slow, raise {LIMIT} (now {limit_seconds()})"
    )
    if PARENT in os.environ:
        error.exit_code = HUNG
    return error


def _lost(rank: int, why: str = "see its message, or the system's log") -> LostProcessError:
    return LostProcessError(f"rank {rank}: another process of this run has ended; {why}")
