"""What recipes, plans and `compare` need to know of each optimizer. No torch; its class is in
`training/build.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from efftrain_cli.model.config import Dimensions, GPTConfig
from efftrain_cli.model.flops import block_matrices, newton_schulz_flops, parameter_count

OptimizerName = Literal["adamw", "muon", "lion"]
MuonScale = Literal["original", "match_rms_adamw"]


def _no_flops(model: Dimensions) -> float:
    return 0.0


def _two_moments(model: GPTConfig) -> int:
    return 2 * parameter_count(model)


def _muon_moments(model: GPTConfig) -> int:
    in_matrices = model.n_layer * sum(rows * columns for rows, columns in block_matrices(model))
    return _two_moments(model) - in_matrices


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """Properties of one optimizer."""

    has_muon_lr: bool = False
    """Whether the blocks' matrices have the learning rate optim.muon_lr."""
    has_second_moment: bool = True
    """Whether optim.beta2_tokens means something to it."""
    supports_sharding: bool = True
    """Whether it can update rows of a tensor without the others."""
    step_flops: Callable[[Dimensions], float] = _no_flops
    """FLOPs of its matrix products in one step."""
    state_size: Callable[[GPTConfig], int] = _two_moments
    """Numbers of its state, fp32; counters of steps are left out."""


OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(),
    "muon": OptimizerFacts(
        has_muon_lr=True,
        supports_sharding=False,
        step_flops=newton_schulz_flops,
        state_size=_muon_moments,
    ),
    "lion": OptimizerFacts(has_second_moment=False, state_size=parameter_count),
}
