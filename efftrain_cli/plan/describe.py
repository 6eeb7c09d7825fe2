"""Describe text, model, steps and result of a run in lines of `pretrain` and its `--plan`. No
torch."""

from __future__ import annotations

from efftrain_cli.foundation.console import human, human_seconds, listed
from efftrain_cli.foundation.step import Progress
from efftrain_cli.model.flops import parameter_count
from efftrain_cli.plan.plan import model_config, plan_step
from efftrain_cli.plan.preview import PlanSummary
from efftrain_cli.recipe.optim import Optim
from efftrain_cli.recipe.recipe import Recipe

LABEL = 8
"""Columns of a line's label."""
STUCK = 0.01
"""A final loss this near to that of token frequencies alone, as a share of it, is stuck there."""


def text_line(recipe: Recipe, tokens: int, epochs: float) -> str:
    """Return the training text, its tokens, and how often the run reads it."""
    size = f"{human(tokens)} tokens for training; {epochs:.2f} epochs"
    return f"text    {recipe.data.named_text}: {size}"


def model_line(recipe: Recipe, vocab_size: int) -> str:
    """Return the shape of [model], and of earlier stages."""
    model = recipe.model
    shapes = [recipe.model_at(stage) for stage in range(len(recipe.stages))] or [model]
    shape = " -> ".join(f"{each.n_layer} x {each.n_embd}" for each in shapes)
    parameters = human(parameter_count(model_config(recipe, vocab_size)))
    return f"model   {shape}, context {model.seq_len:,}: {parameters} parameters"


def steps_line(recipe: Recipe, summary: PlanSummary) -> str:
    """Return number and size of the steps that are left, and what changes from step to step."""
    plans = [group.plan for group in summary.groups]
    if not plans:
        return "steps   none left"
    sizes = sorted(plan.batch_size * plan.seq_len for plan in plans)
    size = f"{sizes[0]:,}"
    if sizes[-1] > sizes[0]:
        size += f" to {sizes[-1]:,}"
    about = "about " if "steps" in recipe.varies else ""
    first = plans[0]
    begin = f"{first.step:,} to " if first.step > 1 else ""  # a branch has its parent's steps
    parts = [f"steps   {about}{begin}{summary.steps:,} of {size} tokens"]
    last = plans[-1]
    parts.append(_rate(recipe.optim))
    if first.seq_len != last.seq_len:
        parts.append(f"length {first.seq_len:,} to {last.seq_len:,} from step {last.step:,} on")
    if first.batch_size != last.batch_size:
        parts.append(
            f"batch {first.batch_size:,} to {last.batch_size:,} from step {last.step:,} on"
        )
    grown = []
    for before, after in zip(summary.groups, summary.groups[1:], strict=False):
        if after.after.stage > before.after.stage:
            grown.append(f"{before.after.step:,}")
    if grown:
        parts.append(f"grows after step {listed(grown)}")
    # Layer dropping: growth also changes the number of blocks.
    keep = plan_step(recipe, summary.end).keep
    if not grown and min(keep) < 1:
        blocks = f"{sum(first.keep):.3g}"
        end = f"{sum(keep):.3g}"
        if end != blocks:
            blocks += f" to {end}"
        parts.append(f"{blocks} blocks")
    return "; ".join(parts)


def _rate(optim: Optim) -> str:
    """Return the learning rate's schedule."""
    text = f"lr {optim.lr:g}"
    if optim.warmup_steps:
        text += f" after {optim.warmup_steps:,}"
    if not optim.has_end:
        return f"{text}, {optim.schedule.replace('_', ' ')}"
    over = ""
    if optim.decay_share is not None:
        over = f" over the last {100 * optim.decay_share:g} %"
    return f"{text}, {optim.schedule}{over} to {optim.min_lr:g}"


def is_stuck(val_loss: float, frequencies: float) -> bool:
    """Return whether a loss is that of token frequencies alone, both in nats per token."""
    return abs(val_loss / frequencies - 1) < STUCK


def result_line(progress: Progress, val_loss: float, frequencies: float) -> str:
    """Return what came of a run.

    Args:
        val_loss: last validation loss, nats per token.
        frequencies: the loss of token frequencies alone, nats per token.
    """
    result = f"result  val loss {val_loss:.4f} nats/token"
    if is_stuck(val_loss, frequencies):
        return f"{result}: stuck; token frequencies alone give {frequencies:.3f}"
    return (
        f"{result}; {human(progress.tokens)} tokens, {human(progress.flops, 'FLOP')}s,"
        f" {human_seconds(progress.train_seconds)}"
    )
