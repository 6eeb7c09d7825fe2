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

    gradient_powers: Mapping[str, int] = {"exp_avg": 1, "exp_avg_sq": 2, "step": 0}
    columns_by_max = frozenset({"adam_sqrt_v_max"})

    def __init__(self, parameters: ParameterSet, settings: Settings) -> None:
        """See `Optimizer`."""
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parameter in parameters.named.items():
            weight_decay = settings.weight_decay * decays(parameters.kinds[name])
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
            self._adamw.state[parameter] = state
            self._state[name] = state

    def step(self, lr: float, found_inf: Tensor) -> None:
        """See `Optimizer.step`."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.found_inf = found_inf
        with torch.no_grad():
            _torch_step(self._adamw)

    def tensors(self) -> Tensors:
        """See `Optimizer.tensors`: `exp_avg.NAME`, `exp_avg_sq.NAME` and the 0-d `step.NAME`."""
        tensors: Tensors = {}
        for name, state in self._state.items():
            tensors |= {f"{key}.{name}": value for key, value in state.items()}
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
