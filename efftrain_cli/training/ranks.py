"""The processes of one run on several devices: who this one is among them, and what they do together.

PyTorch's process groups carry it: NCCL between CUDA devices, gloo between CPUs and for what the hosts tell each other.
Rank 0 alone has a run directory, a screen and checkpoints. Every rank holds the whole model ("replicate") and makes the
same update: gradients are added up in one flat sum after accumulation, in the same layout every step, so that a resumed
run of the same world size repeats it bit for bit. (Buckets that are rebuilt during a run, as DistributedDataParallel's
are, do not.)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from efftrain_cli.foundation.errors import EfftrainError, HungError, LostProcessError, UsageError
from efftrain_cli.foundation.signals import Stop, ask_to_stop, interruptible, stop_asked
from efftrain_cli.training.buckets import buckets, flattened, scatter
from efftrain_cli.training.stopwatch import Exchanged, Stopwatch
from efftrain_cli.training.watch import UNLIMITED, WAITING, Watch

if TYPE_CHECKING:
    from torch.distributed import Store

FOREVER = timedelta(days=7)
"""How long a rank waits for another that prepares data, compiles or saves. In a sum, a rank that has died is noticed at
once."""


class Rewinding(BaseException):
    """Rank 0 has gone back to an earlier state and will share it. As `Stop`, nothing on the way may take it for a
    fault."""


@dataclass(frozen=True)
class Ranks:
    """Who this process is among those of its run. A call that needs the others raises a LostProcessError if one has
    ended."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among those on this machine: the index of its CUDA device."""
    store: Store | None = None
    watch: Watch | None = None
    _spent: Exchanged = field(default_factory=Exchanged)
    """Since it was asked for last."""

    @property
    def alone(self) -> bool:
        """Whether this process is the whole run."""
        return self.world_size == 1

    @property
    def phase(self) -> str:
        """What this rank is at, as it has said; "" where it is alone."""
        return "" if self.watch is None else self.watch.phase

    def enter(self, phase: str, step: int | None = None) -> None:
        """Tells the others' watchers what this rank begins, and of which step: that it gets on."""
        if self.watch is not None:
            self.watch.enter(phase, step)

    def interruptible(self, rescuable: bool = False) -> AbstractContextManager[None]:
        """Work that a signal may abandon; on several ranks none stops by itself: they agree once a step, in `go_on`."""
        return interruptible(rescuable) if self.alone else nullcontext()

    def exchanged(self) -> Exchanged | None:
        """What this rank has spent on the others since the last call; None where it is alone."""
        if self.alone:
            return None
        spent = replace(self._spent)
        self._spent.sums, self._spent.wait_seconds = [], 0.0
        return spent

    def go_on(self, step: int) -> None:
        """Agrees with the other ranks that none wants to stop, in one exchange between the hosts, once per step before
        the first sum. From here on every rank finishes the step.

        Raises:
            Stop: a rank was asked to stop: all drop the step.
            Rewinding: rank 0 has gone back to an earlier state.
            EfftrainError: the ranks are at different steps: a bug.
        """
        if self._agree(step):
            ask_to_stop("a signal to another process")
            raise Stop("a signal to another process")

    def end(self, step: int) -> None:
        """The last agreement: all ranks have trained to the end, unless one raises `Rewinding`."""
        self._agree(step)

    def rewind(self) -> None:
        """Rank 0 interrupts the others, who come to their next agreement, and gives them another state afterwards.

        Raises:
            Stop: a rank was asked to stop.
        """
        if self._agree(0, rewinding=True):
            raise Stop("a signal to another process")

    def _agree(self, step: int, rewinding: bool = False) -> bool:
        """Whether a rank was asked to stop. Where none was and rank 0 rewinds, `Rewinding` on the others."""
        if self.alone:
            return False
        self.enter("exchange")
        began = time.perf_counter()
        said = torch.tensor([int(stop_asked()), int(rewinding), step, -step])
        self.largest(said)
        self._spent.wait_seconds += time.perf_counter() - began
        asked, back, latest, earliest = said.tolist()
        if back and not rewinding and not asked:
            raise Rewinding
        if latest != -earliest and not back:
            steps = f"{-earliest} and {latest}"
            raise EfftrainError(
                f"the ranks of this run are at different steps, {steps}: please report it"
            )
        return bool(asked)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over the ranks, in place: flat buckets of the same layout in every step."""
        if self.alone:
            return
        with self.adding(tensors[0]):
            self.add_up_in(None, tensors)

    def _by_buckets(
        self, tensors: Sequence[Tensor], collective: Callable[[Any, Tensor], object]
    ) -> None:
        """Has `collective(torch.distributed, flat)` change the tensors in place, bucket by bucket."""
        for bucket in buckets(tensors):
            flat = flattened(bucket)
            self._carry(lambda dist, flat=flat: collective(dist, flat))
            scatter(flat, bucket)

    @contextmanager
    def adding(self, tensor: Tensor) -> Iterator[None]:
        """What is timed as the sum of gradients, on the device of `tensor`."""
        self.enter("sum")
        watch = Stopwatch(tensor.device)
        yield
        self._spent.sums.append(watch.stop())

    def begin_sum(self, flat: Tensor) -> Callable[[], None]:
        """Begins to replace a tensor by its sum over the ranks, in place; the result waits for it, on CUDA on the
        device alone."""
        works: list[Any] = []
        self._carry(lambda dist: works.append(dist.all_reduce(flat, async_op=True)))
        return lambda: self._carry(lambda dist: works[0].wait())

    def add_up_by_pairs(self, tensors: Sequence[Tensor]) -> None:
        """As `add_up`, in a balanced tree over the ranks: recursive doubling. Where each rank has added its own lanes
        in such a tree too, the result is the same at every world size, bit for bit."""
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

            with self.adding(tensors[0]):
                self._by_buckets(tensors, exchange)
            distance *= 2

    def largest(self, tensor: Tensor) -> None:
        """Replaces the tensor by its elementwise maximum over the ranks, in place."""
        self._carry(lambda dist: dist.all_reduce(tensor, op=dist.ReduceOp.MAX))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, all of one shape, on rank 0; nothing on the others."""
        parts = (
            [torch.empty_like(tensor) for _ in range(self.world_size)] if self.rank == 0 else None
        )
        self._carry(lambda dist: dist.gather(tensor, parts))
        return parts or []

    def order(self, number: int = 0) -> int:
        """What rank 0 says comes next; it gives the `number`."""
        self.enter("exchange" if self.rank else self.phase)
        said = torch.tensor([number])
        self._carry(lambda dist: dist.broadcast(said, src=0))
        return int(said)

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives every rank the values of rank 0, in place, in the order of the names."""
        for name in sorted(tensors):
            tensor = tensors[name]
            contiguous = tensor.detach().contiguous()
            self._carry(lambda dist, contiguous=contiguous: dist.broadcast(contiguous, src=0))
            with torch.no_grad():
                tensor.copy_(contiguous)

    def share_from(self, source: int, tensors: Sequence[Tensor]) -> None:
        """Gives every rank the values of rank `source`, in place; fp32."""
        self._by_buckets(tensors, lambda dist, flat: dist.broadcast(flat, src=source))

    def sum_of(self, numbers: Tensor) -> None:
        """Replaces a few numbers on the host by their sums over the ranks, in place."""
        self._carry(lambda dist: dist.all_reduce(numbers))

    def group(self, members: Sequence[Sequence[int]]) -> Any:
        """A group of this rank with the others of its list, of lists that together are all ranks; None where it would
        be alone. All ranks call it with the same lists."""
        groups: list[Any] = []
        if len(members[0]) > 1:
            self._carry(
                lambda dist: groups.extend(
                    dist.new_group(list(ranks), timeout=FOREVER) for ranks in members
                )
            )
        return next(
            (group for group, ranks in zip(groups, members, strict=False) if self.rank in ranks),
            None,
        )

    def add_up_in(self, group: Any, tensors: Sequence[Tensor]) -> None:
        """As `add_up`, over the ranks of a `group`; None: over all. It is not timed."""
        self._by_buckets(tensors, lambda dist, flat: dist.all_reduce(flat, group=group))

    def isend(self, tensor: Tensor, to: int) -> Callable[[], None]:
        """Sends a tensor on the host without waiting; the result waits until it is sent, and until then keeps the
        tensor."""
        works: list[Any] = []
        self._carry(lambda dist: works.append((dist.isend(tensor, to), tensor)))
        return lambda: self._carry(lambda dist: works[0][0].wait())

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fills a tensor on the host with the next one that `source` sends here."""
        self._carry(lambda dist: dist.recv(tensor, source))

    def announce(self, key: str, values: Mapping[str, object]) -> None:
        """Says something, as JSON, that other ranks `hear`; each key once."""
        if self.store is not None:
            self.store.set(key, json.dumps(values))

    def hear(self, key: str) -> dict[str, Any]:
        """Waits for what another rank announces under `key`."""
        assert self.store is not None
        try:
            self.store.wait([key], FOREVER)
            return json.loads(self.store.get(key))
        except RuntimeError:
            raise _lost(self.rank) from None

    def everyones(self, value: object) -> list[Any]:
        """What every rank gives here, JSON values, on all ranks, in their order."""
        if self.alone:
            return [value]
        said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(said)
        self._carry(lambda dist: dist.all_reduce(sizes))
        parts = [torch.zeros(size, dtype=torch.uint8) for size in sizes.tolist()]
        parts[self.rank] = said
        everything = torch.cat(parts)
        self._carry(lambda dist: dist.all_reduce(everything))
        return [json.loads(part.numpy().tobytes()) for part in everything.split(sizes.tolist())]

    def check_alike(self, facts: Mapping[str, str]) -> None:
        """Compares facts (versions, hashes) that must be the same on every rank.

        Raises:
            UsageError: they are not; the message names rank, fact and values.
            LostProcessError: they are not, on the other ranks.
        """
        if self.alone:
            return
        first, *others = self.everyones(
            facts
        )  # a collective rather than the store: it notices a rank that has ended
        different = [
            f"{name}: {theirs.get(name)!r} on rank {rank}, {first[name]!r} on rank 0"
            for rank, theirs in enumerate(others, 1)
            for name in first
            if theirs.get(name) != first[name]
        ]
        if different and self.rank:
            raise _lost(self.rank, "it says why")
        if different:
            raise UsageError(
                f"the processes of this run differ, so they would not train one model: {'; '.join(different)}\n"
                "start all of them from the same installation, recipe and data"
            )

    def _carry(self, work: Any) -> None:
        """Does `work(torch.distributed)`, as `carrying`."""
        import torch.distributed as dist

        phase = self.phase
        if phase and phase not in UNLIMITED | WAITING:
            self.enter("sum")  # whoever waits here does not hang
        with self.carrying():
            work(dist)
        if phase:
            self.enter(phase)

    @contextmanager
    def carrying(self, words: tuple[str, ...] = ("",)) -> Iterator[None]:
        """Work that needs the other ranks. `words` tell the errors of a lost connection from others."""
        try:
            yield
        except RuntimeError as error:
            out_of_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(
                error
            )
            if out_of_memory or not any(word in str(error) for word in words):
                raise
            if self.watch is not None and self.watch.verdict is not None:
                raise HungError(self.watch.verdict) from error
            raise _lost(
                self.rank, f"see its message, or the system's log ({str(error).splitlines()[0]})"
            ) from error


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
CONNECTION = ("onnection", "gloo", "NCCL")
"""Words in the errors of a lost connection, where other things may fail too."""


def _lost(rank: int, why: str = "see its message, or the system's log") -> LostProcessError:
    return LostProcessError(f"rank {rank}: another process of this run has ended; {why}")
