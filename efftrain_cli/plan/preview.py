"""The plan of a whole run, for reading before anything is spent: its totals, or every step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from efftrain_cli.foundation.step import Progress
from efftrain_cli.plan.plan import EqualSteps, plan_equal_steps, plan_run
from efftrain_cli.recipe.recipe import Recipe

CSV_COLUMNS = (
    "step,tokens,lr,batch_size,seq_len,accumulation_steps,windows,tokens_discarded,evaluate"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """What a plan adds up to."""

    steps: int
    tokens: int
    windows: int
    flops: float
    """0 where the vocabulary is not known yet."""
    largest_micro_batch: tuple[int, int]
    """(sequences, seq_len) of the micro-batch with the most tokens: what memory must hold."""
    shapes: frozenset[tuple[int, int]]
    """(sequences, seq_len) of the steps."""
    smallest_batch: int
    """Fewest sequences of a step."""
    end: Progress
    """Progress after the last step."""
    groups: tuple[EqualSteps, ...]
    """All steps, in order."""


def summarize_plan(
    recipe: Recipe,
    progress: Progress = Progress(),
    vocab_size: int | None = None,
    until: int | None = None,
) -> PlanSummary:
    """Add up the plan from `progress` to the end of the budget, or to step `until`."""
    train = recipe.train
    largest_batch = 0
    for method in recipe.methods.values():
        largest_batch = max(largest_batch, method.batch_bounds(train.batch_size)[1])

    largest = (0, 0, 0)  # (tokens, seq_len, sequences)
    shapes = set()
    smallest_batch = train.batch_size
    groups = tuple(plan_equal_steps(recipe, progress, vocab_size, until))
    for plan, _, _ in groups:
        smallest_batch = min(smallest_batch, plan.batch_size)
        shapes.add((plan.batch_size, plan.seq_len))
        sequences = math.ceil(plan.batch_size / plan.accumulation_steps)
        if "steps" in recipe.varies:
            # The batch may yet grow until the micro-batches are full; a step that measures has two
            # of them at least.
            fits = max(1, train.micro_batch_tokens // plan.seq_len)
            sequences = max(sequences, min(fits, math.ceil(largest_batch / 2)))
        largest = max(largest, (sequences * plan.seq_len, plan.seq_len, sequences))

    end = progress
    if groups:
        end = groups[-1].after
    _, seq_len, sequences = largest
    return PlanSummary(
        steps=end.step,
        tokens=end.tokens,
        windows=end.windows,
        flops=end.flops,
        largest_micro_batch=(sequences, seq_len),
        shapes=frozenset(shapes),
        smallest_batch=smallest_batch,
        end=end,
        groups=groups,
    )


def csv_lines(
    recipe: Recipe,
    until: int | None = None,
    vocab_size: int | None = None,
    progress: Progress = Progress(),
) -> Iterator[str]:
    """Yield every step after `progress` as a line of CSV under a header; `tokens` and `windows` are
    counted after the step. A stage that ends by FLOPs does so if `vocab_size` is given."""
    yield CSV_COLUMNS
    for plan, after in plan_run(recipe, progress, vocab_size):
        if until is not None and plan.step > until:
            return
        yield (
            f"{plan.step},{after.tokens},{plan.lr:.9g},{plan.batch_size},{plan.seq_len},"
            f"{plan.accumulation_steps},{after.windows},{after.tokens_discarded},{int(plan.evaluate)}"
        )


def staged_warnings(recipe: Recipe, end: Progress) -> Iterator[str]:
    """Yield what is probably not meant about the stages of a plan that ends with `end`.

    Nothing is known of a plan that ends before the budget, or in which a loss or FLOPs that it does
    not count end a stage.
    """
    budget = recipe.train.tokens
    optim = recipe.optim
    if not recipe.stages or end.tokens < budget:
        return
    for stage in recipe.stages:
        switch = stage.switch
        if switch is None:  # of the last stage
            continue
        if switch.reads_val_loss() or (switch.rule == "flops" and not end.flops):
            return

    decay = optim.decay_tokens or budget
    by_tokens = optim.has_end and optim.decay_steps is None
    if end.stage + 1 < len(recipe.stages):
        yield (
            f"the budget, train.tokens = {budget:,}, ends in stage {end.stage}:"
            " the model never grows to [model]; raise it, or end the stage earlier"
        )
    elif by_tokens and decay > 1.01 * end.schedule_tokens:
        yield (
            "the schedule jumps back at each growth,"
            f" so at train.tokens = {budget:,} it stands at {end.schedule_tokens:,} tokens,"
            f" before the end of its decay at {decay:,}: the learning rate ends above min_lr;"
            f" set optim.decay_tokens = {end.schedule_tokens:_}"
        )
