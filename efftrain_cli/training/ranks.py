"""The processes of one run on several devices: who this one is among them, and what they do together.

PyTorch's process groups carry it, under torch.distributed's names: NCCL between CUDA devices, gloo between CPUs and for
what the hosts tell each other. Values between hosts are JSON: torch's object collectives unpickle what a peer sends.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from efftrain_cli.foundation.environment import environment_number
from efftrain_cli.foundation.errors import HungError, LostProcessError, UsageError
from efftrain_cli.foundation.signals import interruptible
from efftrain_cli.training.buckets import buckets, flattened, scatter
from efftrain_cli.training.launch import HUNG, HUNG_FIRST, PARENT
from efftrain_cli.training.stopwatch import CommStats, Stopwatch

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
FOREVER = timedelta(days=7)
"""How long a rank waits for rank 0 to prepare a run."""
LIMIT = "EFFTRAIN_HANG_SECONDS"
"""Environment variable: seconds that a rank waits for the others within a step."""
ANSWER = 5.0
"""Seconds in which the ranks that notice a hang say so."""
LONG = 20
"""Times that limit are the limit of declared phases: first step, compilation, evaluation, saving."""
CONNECTION = ("onnection", "Timed out", "gloo", "remote process exited", "ncclRemoteError")
"""Words in the errors of a lost connection."""


def limit_seconds() -> int:
    """Return the seconds that a rank waits for the others within a step."""
    return environment_number(LIMIT, 300)


@dataclass(frozen=True)
class Ranks:
    """Who this process is among those of its run. A call that needs the others raises a LostProcessError if one has
    ended."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among those on this machine: the index of its CUDA device."""
    store: Store | None = None
    patient: Any = None
    """The process group of declared phases, between hosts."""
    _comm: CommStats = field(default_factory=CommStats)
    """Since it was asked for last."""

    @property
    def is_single_process(self) -> bool:
        """Whether this process is the whole run."""
        return self.world_size == 1

    def interruptible(self, rescuable: bool = False) -> AbstractContextManager[None]:
        """Work that a signal may abandon; on several ranks none stops by itself: they agree once a step."""
        return interruptible(rescuable) if self.is_single_process else nullcontext()

    def pop_comm_stats(self) -> CommStats | None:
        """What this rank has spent on the others since the last call; None where it is alone."""
        if self.is_single_process:
            return None
        spent = replace(self._comm)
        self._comm.sums, self._comm.wait_seconds = [], 0.0
        return spent

    def all_reduce(self, tensors: Sequence[Tensor], group: Any = None) -> None:
        """Replace each tensor by its sum over the ranks, or those of a `group`, in place.

        Tensors are sent in flat buckets of the same layout in every step.
        """
        if self.is_single_process:
            return
        with self.timing_sum(tensors[0].device):
            self._by_buckets(tensors, lambda dist, flat: dist.all_reduce(flat, group=group))

    def _by_buckets(
        self, tensors: Sequence[Tensor], collective: Callable[[Any, Tensor], object]
    ) -> None:
        """Has `collective(torch.distributed, flat)` change the tensors in place, bucket by bucket."""
        for bucket in buckets(tensors):
            flat = flattened(bucket)
            self._carry(lambda dist, flat=flat: collective(dist, flat))
            scatter(flat, bucket)

    @contextmanager
    def timing_sum(self, device: torch.device) -> Iterator[None]:
        """Count the seconds inside, by the device's own time line, as those of adding up."""
        watch = Stopwatch(device)
        yield
        self._comm.sums.append(watch.stop())

    def add_wait(self, seconds: float) -> None:
        """Count seconds that the host has waited for the slowest rank."""
        self._comm.wait_seconds += seconds

    def all_reduce_async(self, flat: Tensor) -> Callable[[], None]:
        """Begins to replace a tensor by its sum over the ranks, in place; the result waits for it, on CUDA on the
        device alone."""
        works: list[Any] = []
        self._carry(lambda dist: works.append(dist.all_reduce(flat, async_op=True)))
        return lambda: self._carry(lambda dist: works[0].wait())

    def all_reduce_in_pairs(self, tensors: Sequence[Tensor]) -> None:
        """As `all_reduce`, in a balanced tree over the ranks: recursive doubling.

        If each rank has added its own terms in such a tree too, the result has the same bits at every world size.
        """
        distance = 1
        while distance < self.world_size:

            def exchange(dist: Any, flat: Tensor, partner: int = self.rank ^ distance) -> None:
                theirs = torch.empty_like(flat)
                sending, receiving = (
                    dist.P2POp(dist.isend, flat, partner),
                    dist.P2POp(dist.irecv, theirs, partner),
                )
                for work in dist.batch_isend_irecv([sending, receiving]):
                    work.wait()
                flat += theirs  # a + b = b + a: only the shape of the tree counts

            with self.timing_sum(tensors[0].device):
                self._by_buckets(tensors, exchange)
            distance *= 2

    def all_reduce_max(self, tensor: Tensor, patient: bool = False) -> None:
        """Replace the tensor by its elementwise maximum over the ranks, in place.

        With `patient`, wait as long as a declared phase may last; the tensor is then on the host.
        """
        group = self.patient if patient else None
        self._carry(lambda dist: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group))

    def barrier(self) -> None:
        """Wait for all ranks, as long as a declared phase may last."""
        if not self.is_single_process:
            self.all_reduce_max(torch.zeros(1), patient=True)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, all of one shape, on rank 0; nothing on the others."""
        parts = (
            [torch.empty_like(tensor) for _ in range(self.world_size)] if self.rank == 0 else None
        )
        self._carry(lambda dist: dist.gather(tensor, parts))
        return parts or []

    def broadcast_int(self, number: int = 0) -> int:
        """What rank 0 says comes next; it gives the `number`."""
        said = torch.tensor([number])
        self._carry(lambda dist: dist.broadcast(said, src=0, group=self.patient))
        return int(said)

    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives every rank the values of rank 0, in place, in the order of the names."""
        for name in sorted(tensors):
            tensor = tensors[name]
            contiguous = tensor.detach().contiguous()
            self._carry(lambda dist, contiguous=contiguous: dist.broadcast(contiguous, src=0))
            with torch.no_grad():
                tensor.copy_(contiguous)

    def broadcast_flat(self, tensors: Sequence[Tensor], src: int) -> None:
        """Gives every rank the values of rank `src`, in place; fp32."""
        self._by_buckets(tensors, lambda dist, flat: dist.broadcast(flat, src=src))

    def new_group(self, members: Sequence[Sequence[int]]) -> Any:
        """A group of this rank with the others of its list, of lists that together are all ranks; None where it would
        be alone. All ranks call it with the same lists."""
        groups: list[Any] = []
        if len(members[0]) > 1:
            self._carry(
                lambda dist: groups.extend(dist.new_group(list(ranks)) for ranks in members)
            )
        return next(
            (group for group, ranks in zip(groups, members, strict=False) if self.rank in ranks),
            None,
        )

    def isend(self, tensor: Tensor, to: int) -> Callable[[], None]:
        """Sends a tensor on the host without waiting; the result waits until it is sent, and until then keeps the
        tensor."""
        works: list[Any] = []
        self._carry(lambda dist: works.append((dist.isend(tensor, to), tensor)))
        return lambda: self._carry(lambda dist: works[0][0].wait())

    def recv(self, tensor: Tensor, src: int) -> None:
        """Fills a tensor on the host with the next one that `src` sends here."""
        self._carry(lambda dist: dist.recv(tensor, src))

    def store_set(self, key: str, values: Mapping[str, object]) -> None:
        """Says something, as JSON, that other ranks `store_get`; each key once."""
        if self.store is not None:
            self.store.set(key, json.dumps(values))

    def store_get(self, key: str) -> dict[str, Any]:
        """Waits for what another rank announces under `key`."""
        assert self.store is not None
        try:
            self.store.wait([key], FOREVER)
            return json.loads(self.store.get(key))
        except RuntimeError:
            raise _lost(self.rank) from None

    def all_gather_json(self, value: object) -> list[Any]:
        """What every rank gives here, JSON values, on all ranks, in their order."""
        if self.is_single_process:
            return [value]
        said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(said)
        self._carry(lambda dist: dist.all_reduce(sizes, group=self.patient))
        parts = [torch.zeros(size, dtype=torch.uint8) for size in sizes.tolist()]
        parts[self.rank] = said
        everything = torch.cat(parts)
        self._carry(lambda dist: dist.all_reduce(everything, group=self.patient))
        return [json.loads(part.numpy().tobytes()) for part in everything.split(sizes.tolist())]

    def check_alike(self, facts: Mapping[str, str]) -> None:
        """Compares facts (versions, hashes) that must be the same on every rank.

        Raises:
            UsageError: they are not; the message names rank, fact and values.
            LostProcessError: they are not, on the other ranks.
        """
        if self.is_single_process:
            return
        # A collective rather than the store: it notices a rank that has ended.
        different = differences(self.all_gather_json(facts))
        if different and self.rank:
            raise _lost(self.rank, "it says why")
        if different:
            raise UsageError(different)

    def _carry(self, work: Any) -> None:
        """Does `work(torch.distributed)`, as `carrying`."""
        import torch.distributed as dist

        with self.carrying():
            work(dist)

    @contextmanager
    def carrying(self) -> Iterator[None]:
        """Work that needs the other ranks: a lost connection is a LostProcessError, other errors stay what they are."""
        try:
            yield
        except RuntimeError as error:
            if not any(word in str(error) for word in CONNECTION):
                raise
            line = str(error).splitlines()[0]
            if hang := self._find_hang("Timed out" in line):
                raise hang from error
            raise _lost(self.rank, f"see its message, or the system's log ({line})") from error

    def _notice(self, timed_out: bool) -> dict[int, bytes]:
        """Say in the store how this rank noticed a loss; return what the ranks have said by then."""
        assert self.store is not None
        keys = [f"noticed/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], "hang" if timed_out else "end")
        deadline = time.monotonic() + (ANSWER if timed_out else 1.0)
        noticed: dict[int, bytes] = {}
        while len(noticed) < self.world_size and time.monotonic() < deadline:
            time.sleep(0.1)
            said = [rank for rank, key in enumerate(keys) if self.store.check([key])]
            noticed = {rank: self.store.get(keys[rank]) for rank in said}
        return noticed

    def _find_hang(self, timed_out: bool) -> LostProcessError | None:
        """Return the error of a hang that this rank has noticed by a time-out, or heard of; None if there is none.

        Ranks that notice a loss say so in the store: those that do not, hang. The first that does names them.
        """
        if self.store is None:
            return None
        try:
            # A halted rank 0, which keeps the store, takes connections and never answers.
            noticed = answer_within(3 * ANSWER, lambda: self._notice(timed_out))
        except RuntimeError:
            return _hung([0], self.world_size) if timed_out and self.rank == 1 else None
        hung = [rank for rank in range(self.world_size) if rank not in noticed]
        if b"hang" not in noticed.values() or not hung or self.rank != min(noticed):
            return None
        return _hung(hung, self.world_size)


def answer_within(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` gives, in a thread that is left behind if it never ends.

    Raises:
        RuntimeError: it took longer, or failed.
    """
    found: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not found:
        raise RuntimeError("no answer")
    return found[0]


def differences(facts: Sequence[Mapping[str, Any]]) -> str:
    """Return what to tell the user about ranks whose facts differ from rank 0's; "" if none do."""
    first, *others = facts
    found = [
        f"{name}: {theirs.get(name)!r} on rank {rank}, {first[name]!r} on rank 0"
        for rank, theirs in enumerate(others, 1)
        for name in first
        if theirs.get(name) != first[name]
    ]
    if not found:
        return ""
    return (
        f"the processes of this run differ, so they would not train one model: {'; '.join(found)}\n"
        "start all of them by one command, from the same installation, recipe and data"
    )


def described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[list[int], str]]:
    """Shape and type of each tensor, as JSON."""
    return {
        name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }


def as_described(described: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Tensors of these shapes and types, to be filled."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        for name, (shape, dtype) in described.items()
    }


ALONE = Ranks()


def _hung(ranks: Sequence[int], world_size: int) -> HungError:
    names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:4]))}"
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    error = HungError(
        f"{names}{more} did not answer in time; all {world_size} processes end\n"
        f"resume the run from its last checkpoint; where a machine is that slow, raise {LIMIT} (now {limit_seconds()})"
    )
    if PARENT in os.environ:
        error.exit_code = HUNG_FIRST if 0 in ranks else HUNG
    return error


def _lost(rank: int, why: str = "see its message, or the system's log") -> LostProcessError:
    return LostProcessError(f"rank {rank}: another process of this run has ended; {why}")
