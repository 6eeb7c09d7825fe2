"""The work of a run that depends on its strategy for several devices: `Devices` is this process
alone.

`Replicated`, `Sharded` and `Rings` override parts of it, each in a file of its own. Loop, gradient,
logger, checkpoints and divergence call these methods and never ask which strategy a run has;
`strategy.py` chooses it once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from efftrain_cli.foundation.errors import EfftrainError, LostProcessError
from efftrain_cli.foundation.signals import Stop, ask_to_stop, stop_asked
from efftrain_cli.foundation.step import Batch, MicroBatch, StepPlan
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.optim.gradients import fill_gradients, gradients_of, norms_of
from efftrain_cli.training.ranks import ALONE, Ranks
from efftrain_cli.training.state import TrainState, model_tensors

Losses = Tensors
"""Share of the step's losses by name, "ce" first: sums over micro-batches, divided by the step's
tokens."""
BeforeLast = Callable[[Losses], None]
"""Called with the complete losses before the backward pass of the last micro-batch."""


class Passes(NamedTuple):
    """Forward and backward passes of a step on this device."""

    run: Callable[[Sequence[MicroBatch], BeforeLast], Losses]
    """Add the gradient of micro-batches to `.grad`; return their losses."""
    parameters: Sequence[nn.Parameter]
    micro_batches: Sequence[MicroBatch]
    """Those of this rank, or a part of them."""
    plan: StepPlan

    def __call__(self, before_last: BeforeLast = lambda losses: None) -> Losses:
        return self.run(self.micro_batches, before_last)

    def of(self, micro_batches: Sequence[MicroBatch]) -> Passes:
        """Return the passes of other micro-batches."""
        return self._replace(micro_batches=micro_batches)


class GradientStep(NamedTuple):
    """A step's losses and columns; its gradient is in `.grad`."""

    losses: Tensors
    """Losses of the whole step."""
    grad_norm: Tensor | None = None
    """Norm before clipping, 0-d; None if the gradients are not clipped yet."""
    norms: Tensors | None = None
    """The same of each parameter's gradient, by name; None with `grad_norm`."""
    method_tensors: Tensors | None = None
    """Tensors in flight after the step; None: as before."""
    dots: tuple[float, float, float] | None = None
    """Products of the gradients of the batch's two halves, if measured."""


class Devices:
    """This process alone."""

    computes_alone = True
    """This process can compute the whole model by itself."""
    is_whole = True
    """Rank 0 has, or can gather, all that a checkpoint holds."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.sharing = ranks
        """The processes that share a batch, and this one among them."""
        self.wanted = False
        """Rank 0: it wants to save after the next step."""
        self.asked = False
        """Rank 0 wants to save after this step."""
        self.patient = False
        """The step is a declared phase: the first one, or one that compiles."""

    # --- a step ---

    def begin_step(self, state: TrainState) -> None:
        """Wait until all ranks begin the next step; rank 0 may log and save between two steps.

        Raises:
            Stop: as `sync_stop_flag`.
        """
        self.patient = True
        self.sync_stop_flag(state.progress.step + 1)

    def cut(self, batch: Batch, plan: StepPlan) -> list[MicroBatch]:
        """Return this rank's micro-batches, numbered in the whole step, without empty ones."""
        return [part for part in split_micro_batches(batch, plan, self.sharing) if len(part.tokens)]

    def step(self, passes: Passes) -> GradientStep:
        """Leave the gradient to apply in `.grad`."""
        return GradientStep(self.gradient(passes))

    def gradient(self, passes: Passes) -> Losses:
        """Leave the gradient of all ranks' micro-batches in `.grad`; return all ranks' losses."""
        losses = passes()
        fill_gradients(passes.parameters)
        return losses

    def take_gradients(self, state: TrainState) -> list[nn.Parameter]:
        """Return the parameters that the optimizer updates here, with gradients in `.grad`."""
        return list(state.model.parameters())

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the l2 norm of the parameters' gradient over all that the ranks hold, 0-d fp32."""
        return torch.nn.utils.get_total_norm(gradients_of(parameters))

    def norms(self, tensors: Tensors) -> Tensors:
        """Return the l2 norm of each tensor, of a parameter by name, over all that the ranks hold,
        0-d fp32."""
        return norms_of(tensors)

    def optimizer_columns(self, state: TrainState) -> Tensors:
        """Return the optimizer's columns of metrics.jsonl for the whole model, 0-d."""
        return state.optimizer.columns()

    def end_step(self, state: TrainState, evaluates: bool, saves: bool) -> None:
        """Gather the tensors that an evaluation or a checkpoint after this step needs."""

    # --- agreement ---

    def sync_stop_flag(self, step: int) -> None:
        """Agree with the other ranks that none wants to stop; all then finish the step.

        Raises:
            Stop: a rank was asked to stop: all drop the step.
            EfftrainError: the ranks are at different steps: a bug.
        """
        if self.exchange_flags(step):
            ask_to_stop("a signal to another process")
            raise Stop("a signal to another process")

    def end(self, state: TrainState) -> None:
        """Agree that all ranks have trained to the end."""
        self.patient = True
        self.exchange_flags(state.progress.step)

    def survivable(self, state: TrainState) -> tuple[type[BaseException], ...]:
        """Return the exceptions that end training and leave a state that rank 0 can read and save.

        On CUDA the loss of another rank is not one: the device waits for that rank, and so does
        every read from it.
        """
        if state.model.device.type == "cuda":
            return (Stop,)
        return (Stop, LostProcessError)

    def after_stop(self, state: TrainState) -> None:
        """Let the other ranks end after rank 0 has saved."""

    def exchange_flags(self, step: int) -> bool:
        """Return whether a rank was asked to stop."""
        if self.ranks.is_single_process:
            return False
        began = time.perf_counter()
        flags = torch.tensor([stop_asked(), step, -step, self.wanted], dtype=torch.int64)
        self.ranks.all_reduce_max(flags, self.patient)
        self.ranks.add_wait(time.perf_counter() - began)
        stops, latest, minus_earliest, wanted = flags.tolist()
        self.asked = bool(wanted)
        # If rank 0 wants something between two steps, the others may have begun the next one.
        if latest != -minus_earliest and not wanted:
            steps = f"{-minus_earliest} and {latest}"
            raise EfftrainError(
                f"the ranks of this run are at different steps, {steps}: please report it"
            )
        return bool(stops)

    # --- the whole state ---

    def ready_to_save(self) -> bool:
        """Return whether the state can be saved after this step; if not, ask after the next."""
        return True

    def full_state_dict(self, state: TrainState) -> tuple[Tensors, Tensors]:
        """Return (model tensors, optimizer tensors), whole, on rank 0."""
        return model_tensors(state), state.optimizer.tensors()


def split_micro_batches(batch: Batch, plan: StepPlan, ranks: Ranks = ALONE) -> list[MicroBatch]:
    """Return the micro-batches of a step that are this rank's, empty ones included."""
    numbers = ranks.share_of(plan.accumulation_steps)
    sizes = [plan.sequences_of(number) for number in numbers]
    tokens = batch.tokens.split(sizes)
    targets = batch.targets.split(sizes)
    return [
        MicroBatch(number, tokens[index], targets[index]) for index, number in enumerate(numbers)
    ]
