"""The growth operators of staged training (Shen et al. 2022): maps over named tensors, from a model
to a larger one.

Before and after, for x the residual stream and W any of q, k, v, o, gate, up and down, each by
itself:

    width, k = 2      tables [E E]   norms [g g]   gains of q, k: g
    (copies)          W -> [ W + A11   A12     ]   A11 + A12 = 0
                           [ A21       W + A22 ]   A21 + A22 = 0
                      tied: last norm [g g] / k    untied: last norm [g g], head [W W] / k

    pad d -> e        tables, head [E 0]   norms sqrt(d/e) [g 1]   eps d/e
                      o, down [ W 0 ]   the others [ W R ]
                              [ 0 0 ]              [ R R ]
                      0: keeps x' = [x 0];  R: random, as nothing reads it yet. With norms of q
                      and k their matrices are times sqrt(d/e) too, because those norms' eps is
                      the same number

    d_ff, n_kv_head   new rows of gate, up (q, k, v) R, new columns of down (o) 0

    depth             x + down(MLP(norm(x + o(attn(norm(x)))))) with o = down = 0, norms = 0,
                      or copied

What they compute for GPT-2, and why, is in `staged_growth.py`, the method's section. Gesmundo and
Maile 2023, arXiv 2308.06103, pad.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.methods.staged_growth import Depth, Moments, StagedGrowth, Symmetry
from efftrain_cli.methods.stages import Operator, grown_shape
from efftrain_cli.model.config import GPTConfig, parameter_kind
from efftrain_cli.model.gpt import GPT

OFFDIAG_SCALE = 0.5
"""Standard deviation of the blocks of A, relative to W's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowthState:
    """What an operator maps: a model's shape, its parameters and its optimizer's state, all by the
    model's parameter names.

    Shapes are those of `efftrain_cli.model.gpt.GPT` (matrices (out, in)); any dtype and device.
    Operators may share tensors that they leave alone with the state they were given.
    """

    config: GPTConfig
    parameters: Tensors
    optimizer: Mapping[str, Tensors]
    """For each kind of state (Adam's `exp_avg`, `exp_avg_sq` and `step`) its tensors by parameter
    name; a parameter may have none of a kind. Empty where the state is lost."""
    gradient_powers: Mapping[str, int]
    """For each kind of state: with which power of the gradient it scales; 0 for a counter (0-d),
    which no operator reshapes. See `efftrain_cli.optim.optimizer.Optimizer`."""


def _parts(
    kind: str,
    tensor: Tensor,
    config: GPTConfig,
) -> Sequence[Tensor]:
    """Return q, k and v of a fused parameter, which grow one by one; else the whole."""
    if kind.startswith("fused"):
        return tensor.split(config.qkv_rows)
    return (tensor,)


def _map_moments(
    state: GrowthState,
    grow_moment: Callable[[str, Tensor, int], Tensor],
) -> dict[str, Tensors]:
    """Apply `grow_moment(name, tensor, power of the gradient)` to the optimizer's tensors; counters
    stay."""
    optimizer = {}
    for key, tensors in state.optimizer.items():
        grown = dict(tensors)
        power = state.gradient_powers[key]
        if power:
            for name, tensor in tensors.items():
                grown[name] = grow_moment(name, tensor, power)
        optimizer[key] = grown
    return optimizer


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw from N(0, 1) in fp64 on the CPU, so that every device grows the same model."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _spread(tensor: Tensor) -> Tensor:
    """Return the standard deviation of a tensor's entries, 0-d fp64 on the CPU."""
    return tensor.double().std(correction=0).cpu()


def _widen(
    kind: str,
    tensor: Tensor,
    factor: int,
    fill: bool,
) -> Tensor:
    """Repeat `tensor` to its k-fold shape, unscaled; `fill`: a matrix's blocks beside the diagonal
    are copies too."""
    if kind == "head_norm":
        return tensor
    if kind.endswith("embedding") or kind == "head":
        return tensor.repeat(1, factor)
    if not kind.endswith("matrix"):
        return tensor.repeat(factor)
    if fill:
        return tensor.repeat(factor, factor)
    return torch.block_diag(*[tensor] * factor)


def _cancelling_blocks(
    tensor: Tensor,
    factor: int,
    generator: torch.Generator,
) -> Tensor:
    """Draw A: random blocks in the k-fold shape of a matrix; each row of blocks sums to 0."""
    rows, columns = tensor.shape
    blocks = _normal((factor, factor, rows, columns), generator)
    blocks = (blocks * (OFFDIAG_SCALE * _spread(tensor))).to(tensor.dtype)
    diagonal = torch.arange(factor)
    blocks[diagonal, diagonal] = 0
    blocks[diagonal, diagonal] = -blocks.sum(dim=1)

    # (row of blocks, row in the block, column of blocks, column in the block)
    matrix = blocks.permute(0, 2, 1, 3).reshape(factor * rows, factor * columns)
    return matrix.to(tensor.device)


def _generator(seed: int, name: str) -> torch.Generator:
    """Make a generator that is a function of the seed, this purpose and the parameter's name."""
    digest = hashlib.sha256(f"{seed}/staged_growth/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def grow_width(
    state: GrowthState,
    factor: int,
    *,
    moments: Moments,
    symmetry: Symmetry,
    seed: int = 0,
) -> GrowthState:
    """Grow a model to `factor` times its width, with `factor` times as many heads of the same size.

    Loss and logits stay to rounding. `seed` draws A. Moments: m / k and v / k^2, but as they are
    for the gains of q and k and for what is itself divided by k.

    Raises:
        ValueError: a parameter that is not a GPT's.
    """

    # Divided by k, so that k times as many channels give the same logits.
    divided = "head"
    if state.config.tied:
        divided = "last_norm"

    def widen(kind: str, tensor: Tensor, fill: bool) -> Tensor:
        parts = _parts(kind, tensor, state.config)
        return torch.cat([_widen(kind, part, factor, fill) for part in parts])

    def widen_moment(name: str, tensor: Tensor, power: int) -> Tensor:
        kind = parameter_kind(name)
        wide = widen(kind, tensor, moments == "ema")
        if kind in (divided, "head_norm"):
            # What is divided itself keeps its gradient, and so do gains that every head shares.
            return wide
        return wide / factor**power

    parameters: Tensors = {}
    for name, old in state.parameters.items():
        kind = parameter_kind(name)
        new = widen(kind, old, False)
        if kind == divided:
            new = new / factor
        elif symmetry == "offdiag" and kind.endswith("matrix"):
            generator = _generator(seed, name)
            parts = _parts(kind, old, state.config)
            blocks = [_cancelling_blocks(part, factor, generator) for part in parts]
            new = new + torch.cat(blocks)
        parameters[name] = new

    return dataclasses.replace(
        state,
        config=grown_shape(state.config, Operator("width", factor)),
        parameters=parameters,
        optimizer=_map_moments(state, widen_moment),
    )


RANDOM_IF_NEW = ("attn.c_attn.weight", "mlp.c_fc.weight", "mlp.c_up.weight")
"""Matrices whose new entries change no function: what they read is 0, or what reads them."""


def grow_size(
    state: GrowthState,
    operator: Operator,
    *,
    seed: int,
) -> GrowthState:
    """Grow a model to the width of "pad", or the d_ff or n_kv_head, that `operator` sets.

    Loss and logits stay to rounding. `seed` draws the new entries, as large as the old ones.
    Moments of new entries are 0; those of what is multiplied by c are m / c and v / c^2.

    Raises:
        ValueError: a parameter that is not a GPT's.
    """
    old = state.config
    config = grown_shape(old, operator)
    ratio = math.sqrt(old.n_embd / config.n_embd)
    with torch.device("meta"):
        target = GPT(config)
    shapes = {name: parameter.shape for name, parameter in target.named_parameters()}

    def is_gain(name: str) -> bool:
        return parameter_kind(name) == "last_norm" or ".ln_" in name

    def enlarge(name: str, tensor: Tensor, power: int | None) -> Tensor:
        """Enlarge the parameter, or with `power` a moment that scales with this gradient power."""
        kind = parameter_kind(name)
        has_normed_rows = config.qk_norm and kind.startswith("fused")
        generator = _generator(seed, name)
        larger = tensor.new_zeros(shapes[name])
        sources = _parts(kind, tensor, old)
        parts = _parts(kind, larger, config)
        for number, source in enumerate(sources):
            part = parts[number]
            # Of gains, and of the rows of q and k.
            factor = 1.0
            if is_gain(name) or (has_normed_rows and number < 2):
                factor = ratio
            scale = factor
            if power is not None:
                scale = factor**-power
            elif is_gain(name):
                part.fill_(ratio)
            elif name.endswith(RANDOM_IF_NEW):
                new_entries = _normal(part.shape, generator)
                part.copy_(new_entries * (factor * _spread(source)))
            old_entries = tuple(slice(size) for size in source.shape)
            part[old_entries] = source * scale
        return larger

    parameters = {}
    for name, tensor in state.parameters.items():
        parameters[name] = enlarge(name, tensor, None)
    return dataclasses.replace(
        state,
        config=config,
        parameters=parameters,
        optimizer=_map_moments(state, enlarge),
    )


def _identity_layer(part: str, like: Tensor, config: GPTConfig) -> Tensor:
    """Make the parameter `part` of a layer whose layer norms and biases are 0 and matrices are eye.

    The layer computes x + proj(attn(0)) + proj(gelu(0)) = x. Eye rather than 0 lets the layer norms
    learn.
    """
    if part.endswith(("q_norm.weight", "k_norm.weight")):
        return torch.ones_like(like)
    if like.dim() == 1:
        return torch.zeros_like(like)
    eyes = []
    for matrix in _parts(parameter_kind(f"h.0.{part}"), like, config):
        eyes.append(torch.eye(*matrix.shape, dtype=like.dtype, device=like.device))
    return torch.cat(eyes)


def grow_depth(
    state: GrowthState,
    factor: int,
    *,
    mode: Depth,
    moments: Moments = "ema",
) -> GrowthState:
    """Grow a model to `factor` times as many layers.

    With `copy_append` layer j is a copy of layer j mod n_layer; else the layers made
    from layer i follow it directly. `identity` and `zero_out_proj` leave loss and logits bit for
    bit. A copied layer copies its moments too. An inserted `zero_out_proj` layer
    starts with moments and step counter 0: before growth its gradients were 0 except in the two
    projections. An inserted `identity` layer does so with `moments="paper"`, and then 3/4 of its
    MLP units are dead for good (0 in and 0 out is a saddle); with "ema" it takes its source's
    moments, whose first steps wake them. (The released code put eye matrices into the moments here;
    we do not.)

    Raises:
        ValueError: a parameter that is not a GPT's.
    """
    layers = state.config.n_layer
    config = grown_shape(state.config, Operator("depth", factor))
    starts_at_zero = mode == "zero_out_proj"
    if mode == "identity":
        starts_at_zero = moments == "paper"
    with torch.device("meta"):
        names = [name for name, _ in GPT(config).named_parameters()]

    parameters: Tensors = {}
    optimizer: dict[str, Tensors] = {key: {} for key in state.optimizer}
    for new in names:
        old = new
        part = ""
        inserted = False
        if new.startswith("h."):
            _, number, part = new.split(".", 2)
            source, copy = divmod(int(number), factor)
            if mode == "copy_append":
                copy, source = divmod(int(number), layers)
            old = f"h.{source}.{part}"
            inserted = copy > 0

        value = state.parameters[old]
        if inserted and mode == "identity":
            value = _identity_layer(part, value, config)
        elif inserted and mode == "zero_out_proj" and ".c_proj." in part:
            value = torch.zeros_like(value)
        parameters[new] = value.clone()

        for key, tensors in state.optimizer.items():
            if old not in tensors:
                continue
            optimizer[key][new] = tensors[old].clone()
            if inserted and starts_at_zero:
                optimizer[key][new].zero_()
    return dataclasses.replace(state, config=config, parameters=parameters, optimizer=optimizer)


def grow(
    state: GrowthState,
    operators: Iterable[Operator],
    section: StagedGrowth,
    seed: int,
) -> GrowthState:
    """Apply the operators one after the other, in the section's variants.

    With moments = "reset" no state of the optimizer is left: it begins anew.

    Raises:
        ValueError: a parameter that is not a GPT's.
    """
    for name in state.parameters:
        parameter_kind(name)
    moments = section.moments
    if moments == "reset":
        state = dataclasses.replace(state, optimizer={})
    for drawn, operator in enumerate(operators, seed):
        kind, factor = operator
        if kind == "width":
            state = grow_width(
                state, factor, moments=moments, symmetry=section.symmetry, seed=drawn
            )
        elif kind == "depth":
            state = grow_depth(state, factor, mode=section.depth, moments=moments)
        else:
            state = grow_size(state, operator, seed=drawn)
    return state
