"""The stages of a recipe in staged training: what grows between them, when each ends, and the rules
that they must keep. The method is in staged_growth.py."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Literal,
    NamedTuple,
    get_args,
)

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.section import (
    SECTION,
    Blocks,
    Channels,
    Count,
    Heads,
    parse_count,
)
from efftrain_cli.model.config import Dimensions, S, resize

if TYPE_CHECKING:
    from efftrain_cli.foundation.step import Progress

OperatorKind = Literal["width", "depth", "pad", "d_ff", "n_kv_head"]
Curve = tuple[tuple[int, float], ...]
"""(schedule_tokens, validation loss) of evaluations, newest last."""
SAME_LOSS_STEPS = {"depth": 1.412, "width": 1.776}
"""S_small / S_target: steps a model of 1/2 the depth or width needs for a loss, over those of the
target model. The authors' released constants, measured on their GPT-2 runs; for both at once they
give 2.455 (`SAME_LOSS_STEPS_BOTH`)."""
SAME_LOSS_STEPS_BOTH = 2.455


class Operator(NamedTuple):
    """One growth operator: what is multiplied, and by how much; of pad (n_embd), d_ff and n_kv_head
    the new size."""

    kind: OperatorKind
    factor: int


def parse_operator(text: str) -> Operator:
    """Read "width", "depth" (both x 2), "width:3", and the sizes of "pad:192", "d_ff:512",
    "n_kv_head:4".

    Raises:
        ValueError: another kind, or a factor that is not an integer of at least 2.
    """
    kind, _, factor = text.partition(":")
    if kind not in get_args(OperatorKind):
        raise ValueError(
            f"{text!r} is not a growth operator; there are width and depth,"
            " with a factor as in 'width:3', and with a size pad:192, d_ff:512 and n_kv_head:4"
        )
    is_number = re.fullmatch(r"[0-9]{1,9}", factor) is not None
    if kind not in ("width", "depth"):
        if not is_number:
            raise ValueError(f"{text!r}: write the new size, as in '{kind}:192'")
    elif factor and not is_number:
        raise ValueError(
            f"{text!r}: the factor must be a whole number: the operators repeat whole copies;"
            f" write '{kind}' or '{kind}:3'"
        )
    if factor and int(factor) < 2:
        raise ValueError(f"{text!r}: the factor must be 2 or more; growth makes no model smaller")
    return Operator(kind, int(factor or 2))  # type: ignore[arg-type]


def grown_shape(shape: S, operator: Operator) -> S:
    """Return the shape of a model after one operator: a [model] or a `GPTConfig`."""
    kind, value = operator
    if kind == "depth":
        return replace(shape, n_layer=shape.n_layer * value)  # type: ignore[type-var]
    if kind == "width":
        sizes = {
            "n_head": value * shape.n_head,
            "kv_heads": value * shape.kv_heads,
            "n_embd": value * shape.n_embd,
            "ff_size": value * shape.ff_size,
        }
    elif kind == "pad":
        sizes = {"n_embd": value}
        shape = replace(shape, norm_eps=shape.norm_eps * shape.n_embd / value)  # type: ignore[type-var]
    elif kind == "n_kv_head":
        group = shape.n_head // shape.kv_heads
        sizes = {"n_head": group * value, "kv_heads": value}
    else:
        sizes = {"ff_size": value}
    return resize(shape, sizes)


def _check_operator(text: str) -> str:
    parse_operator(text)
    return text


def _count_if_text(value: object) -> object:
    if isinstance(value, str):
        return parse_count(value)
    return value


@dataclass(frozen=True, kw_only=True, config=SECTION)
class StageModel:
    """How a stage's model differs from `[model]`."""

    n_layer: Blocks | None = None
    """Transformer blocks."""
    n_head: Heads | None = None
    """Attention heads per block."""
    n_embd: Channels | None = None
    """Width of the residual stream."""
    n_kv_head: Heads | None = None
    """Heads of keys and values."""
    head_dim: Channels | None = None
    """Channels of a head."""
    d_ff: Channels | None = None
    """Hidden units of the MLP."""
    norm_eps: float | None = Field(default=None, gt=0)
    """Added inside each norm; `pad` from width d to e makes d / e of it."""

    def applied(self, model: S) -> S:
        """Return `model` with what differs."""
        given = {key: value for key, value in vars(self).items() if value is not None}
        return replace(model, **given)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Switch:
    """When a stage ends and the model grows."""

    rule: Literal["steps", "tokens", "flops", "loss", "slope"]
    """The run's "steps", "tokens" or "flops" reach `value`; the validation loss falls to `value`
    ("loss"); or its slope d log loss / d log FLOPs, fitted to the last `window` evaluations of the
    stage, rises to `value` ("slope"). Evaluations during the learning rate's warmup and re-warmup
    do not count."""
    value: Annotated[float, BeforeValidator(_count_if_text)]
    """The threshold: counts as in 300_000_000 or "300M"; nats per token for "loss"; negative for
    "slope" (the paper's released thresholds: -0.0575 before doubling the depth, -0.0475 before
    doubling the width)."""
    window: int = Field(default=15, ge=5)
    """Evaluations that one slope is fitted to."""
    times: int = Field(default=3, ge=1)
    """Evaluations in a row at which the slope must be at or above the threshold."""
    latest: Count | None = None
    """Tokens of the run at which the stage ends in any case; a plan assumes them for a stage by
    "loss" or "slope"."""

    def reads_val_loss(self) -> bool:
        """Return whether the rule needs the validation losses of the stage."""
        return self.rule in ("loss", "slope")

    def reached(self, progress: Progress) -> bool:
        """Return whether the stage is over."""
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

        # The last `times` slopes, each over the `window` evaluations up to `end`.
        for end in range(len(curve) - self.times + 1, len(curve) + 1):
            tokens, losses = zip(*curve[end - self.window : end], strict=True)
            if not log_log_slope(tokens, losses) >= self.value:
                return False
        return True

    def with_evaluation(self, curve: Curve, tokens: int, loss: float) -> Curve:
        """Return the curve with one more (schedule_tokens, loss), as long as the rule needs it."""
        return (*curve, (tokens, loss))[-(self.window + self.times - 1) :]


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Stage:
    """One stage of a staged recipe. The last stage's model is `[model]`."""

    model: StageModel = Field(default_factory=StageModel)
    """What differs from `[model]`; in the stages after the first the operators already say it."""
    operators: tuple[Annotated[str, AfterValidator(_check_operator)], ...] = ()
    """How this stage's model grows from the one before, in order: "depth", "width" (x 2), as
    "width:3", or to a size: "pad:192" (n_embd), "d_ff:512", "n_kv_head:4"."""
    switch: Switch | None = None
    """When this stage ends; not for the last."""
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of this stage; default `optim.lr`."""
    rewarmup_steps: int = Field(default=150, ge=0)
    """Steps of linear warmup from 0 after the growth that begins this stage."""
    schedule_ratio: float | None = Field(default=None, gt=0, le=1)
    """rho: the growth that begins this stage sets the schedule's step and tokens to rho times their
    value, the point at which a model of the new size would have reached this loss. Default: the
    authors' constants, 0.708 for depth x 2, 0.563 for width x 2, 0.407 for both."""

    @property
    def ratio(self) -> float:
        """rho, given or by default."""
        if self.schedule_ratio is not None:
            return self.schedule_ratio
        return default_schedule_ratio(map(parse_operator, self.operators))


def shapes_of_stages(target: S, stages: Sequence[Stage]) -> list[S]:
    """Return the model of each stage: `target` with the first's changes, then what the operators
    make of it."""
    shape = stages[0].model.applied(target)
    shapes = [shape]
    for stage in stages[1:]:
        for operator in map(parse_operator, stage.operators):
            shape = grown_shape(shape, operator)
        shapes.append(shape)
    return shapes


def sizes_of(model: Dimensions) -> dict[str, float]:
    """Return the sizes of a model that stages change, given or not, by their keys in [model]."""
    return {
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_embd": model.n_embd,
        "n_kv_head": model.kv_heads,
        "head_dim": model.head_size,
        "d_ff": model.ff_size,
        "norm_eps": model.norm_eps,
    }


def stage_problems(target: Dimensions, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield every rule that the stages of a recipe break; `target` is [model]."""
    if len(stages) == 1:
        yield (
            "one stage is not staged training:"
            " add a second [[stages]] with operators, or remove this one"
        )
        return
    for index, stage in enumerate(stages):
        last = index == len(stages) - 1
        if index == 0 and stage.operators:
            yield (
                "stage 0 has operators, but nothing to grow from;"
                " write them into the stage that they begin"
            )
        if index > 0 and not stage.operators:
            yield (
                f"stage {index} has no operators;"
                ' say how its model grows, as in operators = ["depth"]'
            )
        if not last and stage.switch is None:
            yield (
                f'stage {index} has no switch; say when it ends, as in switch = {{ rule = "tokens",'
                ' value = "100M" }'
            )
        if last and stage.switch is not None:
            yield f"stage {index} is the last and ends with train.tokens; remove its switch"
        if stage.switch is not None:
            for rule in _switch_problems(stage.switch, stages[:index]):
                yield f"stage {index}: {rule}"
    try:
        aims = sizes_of(target)
    except AttributeError:
        return  # a size of [model] is itself wrong, so no stage's shape is known

    # A [model] with other mistakes lacks their values, none of which grows.
    target = type(target)(**{"seq_len": 1, **vars(target)})
    try:
        shapes = shapes_of_stages(target, stages)
    except ValidationError as error:
        for entry in error.errors():
            name = ".".join(map(str, entry["loc"]))
            yield f"the stages grow model.{name} to {entry['input']}: {entry['msg'].lower()}"
        return

    yield from _shape_problems(stages, shapes)
    end = sizes_of(shapes[-1])
    for name, wanted in aims.items():
        if not math.isclose(wanted, end[name], rel_tol=1e-6):
            yield (
                f"the operators end at {name} = {end[name]}, but [model] has {wanted}:"
                " the last stage trains [model]; change stage 0's model or the operators"
            )


def _shape_problems(stages: Sequence[Stage], shapes: Sequence[Dimensions]) -> Iterator[str]:
    """Yield the sizes of each stage's model that do not fit it or the stage before."""
    before = sizes_of(shapes[0])
    for index, (stage, shape) in enumerate(zip(stages, shapes, strict=True)):
        sizes = sizes_of(shape)
        for name, wanted in vars(stage.model).items():
            if wanted is not None and not math.isclose(wanted, sizes[name], rel_tol=1e-6):
                yield (
                    f"stage {index}: model.{name} = {wanted},"
                    f" but its operators make {sizes[name]} of the stage before"
                )
        for name, rule in shape.validation_errors():
            yield f"stage {index}: {name} = {sizes[name]} {rule.replace('model.', '')}"
        for kind, value in map(parse_operator, stage.operators):
            key: str = kind
            if kind == "pad":
                key = "n_embd"
            if key in before and value < before[key]:
                yield (
                    f"stage {index}: {kind}:{value} is less than the stage"
                    f" before's {key} = {before[key]}; growth makes no model smaller"
                )
        before = sizes


def _switch_problems(switch: Switch, before: Sequence[Stage]) -> Iterator[str]:
    if switch.rule == "slope" and switch.value >= 0:
        yield (
            f"switch.value = {switch.value:g}:"
            " the loss falls, so the slope to wait for is negative, as in -0.0575"
        )
    if switch.rule == "slope":
        return
    # A run may be grown before its first step.
    is_before_training = switch.rule == "steps" and switch.value == 0
    if switch.value <= 0 and not is_before_training:
        yield f"switch.value = {switch.value:g} must be positive"
    sign = 1
    order = "less"
    if switch.rule == "loss":
        sign = -1
        order = "more"
    for earlier in before:
        if earlier.switch is None or earlier.switch.rule != switch.rule:
            continue
        if sign * switch.value < sign * earlier.switch.value:
            yield (
                f"switch.value = {switch.value:g} must not be {order}"
                f" than an earlier stage's {earlier.switch.value:g}"
            )


def default_schedule_ratio(operators: Iterable[Operator]) -> float:
    """Return rho = S_target / S_small of these operators, from the authors' constants per doubling
    (`SAME_LOSS_STEPS`).

    A factor k other than 2 counts as log2(k) doublings, which is our extension. Operators to a size
    count nothing: set `schedule_ratio` for them.
    """
    doublings = {"depth": 0.0, "width": 0.0}
    for kind, factor in operators:
        if kind in doublings:
            doublings[kind] += math.log2(factor)

    both = min(doublings.values())
    alone = [SAME_LOSS_STEPS[kind] ** -(count - both) for kind, count in doublings.items()]
    return SAME_LOSS_STEPS_BOTH**-both * math.prod(alone)


def rewarmup_factor(steps_in_stage: int, rewarmup_steps: int) -> float:
    """Return the factor of the schedule's learning rate at the 1-based step of a stage: i / w up to
    step w, then 1.

    The released code climbs to the value that the schedule has at the end of the re-warmup, we to
    the schedule itself, which differs by less than the schedule falls in those w steps.
    """
    if steps_in_stage >= rewarmup_steps:
        return 1.0
    return steps_in_stage / rewarmup_steps


def log_log_slope(x: Iterable[float], y: Iterable[float]) -> float:
    """Fit the slope of log y against log x, d log y / d log x, by least squares."""
    from statistics import linear_regression

    log_x = list(map(math.log, x))
    log_y = list(map(math.log, y))
    return linear_regression(log_x, log_y).slope
