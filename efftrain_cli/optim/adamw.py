"""AdamW over named parameters, and the two measures of its second moment that foretell instability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GroupScale:
    """How one group of parameters departs from the recipe's optimizer settings."""

    lr: float = 1.0
    eps: float = 1.0
    weight_decay: float = 1.0


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay acts on matrices, except the position embeddings: rows that no short sequence reaches get no
    gradient, and decay alone would shrink them."""
    return parameter.dim() >= 2 and not name.endswith("wpe.weight")


class AdamW(torch.optim.AdamW):
    """PyTorch's fused AdamW, its second moments views of one flat buffer that can be measured in one go."""

    second_moments: Tensor
    """fp32 (elements,): all of `exp_avg_sq`, each parameter's share padded with zeros to whole cache lines."""
    found_inf: Tensor | None = None
    """0-d fp32 on the device: where it is 1, `step` leaves weights, moments and step counts as they are."""

    # PyTorch's own three methods import its compiler when first called, which costs eager training two seconds of start.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim.Optimizer."""
        torch.optim.Optimizer.add_param_group.__wrapped__(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients; `set_to_none` must stay True."""
        assert set_to_none
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient, by the kernel that torch.optim.AdamW(fused=True) calls."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            states = [self.state[parameter] for parameter in parameters]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=self.found_inf,
            )
            if self.found_inf is not None:
                torch._foreach_sub_(steps, [self.found_inf] * len(steps))


_ALIGNMENT = 32
"""Elements: 128 bytes of fp32, so that every view starts where vector loads may."""


def build_adamw(
    model: nn.Module,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scales: Mapping[str, GroupScale] | None = None,
) -> AdamW:
    """AdamW with fused kernels; moments exist from the start, so that step 0 can be saved and grown.

    `scales` names parameters whose group has its own lr, eps and weight decay factors. Each group carries
    `lr_scale`; `set_lr` applies it.
    """
    groups: dict[tuple[bool, GroupScale], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        scale = (scales or {}).get(name, GroupScale())
        groups.setdefault((decays(name, parameter), scale), []).append((name, parameter))
    optimizer = AdamW(
        [
            {
                "params": named,
                "weight_decay": weight_decay * scale.weight_decay if decayed else 0.0,
                "eps": eps * scale.eps,
                "lr_scale": scale.lr,
            }
            for (decayed, scale), named in groups.items()
        ],
        lr=0.0,
        betas=betas,
        fused=True,
    )
    parameters = list(model.parameters())
    shares = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in parameters]
    optimizer.second_moments = torch.zeros(sum(shares), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, share in zip(parameters, optimizer.second_moments.split(shares), strict=True):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": share[: parameter.numel()].view(parameter.shape),
        }
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The step's learning rate, times each group's `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements whose roots exist at once: on a CPU 1 MiB of fp32, which its cache holds; on CUDA a bound on memory."""


def adam_sqrt_v(optimizer: AdamW) -> tuple[Tensor, Tensor]:
    """Sum and maximum of sqrt(v) over all of Adam's raw second moments (no bias correction), both 0-d fp32.

    Li et al. 2022 correlate these with loss spikes. max sqrt(v) is sqrt(max v): one pass needs no root.
    """
    second_moments = optimizer.second_moments
    size = min(_CHUNK.get(second_moments.device.type, 1 << 22), second_moments.numel())
    # On a CPU the roots of a whole tensor would go out to memory and back; a chunk's stay in the cache.
    scratch = torch.empty(size, dtype=second_moments.dtype, device=second_moments.device)
    sums, largest = [], []
    for chunk in second_moments.split(size):
        sums.append(torch.sqrt(chunk, out=scratch[: chunk.numel()]).sum())
        largest.append(chunk.max())
    return torch.stack(sums).sum(), torch.stack(largest).max().sqrt()
