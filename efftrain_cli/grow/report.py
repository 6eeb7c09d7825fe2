"""What `efftrain grow --plan` prints: the planners' results as text, and a plot of measured curves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from efftrain_cli.compare import picture
from efftrain_cli.foundation.console import human_count
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.grow.planner import (
    PAPER_OPTIMALITY,
    PAPER_THRESHOLD,
    RELEASED,
    Curve,
    fitted,
    fitted_projection,
    fitted_switch,
    make_curve,
    marginal_projection,
    read_curve,
    released_projection,
    released_switch,
    saving_interval,
    window_for,
)
from efftrain_cli.grow.scaling_law import (
    FittedLaw,
    PlannedStage,
    ScalingLaw,
    fit_law,
    relative_cost,
)
from efftrain_cli.methods.staged_growth import Operator
from efftrain_cli.methods.variance_retention import parse_shape
from efftrain_cli.plan.plan import padded_vocab_size, token_flops
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.run.directory import existing_run, run_names
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.names import find_run
from efftrain_cli.run.origin import origin_data


def schedule_lines(
    law: ScalingLaw, planned: list[PlannedStage], batch: str, fitted_to: FittedLaw | None = None
) -> Iterator[str]:
    """A schedule planned from the scaling law."""
    formula = f"L(N, S) = ({law.n_c:.3g} / N)^{law.alpha_n:.3g} + (2 x {law.s_c:.3g} / S)^{law.alpha_s:.3g} nats per token"
    target = planned[-1]
    if fitted_to is None:
        yield f"{formula}: Kaplan et al. 2020's constants, fitted to their models and data, not to yours."
    else:
        yield formula
        sizes = fitted_to.sizes
        yield (
            f"Fitted to models of {human_count(sizes[0])} to {human_count(sizes[-1])} parameters and up to "
            f"{fitted_to.last_step:,.0f} steps; it misses their losses by {fitted_to.rms:.1%} (rms)."
        )
        if any(stage.size > 1.01 * sizes[-1] or stage.size < 0.99 * sizes[0] for stage in planned):
            yield (
                f"Beyond these sizes it is an extrapolation: take the schedule to {human_count(target.size)} parameters as a guess. The "
                "exponents change with the runs that are fitted."
            )
    yield "N: parameters without embeddings. FLOPs: 6 N per token, without attention and logits."
    yield ""
    yield f"{'stage':>5}  {'parameters':>10}  {'until loss':>10}  {'steps':>9}  {'batch, tokens':>13}  {'tokens':>8}  {'FLOPs':>8}"
    for index, stage in enumerate(planned):
        yield (
            f"{index:>5}  {human_count(stage.size):>10}  {stage.loss:>10.4f}  {stage.steps:>9,.0f}  "
            f"{stage.batch_tokens:>13,.0f}  {human_count(stage.steps * stage.batch_tokens):>8}  {stage.flops:>8.3g}"
        )
    yield ""
    single = law.optimal_size(target.loss)
    yield (
        f"{relative_cost(law, planned):.3f} of the FLOPs of the best single stage to a loss of {target.loss:.4f} "
        f"({human_count(single)} parameters), {'a batch of one size' if batch == 'fixed' else 'the critical batch of each stage'}."
    )
    for small, large in pairwise(planned):
        factor = large.size / small.size
        yield (
            f"growth x {factor:.2f} in parameters: {law.same_loss_steps(factor):.3f} steps of the smaller model for one of the "
            "larger at the same loss"
        )
    yield f"slope d log L / d log C at which a single size is the cheapest for its loss: {law.optimal_slope():.7f}"


def curve_of(source: str, flops: tuple[float, float] | None) -> Curve:
    """The validation curve of a run, or of a CSV file whose FLOPs per step (with, without logits) are given. Runs whose
    steps do not all cost the same are refused."""
    path = Path(source)
    if path.suffix == ".csv" or (path.is_file() and source not in run_names()):
        with_logits, without = flops or (1.0, 1.0)
        return read_curve(path, with_logits, without)
    run = existing_run(find_run(source))
    recipe = load_recipe(str(run / "recipe.toml"))
    if found := list(recipe.methods):
        raise UsageError(
            f"run {source!r} uses {', '.join(found)}: the planner needs runs from scratch whose steps all cost the same"
        )
    model = recipe.model
    vocab_size = int(origin_data(run)["vocab_size"])
    per_token = token_flops(
        recipe, padded_vocab_size(recipe, vocab_size), model.seq_len, model.n_layer
    )
    tokens = recipe.train.batch_size * model.seq_len
    points = {
        float(row["step"]): float(row["val_loss"])
        for row in latest_rows(run)
        if row.get("val_loss") is not None
    }
    return make_curve(
        source, points, per_token.with_logits * tokens, per_token.without_logits * tokens
    )


def law_of(sources: Sequence[str]) -> FittedLaw:
    """The scaling law fitted to runs from scratch, or CSV files written FILE:LAYERSxWIDTH:TOKENS (tokens a step), of
    several sizes and one batch size."""
    curves, batches = [], set()
    for source in sources:
        path, _, rest = source.partition(":")
        if rest or path.endswith(".csv"):
            found = re.fullmatch(r"(\d+)x(\d+):(\d+)", rest)
            if found is None:
                raise UsageError(
                    f"--fit {source}: write FILE:LAYERSxWIDTH:TOKENS, as in base.csv:12x768:524288 (tokens a step)"
                )
            layers, width, tokens = map(int, found.groups())
            curve = read_curve(Path(path), 1.0, 1.0)
        else:
            recipe = load_recipe(str(existing_run(find_run(source)) / "recipe.toml"))
            layers, width = recipe.model.n_layer, recipe.model.n_embd
            tokens = recipe.train.batch_size * recipe.model.seq_len
            curve = curve_of(source, None)
        curves.append((12.0 * layers * width**2, curve))
        batches.add(tokens)
    if len(batches) > 1:
        raise UsageError(
            f"--fit: the runs have batches of {', '.join(f'{b:,}' for b in sorted(batches))} tokens; a fit needs one batch size"
        )
    return fit_law(curves, batches.pop())


def csv_flops(
    shape: str | None, vocab_size: int, operators: list[Operator]
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """FLOPs per step (with, without logits; in arbitrary units) of the small and the target model of two CSV curves.

    Without the target's shape only the ratio without logits is known: a doubled depth costs twice, a doubled width four
    times as much. With it, N = 12 n_layer n_embd^2 and n_embd x vocabulary for the logits, as the paper counts.
    """
    depth = math.prod(factor for kind, factor in operators if kind == "depth")
    width = math.prod(factor for kind, factor in operators if kind == "width")
    if shape is None:
        return (math.nan, 1 / (depth * width**2)), (math.nan, 1.0)
    try:
        layers, n_embd = parse_shape(shape)
    except ValueError as error:
        raise UsageError(f"--shape {error}") from None
    if layers % depth or n_embd % width:
        raise UsageError(
            f"--shape {shape} cannot have grown by these operators: it is not a multiple of them"
        )

    def cost(layers: int, n_embd: int) -> tuple[float, float]:
        blocks = 12.0 * layers * n_embd**2
        return blocks + n_embd * vocab_size, blocks

    return cost(layers // depth, n_embd // width), cost(layers, n_embd)


def threshold_of(operators: list[Operator]) -> float:
    """The released slope threshold of these operators."""
    kinds = {kind for kind, _ in operators}
    return PAPER_THRESHOLD["both" if len(kinds) == 2 else next(iter(kinds))]


def curve_lines(small: Curve, target: Curve | None, threshold: float, window: int) -> Iterator[str]:
    """When to grow, by every rule, and what it would save."""
    width = window_for(small, window)
    yield f"small: {small.name}, {len(small.steps)} evaluations of steps {small.steps[0]:.0f} to {small.steps[-1]:.0f}"
    yield f"grow when the slope d log L / d log C rises above {threshold:g} (released threshold), after its steepest point:"
    noisy, robust = released_switch(small, threshold), fitted_switch(small, threshold, window)
    yield f"  released rule (mean of 5, neighbours):    {_step(noisy)}"
    yield f"  regression over {width:>2} evaluations:           {_step(robust)}"
    if target is None:
        yield "give the curve of a run of the target's size too (--target) for the saving and for equal marginal cost"
        return
    marginal = marginal_projection(small, target, window)
    grow_at = None if marginal is None else marginal.small_steps
    yield f"  equal marginal cost with {target.name}:".ljust(44) + _step(grow_at)
    optimum, noisy_optimum = (
        fitted_switch(target, PAPER_OPTIMALITY, window),
        released_switch(target, PAPER_OPTIMALITY),
    )
    yield (
        f"target: {target.name}, {len(target.steps)} evaluations; its slope rises above {PAPER_OPTIMALITY} at "
        f"{_step(optimum)} (released rule: {_step(noisy_optimum)})"
    )
    yield ""
    yield f"{'rule':<22}  {'S_pre':>7}  {'S_target':>8}  {'ratio':>5}  {'ends at':>7}  {'saving':>7}  {'95 % interval':>15}  {'with logits':>11}"
    released = released_projection(small, target, threshold)
    for projection in filter(
        None, (released, fitted_projection(small, target, threshold, window), marginal)
    ):
        interval = (
            None  # the released rule's pairing of single evaluations has no error to speak of
        )
        if projection.rule != RELEASED:
            interval = saving_interval(projection, window)
        between = (
            "–" if interval is None else f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} %"
        )
        logits = (
            "–"
            if math.isnan(projection.saving_with_logits)
            else f"{100 * projection.saving_with_logits:.1f} %"
        )
        yield (
            f"{projection.rule:<22}  {projection.small_steps:>7,.0f}  {projection.target_steps:>8,.0f}  {projection.ratio:>5.2f}  "
            f"{projection.final_steps:>7,.0f}  {100 * projection.saving:>5.1f} %  {between:>15}  {logits:>11}"
        )
    yield ""
    yield "Savings are projected from two runs from scratch: of the target's FLOPs until it ends. No grown run was measured, and"
    yield "the interval holds the noise of the evaluations only, not that of other seeds."


def _step(step: float | None) -> str:
    return "never on this curve" if step is None else f"step {step:,.0f}"


def plot_curves(
    small: Curve, target: Curve | None, threshold: float, window: int, path: Path
) -> None:
    """Losses and fitted slopes over FLOPs, with the step at which to grow; the format is that of the file's name."""
    import pandas as pd

    curves = [small] if target is None else [small, target]
    losses, slopes = [], []
    for i, each in enumerate(curves):
        cost = each.step_flops_without_logits
        steps, slope, smooth = fitted(each, window)
        losses.append(picture.curve(i, each.name, each.steps * cost, each.losses))
        losses.append(picture.curve(i, each.name, steps * cost, smooth, line=1))
        slopes.append(picture.curve(i, each.name, steps * cost, slope))
    switch = fitted_switch(small, threshold, window)
    ends = () if switch is None else (switch * small.step_flops_without_logits,)
    # What falls steeply at first may leave the frame.
    late = min(float(each.steps.max()) * each.step_flops_without_logits for each in curves) / 20
    upper = picture.Plot(
        "curves",
        "",
        pd.concat(losses),
        "FLOPs without logits (ratios count)",
        "validation loss, nats per token",
        log="x",
        fit_from=late,
        ends=ends,
        fades=True,
    )
    lower = replace(
        upper,
        curves=pd.concat(slopes),
        y="slope d log L / d log C",
        include=(0.0,),
        levels=(threshold, PAPER_OPTIMALITY),
    )
    try:
        picture.write_figure([upper, lower], path)
    except ValueError as error:
        raise UsageError(f"--plot {path}: {error}") from None
