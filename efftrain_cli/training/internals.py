"""Measures of the inside of a model, block by block, every `eval.internals` steps.

Columns of metrics.jsonl, "h.0" being the first block:

    grad_norm_h.0            l2 norm of its gradient before clipping
    update_ratio_h.0         l2 norm of the change of its parameters in the step, over that of the
                             parameters before it
    residual_rms_h.0         RMS of its output, the residual stream
    attention_logit_max_h.0  largest q k / sqrt(head_dim) of its heads, over all queries and the
                             keys that each may see

RMS and logits are of the first validation window after the step, so that they are comparable across
steps, seeds and methods. Everything here only reads: no loss or weight depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.model.gpt import Block
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.optim.gradients import combined_norm
from efftrain_cli.training import dist
from efftrain_cli.training.precision import autocast
from efftrain_cli.training.state import TrainState


def norms(state: TrainState, tensors: Tensors) -> Tensors:
    """Return the l2 norm of each tensor, of a parameter by name, over all that the ranks hold, 0-d
    fp32."""
    held = list(tensors.values())
    local: Sequence[Tensor] = torch._foreach_norm(held)
    if state.division is not None:
        squares = [norm.square() for norm in local]
        dist.all_reduce(squares)
        local = [square.sqrt() for square in squares]
    return dict(zip(tensors, local, strict=True))


def gradient_norms(state: TrainState) -> Tensors:
    """Return the l2 norm of each parameter's gradient, 0-d fp32."""
    gradients = {}
    for name, parameter in state.parameters.items():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    return norms(state, gradients)


def block_weights(state: TrainState) -> Tensors:
    """Copy the weights of all blocks."""
    copies = {}
    for name, weight in state.weights().items():
        if name.startswith("h."):
            copies[name] = weight.clone()
    return copies


def update_columns(
    state: TrainState,
    before: Tensors,
    gradients: Tensors,
) -> Tensors:
    """Return the columns `grad_norm_*` and `update_ratio_*`, each 0-d, after an update.

    Args:
        before: `block_weights` before it.
        gradients: `gradient_norms` before clipping.
    """
    weights = state.weights()
    changes = {}
    for name, old in before.items():
        changes[name] = weights[name] - old
    of_changes = by_layer(norms(state, changes))
    of_weights = by_layer(norms(state, before))
    of_gradients = by_layer(gradients)
    columns = {}
    for block, change in of_changes.items():
        # A delayed gradient may not be due yet.
        not_due = torch.full_like(change, torch.nan)
        columns[f"grad_norm_{block}"] = of_gradients.get(block, not_due)
        columns[f"update_ratio_{block}"] = change / of_weights[block]
    return columns


def by_layer(by_name: Mapping[str, Tensor]) -> Tensors:
    """Combine l2 norms by parameter, "h.0.ln_1.weight", into those of blocks, "h.0", and of tables
    outside, "wte"."""
    parts: dict[str, list[Tensor]] = {}
    for name, norm in by_name.items():
        layer, _, rest = name.partition(".")
        if layer == "h":
            number = rest.partition(".")[0]
            layer = f"h.{number}"
        of_layer = parts.setdefault(layer, [])
        of_layer.append(norm)
    combined = {}
    for layer, of_layer in parts.items():
        combined[layer] = combined_norm(of_layer)
    return combined


def activation_columns(state: TrainState, window: Tensor) -> Tensors:
    """Return `residual_rms_*` and `attention_logit_max_*`, each 0-d fp32, of one forward pass.

    It is not compiled, so compiled graphs stay as they are.

    Args:
        window: token ids, (1, seq_len + 1).
    """
    columns: Tensors = {}

    def run(
        block: Block,
        x: Tensor,
        scale: Tensor | None,
    ) -> Tensor:
        seen: Tensors = {}
        x = block(x, scale, see=seen.__setitem__)
        number = len(columns) // 2
        rms = x.float().square().mean().sqrt()
        columns[f"residual_rms_h.{number}"] = rms
        largest = largest_logit(
            seen["attn.q"],
            seen["attn.k"],
        )
        columns[f"attention_logit_max_h.{number}"] = largest
        return x

    device = state.device
    window = window.to(device, non_blocking=True)
    tokens = window[:, :-1]
    targets = window[:, 1:]
    kernels = attention_kernels(device, same_shape=True)
    with torch.no_grad(), autocast(state.dtype, device), kernels:
        state.model.loss_sum(tokens, targets, run_block=run)
    return columns


def largest_logit(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the largest attention logit, 0-d fp32, of q and k (B, H, T, D): over all heads and
    causal pairs.

    One head at a time: the logits of all heads would be the largest tensor of the model.
    """
    length, size = queries.shape[-2:]
    ones = torch.ones(
        length,
        length,
        dtype=torch.bool,
        device=queries.device,
    )
    future = ones.triu(1)
    maxima = []
    with torch.autocast(queries.device.type, enabled=False):
        queries = queries.flatten(0, 1).float()
        keys = keys.flatten(0, 1).float()
        for q, k in zip(queries, keys, strict=True):
            logits = q @ k.T / size**0.5
            logits.masked_fill_(future, -torch.inf)
            maxima.append(logits.max())
    return torch.stack(maxima).max()
