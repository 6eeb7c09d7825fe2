"""Staged training by growth operators (Shen, Walsh, Keutzer, Dodge, Peters, Beltagy, ICML 2022, arXiv 2203.06211).

Train a small model, map its whole training state (weights, Adam moments, schedule) to a larger one, train on. Growth
shall keep the loss, and let the loss fall on as fast as a model that had the larger size from the start. The schedule
jumps to the step at which such a model would have reached this loss.

Width, factor k: every hidden vector x becomes [x; ...; x].
    vectors, embeddings      p' = [p; ...; p]
    matrices                 W' = blockdiag(W, ..., W) + A, the blocks of A summing to 0 along each row of blocks
    the last layer norm      g' = [g; ...; g] / k, because the output matrix is the embedding matrix
A layer norm of a duplicated vector is the duplicated layer norm, heads double and keep their size, and every row of
blocks of W' maps [u; ...; u] to W u: the logits stay. A = 0 is the paper's operator. With A = 0 the copies get equal
gradients for ever and the wide model stays a narrow one; the paper's runs had dropout to part them, we have none, so
the default draws A at random.
Gradients after growth are g/k, of the last layer norm g, of all blocks alike: so the running averages become m/k and
v/k^2 in *every* block (`moments = "ema"`). The released operator (`moments = "paper"`) leaves the zero blocks' at 0.

Depth, factor k: layers are inserted that compute the identity (`identity`: layer norms and biases 0, matrices eye;
`zero_out_proj`: a copy of the layer before, whose two projections into the residual stream are 0), or layers are
copied (`copy_interleave`, `copy_append`), which keeps no loss.

It attaches between two stages: `grow` takes (config, tensors by name) and gives larger ones. The stages of a recipe
and their switching rules are here too; the planner is `efftrain_cli/growth_plan.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from efftrain_cli.section import SECTION, Count, parse_count

if TYPE_CHECKING:
    from torch import Tensor

    from efftrain_cli.model import GPTConfig
    from efftrain_cli.optim import GroupScale
    from efftrain_cli.step import Progress

SAME_LOSS_STEPS = {"depth": 1.412, "width": 1.776}
"""S_small / S_target: steps a model of 1/2 the depth or width needs for a loss, over those of the target model. The
authors' released constants, measured on their GPT-2 runs; for both at once they give 2.455 (`SAME_LOSS_STEPS_BOTH`)."""
SAME_LOSS_STEPS_BOTH = 2.455
OFFDIAG_SCALE = 0.5
"""Standard deviation of the blocks of A, relative to W's."""
NOISE_SCALE = 0.01
"""Standard deviation of the noise of `symmetry = "noise"`, relative to that of the parameter."""
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
        ValueError: another kind, or a factor that is no integer of at least 2.
    """
    kind, _, factor = text.partition(":")
    if kind not in ("width", "depth"):
        raise ValueError(f"{text!r} is no growth operator; there are width and depth, with a factor as in 'width:3'")
    if factor and re.fullmatch(r"[0-9]+", factor) is None:
        raise ValueError(
            f"{text!r}: the factor must be a whole number: the operators repeat whole copies; write '{kind}' or '{kind}:3'"
        )
    if factor and int(factor) < 2:
        raise ValueError(f"{text!r}: the factor must be 2 or more; growth makes no model smaller")
    return Operator(kind, int(factor or 2))  # type: ignore[arg-type]


def _check_operator(text: str) -> str:
    parse_operator(text)
    return text


def _parse_value(value: object) -> object:
    return parse_count(value) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, config=SECTION)
class StageModel:
    """How a stage's model differs from `[model]`."""

    n_layer: int | None = Field(default=None, ge=1)
    """Transformer blocks."""
    n_head: int | None = Field(default=None, ge=1)
    """Attention heads per block."""
    n_embd: int | None = Field(default=None, ge=1)
    """Width of the residual stream."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Switch:
    """When a stage ends and the model grows."""

    rule: Literal["steps", "tokens", "flops", "loss", "slope"]
    """The run's "steps", "tokens" or "flops" reach `value`; the validation loss falls to `value` ("loss"); or its slope
    d log loss / d log FLOPs, fitted to the last `window` evaluations of the stage, rises to `value` ("slope"). Evaluations
    during the learning rate's warmup and re-warmup do not count."""
    value: Annotated[float, BeforeValidator(_parse_value)]
    """The threshold: counts as in 300_000_000 or "300M"; nats per token for "loss"; negative for "slope" (the paper's
    released thresholds: -0.0575 before doubling the depth, -0.0475 before doubling the width)."""
    window: int = Field(default=15, ge=5)
    """Evaluations that one slope is fitted to."""
    times: int = Field(default=3, ge=1)
    """Evaluations in a row at which the slope must be at or above the threshold."""
    latest: Annotated[Count, Field(ge=1)] | None = None
    """Tokens of the run at which the stage ends even if the rule has not been met; a plan assumes that a stage by "loss" or
    "slope" lasts until then."""

    def reads_val_loss(self) -> bool:
        """Whether the rule needs the validation losses of the stage."""
        return self.rule in ("loss", "slope")

    def reached(self, progress: Progress) -> bool:
        """Whether the stage is over."""
        if self.latest is not None and progress.tokens >= self.latest:
            return True
        if self.rule == "steps":
            return progress.step >= self.value
        if self.rule == "tokens":
            return progress.tokens >= self.value
        if self.rule == "flops":
            return progress.flops >= self.value
        curve = progress.stage_curve
        if self.rule == "loss":
            return bool(curve) and curve[-1][1] <= self.value
        if len(curve) < self.window + self.times - 1:
            return False
        ends = range(len(curve) - self.times + 1, len(curve) + 1)
        return all(log_log_slope(*zip(*curve[end - self.window : end], strict=True)) >= self.value for end in ends)

    def with_evaluation(self, curve: tuple[tuple[int, float], ...], tokens: int, loss: float) -> tuple[tuple[int, float], ...]:
        """The curve with one more (schedule_tokens, loss), as long as the rule needs it."""
        return (*curve, (tokens, loss))[-(self.window + self.times - 1) :]


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Stage:
    """One stage of a staged recipe. The last stage's model is `[model]`."""

    model: StageModel = Field(default_factory=StageModel)
    """What differs from `[model]`; in the stages after the first the operators already say it."""
    operators: tuple[Annotated[str, AfterValidator(_check_operator)], ...] = ()
    """How this stage's model grows from the one before, in order: "depth", "width" (x 2), or with a factor, "width:3"."""
    switch: Switch | None = None
    """When this stage ends; not for the last."""
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of this stage; default `optim.lr`."""
    rewarmup_steps: int = Field(default=150, ge=0)
    """Steps of linear warmup from 0 after the growth that begins this stage."""
    schedule_ratio: float | None = Field(default=None, gt=0, le=1)
    """rho: the growth that begins this stage sets the schedule's step and tokens to rho times their value, the point at which a model of the new size
    would have reached this loss. Default: the authors' constants, 0.708 for depth x 2, 0.563 for width x 2, 0.407 for both."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class StagedGrowth:
    """Staged training: how a small model's whole training state is mapped to a larger model's."""

    moments: Literal["paper", "ema", "reset"] = "ema"
    """Adam's moments: those of the released operator, which leaves the zero blocks' at 0 ("paper"); what the running averages
    would be, in every block ("ema"); or all 0, as a control ("reset")."""
    symmetry: Literal["none", "offdiag", "noise"] = "offdiag"
    """What makes the copies of a widened model differ: nothing, blocks that cancel (the loss stays), or noise (it does not)."""
    depth: Literal["identity", "zero_out_proj", "copy_interleave", "copy_append"] = "zero_out_proj"
    """What the inserted layers of a deepened model compute: the identity in two ways (the loss stays), or what the copied
    layers compute (it does not)."""
    dynamics: Literal["target", "small"] = "target"
    """Learning rates after growth in width by k: those of the target model, or the small model's own steps ("small": matrices
    and the last layer norm at lr / k and k times the weight decay, eps / k)."""

    def preserves_loss(self, operators: Iterable[Operator]) -> bool:
        """Whether these operators, in this section's variants, claim to leave loss and logits as they are."""
        return all(
            self.symmetry != "noise" if kind == "width" else not self.depth.startswith("copy") for kind, _ in operators
        )


def shapes_of_stages(target: tuple[int, int, int], stages: Sequence[Stage]) -> list[Shape]:
    """The model of each stage: the first is `target` with its own changes, the others grow from it by their operators."""
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
        yield "one stage is no staged training: add a second [[stages]] with operators, or take this one away"
    for index, stage in enumerate(stages):
        last = index == len(stages) - 1
        if index == 0 and stage.operators:
            yield "stage 0 has operators, but nothing to grow from; write them into the stage that they begin"
        if index > 0 and not stage.operators:
            yield f'stage {index} has no operators; say how its model grows, as in operators = ["depth"]'
        if not last and stage.switch is None:
            yield f'stage {index} has no switch; say when it ends, as in switch = {{ rule = "tokens", value = "100M" }}'
        if last and stage.switch is not None and len(stages) > 1:
            yield f"stage {index} is the last and ends with train.tokens; take its switch away"
        if stage.switch is not None:
            yield from (f"stage {index}: {rule}" for rule in _switch_problems(stage.switch, stages[:index]))
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
    nothing_trained = switch.rule == "steps" and switch.value == 0  # a run grown before its first step
    if switch.rule != "slope" and switch.value <= 0 and not nothing_trained:
        yield f"switch.value = {switch.value:g} must be positive"
    for earlier in before:
        if earlier.switch and earlier.switch.rule == switch.rule and switch.rule != "slope":
            falling = switch.rule == "loss"
            if switch.value > earlier.switch.value if falling else switch.value < earlier.switch.value:
                order = "more" if falling else "less"
                yield f"switch.value = {switch.value:g} must not be {order} than an earlier stage's {earlier.switch.value:g}"


def default_schedule_ratio(operators: Iterable[Operator]) -> float:
    """rho = S_target / S_small of these operators together, from the authors' constants per doubling (`SAME_LOSS_STEPS`).

    A factor k other than 2 counts as log2(k) doublings, which is our extension.
    """
    doublings = {"depth": 0.0, "width": 0.0}
    for kind, factor in operators:
        doublings[kind] += math.log2(factor)
    both = min(doublings.values())
    return SAME_LOSS_STEPS_BOTH**-both * math.prod(SAME_LOSS_STEPS[k] ** -(n - both) for k, n in doublings.items())


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
    return sum((a - mx) * (b - my) for a, b in zip(lx, ly, strict=True)) / sum((a - mx) ** 2 for a in lx)


# --- the operators ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowthState:
    """What an operator maps: a model's shape, its parameters and AdamW's state, all by the model's parameter names.

    Shapes are those of `efftrain_cli.model.GPT` (matrices (out, in)); any dtype and device. The three dicts of the
    optimizer are empty where its state is lost. Operators share tensors they leave alone with the state they were given.
    """

    config: GPTConfig
    parameters: Mapping[str, Tensor]
    exp_avg: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Adam's first moments, m."""
    exp_avg_sq: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Adam's second moments, v."""
    steps: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Adam's step counter of each parameter (0-d), which its bias correction reads."""


_VECTORS = ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias", "attn.c_proj.bias", "mlp.c_fc.bias", "mlp.c_proj.bias")
_MATRICES = ("attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def _kind(name: str) -> str:
    """Which rule of §width a parameter follows."""
    if name in ("wte.weight", "wpe.weight"):
        return "embedding"
    if name in ("ln_f.weight", "ln_f.bias"):
        return "last_norm"
    _, _, rest = name.removeprefix("h.").partition(".")
    if name.startswith("h."):
        if rest in ("attn.c_attn.weight", "attn.c_attn.bias"):
            return "fused_matrix" if rest.endswith("weight") else "fused_vector"
        if rest in _VECTORS:
            return "vector"
        if rest in _MATRICES:
            return "matrix"
    raise ValueError(f"no growth operator knows the parameter {name!r}; they grow GPT-2's parameters")


def _widen(kind: str, tensor: Tensor, factor: int, fill: bool) -> Tensor:
    """`tensor` in its k-fold shape, unscaled. Of a matrix the blocks beside the diagonal are copies too where `fill`."""
    import torch

    if kind.startswith("fused"):  # q, k and v grow one by one, not the fused matrix
        return torch.cat([_widen(kind.removeprefix("fused_"), part, factor, fill) for part in tensor.chunk(3)])
    if kind == "embedding":
        return tensor.repeat(1, factor)
    if kind != "matrix":
        return tensor.repeat(factor)
    return tensor.repeat(factor, factor) if fill else torch.block_diag(*[tensor] * factor)


def _cancelling_blocks(kind: str, tensor: Tensor, factor: int, generator: object) -> Tensor:
    """A: random blocks in the k-fold shape of a matrix that sum to 0 along every row of blocks."""
    import torch

    if kind == "fused_matrix":
        return torch.cat([_cancelling_blocks("matrix", part, factor, generator) for part in tensor.chunk(3)])
    rows, columns = tensor.shape
    # (row block, column block, rows, columns); drawn on the CPU, so that every device grows the same model
    blocks = torch.randn(factor, factor, rows, columns, generator=generator, dtype=torch.float64)  # type: ignore[call-overload]
    blocks = (blocks * (OFFDIAG_SCALE * tensor.double().std(correction=0).cpu())).to(tensor.dtype)
    diagonal = torch.arange(factor)
    blocks[diagonal, diagonal] = 0
    blocks[diagonal, diagonal] = -blocks.sum(dim=1)
    return blocks.permute(0, 2, 1, 3).reshape(factor * rows, factor * columns).to(tensor.device)


def _generator(seed: int, name: str) -> object:
    """A generator that is a function of the seed, this purpose and the parameter's name."""
    import hashlib

    import torch

    digest = hashlib.sha256(f"{seed}/staged_growth/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def grow_width(
    state: GrowthState,
    factor: int = 2,
    *,
    moments: Literal["paper", "ema", "reset"] = "ema",
    symmetry: Literal["none", "offdiag", "noise"] = "offdiag",
    seed: int = 0,
) -> GrowthState:
    """The state of a model `factor` times as wide, with `factor` times as many heads of the same size.

    Loss and logits stay to rounding, except with `symmetry="noise"`. `seed` draws A or the noise.

    Raises:
        ValueError: a parameter that is not GPT-2's.
    """
    import torch

    parameters: dict[str, Tensor] = {}
    for name, old in state.parameters.items():
        kind = _kind(name)
        new = _widen(kind, old, factor, fill=False)
        if kind == "last_norm":
            new = new / factor
        elif symmetry == "offdiag" and kind.endswith("matrix"):
            new = new + _cancelling_blocks(kind, old, factor, _generator(seed, name))
        elif symmetry == "noise" and new.dim() == 2:
            noise = torch.randn(new.shape, generator=_generator(seed, name), dtype=torch.float64)  # type: ignore[call-overload]
            if name == "wte.weight":
                noise[state.config.vocab_size :] = 0  # padding rows stay 0
            new = new + (noise * (NOISE_SCALE * old.double().std(correction=0).cpu())).to(new.dtype).to(new.device)
        parameters[name] = new

    exp_avg: dict[str, Tensor] = {}
    exp_avg_sq: dict[str, Tensor] = {}
    for name, old in state.exp_avg.items():
        kind = _kind(name)
        # the last layer norm is halved itself, so its gradient is not
        scale = 1 if kind == "last_norm" else factor
        exp_avg[name] = _widen(kind, old, factor, fill=moments == "ema") / scale
        exp_avg_sq[name] = _widen(kind, state.exp_avg_sq[name], factor, fill=moments == "ema") / scale**2
    config = dataclasses.replace(
        state.config, n_embd=factor * state.config.n_embd, n_head=factor * state.config.n_head
    )
    grown = GrowthState(
        config=config, parameters=parameters, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, steps=dict(state.steps)
    )
    return reset_moments(grown) if moments == "reset" else grown


def _identity_layer(part: str, like: Tensor) -> Tensor:
    """The parameter `part` of a layer whose layer norms and biases are 0 and whose matrices are eye.

    The layer computes x + proj(attn(0)) + proj(gelu(0)) = x. Eye rather than 0 lets the layer norms learn.
    """
    import torch

    if like.dim() == 1:
        return torch.zeros_like(like)
    if part == "attn.c_attn.weight":
        return torch.eye(like.shape[1], dtype=like.dtype, device=like.device).repeat(3, 1)
    return torch.eye(*like.shape, dtype=like.dtype, device=like.device)


def grow_depth(
    state: GrowthState,
    factor: int = 2,
    *,
    mode: Literal["identity", "zero_out_proj", "copy_interleave", "copy_append"] = "zero_out_proj",
    moments: Literal["paper", "ema", "reset"] = "ema",
) -> GrowthState:
    """The state of a model with `factor` times as many layers.

    With `copy_append` layer j is a copy of layer j mod n_layer; else the layers made from layer i follow it directly.
    `identity` and `zero_out_proj` leave loss and logits bit for bit. A copied layer copies its moments too. An inserted
    `zero_out_proj` layer starts with moments and step counter 0: before growth its gradients were 0 except in the two
    projections. An inserted `identity` layer does so with `moments="paper"`, and then 3/4 of its MLP units are dead for
    ever (0 in and 0 out is a saddle); with "ema" it takes its source's moments, whose first steps wake them. (The
    released code put eye matrices into the moments here; we do not.)

    Raises:
        ValueError: a parameter that is not GPT-2's.
    """
    import torch

    layers = state.config.n_layer
    if mode == "copy_append":
        sources = [(j % layers, j >= layers) for j in range(factor * layers)]
    else:
        sources = [(j // factor, j % factor > 0) for j in range(factor * layers)]
    for name in state.parameters:
        _kind(name)
    parts = [name.removeprefix("h.0.") for name in state.parameters if name.startswith("h.0.")]
    parameters: dict[str, Tensor] = {}
    exp_avg: dict[str, Tensor] = {}
    exp_avg_sq: dict[str, Tensor] = {}
    steps: dict[str, Tensor] = {}

    def take(new: str, old: str, fresh: bool) -> None:
        if old in state.exp_avg:
            exp_avg[new] = torch.zeros_like(state.exp_avg[old]) if fresh else state.exp_avg[old].clone()
            exp_avg_sq[new] = torch.zeros_like(state.exp_avg_sq[old]) if fresh else state.exp_avg_sq[old].clone()
            steps[new] = torch.zeros_like(state.steps[old]) if fresh else state.steps[old].clone()

    for name in state.parameters:  # the model's own order of names: wte, wpe, the layers, ln_f
        if not name.startswith("h."):
            parameters[name] = state.parameters[name]
            take(name, name, fresh=False)
        elif name == f"h.0.{parts[0]}":
            for j, (source, inserted) in enumerate(sources):
                for part in parts:
                    new, old = f"h.{j}.{part}", f"h.{source}.{part}"
                    value = state.parameters[old]
                    if inserted and mode == "identity":
                        value = _identity_layer(part, value)
                    elif inserted and mode == "zero_out_proj" and ".c_proj." in part:
                        value = torch.zeros_like(value)
                    parameters[new] = value.clone()
                    fresh = inserted and (mode == "zero_out_proj" or (mode == "identity" and moments == "paper"))
                    take(new, old, fresh)
    config = dataclasses.replace(state.config, n_layer=factor * layers)
    grown = GrowthState(
        config=config, parameters=parameters, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, steps=steps
    )
    return reset_moments(grown) if moments == "reset" else grown


def reset_moments(state: GrowthState) -> GrowthState:
    """The same model with Adam as if it had never stepped: moments and step counters 0."""
    import torch

    return dataclasses.replace(
        state,
        exp_avg={name: torch.zeros_like(tensor) for name, tensor in state.exp_avg.items()},
        exp_avg_sq={name: torch.zeros_like(tensor) for name, tensor in state.exp_avg_sq.items()},
        steps={name: torch.zeros_like(tensor) for name, tensor in state.steps.items()},
    )


def grow(state: GrowthState, operators: Iterable[Operator], section: StagedGrowth, seed: int) -> GrowthState:
    """The operators one after the other, in the section's variants.

    Raises:
        ValueError: a parameter that is not GPT-2's.
    """
    for index, (kind, factor) in enumerate(operators):
        if kind == "width":
            state = grow_width(
                state, factor, moments=section.moments, symmetry=section.symmetry, seed=seed + index
            )
        else:
            state = grow_depth(state, factor, mode=section.depth, moments=section.moments)
    return state


# --- training after growth ---


def small_model_scales(name: str, width_factor: int) -> GroupScale:
    """The scales with which a parameter of a model widened k-fold takes the small model's own steps.

    All k blocks of a row step alike, so a matrix needs lr / k, and so does the last layer norm, which is 1/k of its size
    at the same gradient. Gradients are g/k, so eps is too, but for the last layer norm. Weight decay is k times as large
    where the learning rate is 1/k. With "ema" moments, symmetry "none" and no clipping the widened model then repeats the
    small model's losses to rounding: the test of the operators, and the 1/width rule of learning rates.
    """
    from efftrain_cli.optim import GroupScale

    kind = _kind(name)
    if kind == "last_norm":
        return GroupScale(lr=1 / width_factor, weight_decay=width_factor)
    if kind.endswith("matrix"):
        return GroupScale(lr=1 / width_factor, eps=1 / width_factor, weight_decay=width_factor)
    return GroupScale(eps=1 / width_factor)


def width_asymmetry(parameters: Mapping[str, Tensor], factor: int) -> float:
    """How much the copies of a model widened k-fold differ: |p - p'| / |p| over all matrices and embeddings together,
    where p' is p with the copies cyclically exchanged. 0 while they are equal, of order 1 once they went their own ways.

    Vectors are left out: the gradient of the key bias is rounding only, and Adam makes full steps of it.
    """
    difference = total = 0.0
    for name, tensor in parameters.items():
        if tensor.dim() != 2:
            continue
        kind = _kind(name)
        for part in tensor.chunk(3) if kind == "fused_matrix" else (tensor,):
            exchanged = part.roll(part.shape[1] // factor, 1)
            if kind != "embedding":
                exchanged = exchanged.roll(part.shape[0] // factor, 0)
            difference += float((part.double() - exchanged.double()).square().sum())
            total += float(part.double().square().sum())
    return math.sqrt(difference / total) if total else 0.0
