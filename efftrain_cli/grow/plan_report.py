"""Write out what `efftrain grow` did, and when it would grow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from efftrain_cli.foundation.console import Row, table_lines
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.grow.planner import THRESHOLDS, Curve, equal_marginal_cost, saving, smooth
from efftrain_cli.methods.stages import Operator
from efftrain_cli.model.flops import flops_per_token
from efftrain_cli.plan.plan import model_config
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.names import find_run
from efftrain_cli.run.origin import origin_data
from efftrain_cli.run.stability import validation_curve

if TYPE_CHECKING:
    from efftrain_cli.grow.grow import Grown


def growth_lines(grown: Grown, weights_only: bool) -> Iterator[str]:
    """Yield what a growth did, and the command that continues it."""
    record = grown.record
    source = grown.checkpoint.parent.parent.name
    yield f"run         {grown.run}, from {source} after step {record.step}"
    yield f"parameters  {record.parameters_before:,} -> {record.parameters_after:,}"
    yield (
        f"loss        {record.val_loss_before:.6f} -> {record.val_loss_after:.6f} nats"
        " per token on the same validation windows"
    )
    yield f"logits      largest difference {grown.largest_logit_difference:.2g}"
    if not record.preserves_loss:
        yield "            (these variants do not keep the loss)"
    if weights_only:
        yield (
            "lost        the optimizer's moments and step counters:"
            " expect a higher loss for about a hundred steps"
        )
    yield ""
    resume = f"  efftrain pretrain --resume {grown.run.name}"
    if grown.budget_left:
        yield f"next        {grown.budget_left:,} tokens are left"
        yield resume
    else:
        budget = f"train.tokens = {grown.recipe.train.tokens:,}"
        yield f"next        nothing is left of {budget}, which counts the tokens before the growth"
        yield f"{resume} --set train.tokens=N   (N tokens in all)"


def read_curve(name: str) -> Curve:
    """Return the smoothed curve of a run, with the FLOPs of its steps, logits included.

    Raises:
        UsageError: there is no such run, its steps do not all cost the same, or its evaluations are
            too few.
    """
    run = find_run(name)
    recipe = load_recipe(str(run / "recipe.toml"))
    if recipe.methods:
        raise UsageError(
            f"run {name!r} uses {', '.join(recipe.methods)}\n"
            "  plan with runs from scratch whose steps all cost the same"
        )
    config = model_config(recipe, int(origin_data(run)["vocab_size"]))
    per_token = flops_per_token(config, config.seq_len, config.n_layer).with_logits
    step_flops = per_token * recipe.train.batch_size * config.seq_len
    points = [point for point in validation_curve(latest_rows(run)) if point[0] > 0]
    steps, losses = np.array(points, dtype=float).reshape(-1, 2).T
    try:
        return smooth(steps, losses, step_flops)
    except UsageError as error:
        raise UsageError(f"{run.name}: {error}") from None


def threshold_of(operators: Sequence[Operator]) -> float:
    """Return the released slope threshold of these operators.

    Raises:
        UsageError: the released code has none for them.
    """
    kinds = sorted({operator.kind for operator in operators})
    threshold = THRESHOLDS.get(tuple(kinds))
    if threshold is None:
        raise UsageError(
            "--plan needs --operator width, depth,"
            " or both, for which the slope to grow at was released"
        )
    return threshold


def plan_lines(small: Curve, target: Curve | None, threshold: float) -> Iterator[str]:
    """Yield when to grow by each rule, and what it would save."""
    rules = {f"slope above {threshold}": small.switch(threshold)}
    if target is not None:
        rules["equal marginal cost"] = equal_marginal_cost(small, target)
    rows: list[Row] = []
    for rule, step in rules.items():
        if step is None:
            rows.append((rule, "never", "", "", ""))
            continue
        cells = ["", "", ""]
        if target is not None:
            start = float(target.steps_to(small.loss_at(step)))
            # The target may never have the loss.
            if math.isfinite(start):
                share = saving(small, target, step)
                cells = [f"{start:,.0f}", f"{share:.1%}", f"{start / step:.3f}"]
        rows.append((rule, f"{step:,.0f}", *cells))
    head = ("rule", "grow at step", "target's step", "saves", "schedule_ratio")
    yield from table_lines(head, rows)
    if target is None:
        yield "--target RUN, of the target's size, adds equal marginal cost and the savings"
    else:
        yield "projected from two runs from scratch; no grown run was measured"
