"""Decide each step, and what a finished step makes of the run's progress: the methods meet here.

Both functions are pure. Everything that a method decides about a step is decided here and nowhere
else, so a schedule can be printed before anything is spent (`efftrain pretrain --plan`), tested
without a trainer, and resumed exactly.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from efftrain_cli.foundation.step import Progress, StepPlan, StepResult
from efftrain_cli.methods.stages import rewarmup_factor
from efftrain_cli.model.config import GPTConfig
from efftrain_cli.model.flops import flops_per_token
from efftrain_cli.recipe.optim import Optim
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sections import config_of


@cache
def _stage(recipe: Recipe, stage: int) -> tuple[int, Optim]:
    return recipe.model_at(stage).n_layer, recipe.optim_at(stage)


def model_config(recipe: Recipe, vocab_size: int, stage: int | None = None) -> GPTConfig:
    """Return the shape of the recipe's model, of a stage from 0; default: of [model]."""
    return config_of(recipe.model_at(stage), vocab_size)


def plan_step(recipe: Recipe, progress: Progress, ranks: int = 1) -> StepPlan:
    """Decide the step after `progress`. On several `ranks` only the number of micro-batches may
    differ."""
    step = progress.step + 1
    train = recipe.train
    optim = recipe.optim
    n_layer = recipe.model.n_layer
    if recipe.stages:
        n_layer, optim = _stage(recipe, progress.stage)

    full = recipe.model.seq_len
    seq_len = full
    per_window = 1
    batch_size = train.batch_size
    length_warmup = recipe.seq_len_warmup
    if length_warmup is not None:
        seq_len = length_warmup.seq_len_at(step, full)
        batch_size = length_warmup.batch_size_at(seq_len, full, train.batch_size)
        per_window = length_warmup.sequences_per_window_at(seq_len, full)
    if recipe.batch_size_warmup is not None:
        batch_size = recipe.batch_size_warmup.batch_size_at(
            progress.sequences, progress.tokens, train.batch_size
        )
    if recipe.simigrad is not None and progress.batch_size:
        batch_size = progress.batch_size

    tokens = batch_size * seq_len
    lr = optim.lr_at(
        progress.schedule_step + 1,
        progress.schedule_tokens + tokens,
        progress.lr_warmup_tokens,
        optim.decay_tokens or train.tokens,
    )
    measures = False
    if recipe.simigrad is not None:
        measures = recipe.simigrad.measures_at(step)
        lr *= recipe.simigrad.lr_factor(batch_size, train.batch_size)
    if progress.stage:
        stage = recipe.stages[progress.stage]
        lr *= rewarmup_factor(step - progress.stage_step, stage.rewarmup_steps)

    keep: tuple[float, ...] = (1.0,) * n_layer
    scales = None
    layer_drop = recipe.progressive_layer_drop
    if layer_drop is not None:
        keep = layer_drop.keep_probabilities(step, n_layer)
        scales = layer_drop.branch_scales(step, n_layer)

    return StepPlan(
        step=step,
        lr=lr,
        batch_size=batch_size,
        seq_len=seq_len,
        accumulation_steps=accumulation_steps(recipe, batch_size, seq_len, ranks),
        window_start=progress.windows,
        sequences_per_window=per_window,
        keep=keep,
        evaluate=step % recipe.eval.every == 0 or progress.tokens + tokens >= train.tokens,
        branch_scales=scales,
        measure_similarity=measures,
        beta2=optim.beta2_at(tokens),
    )


def accumulation_steps(recipe: Recipe, batch_size: int, seq_len: int, ranks: int) -> int:
    """Count the micro-batches of a step of `batch_size` sequences of `seq_len` tokens.

    As few as hold no more whole sequences each than fit into train.micro_batch_tokens, and one
    sequence if none fits. They differ by at most one sequence. Every rank gets equally
    many; SimiGrad's two halves do too.
    """
    fits = max(1, recipe.train.micro_batch_tokens // seq_len)
    multiple = micro_batch_multiple(recipe, ranks)
    # Rounded up to whole micro-batches, then to a multiple of them.
    return -(-batch_size // fits // multiple) * multiple


def shorten_schedules(recipe: Recipe, half: int, batch_size: int) -> dict[str, Any]:
    """Return the recipe's sections and stages whose schedules are moved into 2 x `half` steps of
    `batch_size` sequences, so that they change before and after step `half`."""
    moved: dict[str, Any] = {}
    for method in recipe.methods.values():
        moved |= method.shortened(recipe, half, batch_size)
    return moved


def micro_batch_multiple(recipe: Recipe, ranks: int) -> int:
    """Return what the number of a step's micro-batches is a multiple of."""
    if recipe.simigrad is None:
        return ranks
    if recipe.is_sharded:
        return 2 * ranks  # its halves are alike on every rank, which runs every pass
    return math.lcm(ranks, 2)


def full_plan(
    recipe: Recipe,
    sequences: int,
    seq_len: int,
    n_layer: int,
    micro_batches: int = 1,
) -> StepPlan:
    """Plan a step that no schedule shortens, with all blocks and all measurements, for probes: its
    rate is 0."""
    scales = None
    if recipe.progressive_layer_drop is not None:
        scales = (1.0,) * n_layer
    return StepPlan(
        step=1,
        lr=0.0,
        batch_size=sequences,
        seq_len=seq_len,
        accumulation_steps=micro_batches,
        window_start=0,
        sequences_per_window=1,
        keep=(1.0,) * n_layer,
        evaluate=False,
        branch_scales=scales,
        measure_similarity=recipe.simigrad is not None,
    )


def after_step(recipe: Recipe, progress: Progress, plan: StepPlan, result: StepResult) -> Progress:
    """Return the run's progress once `plan` has been carried out with `result`.

    `best_loss` and `train_seconds`, which the host reads later, are set by `trainer.read_records`.
    """
    schedule_step = progress.schedule_step + 1
    schedule_tokens = progress.schedule_tokens + result.tokens
    lr_warmup_tokens = progress.lr_warmup_tokens
    if schedule_step <= recipe.optim.warmup_steps:
        lr_warmup_tokens = schedule_tokens
    batch_size = progress.batch_size
    window = progress.simigrad_window
    if recipe.simigrad is not None:
        batch_size, window = recipe.simigrad.decide(plan.batch_size, window, result.simigrad_dots)
    return Progress(  # in the order of its fields: keywords would take as long as all the rest
        plan.step,
        progress.segment,
        progress.stage,
        progress.stage_step,
        progress.stage_curve,
        progress.windows + plan.windows,
        progress.sequences + plan.batch_size,
        progress.tokens + result.tokens,
        progress.tokens_discarded + plan.windows * recipe.model.seq_len - result.tokens,
        progress.flops + result.flops,
        progress.train_seconds,
        batch_size,
        schedule_step,
        schedule_tokens,
        lr_warmup_tokens,
        progress.best_loss,
        progress.evaluation_due,
        window,
    )


def after_evaluation(recipe: Recipe, progress: Progress, val_loss: float) -> Progress:
    """Return the progress once the host has read a validation loss, if the stage's switch reads it.

    Losses of the learning rate's warmup and of the re-warmup after growth say nothing about the
    model's own curve and are left out.
    """
    stage = recipe.stages[progress.stage]
    warming = progress.schedule_step <= recipe.optim.warmup_steps
    rewarming = progress.stage > 0 and progress.step - progress.stage_step <= stage.rewarmup_steps
    if stage.switch is None or warming or rewarming:
        return progress
    curve = stage.switch.with_evaluation(progress.stage_curve, progress.schedule_tokens, val_loss)
    return progress._replace(stage_curve=curve)


def reads_val_loss(recipe: Recipe, progress: Progress) -> bool:
    """Return whether `after_evaluation` needs the validation losses of this stage."""
    if not recipe.stages:
        return False
    switch = recipe.stages[progress.stage].switch
    return switch is not None and switch.reads_val_loss()


def stage_ended(recipe: Recipe, progress: Progress) -> bool:
    """Return whether the model grows before the next step."""
    if progress.stage + 1 >= len(recipe.stages):
        return False
    switch = recipe.stages[progress.stage].switch
    return switch is not None and switch.reached(progress)


def after_growth(recipe: Recipe, progress: Progress) -> Progress:
    """Return the progress with which the next stage begins.

    The schedule stands where a model of the new size would have reached this loss; steps, tokens
    and FLOPs stay what was spent.
    """
    stage = recipe.stages[progress.stage + 1]
    schedule_tokens = round(stage.ratio * progress.schedule_tokens)
    return progress._replace(
        stage=progress.stage + 1,
        stage_step=progress.step,
        stage_curve=(),
        simigrad_window=(),  # gradients of the smaller model say nothing about the larger one's
        schedule_step=round(stage.ratio * progress.schedule_step),
        schedule_tokens=schedule_tokens,
        lr_warmup_tokens=min(progress.lr_warmup_tokens, schedule_tokens),
    )


def plan_run(
    recipe: Recipe,
    progress: Progress = Progress(),
    vocab_size: int | None = None,
) -> Iterator[tuple[StepPlan, Progress]]:
    """Yield every step from `progress` to the end of the budget, each with the progress after it.

    Where a step's outcome decides later ones (adaptive batching, a growth trigger) the plan assumes
    what the method states for it: SimiGrad's batch stays as it is. FLOPs are 0 unless `vocab_size`
    is given.
    """
    while progress.tokens < recipe.train.tokens:
        if stage_ended(recipe, progress):
            progress = after_growth(recipe, progress)
        plan = plan_step(recipe, progress)
        result = assumed_result(recipe, plan, vocab_size, progress.stage)
        progress = after_step(recipe, progress, plan, result)
        yield plan, progress


SUMS = (
    "step",
    "windows",
    "sequences",
    "tokens",
    "tokens_discarded",
    "flops",
    "schedule_step",
    "schedule_tokens",
)
"""Fields of `Progress` that each step adds to."""


class EqualSteps(NamedTuple):
    """Successive steps that cost the same: they differ only in their rate, in the text they read,
    in the blocks that layer dropping expects, and in what is evaluated or measured."""

    plan: StepPlan
    """The first of them."""
    steps: int
    after: Progress
    """Progress after the last of them."""


def plan_equal_steps(
    recipe: Recipe,
    progress: Progress = Progress(),
    vocab_size: int | None = None,
    until: int | None = None,
) -> Iterator[EqualSteps]:
    """Yield the steps of `plan_run` up to step `until`, with equal ones together.

    Of each group only a few steps are planned: the size of steps rises or falls monotonically
    between two phases of a schedule, so all are equal if the first and the last are.
    """
    while progress.tokens < recipe.train.tokens and (until is None or progress.step < until):
        if stage_ended(recipe, progress):
            progress = after_growth(recipe, progress)
        plan = plan_step(recipe, progress)
        steps = _count_equal(recipe, progress, plan, vocab_size, until)
        progress = _after_equal(recipe, progress, plan, steps, vocab_size)
        yield EqualSteps(plan, steps, progress)


def _count_equal(
    recipe: Recipe,
    progress: Progress,
    plan: StepPlan,
    vocab_size: int | None,
    until: int | None,
) -> int:
    """Return how many steps from `plan` on cost the same."""
    # FLOPs decide nothing but the end of a stage.
    counted_for = vocab_size if recipe.stages else None

    def differs(steps: int) -> bool:
        """Return whether the last of so many steps costs something else."""
        before = _after_equal(recipe, progress, plan, steps - 1, counted_for)
        if before.tokens >= recipe.train.tokens or stage_ended(recipe, before):
            return True
        return _size_of(plan_step(recipe, before)) != _size_of(plan)

    most = math.ceil((recipe.train.tokens - progress.tokens) / (plan.batch_size * plan.seq_len))
    if until is not None:
        most = min(most, until - progress.step)
    if recipe.seq_len_warmup is not None:
        ends = [end for end in recipe.seq_len_warmup.until if end >= plan.step]
        most = min([most, *(end - progress.step for end in ends)])
    return 1 + bisect_left(range(2, most + 1), True, key=differs)


def _size_of(plan: StepPlan) -> tuple[int, ...]:
    return plan.batch_size, plan.seq_len, plan.accumulation_steps, plan.sequences_per_window


def _after_equal(
    recipe: Recipe,
    progress: Progress,
    plan: StepPlan,
    steps: int,
    vocab_size: int | None,
) -> Progress:
    """Return the progress after so many steps that cost what `plan` does."""
    mean = plan
    if recipe.progressive_layer_drop is not None and vocab_size is not None:
        last = plan.step + steps - 1
        blocks = recipe.progressive_layer_drop.blocks_over(plan.step, last, len(plan.keep))
        mean = plan._replace(keep=(blocks / steps,))
    result = assumed_result(recipe, mean, vocab_size, progress.stage)
    once = after_step(recipe, progress, plan, result)
    after: dict[str, Any] = {}
    for name in SUMS:
        before = getattr(progress, name)
        after[name] = before + steps * (getattr(once, name) - before)
    warming = min(steps, recipe.optim.warmup_steps - progress.schedule_step)
    if warming > 0:
        after["lr_warmup_tokens"] = progress.schedule_tokens + warming * result.tokens
    return once._replace(**after)


def assumed_result(
    recipe: Recipe,
    plan: StepPlan,
    vocab_size: int | None,
    stage: int = 0,
) -> StepResult:
    """Return what a step is expected to be before it runs: every target trained on, blocks at their
    mean."""
    tokens = plan.batch_size * plan.seq_len
    if vocab_size is None:
        return StepResult(tokens, 0.0)
    config = model_config(recipe, vocab_size, stage)
    blocks = sum(plan.keep)
    per_token = flops_per_token(config, plan.seq_len, blocks)
    of_optimizer = recipe.optim.facts.step_flops(config)
    return StepResult(
        tokens=tokens,
        flops=per_token.with_logits * tokens + of_optimizer,
        flops_without_logits=per_token.without_logits * tokens + of_optimizer,
        optimizer_flops=of_optimizer,
        blocks_executed=blocks,
    )
