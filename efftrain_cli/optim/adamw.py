"""AdamW over named parameters, and the two measures of its second moment that predict
instability."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.optim.optimizer import ParameterSet, Settings, WithoutCompiler, decays


class _FusedAdamW(WithoutCompiler, torch.optim.AdamW):
    found_inf: Tensor
    """0-d fp32 on the device: torch's fused step reads it."""


# What torch wraps around its step imports its compiler; the step itself does not.
_torch_step = inspect.unwrap(torch.optim.Adam.step)

_ALIGNMENT = 32
"""Elements, 128 bytes of fp32: every view starts at an address that vector loads accept."""

_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Most elements whose square roots are in memory at once, by device type.

On a CPU 1 MiB of fp32, which fits its cache; on CUDA a bound on memory.
"""


class AdamW:
    """An `Optimizer`: PyTorch's fused AdamW (Loshchilov and Hutter 2019), all second moments in one
    flat buffer."""

    gradient_powers: Mapping[str, int] = {
        "exp_avg": 1,
        "exp_avg_sq": 2,
        "exp_avg_sq_weight": 0,
        "step": 0,
    }
    columns_by_max = frozenset({"adam_sqrt_v_max"})

    def __init__(self, parameters: ParameterSet, settings: Settings) -> None:
        """See `Optimizer`."""
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parameter in parameters.named.items():
            kind = parameters.kinds[name]
            weight_decay = settings.weight_decay * decays(kind)
            groups.setdefault(weight_decay, []).append(parameter)
        param_groups = []
        for weight_decay, members in groups.items():
            param_groups.append({"params": members, "weight_decay": weight_decay})
        self._adamw = _FusedAdamW(
            param_groups,
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

        named = parameters.named
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
                for old, new in (
                    (parameter, weight),
                    (state["exp_avg"], mean),
                    (state["exp_avg_sq"], square),
                    (state["exp_avg_sq_weight"], square_weight),
                    (state["step"], step),
                ):
                    torch.where(skip, old, new, out=old)

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

        # On a CPU the roots of the whole buffer would go out to memory and back; those of a chunk
        # stay in the cache.
        chunk_size = _CHUNK.get(moments.device.type, 1 << 22)
        chunk_size = min(chunk_size, moments.numel())
        buffer = moments.new_empty(chunk_size)
        sums = []
        maxima = []
        for chunk in moments.split(chunk_size):
            roots = buffer[: chunk.numel()]
            torch.sqrt(chunk, out=roots)
            sums.append(roots.sum())
            # The maximum of sqrt(v) is the root of the maximum of v.
            maxima.append(chunk.max())
        return {
            "adam_sqrt_v_l1": torch.stack(sums).sum(),
            "adam_sqrt_v_max": torch.stack(maxima).max().sqrt(),
        }
