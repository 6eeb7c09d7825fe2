"""The growth operators of staged training (Shen et al. 2022): maps over named tensors, from a model to a larger one.

Before and after, for x the residual stream and W any of q, k, v, o, gate, up and down, each by itself:

    width, k = 2      tables [E E]   W -> [ W + A11   A12     ]   A11 + A12 = 0    norms [g g]   gains of q, k: g
    (copies)                             [ A21       W + A22 ]   A21 + A22 = 0
                      tied: last norm [g g] / k          untied: last norm [g g], head [W W] / k

    pad d -> e        tables, head [E 0]   norms sqrt(d/e) [g 1]   eps d/e   o, down [ W 0 ]   the others [ W R ]
                                                                                    [ 0 0 ]              [ R R ]
                      0: keeps x' = [x 0];  R: random, as nothing reads it yet. With norms of q and k their matrices are
                      times sqrt(d/e) too, because those norms' eps is the same number

    d_ff, n_kv_head   new rows of gate, up (q, k, v) R, new columns of down (o) 0

    depth             x + down(MLP(norm(x + o(attn(norm(x)))))) with o = down = 0, norms = 0, copied, or random

What they compute for GPT-2, and why, is in `staged_growth.py`, the method's section. Gesmundo and Maile 2023, arXiv
2308.06103, pad.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from efftrain_cli.methods.staged_growth import (
    Depth,
    Moments,
    Operator,
    StagedGrowth,
    Symmetry,
    grown_shape,
)
from efftrain_cli.model.parameter_kinds import ParameterKind, parameter_kind
from efftrain_cli.optim.parameter_groups import GroupScale

if TYPE_CHECKING:
    from torch import Tensor

    from efftrain_cli.model.config import GPTConfig

OFFDIAG_SCALE = 0.5
"""Standard deviation of the blocks of A, relative to W's."""
NOISE_SCALE = 0.01
"""Standard deviation of the noise of `symmetry = "noise"`, relative to that of the parameter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowthState:
    """What an operator maps: a model's shape, its parameters and its optimizer's state, all by the model's parameter
    names.

    Shapes are those of `efftrain_cli.model.gpt.GPT` (matrices (out, in)); any dtype and device. Operators share tensors
    they leave alone with the state they were given.
    """

    config: GPTConfig
    parameters: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]] = dataclasses.field(default_factory=dict)
    """For each kind of state (Adam's `exp_avg`, `exp_avg_sq` and `step`) its tensors by parameter name; a parameter may
    have none of a kind. Empty where the state is lost."""
    gradient_powers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """For each kind of state: with which power of the gradient it scales; 0 for a counter (0-d), which no operator
    reshapes. See `efftrain_cli.optim.optimizer.Optimizer`."""


def _parts(kind: str, tensor: Tensor, config: GPTConfig) -> Sequence[Tensor]:
    """q, k and v of a fused parameter, which grow one by one; else the whole."""
    return tensor.split(config.qkv_rows) if kind.startswith("fused") else (tensor,)


def _widen(kind: str, tensor: Tensor, factor: int, fill: bool) -> Tensor:
    """`tensor` in its k-fold shape, unscaled; with `fill` a matrix's blocks beside the diagonal are copies too."""
    import torch

    if kind == "head_norm":
        return tensor
    if kind.endswith("embedding") or kind == "head":
        return tensor.repeat(1, factor)
    if not kind.endswith("matrix"):
        return tensor.repeat(factor)
    return tensor.repeat(factor, factor) if fill else torch.block_diag(*[tensor] * factor)


def _cancelling_blocks(tensor: Tensor, factor: int, generator: object) -> Tensor:
    """A: random blocks in the k-fold shape of a matrix that sum to 0 along every row of blocks."""
    import torch

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
    moments: Moments = "ema",
    symmetry: Symmetry = "offdiag",
    seed: int = 0,
) -> GrowthState:
    """The state of a model `factor` times as wide, with `factor` times as many heads of the same size.

    Loss and logits stay to rounding, except with `symmetry="noise"`. `seed` draws A or the noise. Moments: m / k and
    v / k^2, but as they are for the gains of q and k and for what is itself divided by k.

    Raises:
        ValueError: a parameter that is not a GPT's.
    """
    import torch

    divided = "last_norm" if state.config.tied else "head"

    def widen(kind: str, tensor: Tensor, fill: bool) -> Tensor:
        parts = _parts(kind, tensor, state.config)
        return torch.cat([_widen(kind, part, factor, fill) for part in parts])

    parameters: dict[str, Tensor] = {}
    for name, old in state.parameters.items():
        kind = parameter_kind(name)
        new = widen(kind, old, False)
        if kind == divided:
            new = new / factor
        elif symmetry == "offdiag" and kind.endswith("matrix"):
            generator = _generator(seed, name)
            parts = _parts(kind, old, state.config)
            new = new + torch.cat([_cancelling_blocks(part, factor, generator) for part in parts])
        elif symmetry == "noise" and new.dim() == 2:
            noise = torch.randn(new.shape, generator=_generator(seed, name), dtype=torch.float64)  # type: ignore[call-overload]
            if kind in ("token_embedding", "head"):
                noise[state.config.vocab_size :] = 0  # padding rows stay 0
            new = new + (noise * (NOISE_SCALE * old.double().std(correction=0).cpu())).to(
                new.dtype
            ).to(new.device)
        parameters[name] = new

    optimizer: dict[str, dict[str, Tensor]] = {}
    for key, tensors in state.optimizer.items():
        power = state.gradient_powers[key]
        optimizer[key] = grown_tensors = {}
        for name, old in tensors.items():
            kind = parameter_kind(name)
            # What is divided itself keeps its gradient, and so do gains that every head shares.
            scale = 1 if kind in (divided, "head_norm") else factor
            grown_tensors[name] = (
                widen(kind, old, moments == "ema") / scale**power if power else old
            )
    config = grown_shape(state.config, Operator("width", factor))
    grown = dataclasses.replace(state, config=config, parameters=parameters, optimizer=optimizer)
    return reset_moments(grown) if moments == "reset" else grown


RANDOM_IF_NEW = ("attn.c_attn.weight", "mlp.c_fc.weight", "mlp.c_up.weight")
"""Matrices whose new entries change no function: what they read is 0, or what reads them."""


def grow_size(
    state: GrowthState, operator: Operator, *, moments: Moments = "ema", seed: int = 0
) -> GrowthState:
    """The state of a model with the width of "pad", or the d_ff or n_kv_head, that `operator` sets.

    Loss and logits stay to rounding. `seed` draws the new entries, as large as the old ones. Moments of new entries are
    0; those of what is multiplied by c are m / c and v / c^2.

    Raises:
        ValueError: a parameter that is not a GPT's, a size less than before, or pad with layer norms.
    """
    import torch

    from efftrain_cli.model.gpt import GPT

    old, config = state.config, grown_shape(state.config, operator)
    if operator.kind == "pad" and (old.norm_facts.is_centered or not old.norm_facts.vectors):
        raise ValueError('pad needs norm = "rmsnorm": zeros beside the channels move a mean')
    if (
        min(config.n_embd - old.n_embd, config.ff_size - old.ff_size, config.n_head - old.n_head)
        < 0
    ):
        raise ValueError(f"{operator.kind}:{operator.factor}: growth makes no model smaller")
    ratio = math.sqrt(old.n_embd / config.n_embd)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in GPT(config).named_parameters()}

    def enlarge(name: str, tensor: Tensor, power: int | None) -> Tensor:
        """The parameter, or with `power` a state that scales with this power of its gradient."""
        kind = parameter_kind(name)
        gain = kind == "last_norm" or ".ln_" in name
        rows = config.qkv_rows if kind.startswith("fused") else (shapes[name][0],)
        generator, parts = _generator(seed, name), []
        for number, source in enumerate(_parts(kind, tensor, old)):
            factor = ratio if gain or (config.qk_norm and len(rows) > 1 and number < 2) else 1.0
            part = source.new_zeros(rows[number], *shapes[name][1:])
            if power is None and gain:
                part.fill_(ratio)
            elif power is None and name.endswith(RANDOM_IF_NEW):
                drawn = torch.randn(part.shape, generator=generator, dtype=torch.float64)  # type: ignore[call-overload]
                part.copy_(drawn * (factor * source.double().std(correction=0).cpu()))
            scale = factor if power is None else factor**-power
            part[tuple(slice(size) for size in source.shape)] = source * scale
            parts.append(part)
        return torch.cat(parts)

    parameters = {name: enlarge(name, tensor, None) for name, tensor in state.parameters.items()}
    optimizer: dict[str, dict[str, Tensor]] = {}
    for key, tensors in state.optimizer.items():
        power = state.gradient_powers[key]
        optimizer[key] = {
            name: enlarge(name, tensor, power) if power else tensor
            for name, tensor in tensors.items()
        }
    grown = dataclasses.replace(state, config=config, parameters=parameters, optimizer=optimizer)
    return reset_moments(grown) if moments == "reset" else grown


def _identity_layer(part: str, like: Tensor, config: GPTConfig) -> Tensor:
    """The parameter `part` of a layer whose layer norms and biases are 0 and whose matrices are eye.

    The layer computes x + proj(attn(0)) + proj(gelu(0)) = x. Eye rather than 0 lets the layer norms learn.
    """
    import torch

    if part.endswith(("_affine.weight", "q_norm.weight", "k_norm.weight")):
        return torch.ones_like(like)
    if like.dim() == 1:
        return torch.zeros_like(like)
    rows = config.qkv_rows if part == "attn.c_attn.weight" else (len(like),)
    columns = like.shape[1]
    return torch.cat(
        [torch.eye(count, columns, dtype=like.dtype, device=like.device) for count in rows]
    )


def grow_depth(
    state: GrowthState,
    factor: int = 2,
    *,
    mode: Depth = "zero_out_proj",
    moments: Moments = "ema",
    seed: int = 0,
) -> GrowthState:
    """The state of a model with `factor` times as many layers.

    With `copy_append` and `copies` layer j is a copy of layer j mod n_layer; with `random` the layers after the old
    ones are drawn from `seed`, with moments and step counter 0; else the layers made from layer i follow it directly.
    `identity` and `zero_out_proj` leave loss and logits bit for bit. A copied layer copies its moments too. An inserted
    `zero_out_proj` layer starts with moments and step counter 0: before growth its gradients were 0 except in the two
    projections. An inserted `identity` layer does so with `moments="paper"`, and then 3/4 of its MLP units are dead for
    good (0 in and 0 out is a saddle); with "ema" it takes its source's moments, whose first steps wake them. (The
    released code put eye matrices into the moments here; we do not.)

    Raises:
        ValueError: a parameter that is not a GPT's, or `identity` with an MLP in which it would never learn.
    """
    import torch

    if mode == "identity" and not state.config.mlp_facts.has_slope_at_zero:
        raise ValueError(
            f'identity with mlp = "{state.config.mlp}": new layers would have no gradient'
        )
    layers = state.config.n_layer
    config = grown_shape(state.config, Operator("depth", factor))
    fresh_layers = _initial_layers(config, seed) if mode == "random" else {}
    if mode in ("copy_append", "copies", "random"):
        sources = [(j % layers, j >= layers) for j in range(factor * layers)]
    else:
        sources = [(j // factor, j % factor > 0) for j in range(factor * layers)]
    for name in state.parameters:
        parameter_kind(name)
    parts = [name.removeprefix("h.0.") for name in state.parameters if name.startswith("h.0.")]
    parameters: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Tensor]] = {key: {} for key in state.optimizer}

    def take(new: str, old: str, fresh: bool) -> None:
        for key, tensors in state.optimizer.items():
            if old in tensors:
                optimizer[key][new] = (
                    torch.zeros_like(tensors[old]) if fresh else tensors[old].clone()
                )

    for name in state.parameters:  # the model's own order of names: wte, wpe, the layers, ln_f
        if not name.startswith("h."):
            parameters[name] = state.parameters[name]
            take(name, name, fresh=False)
        elif name == f"h.0.{parts[0]}":
            for j, (source, inserted) in enumerate(sources):
                for part in parts:
                    new, old = f"h.{j}.{part}", f"h.{source}.{part}"
                    value = state.parameters[old]
                    projection = ".c_proj." in part or part.endswith("c_proj_affine.bias")
                    if inserted and mode == "identity":
                        value = _identity_layer(part, value, config)
                    elif inserted and mode == "random":
                        value = fresh_layers[new].to(value)
                    elif inserted and mode == "zero_out_proj" and projection:
                        value = torch.zeros_like(value)
                    parameters[new] = value.clone()
                    fresh = mode in ("zero_out_proj", "random") or (
                        mode == "identity" and moments == "paper"
                    )
                    take(new, old, inserted and fresh)
    grown = dataclasses.replace(state, config=config, parameters=parameters, optimizer=optimizer)
    return reset_moments(grown) if moments == "reset" else grown


def _initial_layers(config: GPTConfig, seed: int) -> dict[str, Tensor]:
    """The layers of a fresh model of that shape, by name."""
    from efftrain_cli.model.gpt import GPT

    model = GPT(config)
    model.init_weights(seed)
    return {name: p.detach() for name, p in model.named_parameters() if name.startswith("h.")}


def reset_moments(state: GrowthState) -> GrowthState:
    """The same model with an optimizer that has never stepped: moments and step counters 0."""
    import torch

    optimizer = state.optimizer.items()
    zeros = {
        key: {name: torch.zeros_like(old) for name, old in tensors.items()}
        for key, tensors in optimizer
    }
    return dataclasses.replace(state, optimizer=zeros)


def grow(
    state: GrowthState, operators: Iterable[Operator], section: StagedGrowth, seed: int
) -> GrowthState:
    """The operators one after the other, in the section's variants.

    Raises:
        ValueError: a parameter that is not a GPT's.
    """
    moments = section.moments
    for drawn, operator in enumerate(operators, seed):
        kind, factor = operator
        if kind == "width":
            state = grow_width(
                state, factor, moments=moments, symmetry=section.symmetry, seed=drawn
            )
        elif kind == "depth":
            state = grow_depth(state, factor, mode=section.depth, moments=moments, seed=drawn)
        else:
            state = grow_size(state, operator, moments=moments, seed=drawn)
    return state


# --- training after growth ---


def small_model_scales(kind: ParameterKind, width_factor: int, tied: bool = True) -> GroupScale:
    """The scales with which a parameter of a model widened k-fold takes the small model's own steps.

    All k blocks of a row step alike, so a matrix needs lr / k, and so does the last layer norm, which is 1/k of its
    size at the same gradient. Gradients are g/k, so eps is too, but for the last layer norm. Weight decay is k times as
    large where the learning rate is 1/k. With "ema" moments, symmetry "none" and no clipping the widened model then
    repeats the small model's losses to rounding: the test of the operators, and the 1/width rule of learning rates.
    """
    if kind == ("last_norm" if tied else "head"):
        return GroupScale(lr=1 / width_factor, weight_decay=width_factor)
    if kind == "head_norm":
        return GroupScale()
    if kind.endswith("matrix"):
        return GroupScale(lr=1 / width_factor, eps=1 / width_factor, weight_decay=width_factor)
    return GroupScale(eps=1 / width_factor)


def width_asymmetry(parameters: Mapping[str, Tensor], factor: int, config: GPTConfig) -> float:
    """How much the copies of a model widened k-fold differ: |p - p'| / |p| over all matrices and embeddings together,
    where p' is p with the copies cyclically exchanged. 0 while they are equal, of order 1 once they went their own
    ways.

    Vectors are left out: the gradient of the key bias is rounding only, and Adam makes full steps of it.
    """
    difference = total = 0.0
    for name, tensor in parameters.items():
        if tensor.dim() != 2:
            continue
        kind = parameter_kind(name)
        for part in _parts(kind, tensor, config):
            exchanged = part.roll(part.shape[1] // factor, 1)
            if kind.endswith("matrix"):
                exchanged = exchanged.roll(part.shape[0] // factor, 0)
            difference += float((part.double() - exchanged.double()).square().sum())
            total += float(part.double().square().sum())
    return math.sqrt(difference / total) if total else 0.0
