"""AdamW over named parameters, and the two measures of its second moment that predict
instability."""

from __future__ import annotations

import inspect
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.optim.optimizer import (
    Optimizer,
    ParameterSet,
    Settings,
    by_weight_decay,
)
from efftrain_cli.optim.tensors import elements_at_once, keep_if

# What torch wraps around these imports its compiler, which costs eager training two seconds of
# start; they themselves do not.
_torch_step = inspect.unwrap(torch.optim.Adam.step)
_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class _FusedAdamW(torch.optim.AdamW):
    found_inf: Tensor
    """0-d fp32 on the device: torch's fused step reads it."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _add_param_group(self, param_group)


_ALIGNMENT = 32
"""Elements, 128 bytes of fp32: every view starts at an address that vector loads accept."""


class AdamW(Optimizer):
    """An `Optimizer`: PyTorch's fused AdamW (Loshchilov and Hutter 2019), all second moments in one
    flat buffer."""

    gradient_powers: ClassVar = {
        "exp_avg": 1,
        "exp_avg_sq": 2,
        "exp_avg_sq_weight": 0,
        "step": 0,
    }
    columns_by_max = frozenset({"adam_sqrt_v_max"})

    def __init__(self, parameters: ParameterSet, settings: Settings) -> None:
        """See `Optimizer`."""
        named = parameters.named
        param_groups = []
        for decay, names in by_weight_decay(parameters, settings.weight_decay).items():
            members = [named[name] for name in names]
            param_groups.append({"params": members, "weight_decay": decay})
        self._adamw = _FusedAdamW(
            param_groups,
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

        sizes = []
        for parameter in named.values():
            lines = math.ceil(parameter.numel() / _ALIGNMENT)
            sizes.append(lines * _ALIGNMENT)
        first = next(iter(named.values()))
        # fp32 (elements,): all of `exp_avg_sq`, each parameter's padded with zeros to whole cache
        # lines.
        self._second_moments = first.new_zeros(sum(sizes))

        self._state = {}
        views = self._second_moments.split(sizes)
        for (name, parameter), view in zip(named.items(), views, strict=True):
            state = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": view[: parameter.numel()].view(parameter.shape),
            }
            if settings.beta2_tokens is not None:
                # Of the terms of `exp_avg_sq`, for its bias correction.
                state["exp_avg_sq_weight"] = torch.zeros((), device=parameter.device)
            self._adamw.state[parameter] = state
            self._state[name] = state

    def step(
        self,
        lr: float,
        found_inf: Tensor,
        beta2: float | None = None,
    ) -> None:
        """See `Optimizer.step`."""
        if beta2 is not None:
            self._step_at(lr, found_inf, beta2)
            return
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.found_inf = found_inf
        with torch.no_grad():
            _torch_step(self._adamw)

    @torch.no_grad()
    def _step_at(
        self,
        lr: float,
        found_inf: Tensor,
        beta2: float,
    ) -> None:
        """Make torch's step with a beta2 of its own.

        v is corrected by the weight of its terms, 1 less the product of every step's beta2: torch's
        1 - beta2^step is that only if all are equal.
        """
        skip = found_inf.bool()
        for group in self._adamw.param_groups:
            beta1 = group["betas"][0]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self._adamw.state[parameter]
                mean = torch.lerp(state["exp_avg"], gradient, 1 - beta1)
                square = torch.lerp(state["exp_avg_sq"], gradient.square(), 1 - beta2)
                square_weight = beta2 * state["exp_avg_sq_weight"] + (1 - beta2)
                step = state["step"] + 1

                rms = (square / square_weight).sqrt_().add_(group["eps"])
                mean_weight = 1 - beta1**step
                direction = mean / mean_weight / rms
                weight = parameter * (1 - lr * group["weight_decay"])
                weight.sub_(direction, alpha=lr)
                keys = ("exp_avg", "exp_avg_sq", "exp_avg_sq_weight", "step")
                keep_if(
                    skip,
                    [parameter, *(state[key] for key in keys)],
                    [weight, mean, square, square_weight, step],
                )

    def tensors(self) -> Tensors:
        """See `Optimizer.tensors`: `exp_avg.NAME`, `exp_avg_sq.NAME` and the 0-d `step.NAME`; with
        `beta2_tokens` the 0-d `exp_avg_sq_weight.NAME` too."""
        tensors: Tensors = {}
        for name, state in self._state.items():
            for key, value in state.items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def columns(self) -> Tensors:
        """Return sum and maximum of sqrt(v) over Adam's second moments v, without bias correction.

        Li et al. 2022 correlate these with loss spikes.
        """
        moments = self._second_moments
        if not moments.numel():  # a rank that holds no rows
            zero = moments.new_zeros(())
            return {"adam_sqrt_v_l1": zero, "adam_sqrt_v_max": zero.clone()}

        # On a CPU the roots of the whole buffer would go out to memory and back.
        chunks = moments.split(elements_at_once(moments.device))
        sums = [chunk.sqrt().sum() for chunk in chunks]
        return {
            "adam_sqrt_v_l1": torch.stack(sums).sum(),
            # The maximum of sqrt(v) is the root of the maximum of v.
            "adam_sqrt_v_max": moments.max().sqrt(),
        }
