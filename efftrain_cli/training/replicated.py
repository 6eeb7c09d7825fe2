"""strategy = "replicate": every rank holds the whole model and makes the same update.

Gradients are all-reduced in flat buckets whose layout depends on the tensors' sizes alone, so a
resumed run of the same world size repeats each sum bit for bit. (DistributedDataParallel rebuilds
its buckets during a run, and does not.) On CUDA a bucket is sent while the backward pass of the
last micro-batch computes the rest, which does not change the sum.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from efftrain_cli.foundation.errors import LostProcessError, ReplicaError
from efftrain_cli.optim.gradients import fill_gradients, gradients_of
from efftrain_cli.training.devices import Devices, Losses, Passes
from efftrain_cli.training.ranks import Ranks, buckets, flatten, scatter
from efftrain_cli.training.state import TrainState

OVERLAPPING = frozenset({"cuda"})
"""Device types on which the all-reduce begins during the backward pass.

That pass keeps the cores of a CPU busy.
"""
IN_FLIGHT = 4
"""Most buckets of an overlapped all-reduce in flight at once."""


class Replicated(Devices):
    """Copies of the model that share each batch."""

    def __init__(self, ranks: Ranks, check_every: int | None) -> None:
        super().__init__(ranks)
        self._check_every = check_every
        self._compared = False
        """Whether all ranks were found to have equal weights after the last step."""

    def begin_step(self, state: TrainState) -> None:
        self._compared = False
        super().begin_step(state)

    def ready_to_save(self) -> bool:
        self.wanted = not self._compared
        return self._compared

    def end_step(self, state: TrainState, evaluates: bool, saves: bool) -> None:
        checks = self._check_every and state.progress.step % self._check_every == 0
        if saves or checks or self.asked:
            self._compare_weights(state)

    def _compare_weights(self, state: TrainState) -> None:
        """Compare a checksum of all weights, which one flipped bit changes.

        Raises:
            ReplicaError: a rank has other weights.
            LostProcessError: a rank has other weights, on ranks other than 0.
        """
        self.wanted = False
        sums = []
        for parameter in state.model.parameters():
            sums.append(parameter.detach().view(torch.int32).sum())
        checksums = self.ranks.all_gather_json(int(torch.stack(sums).sum()))
        usual, count = Counter(checksums).most_common(1)[0]
        self._compared = count == len(checksums)
        if self._compared:
            return
        if self.ranks.rank:
            raise LostProcessError(f"rank {self.ranks.rank}: the weights differ; rank 0 says how")

        # Without a majority any rank may be wrong.
        suspects = list(range(len(checksums)))
        if 2 * count > len(checksums):
            suspects = [rank for rank in suspects if checksums[rank] != usual]
        names = ", ".join(map(str, suspects))
        raise ReplicaError(
            f"step {state.progress.step}: the weights of rank {names} differ from the others':"
            " its memory or device may be faulty\n"
            "resume the run from its last checkpoint, on other hardware"
        )

    def gradient(self, passes: Passes) -> Losses:
        # Similarity needs two sums: they come after the passes.
        overlaps = not passes.plan.measure_similarity
        if overlaps and passes.parameters[0].device.type in OVERLAPPING:
            return self._overlapped(passes)
        losses = passes()
        self.sync_stop_flag(passes.plan.step)
        fill_gradients(passes.parameters)
        tensors = [*gradients_of(passes.parameters), *losses.values()]
        with self.ranks.timing_sum(passes.parameters[0].device):
            self.ranks.all_reduce(tensors)
        return losses

    def _overlapped(self, passes: Passes) -> Losses:
        reduce = OverlappedAllReduce(self.ranks, passes.parameters)

        def begin(losses: Losses) -> None:
            self.sync_stop_flag(passes.plan.step)
            reduce.begin(list(losses.values()))

        losses = passes(begin)
        # Every rank must send the same buckets, also one without a micro-batch.
        if not passes.micro_batches:
            begin(losses)
        fill_gradients(passes.parameters)
        reduce.finish()
        return losses


class OverlappedAllReduce:
    """`Ranks.all_reduce` of all gradients and losses, while the backward pass computes the rest.

    Hooks on the parameters send a bucket once its gradients are complete and the bucket after it in
    the model has been sent. So all ranks send the same buckets in the same order, even if they run
    different blocks.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[nn.Parameter]) -> None:
        self._ranks = ranks
        self._parameters = parameters
        self._in_flight: deque[tuple[list[Tensor], Tensor, Callable[[], None]]] = deque()

    def begin(self, losses: Sequence[Tensor]) -> None:
        """Prepare to send buckets during the backward pass that follows."""
        self._buckets = list(buckets([*self._parameters, *losses]))
        self._bucket_of = {}
        self._missing = [0] * len(self._buckets)
        for number, bucket in enumerate(self._buckets):
            for tensor in bucket:
                self._bucket_of[id(tensor)] = number
                self._missing[number] += isinstance(tensor, nn.Parameter)
        self._left = len(self._buckets)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrived)
            for parameter in self._parameters
        ]

    def finish(self) -> None:
        """Send the remaining buckets and wait for all sums. Every parameter must have a `.grad`."""
        for hook in self._hooks:
            hook.remove()
        with self._ranks.timing_sum(self._parameters[0].device):
            while self._left:
                self._send()
            while self._in_flight:
                self._receive()

    def _arrived(self, parameter: Tensor) -> None:
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while self._left and not self._missing[self._left - 1]:
            self._send()

    def _send(self) -> None:
        # Memory for a few buckets, not for a second copy of the gradient.
        if len(self._in_flight) == IN_FLIGHT:
            self._receive()
        self._left -= 1
        bucket = []
        for tensor in self._buckets[self._left]:
            if isinstance(tensor, nn.Parameter):
                assert tensor.grad is not None
                tensor = tensor.grad
            bucket.append(tensor)
        flat = flatten(bucket)
        wait = self._ranks.all_reduce_async(flat)
        self._in_flight.append((bucket, flat, wait))

    def _receive(self) -> None:
        bucket, flat, wait = self._in_flight.popleft()
        wait()
        scatter(flat, bucket)
