"""Define what the rest of the program asks of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor, nn

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.model.config import ParameterKind
from efftrain_cli.optim.facts import MuonScale


class Settings(Protocol):
    """The keys of a recipe's [optim] that optimizers read."""

    @property
    def lr(self) -> float: ...
    @property
    def muon_lr(self) -> float | None: ...
    @property
    def muon_scale(self) -> MuonScale | None: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def beta2_tokens(self) -> int | None: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class ParameterSet:
    """The parameters that an optimizer updates, with the facts that its update depends on."""

    named: Mapping[str, nn.Parameter]
    """Parameter by name."""
    kinds: Mapping[str, ParameterKind]
    """Kind by name, of at least these parameters: it decides on weight decay and on Muon."""
    qkv_rows: Sequence[int] = ()
    """Numbers of rows of q, k and v in a fused matrix: Muon orthogonalizes each by itself."""


def decays(kind: ParameterKind) -> bool:
    """Return whether weight decay acts on a kind: on matrices, except the position embeddings.

    Rows that no short sequence reaches get no gradient, and decay alone would shrink them.
    """
    return kind in ("token_embedding", "head", "matrix", "fused_matrix")


def by_weight_decay(
    parameters: ParameterSet,
    weight_decay: float,
) -> dict[float, list[str]]:
    """Group the parameters by the weight decay that acts on them."""
    groups: dict[float, list[str]] = {}
    for name in parameters.named:
        decay = weight_decay * decays(parameters.kinds[name])
        groups.setdefault(decay, []).append(name)
    return groups


class Optimizer(Protocol):
    """Update named parameters by their gradients.

    Only `training/build.py` chooses an optimizer by its name.
    """

    gradient_powers: ClassVar[Mapping[str, int]]
    """Power of the gradient with which each kind of state scales; 0 for a counter of steps.

    Growth reads it. If a wider model's gradients are 1/k of the small one's, first moments become
    1/k and second moments 1/k^2.
    """

    columns_by_max: ClassVar[frozenset[str]] = frozenset()
    """Columns that a sharded model reduces over the ranks by their maximum; all others are sums."""

    def __init__(self, parameters: ParameterSet, settings: Settings) -> None:
        """Create the state that the first step starts from."""

    def step(
        self,
        lr: float,
        found_inf: Tensor,
        beta2: float | None = None,
    ) -> None:
        """Update every parameter that has a gradient, at the step's learning rate.

        `beta2` is Adam's second decay rate in this step, needed with `beta2_tokens`; None: the
        second of `betas`.
        If `found_inf` (0-d fp32 on the device) is 1, weights, moments and counters keep every bit.
        The device reads it, so the host need not wait for its value.
        """

    def tensors(self) -> Tensors:
        """Return the whole state as `STATE.PARAMETER`, such as `exp_avg.wte.weight`.

        These are the tensors themselves, not copies: a checkpoint saves them or is loaded into
        them. They exist before the first step, so that step 0 can be saved and grown.
        """

    def columns(self) -> Tensors:
        """Return measures of stability by column of metrics.jsonl: 0-d fp32 device tensors."""
        return {}


def check_cover(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
) -> None:
    """Check that each parameter has one first moment, so that none is updated twice or never.

    Raises:
        RuntimeError: a parameter has none or several: a bug.
    """
    covered = []
    for key in optimizer.tensors():
        state, _, parameter = key.partition(".")
        is_first_moment = optimizer.gradient_powers[state] == 1
        if is_first_moment:
            covered.append(parameter)
    if sorted(covered) != sorted(parameters):
        raise RuntimeError("the optimizer's groups do not cover each parameter once")
