"""What happens inside of a model, block by block, every `eval.internals` steps.

Columns of metrics.jsonl, "h.0" being the first block:

    grad_norm_h.0            l2 norm of its gradient before clipping; null if a delayed gradient is not due yet
    update_ratio_h.0         l2 norm of the change of its parameters in the step, over that of the parameters before it
    residual_rms_h.0         RMS of its output, the residual stream
    attention_logit_max_h.0  largest q k / sqrt(head_dim) of its heads, over all queries and the keys that each may see
    entropy                  mean entropy of the predicted distributions over the next token, nats

The last three are of the first validation window after the step, so that they are comparable across steps, seeds and
methods. Everything here only reads: no loss, weight or random number depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from efftrain_cli.model.gpt import GPT, Block
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.training.build import autocast
from efftrain_cli.training.devices import Devices

POSITIONS = 256
"""Positions whose predictions exist at once."""


class UpdateWatch:
    """Norms of one step's gradient and of the change that it makes. Holds a copy of the blocks' weights meanwhile."""

    def __init__(
        self, names: Sequence[str], devices: Devices, norms: Mapping[str, Tensor] | None
    ) -> None:
        """`names` are those of the model's parameters; `norms` as in `StepResult`."""
        self._names, self._devices, self._norms = names, devices, norms

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note the gradients, not clipped yet unless `norms` were given, and the weights before the step."""
        named = zip(self._names, parameters, strict=True)
        self._parameters = {name: p.detach() for name, p in named if name.startswith("h.")}
        if self._norms is None:
            gradients = {name: p.grad for name, p in zip(self._names, parameters, strict=True)}
            self._norms = self._devices.norms(
                {name: grad for name, grad in gradients.items() if grad is not None}
            )
        self._before = {name: tensor.clone() for name, tensor in self._parameters.items()}

    def end(self) -> dict[str, Tensor]:
        """Return the columns `grad_norm_*` and `update_ratio_*`, each 0-d, after the step."""
        assert self._norms is not None
        changes = {name: self._parameters[name] - old for name, old in self._before.items()}
        weights = norms_by_layer(self._devices.norms(self._before))
        gradients = norms_by_layer(self._norms)
        columns = {}
        for block, change in norms_by_layer(self._devices.norms(changes)).items():
            none = torch.full_like(change, torch.nan)
            columns[f"grad_norm_{block}"] = gradients.get(block, none)
            columns[f"update_ratio_{block}"] = change / weights[block]
        return columns


def norms_by_layer(norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Combine l2 norms by parameter, "h.0.ln_1.weight", into those of blocks, "h.0", and of tables outside, "wte"."""
    layers: dict[str, list[Tensor]] = {}
    for name, norm in norms.items():
        layer = ".".join(name.split(".")[: 2 if name.startswith("h.") else 1])
        layers.setdefault(layer, []).append(norm)
    return {layer: torch.linalg.vector_norm(torch.stack(found)) for layer, found in layers.items()}


def measure_activations(model: GPT, window: Tensor, dtype: str) -> dict[str, Tensor]:
    """Return `residual_rms_*`, `attention_logit_max_*` and `entropy`, each 0-d fp32, of one forward pass.

    It is not compiled, so compiled graphs stay as they are.

    Args:
        window: token ids, (1, seq_len + 1).
        dtype: compute type, as `compute_dtype` returns it.
    """
    columns: dict[str, Tensor] = {}

    def run(block: Block, x: Tensor, scale: Tensor | None) -> Tensor:
        seen: dict[str, Tensor] = {}
        x = block(x, scale, see=seen.__setitem__)
        number = len(columns) // 2
        columns[f"residual_rms_h.{number}"] = x.float().square().mean().sqrt()
        columns[f"attention_logit_max_h.{number}"] = largest_logit(seen["attn.q"], seen["attn.k"])
        if block is model.h[-1]:  # here also the weights of the head are whole on every device
            columns["entropy"] = mean_entropy(model, x)
        return x

    window = window.to(model.device, non_blocking=True)
    with (
        torch.no_grad(),
        autocast(dtype, model.device),
        attention_kernels(model.device, same_shape=True),
    ):
        model.loss_sum(window[:, :-1], window[:, 1:], run_block=run)
    return columns


def largest_logit(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the largest attention logit, 0-d fp32, of q and k (B, H, T, D): over all heads and causal pairs.

    One head at a time: the logits of all heads would be the largest tensor of the model.
    """
    size, length = queries.shape[-1], queries.shape[-2]
    future = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
    largest = []
    with torch.autocast(queries.device.type, enabled=False):
        for q, k in zip(queries.flatten(0, 1).float(), keys.flatten(0, 1).float(), strict=True):
            logits = q @ k.T / size**0.5
            largest.append(logits.masked_fill_(future, -torch.inf).max())
    return torch.stack(largest).max()


def mean_entropy(model: GPT, x: Tensor) -> Tensor:
    """Return the mean entropy of the predictions, nats, 0-d fp32, from the last residual stream (B, T, C).

    Some positions at a time: their logits would be larger than those of a micro-batch that are kept.
    """
    total = torch.zeros((), device=x.device)
    for part in x.flatten(0, 1).split(POSITIONS):
        log_shares = torch.log_softmax(model.head(part).float(), dim=-1)
        total -= (log_shares.exp() * log_shares).sum()
    return total / x[..., 0].numel()
