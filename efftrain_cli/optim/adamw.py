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
"""Elements: 128 bytes of fp32, so that every view starts where vector loads may."""

_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements whose roots exist at once: on a CPU 1 MiB of fp32, which its cache holds; on CUDA a
bound on memory."""


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
        self._adamw = _FusedAdamW(
            [{"params": members, "weight_decay": decay} for decay, members in groups.items()],
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
        """Return sum and maximum of sqrt(v) over all of Adam's raw second moments (no bias
        correction).

        Li et al. 2022 correlate these with loss spikes. max sqrt(v) is sqrt(max v): one pass needs
        no root.
        """
        moments = self._second_moments
        if not moments.numel():  # a rank that holds no rows
            zero = moments.new_zeros(())
            return {"adam_sqrt_v_l1": zero, "adam_sqrt_v_max": zero.clone()}

        # On a CPU the roots of a whole tensor would go out to memory and back; a chunk's stay in
        # the cache.
        size = min(_CHUNK.get(moments.device.type, 1 << 22), moments.numel())
        roots = moments.new_empty(size)
        sums = []
        maxima = []
        for chunk in moments.split(size):
            torch.sqrt(chunk, out=roots[: chunk.numel()])
            sums.append(roots[: chunk.numel()].sum())
            maxima.append(chunk.max())
        return {
            "adam_sqrt_v_l1": torch.stack(sums).sum(),
            "adam_sqrt_v_max": torch.stack(maxima).max().sqrt(),
        }
