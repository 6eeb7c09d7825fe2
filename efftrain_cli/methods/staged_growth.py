"""Staged training by growth operators (Shen, Walsh, Keutzer, Dodge, Peters, Beltagy, ICML 2022, arXiv 2203.06211).

Train a small model, map its whole training state (weights, Adam moments, schedule) to a larger one, train on. Growth
should keep the loss, and the loss should go on falling as fast as that of a model that had the larger size from the
start. The schedule jumps to the step at which such a model would have reached this loss.

Width, factor k: every hidden vector x becomes [x; ...; x].
    vectors, embeddings      p' = [p; ...; p]
    matrices                 W' = blockdiag(W, ..., W) + A, the blocks of A summing to 0 along each row of blocks
    the last layer norm      g' = [g; ...; g] / k, because the output matrix is the embedding matrix
A layer norm of a duplicated vector is the duplicated layer norm, heads double and keep their size, and every row of
blocks of W' maps [u; ...; u] to W u: the logits stay, up to rounding. A = 0 is the paper's operator. With A = 0 the
copies get equal gradients at every step, so the wide model never becomes more than the narrow one. The paper's runs had
dropout, which made the copies differ; we have none, so the default draws A at random. With A = 0 the gradient after
growth is g/k in every block, the zero blocks included, and g in the last layer norm: the running averages become m/k
and v/k^2 in *every* block (`moments = "ema"`). With A drawn at random this is an approximation: the copies' gradients
then differ. The released operator (`moments = "paper"`) leaves the zero blocks' averages at 0.

Depth, factor k: layers are inserted that compute the identity (`identity`: layer norms and biases 0, matrices eye;
`zero_out_proj`: a copy of the layer before, whose two projections into the residual stream are 0), or layers are
copied (`copy_interleave`, `copy_append`), which keeps no loss.

It attaches between two stages: `growth_operators.grow` takes (config, tensors by name) and gives larger ones. Here are
the stages of a recipe and their switching rules; when to switch is planned in `efftrain_cli/grow/planner.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.bounds import HEADS, LAYERS, WIDTH
from efftrain_cli.foundation.section import SECTION, Count, parse_count
from efftrain_cli.methods.method import Method, Sections

if TYPE_CHECKING:
    from efftrain_cli.foundation.step import Progress

Moments = Literal["paper", "ema", "reset"]
Symmetry = Literal["none", "offdiag", "noise"]
Depth = Literal["identity", "zero_out_proj", "copy_interleave", "copy_append"]
Curve = tuple[tuple[int, float], ...]
"""(schedule_tokens, validation loss) of evaluations, newest last."""
SAME_LOSS_STEPS = {"depth": 1.412, "width": 1.776}
"""S_small / S_target: steps a model of 1/2 the depth or width needs for a loss, over those of the target model. The
authors' released constants, measured on their GPT-2 runs; for both at once they give 2.455 (`SAME_LOSS_STEPS_BOTH`)."""
SAME_LOSS_STEPS_BOTH = 2.455
SYMMETRY_CHECK_STEPS = 20
"""Steps after which a widened model's copies are looked at."""
SYMMETRY_TOLERANCE = 1e-3
"""Relative difference of the copies below which they count as equal: fp32 rounding reaches 1e-4 in 1,500 steps."""


class Shape(NamedTuple):
    """What growth changes of a model."""

    n_layer: int
    n_head: int
    n_embd: int


class Operator(NamedTuple):
    """One growth operator: what is multiplied, and by how much."""

    kind: Literal["width", "depth"]
    factor: int


def parse_operator(text: str) -> Operator:
    """Reads "width", "depth" (both x 2), "width:3".

    Raises:
        ValueError: another kind, or a factor that is not an integer of at least 2.
    """
    kind, _, factor = text.partition(":")
    if kind not in ("width", "depth"):
        raise ValueError(
            f"{text!r} is not a growth operator; there are width and depth, with a factor as in 'width:3'"
        )
    if factor and re.fullmatch(r"[0-9]{1,9}", factor) is None:
        raise ValueError(
            f"{text!r}: the factor must be a whole number: the operators repeat whole copies; write '{kind}' or '{kind}:3'"
        )
    if factor and int(factor) < 2:
        raise ValueError(f"{text!r}: the factor must be 2 or more; growth makes no model smaller")
    return Operator(kind, int(factor or 2))  # type: ignore[arg-type]


def _check_operator(text: str) -> str:
    parse_operator(text)
    return text


@dataclass(frozen=True, kw_only=True, config=SECTION)
class StageModel:
    """How a stage's model differs from `[model]`."""

    n_layer: int | None = Field(default=None, ge=1, le=LAYERS)
    """Transformer blocks."""
    n_head: int | None = Field(default=None, ge=1, le=HEADS)
    """Attention heads per block."""
    n_embd: int | None = Field(default=None, ge=1, le=WIDTH)
    """Width of the residual stream."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Switch:
    """When a stage ends and the model grows."""

    rule: Literal["steps", "tokens", "flops", "loss", "slope"]
    """The run's "steps", "tokens" or "flops" reach `value`; the validation loss falls to `value` ("loss"); or its slope
    d log loss / d log FLOPs, fitted to the last `window` evaluations of the stage, rises to `value` ("slope").
    Evaluations during the learning rate's warmup and re-warmup do not count."""
    value: Annotated[
        float,
        BeforeValidator(lambda value: parse_count(value) if isinstance(value, str) else value),
    ]
    """The threshold: counts as in 300_000_000 or "300M"; nats per token for "loss"; negative for "slope" (the paper's
    released thresholds: -0.0575 before doubling the depth, -0.0475 before doubling the width)."""
    window: int = Field(default=15, ge=5)
    """Evaluations that one slope is fitted to."""
    times: int = Field(default=3, ge=1)
    """Evaluations in a row at which the slope must be at or above the threshold."""
    latest: Annotated[Count, Field(ge=1)] | None = None
    """Tokens of the run at which the stage ends in any case; a plan assumes them for a stage by "loss" or "slope"."""

    def reads_val_loss(self) -> bool:
        """Whether the rule needs the validation losses of the stage."""
        return self.rule in ("loss", "slope")

    def reached(self, progress: Progress) -> bool:
        """Whether the stage is over."""
        if self.latest is not None and progress.tokens >= self.latest:
            return True
        counts = {"steps": progress.step, "tokens": progress.tokens, "flops": progress.flops}
        if self.rule in counts:
            return counts[self.rule] >= self.value
        curve = progress.stage_curve
        if self.rule == "loss":
            return bool(curve) and curve[-1][1] <= self.value
        if len(curve) < self.window + self.times - 1:
            return False
        ends = range(len(curve) - self.times + 1, len(curve) + 1)
        return all(
            log_log_slope(*zip(*curve[end - self.window : end], strict=True)) >= self.value
            for end in ends
        )

    def with_evaluation(self, curve: Curve, tokens: int, loss: float) -> Curve:
        """The curve with one more (schedule_tokens, loss), as long as the rule needs it."""
        return (*curve, (tokens, loss))[-(self.window + self.times - 1) :]


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Stage:
    """One stage of a staged recipe. The last stage's model is `[model]`."""

    model: StageModel = Field(default_factory=StageModel)
    """What differs from `[model]`; in the stages after the first the operators already say it."""
    operators: tuple[Annotated[str, AfterValidator(_check_operator)], ...] = ()
    """How this stage's model grows from the one before, in order: "depth", "width" (x 2), or as "width:3"."""
    switch: Switch | None = None
    """When this stage ends; not for the last."""
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of this stage; default `optim.lr`."""
    rewarmup_steps: int = Field(default=150, ge=0)
    """Steps of linear warmup from 0 after the growth that begins this stage."""
    schedule_ratio: float | None = Field(default=None, gt=0, le=1)
    """rho: the growth that begins this stage sets the schedule's step and tokens to rho times their value, the point at
    which a model of the new size would have reached this loss. Default: the authors' constants, 0.708 for depth x 2,
    0.563 for width x 2, 0.407 for both."""


def _planned_end(recipe: Sections, switch: Switch | None) -> float | None:
    """Return the tokens of the run at which a stage ends, None if only training shows it."""
    if switch is None or switch.rule not in ("steps", "tokens"):
        return None
    end = switch.value
    if switch.rule == "steps":
        if recipe.varies & {"length", "batch"}:
            return None
        end *= recipe.train.batch_size * recipe.model.seq_len
    return end if switch.latest is None else min(end, switch.latest)


@dataclass(frozen=True, kw_only=True, config=SECTION)
class StagedGrowth(Method):
    """Staged training: how a small model's whole training state is mapped to a larger model's."""

    also_called: ClassVar = {"": "growth"}

    moments: Moments = "ema"
    """The optimizer's moments: those of the released operator, which leaves the zero blocks' at 0 ("paper"); what the
    running averages would be, in every block ("ema"); or all 0, as a control ("reset")."""
    symmetry: Symmetry = "offdiag"
    """What makes a wider model's copies differ: nothing, blocks that cancel (the loss stays), noise (it does not)."""
    depth: Depth = "zero_out_proj"
    """What a deeper model's new layers compute: the identity in two ways (the loss stays), or a copy (it does not)."""
    dynamics: Literal["target", "small"] = "target"
    """Learning rates after growth in width by k: those of the target model, or the small model's own steps ("small":
    matrices and the last layer norm at lr / k and k times the weight decay, eps / k)."""

    def problems(self, recipe: Sections) -> Iterator[tuple[str, str]]:
        if recipe.optim.name == "muon" and self.dynamics == "small":
            rule = 'must be "target" with optim.name = "muon": the small model\'s dynamics are derived for AdamW'
            yield "staged_growth.dynamics", rule
        if not recipe.stages:
            return
        model = recipe.model
        for rule in stage_problems((model.n_layer, model.n_head, model.n_embd), recipe.stages):
            yield "stages", rule
        kinds = {
            kind for stage in recipe.stages for kind, _ in map(parse_operator, stage.operators)
        }
        if "width" in kinds and (model.norm == "none" or model.init == "unit"):
            key = 'norm = "none"' if model.norm == "none" else 'init = "unit"'
            rule = f"operator width does not keep the loss with model.{key}, whose logits grow with the width; grow in depth"
            yield "stages", rule
        if "depth" in kinds and model.norm == "none" and self.depth == "identity":
            rule = 'must not be "identity" with model.norm = "none": inserted layers are the identity by layer norms of 0; take "zero_out_proj"'
            yield "staged_growth.depth", rule
        for index, stage in enumerate(recipe.stages):
            if stage.lr is not None and stage.lr < recipe.optim.min_lr:
                rule = f"stage {index}: lr = {stage.lr:g} must not be less than optim.min_lr = {recipe.optim.min_lr:g}, where its decay ends"
                yield "stages", rule

    def warnings(self, recipe: Sections) -> Iterator[str]:
        optim, budget = recipe.optim, recipe.train.tokens
        ends = [_planned_end(recipe, stage.switch) for stage in recipe.stages[:-1]]
        for index, stage_end in enumerate(ends):
            if stage_end is not None and stage_end >= budget:
                yield (
                    f"stage {index} ends after {stage_end:,.0f} tokens, but the budget, train.tokens = {budget:,}, before: "
                    "the model never grows to [model]"
                )
                return
        end = self._schedule_end(recipe, ends)
        decay = optim.decay_tokens or budget
        by_tokens = optim.schedule != "constant" and optim.decay_steps is None
        if by_tokens and end is not None and decay > 1.01 * end:
            yield (
                f"the schedule jumps back at each growth, so at train.tokens = {budget:,} it stands at about {end:,} tokens, "
                f"before the end of its decay at {decay:,}: the learning rate ends above min_lr; set optim.decay_tokens = {end:_}"
            )

    def _schedule_end(self, recipe: Sections, ends: Iterable[float | None]) -> int | None:
        """Return the tokens at which the schedule stands at the end of the budget, None if only training shows it."""
        schedule, trained = 0.0, 0.0
        for end, following in zip(ends, recipe.stages[1:], strict=True):
            if end is None:
                return None
            ratio = following.schedule_ratio or default_schedule_ratio(
                map(parse_operator, following.operators)
            )
            schedule, trained = (schedule + end - trained) * ratio, end
        return round(schedule + recipe.train.tokens - trained)

    def assumptions(self, recipe: Sections) -> list[str]:
        return [
            f"Stage {index} ends by the {switch.rule} of the validation loss; the plan assumes "
            + (
                "the end of the budget."
                if switch.latest is None
                else f"{switch.latest:,} tokens, its latest."
            )
            for index, switch in enumerate(stage.switch for stage in recipe.stages)
            if switch is not None and switch.reads_val_loss()
        ]

    def shortened(self, recipe: Sections, half: int, batch_size: int) -> dict[str, Any]:
        return {
            "stages": tuple(
                stage
                if stage.switch is None
                else replace(stage, switch=Switch(rule="steps", value=half + i))
                for i, stage in enumerate(recipe.stages)
            )
        }

    def without_schedule(self) -> dict[str, Any]:
        return {"stages": ()}  # the model that they end with

    def preserves_loss(self, operators: Iterable[Operator]) -> bool:
        """Whether these operators, in this section's variants, claim to leave loss and logits as they are."""
        keeps = {"width": self.symmetry != "noise", "depth": not self.depth.startswith("copy")}
        return all(keeps[kind] for kind, _ in operators)


def shapes_of_stages(target: tuple[int, int, int], stages: Sequence[Stage]) -> list[Shape]:
    """The model of each stage: first `target` with the stage's changes, then what the operators make of it."""
    first = stages[0].model
    layers, heads, width = target
    shapes = [Shape(first.n_layer or layers, first.n_head or heads, first.n_embd or width)]
    for stage in stages[1:]:
        layers, heads, width = shapes[-1]
        for kind, factor in map(parse_operator, stage.operators):
            if kind == "depth":
                layers *= factor
            else:
                heads, width = heads * factor, width * factor
        shapes.append(Shape(layers, heads, width))
    return shapes


def stage_problems(target: tuple[int, int, int], stages: Sequence[Stage]) -> Iterator[str]:
    """Every rule that the stages of a recipe break; `target` is [model]'s (n_layer, n_head, n_embd)."""
    if len(stages) == 1:
        yield "one stage is not staged training: add a second [[stages]] with operators, or remove this one"
    for index, stage in enumerate(stages):
        last = index == len(stages) - 1
        if index == 0 and stage.operators:
            yield "stage 0 has operators, but nothing to grow from; write them into the stage that they begin"
        if index > 0 and not stage.operators:
            yield f'stage {index} has no operators; say how its model grows, as in operators = ["depth"]'
        if not last and stage.switch is None:
            yield f'stage {index} has no switch; say when it ends, as in switch = {{ rule = "tokens", value = "100M" }}'
        if last and stage.switch is not None and len(stages) > 1:
            yield f"stage {index} is the last and ends with train.tokens; remove its switch"
        if stage.switch is not None:
            yield from (
                f"stage {index}: {rule}" for rule in _switch_problems(stage.switch, stages[:index])
            )
    shapes = shapes_of_stages(target, stages)
    for index, (stage, shape) in enumerate(zip(stages, shapes, strict=True)):
        for name in Shape._fields:
            wanted, found = getattr(stage.model, name), getattr(shape, name)
            if wanted is not None and wanted != found:
                yield f"stage {index}: model.{name} = {wanted}, but its operators make {found} of the stage before"
        if shape.n_embd % shape.n_head:
            yield f"stage {index}: n_head = {shape.n_head} must divide n_embd = {shape.n_embd}"
    if len(stages) > 1:
        for name, wanted, found in zip(Shape._fields, target, shapes[-1], strict=True):
            first = getattr(shapes[0], name)
            if wanted < first:
                yield f"stage 0 has {name} = {first}, more than [model]'s {wanted}; growth makes no model smaller"
            elif wanted != found:
                yield (
                    f"the operators end at {name} = {found}, but [model] has {wanted}: the last stage trains [model]; "
                    "change stage 0's model or the operators"
                )


def _switch_problems(switch: Switch, before: Sequence[Stage]) -> Iterator[str]:
    if switch.rule == "slope" and switch.value >= 0:
        yield f"switch.value = {switch.value:g}: the loss falls, so the slope to wait for is negative, as in -0.0575"
    nothing_trained = (
        switch.rule == "steps" and switch.value == 0
    )  # a run grown before its first step
    if switch.rule != "slope" and switch.value <= 0 and not nothing_trained:
        yield f"switch.value = {switch.value:g} must be positive"
    for earlier in before:
        if earlier.switch and earlier.switch.rule == switch.rule and switch.rule != "slope":
            falling = switch.rule == "loss"
            if (
                switch.value > earlier.switch.value
                if falling
                else switch.value < earlier.switch.value
            ):
                order = "more" if falling else "less"
                yield f"switch.value = {switch.value:g} must not be {order} than an earlier stage's {earlier.switch.value:g}"


def default_schedule_ratio(operators: Iterable[Operator]) -> float:
    """rho = S_target / S_small of these operators together, from the authors' constants per doubling
    (`SAME_LOSS_STEPS`).

    A factor k other than 2 counts as log2(k) doublings, which is our extension.
    """
    doublings = {"depth": 0.0, "width": 0.0}
    for kind, factor in operators:
        doublings[kind] += math.log2(factor)
    both = min(doublings.values())
    return SAME_LOSS_STEPS_BOTH**-both * math.prod(
        SAME_LOSS_STEPS[k] ** -(n - both) for k, n in doublings.items()
    )


def rewarmup_factor(steps_in_stage: int, rewarmup_steps: int) -> float:
    """Factor on the schedule's learning rate at the 1-based step of a stage: i / w up to step w, then 1.

    The released code climbs to the value that the schedule has at the end of the re-warmup, we to the schedule itself,
    which differs by less than the schedule falls in those w steps.
    """
    return 1.0 if steps_in_stage >= rewarmup_steps else steps_in_stage / rewarmup_steps


def log_log_slope(x: Iterable[float], y: Iterable[float]) -> float:
    """Least-squares slope of log y against log x, d log y / d log x.

    Raises:
        ValueError: fewer than two points.
    """
    lx, ly = [math.log(v) for v in x], [math.log(v) for v in y]
    if len(lx) < 2:
        raise ValueError(f"a slope needs two points or more, here are {len(lx)}")
    mx, my = sum(lx) / len(lx), sum(ly) / len(ly)
    return sum((a - mx) * (b - my) for a, b in zip(lx, ly, strict=True)) / sum(
        (a - mx) ** 2 for a in lx
    )
