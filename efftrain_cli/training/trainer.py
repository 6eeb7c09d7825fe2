"""The one training loop. It names no method: a step's plan comes from `plan.py`, its gradient from
`gradient.py`.

`train` is a generator. Its caller owns logging, checkpoints and when to stop, so training can be
watched, cut short and continued without callbacks. Records hold device tensors; `read_records`
brings many to the host at once, so that no step waits for the device.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import record_function

from efftrain_cli.data.windows import Windows
from efftrain_cli.foundation.step import Batch, Progress, StepPlan, StepResult
from efftrain_cli.model.flops import peak_flops
from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.plan.plan import (
    after_evaluation,
    after_step,
    method_columns,
    plan_step,
    reads_val_loss,
    stage_ended,
)
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sections import Checkpoint
from efftrain_cli.training.build import autocast, compute_dtype
from efftrain_cli.training.compiling import (
    compile_seconds,
    freeze_objects,
    may_compile,
    micro_batch_shapes,
)
from efftrain_cli.training.devices import Devices
from efftrain_cli.training.gradient import build_forward_backward
from efftrain_cli.training.internals import UpdateWatch, measure_activations
from efftrain_cli.training.ranks import ALONE, Ranks
from efftrain_cli.training.state import TrainState
from efftrain_cli.training.stopwatch import CommStats, Stopwatch
from efftrain_cli.training.strategy import single_device


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One finished step, or step 0: the state before training, with its validation loss only."""

    progress: Progress
    """Progress after the step, except `best_loss` and `train_seconds`: see `read_records`."""
    plan: StepPlan | None = None
    result: StepResult | None = None
    val_loss: Tensor | None = None
    """0-d fp32, nats per token at full length, all blocks, measured after the step's update."""
    position_losses: Mapping[str, Tensor] = field(default_factory=dict)
    """Column -> validation loss of a stretch of positions; empty unless [eval] positions is set."""
    training: Stopwatch | None = None
    evaluation: Stopwatch | None = None
    devices: int = 1
    """Number of devices that shared the step."""
    comm: CommStats | None = None
    """Communication time of this rank in the step; None for a single process."""
    compile_seconds: float = 0.0
    """Seconds of the step spent compiling; they are not training time."""


def evaluate(
    model: GPT,
    windows: Tensor,
    micro_batch_tokens: int,
    dtype: str,
    ranks: Ranks = ALONE,
) -> Tensor:
    """Return the mean cross-entropy of validation windows (n, seq_len + 1): 0-d fp32, nats a token.

    It is measured at full length with all blocks, and touches no training state and no random
    generator. The ranks share the windows; the result is that of one process, bit for bit.
    """

    def loss_sum(chunk: Tensor) -> Tensor:
        return model.loss_sum(chunk[:, :-1], chunk[:, 1:])

    sums = _sum_over_chunks(model, windows, micro_batch_tokens, dtype, ranks, loss_sum)
    # Added in order, which decides the last bits.
    return reduce(add, sums.unbind()) / windows[:, 1:].numel()


def loss_by_position(
    model: GPT,
    windows: Tensor,
    micro_batch_tokens: int,
    dtype: str,
    ranks: Ranks = ALONE,
) -> dict[str, Tensor]:
    """Return the mean cross-entropy of each stretch of positions, in a forward pass of its own.

    Windows and settings are those of `evaluate`. The keys are columns, `val_loss_from_POSITION`;
    values are 0-d fp32, nats per token.
    """
    seq_len = windows.shape[1] - 1

    def losses(chunk: Tensor) -> Tensor:
        hidden = model.hidden(chunk[:, :-1])
        logits = model.head(hidden).float().flatten(0, 1)
        targets = chunk[:, 1:].flatten()
        by_target = F.cross_entropy(logits, targets, reduction="none")
        return by_target.view(-1, seq_len).sum(0)

    sums = _sum_over_chunks(model, windows, micro_batch_tokens, dtype, ranks, losses, seq_len)
    means = sums.sum(0) / len(windows)
    # The stretches begin at 0, and at 1/16, 1/8, 1/4 and 1/2 of the context.
    sixteenths = (0, 1, 2, 4, 8, 16)
    borders = sorted({seq_len * part // 16 for part in sixteenths})
    columns = {}
    for start, end in itertools.pairwise(borders):
        columns[f"val_loss_from_{start}"] = means[start:end].mean()
    return columns


def _sum_over_chunks(
    model: GPT,
    windows: Tensor,
    micro_batch_tokens: int,
    dtype: str,
    ranks: Ranks,
    losses_of: Callable[[Tensor], Tensor],
    *size: int,
) -> Tensor:
    """Return `losses_of(chunk)` of each chunk of the windows, (chunks, *size).

    The ranks share the chunks.

    Args:
        losses_of: returns a tensor (*size,).
        size: () for a loss per chunk, (seq_len,) for one per position.
    """
    seq_len = windows.shape[1] - 1
    chunks = windows.split(max(1, micro_batch_tokens // seq_len))
    device = model.device
    sums = torch.zeros(len(chunks), *size, device=device)
    with torch.no_grad(), autocast(dtype, device), attention_kernels(device, same_shape=True):
        for first in range(0, len(chunks), ranks.world_size):
            number = first + ranks.rank
            if number < len(chunks):
                sums[number] = losses_of(chunks[number].to(device, non_blocking=True))
            elif model.lockstep:
                # The other ranks' passes need this one's weights.
                losses_of(chunks[-1].to(device, non_blocking=True))

    ranks.barrier()
    ranks.all_reduce([sums])
    return sums


def train(
    state: TrainState,
    recipe: Recipe,
    train_data: Windows,
    val_windows: Tensor,
    until: int | None = None,
    devices: Devices | None = None,
) -> Iterator[StepRecord]:
    """Train `state` in place; yield a record per step until the token budget, step `until` or the
    stage's end.

    After the end of a stage the caller grows the state and calls `train` again. A fresh state
    yields a record for step 0 first. The last step is always evaluated. A step whose loss or
    gradient is not finite changes nothing, and no later step does; `read_records` reports it.

    Args:
        val_windows: the fixed validation set, token ids, (n, seq_len + 1).
        devices: this process alone if None.
    """
    devices = devices or single_device(recipe, state.model, state.method_tensors)
    device = state.model.device
    ranks = devices.ranks
    sharing = devices.sharing
    forward_backward = build_forward_backward(recipe, state.model, device, devices)
    ahead = Ahead(train_data, sharing, device)
    clock = StepClock(recipe, device)
    gc.unfreeze()  # what an earlier training froze may be garbage by now
    if state.progress.step == 0 or state.progress.evaluation_due:
        yield evaluate_first(state, recipe, val_windows, devices)

    while not is_spent(state.progress, recipe, until) and not stage_ended(recipe, state.progress):
        devices.begin_step(state)
        plan = plan_step(recipe, state.progress, sharing.world_size)
        ranks.pop_comm_stats()  # drops an evaluation's, which is no part of this step
        devices.patient = clock.start(plan)
        # Until the update a signal may stop the step anywhere; from there on the step is finished
        # first.
        with ranks.interruptible(rescuable=True):
            batch = ahead.batch(plan)
            with record_function("gradient"):
                result = forward_backward(batch, plan)
            progress = after_step(recipe, state.progress, plan, result)
            if progress.tokens < recipe.train.tokens and progress.step != until:
                ahead.fetch(plan_step(recipe, progress, sharing.world_size))
        result = apply_step(state, recipe, plan, result, devices)
        state.progress = progress
        training, compiling = clock.stop()
        record = StepRecord(
            progress=state.progress,
            plan=plan,
            result=result,
            training=training,
            devices=ranks.world_size,
            comm=ranks.pop_comm_stats(),
            compile_seconds=compiling,
        )

        due = plan.evaluate or stage_ended(recipe, state.progress)
        last = plan.step == until or state.progress.tokens >= recipe.train.tokens
        with_internals = recipe.eval.measures_internals(plan.step)
        saves = last or saves_at(recipe.checkpoint, plan.step)
        devices.end_step(state, due or with_internals, saves)
        if with_internals:
            record = measure_internals(record, state, recipe, val_windows, devices)
        if due or plan.step == until:
            try:
                record = evaluate_state(record, state, recipe, val_windows, devices)
            except devices.survivable(state):
                # The step itself is finished: yield its row now. A resumed run repeats the
                # evaluation.
                state.progress = state.progress._replace(evaluation_due=due)
                yield record
                raise
            # A run that is cut at `until` must continue like one that is not: an evaluation that
            # only `until` caused decides nothing.
            if due:
                decide_by_evaluation(state, recipe, record)
            record = replace(record, progress=state.progress)
        yield record
        if record.compile_seconds:
            freeze_objects()


def is_spent(progress: Progress, recipe: Recipe, until: int | None) -> bool:
    """Return whether the token budget or step `until` is reached."""
    spent = progress.tokens >= recipe.train.tokens
    return spent or (until is not None and progress.step >= until)


class Ahead:
    """Reads and sends the next step's batch while a CUDA device is busy with the step before."""

    def __init__(self, windows: Windows, sharing: Ranks, device: torch.device) -> None:
        self._windows = windows
        self._sharing = sharing
        self._device = device
        self._plan: StepPlan | None = None

    def fetch(self, plan: StepPlan) -> None:
        """Read this rank's share of the batch of `plan` and send it to the device."""
        with record_function("data"):
            batch = self._windows.batch(plan, self._sharing.rank, self._sharing.world_size)
            self._batch = batch.to(self._device)
        self._plan = plan

    def batch(self, plan: StepPlan) -> Batch:
        """Return the batch of `plan`, fetched before or now."""
        if self._plan != plan:
            self.fetch(plan)
        return self._batch


class StepClock:
    """Measure the seconds of each step, and those spent compiling in it."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._may_compile = may_compile(recipe, device)
        self._device = device
        self._shapes = set[tuple[int, int]]()

    def start(self, plan: StepPlan) -> bool:
        """Begin a step; return whether it may take long, as the first one and a compiling one."""
        first = not self._shapes
        new_shapes = micro_batch_shapes(plan) - self._shapes
        self._shapes |= new_shapes
        compiling = self._may_compile and bool(new_shapes)
        # Compilation begins while the device is busy with earlier steps, whose time is not this
        # step's: wait until it is idle.
        self._training = Stopwatch(self._device, idle=compiling)
        self._compiled = compile_seconds()
        return first or compiling

    def stop(self) -> tuple[Stopwatch, float]:
        """End the step; return its stopwatch and the seconds spent compiling."""
        return self._training.stop(), compile_seconds() - self._compiled


def evaluate_state(
    record: StepRecord,
    state: TrainState,
    recipe: Recipe,
    val_windows: Tensor,
    devices: Devices,
) -> StepRecord:
    """Return `record` with the validation loss of `state`."""
    ranks = devices.ranks
    watch = Stopwatch(state.model.device)
    dtype = compute_dtype(recipe, state.model.device)
    size = recipe.train.micro_batch_tokens
    positions = {}
    with ranks.interruptible():
        loss = evaluate(state.model, val_windows, size, dtype, ranks)
        if recipe.eval.positions:
            positions = loss_by_position(state.model, val_windows, size, dtype, ranks)
    return replace(record, val_loss=loss, position_losses=positions, evaluation=watch.stop())


def measure_internals(
    record: StepRecord,
    state: TrainState,
    recipe: Recipe,
    val_windows: Tensor,
    devices: Devices,
) -> StepRecord:
    """Return `record` with the columns of `measure_activations` of the first validation window."""
    assert record.result is not None
    dtype = compute_dtype(recipe, state.model.device)
    with devices.ranks.peer_errors():
        columns = measure_activations(state.model, val_windows[:1], dtype)
    result = record.result._replace(scalars={**record.result.scalars, **columns})
    return replace(record, result=result)


def evaluate_first(
    state: TrainState,
    recipe: Recipe,
    val_windows: Tensor,
    devices: Devices,
) -> StepRecord:
    """Evaluate `state` before its next step; return the record."""
    record = StepRecord(progress=state.progress)
    record = evaluate_state(record, state, recipe, val_windows, devices)
    state.progress = state.progress._replace(evaluation_due=False)
    if state.progress.step > 0:
        decide_by_evaluation(state, recipe, record)
    return replace(record, progress=state.progress)


def decide_by_evaluation(state: TrainState, recipe: Recipe, record: StepRecord) -> None:
    """Update the progress by the validation loss if a method of the recipe reads it."""
    if reads_val_loss(recipe, state.progress) and record.val_loss is not None:
        state.progress = after_evaluation(recipe, state.progress, float(record.val_loss))


def saves_at(checkpoint: Checkpoint, step: int) -> bool:
    """Return whether `checkpoint.every` counts steps and `step` is a multiple of it."""
    return isinstance(checkpoint.every, int) and step % checkpoint.every == 0


def apply_step(
    state: TrainState,
    recipe: Recipe,
    plan: StepPlan,
    result: StepResult,
    devices: Devices,
) -> StepResult:
    """Update `state` by the gradient in `.grad`; return the result with the update's measures."""
    watch = None
    if recipe.eval.measures_internals(plan.step):
        names = [name for name, _ in state.model.named_parameters()]
        watch = UpdateWatch(names, devices, result.norms)
    with record_function("optimizer"):
        grad_norm = update(
            state,
            lr=plan.lr,
            grad_clip=recipe.optim.grad_clip,
            loss=result.scalars["loss"],
            grad_norm=result.grad_norm,
            devices=devices,
            watch=watch,
        )
    if result.method_tensors is not None:
        state.method_tensors.clear()
        state.method_tensors.update(result.method_tensors)

    scalars = dict(result.scalars)
    with record_function("measures"):
        scalars["grad_norm"] = grad_norm
        scalars |= devices.optimizer_columns(state)
        if watch is not None:
            scalars |= watch.end()
        scalars["nonfinite"] = state.nonfinite
    # A record waits to be read: it must not keep gradients alive.
    return result._replace(scalars=scalars, norms=None, method_tensors=None)


def update(
    state: TrainState,
    lr: float,
    grad_clip: float,
    loss: Tensor,
    grad_norm: Tensor | None = None,
    devices: Devices | None = None,
    watch: UpdateWatch | None = None,
) -> Tensor:
    """Clip the gradients in `.grad`, step the optimizer at `lr`, and set `.grad` to None.

    If `loss` or the gradient norm is not finite, weights, moments and step counts stay as they are,
    now and in every later call.

    Args:
        grad_clip: largest gradient norm; 0 clips nothing.
        grad_norm: norm before clipping of gradients that are clipped already.

    Returns:
        The gradient norm before clipping, 0-d fp32.
    """
    devices = devices or Devices()
    parameters = devices.take_gradients(state)
    if watch is not None:
        watch.begin(parameters)
    if grad_norm is None:
        grad_norm = devices.gradient_norm(parameters)
        if grad_clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, grad_norm)
    finite = torch.isfinite(grad_norm) & torch.isfinite(loss)
    state.nonfinite = torch.maximum(state.nonfinite, (~finite).float())
    state.optimizer.step(lr, found_inf=state.nonfinite)
    for parameter in parameters:
        parameter.grad = None
    return grad_norm


def read_records(
    state: TrainState,
    recipe: Recipe,
    records: Sequence[StepRecord],
) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl for `records`, read in one transfer from the device.

    The only writer of `progress.best_loss` and `progress.train_seconds`: call it on every record,
    in order, and before a checkpoint is written. Values that are not finite become None, with
    `nonfinite` True.
    """
    if not records:
        return []
    device = state.nonfinite.device
    peak = None
    if device.type == "cuda":
        dtype = compute_dtype(recipe, device)
        peak = peak_flops(torch.cuda.get_device_name(device), dtype)

    best_loss = state.progress.best_loss
    train_seconds = state.progress.train_seconds
    rows = []
    for record, measured in zip(records, _read_scalars(records), strict=True):
        row = _state_columns(record, measured)
        if record.plan and record.result and record.training:
            seconds = record.training.seconds() - record.compile_seconds
            train_seconds += seconds
            row |= _step_columns(record, measured, best_loss, seconds, peak)
            row |= method_columns(recipe, record.plan, record.result)
            loss = measured["loss"]
            is_valid = not math.isnan(loss) and not measured["nonfinite"]
            if is_valid and (best_loss is None or loss < best_loss):
                best_loss = loss
        row["train_seconds"] = train_seconds
        rows.append(row)
    state.progress = state.progress._replace(best_loss=best_loss, train_seconds=train_seconds)
    return rows


def _read_scalars(records: Sequence[StepRecord]) -> list[dict[str, float]]:
    """Read the device tensors of `records`, by column, in one transfer."""
    scalars = []
    for record in records:
        columns = dict(record.result.scalars) if record.result else {}
        if record.val_loss is not None:
            columns |= {**record.position_losses, "val_loss": record.val_loss}
        scalars.append(columns)

    tensors = []
    for columns in scalars:
        tensors += [tensor.float() for tensor in columns.values()]
    values = iter(torch.stack(tensors).tolist())
    # The values come back in the order of the columns.
    measured = []
    for columns in scalars:
        measured.append({name: next(values) for name in columns})
    return measured


def _state_columns(record: StepRecord, measured: dict[str, float]) -> dict[str, Any]:
    """Return the columns of a state, trained or not; take validation losses out of `measured`."""
    progress = record.progress
    row: dict[str, Any] = {
        "step": progress.step,
        "segment": progress.segment,
        "stage": progress.stage,
        "tokens": progress.tokens,
        "tokens_discarded": progress.tokens_discarded,
        "windows": progress.windows,
        "sequences": progress.sequences,
        "total_flops": progress.flops,
        "val_loss": finite_or_none(measured.pop("val_loss", math.nan)),
    }
    for name in record.position_losses:
        row[name] = finite_or_none(measured.pop(name))
    row["eval_seconds"] = 0.0
    if record.evaluation is not None:
        row["eval_seconds"] = record.evaluation.seconds()
    return row


def _step_columns(
    record: StepRecord,
    measured: Mapping[str, float],
    best_loss: float | None,
    seconds: float,
    peak: float | None,
) -> dict[str, object]:
    """Return the columns of a trained step.

    Args:
        measured: the record's scalars, by column.
        best_loss: lowest loss of an earlier step.
        seconds: training time of the step.
        peak: FLOPs per second that one device reaches at most.
    """
    plan = record.plan
    result = record.result
    training = record.training
    assert plan and result and training
    loss_ratio = mfu = cpu_seconds = comm_seconds = wait_seconds = None
    if best_loss is not None:
        loss_ratio = finite_or_none(measured["loss"] / best_loss)
    if peak is not None:
        mfu = result.flops / seconds / (peak * record.devices)
    if record.devices == 1:
        cpu_seconds = training.cpu_seconds
    if record.comm is not None:
        comm_seconds = record.comm.comm_seconds()
        wait_seconds = record.comm.wait_seconds
    return {
        "seq_len": plan.seq_len,
        "batch_size": plan.batch_size,
        "accumulation_steps": plan.accumulation_steps,
        "lr": plan.lr,
        # An optimizer without second moments has no such columns.
        "adam_sqrt_v_l1": None,
        "adam_sqrt_v_max": None,
        **{name: finite_or_none(value) for name, value in measured.items()},
        "loss_ratio": loss_ratio,
        "nonfinite": bool(measured["nonfinite"]),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "compile_seconds": record.compile_seconds,
        "comm_seconds": comm_seconds,
        "wait_seconds": wait_seconds,
        "tokens_per_second": result.tokens / seconds,
        "flops": result.flops,
        "flops_without_logits": result.flops_without_logits,
        "optimizer_flops": result.optimizer_flops,
        "mfu": mfu,
    }


def finite_or_none(value: float) -> float | None:
    """Return `value`, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
