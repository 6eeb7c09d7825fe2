"""The values that one training step is made of. Decisions about them live in `plan/plan.py`;
nothing here computes.

`Progress` goes in, `StepPlan` says what the step will do, `StepResult` what it was, and
`after_step` makes the next `Progress`. All are immutable. No torch at import, so that plans can be
printed without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Progress(NamedTuple):
    """How far a run has come: the readable numbers of a checkpoint. Everything a plan depends on is
    here.

    A tuple rather than a dataclass because a plan of 100,000 steps makes 100,000 of them.
    """

    step: int = 0
    """Finished optimizer steps."""
    segment: int = 0
    """Starts and resumes of this run so far, less one; in metrics.jsonl the highest segment of a
    step counts."""
    stage: int = 0
    """Stage of a staged recipe, from 0."""
    stage_step: int = 0
    """Step after which this stage began: 0, or the step at which the model grew."""
    stage_curve: tuple[tuple[int, float], ...] = ()
    """Recent (schedule_tokens, validation loss) of this stage, newest last, where its switch reads
    them."""
    windows: int = 0
    """Full-length windows of the corpus consumed."""
    sequences: int = 0
    """Sequences trained on."""
    tokens: int = 0
    """Targets trained on."""
    tokens_discarded: int = 0
    """Tokens of consumed windows that no step trained on."""
    flops: float = 0.0
    """FLOPs executed, logit matmul included."""
    train_seconds: float = 0.0
    """Seconds spent training, without evaluation, checkpoints and compilation."""
    batch_size: int = 0
    """Sequences in the next batch where a method adapts it; 0 where the recipe decides."""
    schedule_step: int = 0
    """Steps as the learning-rate schedule counts them; growth may set it."""
    schedule_tokens: int = 0
    """Tokens as the learning-rate schedule counts them; growth may set it."""
    lr_warmup_tokens: int = 0
    """`schedule_tokens` at the end of the learning-rate warmup: where the decay by tokens
    begins."""
    best_loss: float | None = None
    """Lowest training loss of any finished step, nats per token."""
    evaluation_due: bool = False
    """The validation loss of the last finished step is still to be measured: a stop came before it
    was."""
    simigrad_window: tuple[tuple[float, float, float], ...] = ()
    """SimiGrad's recent (<A,B>, |A|^2, |B|^2), newest last."""


class StepPlan(NamedTuple):
    """Everything decided about one optimizer step before it runs."""

    step: int
    """1-based: the step about to run."""
    lr: float
    batch_size: int
    """Sequences, over all micro-batches and ranks."""
    seq_len: int
    """Tokens per sequence."""
    accumulation_steps: int
    """Micro-batches; their sizes differ by at most one sequence."""
    window_start: int
    """Position in the stream of windows where this step's batch begins."""
    sequences_per_window: int
    """Sequences cut from each window: 1 where the window is truncated to `seq_len`."""
    keep: tuple[float, ...]
    """Keep probability of each block, length n_layer; gates are drawn where the forward pass
    runs."""
    evaluate: bool
    """Measure the validation loss after this step."""
    branch_scales: tuple[float, ...] | None = None
    """Factor of each block's residual branches, length n_layer; None where all are 1."""
    measure_similarity: bool = False
    """Compare the gradients of the two halves of the batch."""
    beta2: float | None = None
    """Adam's second decay rate in this step; None: the optimizer's own."""

    def first_sequence(self, micro_batch: int) -> int:
        """Return the number of the first sequence of a micro-batch (from 0, in the whole step); the
        larger ones come first."""
        size, larger = divmod(self.batch_size, self.accumulation_steps)
        return micro_batch * size + min(micro_batch, larger)

    def sequences_of(self, micro_batch: int) -> int:
        """Return the sequences in a micro-batch."""
        return self.first_sequence(micro_batch + 1) - self.first_sequence(micro_batch)

    @property
    def tokens(self) -> int:
        """Targets of the step, over all micro-batches and ranks."""
        return self.batch_size * self.seq_len

    @property
    def windows(self) -> int:
        """Windows of the corpus that the step consumes."""
        return -(-self.batch_size // self.sequences_per_window)


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids of one step on one rank: `tokens` and `targets` are int64 (sequences, seq_len)."""

    tokens: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; do not wait for the copy if it comes from pinned memory."""
        return Batch(
            self.tokens.to(device, non_blocking=True), self.targets.to(device, non_blocking=True)
        )


class StepResult(NamedTuple):
    """What one step was. Tensors stay on the device until `read_records` brings many of them over
    at once."""

    tokens: int
    """Targets trained on, all ranks."""
    flops: float
    """FLOPs executed: `flops.flops_per_token` over the blocks that ran, logits included, and
    `optimizer_flops`."""
    flops_without_logits: float = 0.0
    optimizer_flops: float = 0.0
    """FLOPs of the optimizer's matrix products: Muon's Newton-Schulz iterations."""
    blocks_executed: float = 0.0
    """Blocks computed per sequence, averaged over the micro-batches."""
    scalars: Mapping[str, Tensor] = {}
    """Column of metrics.jsonl -> 0-d fp32. `loss`: cross-entropy, nats per token over the whole
    step; a method's further terms of the objective; from the update `grad_norm` (global l2 norm
    before clipping), the optimizer's measures, and `nonfinite` (sticky: 1 from the first step whose
    loss or gradient was not finite; such updates are not applied)."""
    simigrad_dots: tuple[float, float, float] | None = None
    """<A,B>, |A|^2, |B|^2 of the two half-batch gradients, when SimiGrad read them this step."""
