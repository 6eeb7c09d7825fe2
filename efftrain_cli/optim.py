"""AdamW over named parameters, and the two measures of its second moment that foretell instability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


def build_adamw(
    model: nn.Module,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scales: Mapping[str, GroupScale] | None = None,
) -> torch.optim.AdamW:
    """AdamW with fused kernels; moments exist from the start, so that step 0 can be saved and grown.

    `scales` names parameters whose group has its own lr, eps and weight decay factors. Each group carries
    `lr_scale`; `set_lr` applies it.
    """
    groups: dict[tuple[bool, GroupScale], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        scale = (scales or {}).get(name, GroupScale())
        groups.setdefault((decays(name, parameter), scale), []).append((name, parameter))
    optimizer = torch.optim.AdamW(
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
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The step's learning rate, times each group's `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def adam_sqrt_v(optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
    """Sum and maximum of sqrt(v) over all of Adam's raw second moments (no bias correction), both 0-d fp32.

    Li et al. 2022 correlate these with loss spikes. max sqrt(v) is sqrt(max v): one pass needs no root.
    """
    second_moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
    l1 = torch.stack(torch._foreach_norm(torch._foreach_sqrt(second_moments), 1)).sum()
    largest = torch.stack(torch._foreach_max(second_moments)).max().sqrt()
    return l1, largest
