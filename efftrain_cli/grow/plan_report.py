"""Write out what `efftrain grow` did, and what its planners found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from efftrain_cli.foundation.console import human_count, human_flops, table_lines
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.grow.planner import (
    PAPER_OPTIMALITY,
    PAPER_THRESHOLD,
    Curve,
    equal_marginal_cost,
    fitted_switch,
    make_curve,
    project,
)
from efftrain_cli.grow.scaling_law import (
    FittedLaw,
    PlannedStage,
    ScalingLaw,
    fit_law,
    relative_cost,
)
from efftrain_cli.methods.staged_growth import Operator
from efftrain_cli.model.flops import flops_per_token
from efftrain_cli.plan.plan import model_config
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.names import find_run
from efftrain_cli.run.origin import origin_data

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
    before = " ".join(f"{value:.4f}" for value in grown.logits_before)
    after = " ".join(f"{value:.4f}" for value in grown.logits_after)
    yield (
        f"logits      {before} ... -> {after} ...,"
        f" largest difference {grown.largest_logit_difference:.2g}"
    )
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


def schedule_lines(
    law: ScalingLaw,
    planned: list[PlannedStage],
    batch: str,
    fitted_to: FittedLaw | None = None,
) -> Iterator[str]:
    """Yield a schedule planned from the scaling law."""
    formula = (
        f"L(N, S) = ({law.n_c:.3g} / N)^{law.alpha_n:.3g} +"
        f" (2 x {law.s_c:.3g} / S)^{law.alpha_s:.3g} nats per token"
    )
    target = planned[-1]
    if fitted_to is None:
        yield (
            f"{formula}: Kaplan et al. 2020's constants, fitted to their models and data,"
            " not to yours."
        )
    else:
        yield formula
        sizes = fitted_to.sizes
        yield (
            f"Fitted to models of {human_count(sizes[0])} to {human_count(sizes[-1])} parameters"
            f" and up to {fitted_to.last_step:,.0f} steps;"
            f" it misses their losses by {fitted_to.rms:.1%} (rms)."
        )
        if any(stage.size > 1.01 * sizes[-1] or stage.size < 0.99 * sizes[0] for stage in planned):
            yield (
                "Beyond these sizes it is an extrapolation:"
                f" take the schedule to {human_count(target.size)} parameters as a guess."
                " The exponents change with the runs that are fitted."
            )
    yield "N: parameters without embeddings. FLOPs: 6 N per token, without attention and logits."
    yield ""
    head = ("stage", "parameters", "until loss", "steps", "batch, tokens", "tokens", "FLOPs")
    rows = []
    for index, stage in enumerate(planned):
        counts = (f"{stage.steps:,.0f}", f"{stage.batch_tokens:,.0f}")
        tokens = human_count(stage.steps * stage.batch_tokens)
        size = human_count(stage.size)
        rows.append(
            (str(index), size, f"{stage.loss:.4f}", *counts, tokens, f"{human_flops(stage.flops)}s")
        )
    yield from table_lines(head, rows)
    yield ""
    single = law.optimal_size(target.loss)
    yield (
        f"{relative_cost(law, planned):.3f} of the FLOPs of the best single stage"
        f" to a loss of {target.loss:.4f} ({human_count(single)} parameters),"
        f" {'a batch of one size' if batch == 'fixed' else 'the critical batch of each stage'}."
    )
    for small, large in pairwise(planned):
        factor = large.size / small.size
        yield (
            f"growth x {factor:.2f} in parameters: {law.same_loss_steps(factor):.3f} steps"
            " of the smaller model for one of the larger at the same loss"
        )
    yield (
        "slope d log L / d log C at which a single size is the cheapest for its loss:"
        f" {law.optimal_slope():.7f}"
    )


def curve_of(source: str, window: int = 31) -> Curve:
    """Read the validation curve of a run, to be fitted over `window` evaluations.

    Raises:
        UsageError: there is no such run, its steps do not all cost the same, or its evaluations are
            too few.
    """
    run = find_run(source)
    recipe = load_recipe(str(run / "recipe.toml"))
    if recipe.methods:
        raise UsageError(
            f"run {source!r} uses {', '.join(recipe.methods)}\n"
            "  plan with runs from scratch whose steps all cost the same"
        )
    vocab_size = int(origin_data(run)["vocab_size"])
    config = model_config(recipe, vocab_size)
    per_token = flops_per_token(config, config.seq_len, config.n_layer)
    tokens = recipe.train.batch_size * config.seq_len
    points = {
        float(row["step"]): float(row["val_loss"])
        for row in latest_rows(run)
        if row.get("val_loss") is not None
    }
    return make_curve(
        source, points, per_token.with_logits * tokens, per_token.without_logits * tokens, window
    )


def law_of(sources: Sequence[str]) -> FittedLaw:
    """Return the scaling law fitted to runs from scratch of several sizes and one batch size.

    Raises:
        UsageError: a curve is refused, the batches differ, or all runs have one size.
    """
    curves = []
    batches = set()
    for source in sources:
        recipe = load_recipe(str(find_run(source) / "recipe.toml"))
        curves.append((12.0 * recipe.model.n_layer * recipe.model.n_embd**2, curve_of(source)))
        batches.add(recipe.train.batch_size * recipe.model.seq_len)
    if len(batches) > 1:
        raise UsageError(
            f"--fit: the runs have batches of {', '.join(f'{b:,}' for b in sorted(batches))}"
            " tokens\n  name runs of one batch size"
        )
    return fit_law(curves, batches.pop())


def threshold_of(operators: Sequence[Operator]) -> float:
    """Return the released slope threshold of these operators.

    Raises:
        UsageError: the released code has none for them.
    """
    kinds = sorted({operator.kind for operator in operators})
    threshold = PAPER_THRESHOLD.get(tuple(kinds))
    if threshold is None:
        raise UsageError(
            "--small needs --operator width, depth,"
            " or both, for which the slope to grow at was released\n"
            "  for other operators, give it: --threshold"
        )
    return threshold


def curve_lines(small: Curve, target: Curve | None, threshold: float) -> Iterator[str]:
    """Yield when to grow, by both rules, and what it would save."""
    yield (
        f"small: {small.name}, {len(small.steps)} evaluations"
        f" of steps {small.steps[0]:.0f} to {small.steps[-1]:.0f}"
    )
    yield (
        f"grow when the slope d log L / d log C rises above {threshold:g} (released threshold),"
        " after its steepest point:"
    )
    yield (
        "  regression"
        f" over {small.window:>2} evaluations:           {_step(fitted_switch(small, threshold))}"
    )
    if target is None:
        yield (
            "give the curve of a run of the target's size too"
            " (--target) for the saving and for equal marginal cost"
        )
        return
    steps = {
        "fitted slope": fitted_switch(small, threshold),
        "equal marginal cost": equal_marginal_cost(small, target),
    }
    yield f"  equal marginal cost with {target.name}:".ljust(44) + _step(
        steps["equal marginal cost"]
    )
    optimum = fitted_switch(target, PAPER_OPTIMALITY)
    yield (
        f"target: {target.name}, {len(target.steps)} evaluations;"
        f" its slope rises above {PAPER_OPTIMALITY} at {_step(optimum)}"
    )
    yield ""
    rows = []
    for rule, step in steps.items():
        projection = project(small, target, step)
        if projection is not None:
            rows.append(
                (
                    rule,
                    f"{projection.small_steps:,.0f}",
                    f"{projection.target_steps:,.0f}",
                    f"{projection.ratio:.2f}",
                    f"{projection.final_steps:,.0f}",
                    f"{100 * projection.saving:.1f} %",
                    f"{100 * projection.saving_with_logits:.1f} %",
                )
            )
    head = ("rule", "S_pre", "S_target", "ratio", "ends at", "saving", "with logits")
    yield from table_lines(head, rows)
    yield ""
    yield (
        "Savings are projected from two runs from scratch: of the target's FLOPs until it ends."
        " No grown run was measured."
    )


def _step(step: float | None) -> str:
    if step is None:
        return "never on this curve"
    return f"step {step:,.0f}"
