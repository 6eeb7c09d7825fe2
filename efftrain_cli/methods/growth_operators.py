"""The growth operators of staged training (Shen et al. 2022): maps over named tensors, from a model to a larger one.

What they compute, and why, is in `staged_growth.py`, the method's section.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from efftrain_cli.methods.staged_growth import Depth, Moments, Operator, StagedGrowth, Symmetry
from efftrain_cli.model.parameter_kinds import ParameterKind, parameter_kind
from efftrain_cli.optim.groups import GroupScale

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


def _widen(kind: str, tensor: Tensor, factor: int, fill: bool) -> Tensor:
    """`tensor` in its k-fold shape, unscaled; with `fill` a matrix's blocks beside the diagonal are copies too."""
    import torch

    if kind.startswith("fused"):  # q, k and v grow one by one, not the fused matrix
        return torch.cat(
            [_widen(kind.removeprefix("fused_"), part, factor, fill) for part in tensor.chunk(3)]
        )
    if kind.endswith("embedding"):
        return tensor.repeat(1, factor)
    if kind != "matrix":
        return tensor.repeat(factor)
    return tensor.repeat(factor, factor) if fill else torch.block_diag(*[tensor] * factor)


def _cancelling_blocks(kind: str, tensor: Tensor, factor: int, generator: object) -> Tensor:
    """A: random blocks in the k-fold shape of a matrix that sum to 0 along every row of blocks."""
    import torch

    if kind == "fused_matrix":
        return torch.cat(
            [_cancelling_blocks("matrix", part, factor, generator) for part in tensor.chunk(3)]
        )
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

    Loss and logits stay to rounding, except with `symmetry="noise"`. `seed` draws A or the noise.

    Raises:
        ValueError: a parameter that is not GPT-2's.
    """
    import torch

    parameters: dict[str, Tensor] = {}
    for name, old in state.parameters.items():
        kind = parameter_kind(name)
        new = _widen(kind, old, factor, fill=False)
        if kind == "last_norm":
            new = new / factor
        elif symmetry == "offdiag" and kind.endswith("matrix"):
            new = new + _cancelling_blocks(kind, old, factor, _generator(seed, name))
        elif symmetry == "noise" and new.dim() == 2:
            noise = torch.randn(new.shape, generator=_generator(seed, name), dtype=torch.float64)  # type: ignore[call-overload]
            if name == "wte.weight":
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
            # the last layer norm is halved itself, so its gradient is not
            scale = 1 if kind == "last_norm" else factor
            grown_tensors[name] = (
                _widen(kind, old, factor, fill=moments == "ema") / scale**power if power else old
            )
    config = dataclasses.replace(
        state.config, n_embd=factor * state.config.n_embd, n_head=factor * state.config.n_head
    )
    grown = dataclasses.replace(state, config=config, parameters=parameters, optimizer=optimizer)
    return reset_moments(grown) if moments == "reset" else grown


def _identity_layer(part: str, like: Tensor) -> Tensor:
    """The parameter `part` of a layer whose layer norms and biases are 0 and whose matrices are eye.

    The layer computes x + proj(attn(0)) + proj(gelu(0)) = x. Eye rather than 0 lets the layer norms learn.
    """
    import torch

    if part.endswith("_affine.weight"):
        return torch.ones_like(like)
    if like.dim() == 1:
        return torch.zeros_like(like)
    if part == "attn.c_attn.weight":
        return torch.eye(like.shape[1], dtype=like.dtype, device=like.device).repeat(3, 1)
    return torch.eye(*like.shape, dtype=like.dtype, device=like.device)


def grow_depth(
    state: GrowthState, factor: int = 2, *, mode: Depth = "zero_out_proj", moments: Moments = "ema"
) -> GrowthState:
    """The state of a model with `factor` times as many layers.

    With `copy_append` layer j is a copy of layer j mod n_layer; else the layers made from layer i follow it directly.
    `identity` and `zero_out_proj` leave loss and logits bit for bit. A copied layer copies its moments too. An inserted
    `zero_out_proj` layer starts with moments and step counter 0: before growth its gradients were 0 except in the two
    projections. An inserted `identity` layer does so with `moments="paper"`, and then 3/4 of its MLP units are dead for
    good (0 in and 0 out is a saddle); with "ema" it takes its source's moments, whose first steps wake them. (The
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
                        value = _identity_layer(part, value)
                    elif inserted and mode == "zero_out_proj" and projection:
                        value = torch.zeros_like(value)
                    parameters[new] = value.clone()
                    fresh = mode == "zero_out_proj" or (mode == "identity" and moments == "paper")
                    take(new, old, inserted and fresh)
    config = dataclasses.replace(state.config, n_layer=factor * layers)
    grown = dataclasses.replace(state, config=config, parameters=parameters, optimizer=optimizer)
    return reset_moments(grown) if moments == "reset" else grown


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


def small_model_scales(kind: ParameterKind, width_factor: int) -> GroupScale:
    """The scales with which a parameter of a model widened k-fold takes the small model's own steps.

    All k blocks of a row step alike, so a matrix needs lr / k, and so does the last layer norm, which is 1/k of its
    size at the same gradient. Gradients are g/k, so eps is too, but for the last layer norm. Weight decay is k times as
    large where the learning rate is 1/k. With "ema" moments, symmetry "none" and no clipping the widened model then
    repeats the small model's losses to rounding: the test of the operators, and the 1/width rule of learning rates.
    """
    if kind == "last_norm":
        return GroupScale(lr=1 / width_factor, weight_decay=width_factor)
    if kind.endswith("matrix"):
        return GroupScale(lr=1 / width_factor, eps=1 / width_factor, weight_decay=width_factor)
    return GroupScale(eps=1 / width_factor)


def width_asymmetry(parameters: Mapping[str, Tensor], factor: int) -> float:
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
        for part in tensor.chunk(3) if kind == "fused_matrix" else (tensor,):
            exchanged = part.roll(part.shape[1] // factor, 1)
            if not kind.endswith("embedding"):
                exchanged = exchanged.roll(part.shape[0] // factor, 0)
            difference += float((part.double() - exchanged.double()).square().sum())
            total += float(part.double().square().sum())
    return math.sqrt(difference / total) if total else 0.0
