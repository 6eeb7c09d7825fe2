"""Measures of the inside of a model, block by block, every `eval.internals` steps.

Columns of metrics.jsonl, "h.0" being the first block:

    grad_norm_h.0            l2 norm of its gradient before clipping; null if a delayed gradient is
                             not due yet
    update_ratio_h.0         l2 norm of the change of its parameters in the step, over that of the
                             parameters before it
    residual_rms_h.0         RMS of its output, the residual stream
    attention_logit_max_h.0  largest q k / sqrt(head_dim) of its heads, over all queries and the
                             keys that each may see

RMS and logits are of the first validation window after the step, so that they are comparable across
steps, seeds and methods. Everything here only reads: no loss, weight or random number depends on
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.model.gpt import GPT, Block
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.optim.gradients import combined_norm
from efftrain_cli.training.build import autocast
from efftrain_cli.training.devices import Devices

# --- the update -----------------------------------------------------------------------------------


class UpdateWatch:
    """Norms of one step's gradient and of the change that it makes.

    It holds a copy of the blocks' weights while the optimizer steps.
    """

    def __init__(
        self,
        names: Sequence[str],
        devices: Devices,
        norms: Mapping[str, Tensor] | None,
    ) -> None:
        """`names` are those of the model's parameters; `norms` as in `StepResult`."""
        self._names = names
        self._devices = devices
        self._norms = norms

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note the gradients, not clipped yet unless `norms` were given, and the weights before the
        step."""
        self._weights = {}
        self._before = {}
        gradients = {}
        for name, parameter in zip(self._names, parameters, strict=True):
            if parameter.grad is not None:
                gradients[name] = parameter.grad
            if name.startswith("h."):
                self._weights[name] = parameter.detach()
                self._before[name] = parameter.detach().clone()

        if self._norms is None:
            self._norms = self._devices.norms(gradients)

    def end(self) -> Tensors:
        """Return the columns `grad_norm_*` and `update_ratio_*`, each 0-d, after the step."""
        assert self._norms is not None
        changes = {}
        for name, before in self._before.items():
            changes[name] = self._weights[name] - before
        weight_norms = norms_by_layer(self._devices.norms(self._before))
        change_norms = norms_by_layer(self._devices.norms(changes))
        grad_norms = norms_by_layer(self._norms)

        columns = {}
        for block, change_norm in change_norms.items():
            not_due = torch.full_like(change_norm, torch.nan)
            columns[f"grad_norm_{block}"] = grad_norms.get(block, not_due)
            columns[f"update_ratio_{block}"] = change_norm / weight_norms[block]
        return columns


def norms_by_layer(norms: Mapping[str, Tensor]) -> Tensors:
    """Combine l2 norms by parameter, "h.0.ln_1.weight", into those of blocks, "h.0", and of tables
    outside, "wte"."""
    by_layer: dict[str, list[Tensor]] = {}
    for name, norm in norms.items():
        layer, _, rest = name.partition(".")
        if layer == "h":
            number = rest.partition(".")[0]
            layer = f"h.{number}"
        by_layer.setdefault(layer, []).append(norm)
    return {layer: combined_norm(parts) for layer, parts in by_layer.items()}


# --- a validation window --------------------------------------------------------------------------


def measure_activations(model: GPT, window: Tensor, dtype: str) -> Tensors:
    """Return `residual_rms_*` and `attention_logit_max_*`, each 0-d fp32, of one forward pass.

    It is not compiled, so compiled graphs stay as they are.

    Args:
        window: token ids, (1, seq_len + 1).
        dtype: compute type, as `compute_dtype` returns it.
    """
    columns: Tensors = {}

    def run(block: Block, x: Tensor, scale: Tensor | None) -> Tensor:
        activations: Tensors = {}
        x = block(x, scale, see=activations.__setitem__)

        number = len(columns) // 2
        rms = x.float().square().mean().sqrt()
        columns[f"residual_rms_h.{number}"] = rms
        largest = largest_logit(activations["attn.q"], activations["attn.k"])
        columns[f"attention_logit_max_h.{number}"] = largest
        return x

    device = model.device
    window = window.to(device, non_blocking=True)
    tokens = window[:, :-1]
    targets = window[:, 1:]
    with torch.no_grad(), autocast(dtype, device), attention_kernels(device, same_shape=True):
        model.loss_sum(tokens, targets, run_block=run)
    return columns


def largest_logit(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the largest attention logit, 0-d fp32, of q and k (B, H, T, D): over all heads and
    causal pairs.

    One head at a time: the logits of all heads would be the largest tensor of the model.
    """
    length, size = queries.shape[-2:]
    ones = torch.ones(length, length, dtype=torch.bool, device=queries.device)
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
