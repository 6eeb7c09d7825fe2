"""Define what the rest of the program asks of an optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.model.parameter_kinds import ParameterKind


class Settings(Protocol):
    """What optimizers read of a recipe's [optim]."""

    @property
    def lr(self) -> float: ...
    @property
    def muon_lr(self) -> float | None: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class ParameterSet:
    """The parameters that an optimizer updates, by name, and what it has to know of them."""

    named: Mapping[str, nn.Parameter]
    kinds: Mapping[str, ParameterKind]
    """At least of these parameters; weight decay and Muon go by them."""
    qkv_rows: Sequence[int] = ()
    """Rows of q, k and v in a fused matrix."""


def decays(kind: ParameterKind) -> bool:
    """Return whether weight decay acts on a kind: on matrices, except the position embeddings.

    Rows that no short sequence reaches get no gradient, and decay alone would shrink them.
    """
    return kind in ("token_embedding", "head", "matrix", "fused_matrix")


class Optimizer(Protocol):
    """Updates named parameters by their gradients. `training/build.py` alone chooses among them by
    name."""

    gradient_powers: Mapping[str, int]
    """For each kind of state: with which power of the gradient it scales, 0 for a counter of steps.
    Growth reads it: where a wider model's gradients are 1/k of the small one's, first moments
    become 1/k and second moments 1/k^2."""

    columns_by_max: frozenset[str]
    """Columns of which the largest over all ranks is that of a sharded model; the others add up."""

    def __init__(self, parameters: ParameterSet, settings: Settings) -> None:
        """Begin before the first step."""

    def step(self, lr: float, found_inf: Tensor) -> None:
        """Update every parameter that has a gradient, at the step's learning rate.

        If `found_inf` (0-d fp32 on the device) is 1, weights, moments and counters keep every bit.
        The host does not wait to find out.
        """

    def tensors(self) -> Tensors:
        """Return the whole state as `STATE.PARAMETER`, such as `exp_avg.wte.weight`, to be saved or
        written into.

        They are the tensors themselves, and exist from the start, so that step 0 can be saved and
        grown.
        """

    def columns(self) -> Tensors:
        """Return measures of stability by column of metrics.jsonl: 0-d fp32 device tensors."""


def check_cover(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Assert that each parameter has one first moment, so that none is updated twice or never."""
    keys = [key.partition(".") for key in optimizer.tensors()]
    covered = sorted(name for kind, _, name in keys if optimizer.gradient_powers[kind] == 1)
    assert covered == sorted(parameters), "the optimizer's groups do not cover each parameter once"


class WithoutCompiler:
    """PyTorch's own `add_param_group` imports its compiler, which costs eager training two seconds
    of start."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch.optim.Optimizer does."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)
