"""What recipes, plans and `compare` need to know of each optimizer. No torch; its class is in `training/build.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from efftrain_cli.model.config import Dimensions
from efftrain_cli.model.flops import newton_schulz_flops

OptimizerName = Literal["adamw", "muon", "lion"]


def _no_flops(model: Dimensions) -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """Properties of one optimizer."""

    has_muon_lr: bool = False
    """Whether the blocks' matrices have the learning rate optim.muon_lr."""
    supports_sharding: bool = True
    """Whether it can update rows of a tensor without the others."""
    supports_small_dynamics: bool = False
    """Whether it scales lr, eps and weight decay by parameter, for growth with dynamics = "small"."""
    step_flops: Callable[[Dimensions], float] = _no_flops
    """FLOPs of its matrix products in one step."""

    @property
    def counts_flops(self) -> bool:
        """Whether a step has matrix products."""
        return self.step_flops is not _no_flops


OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(supports_small_dynamics=True),
    "muon": OptimizerFacts(
        has_muon_lr=True, supports_sharding=False, step_flops=newton_schulz_flops
    ),
    "lion": OptimizerFacts(),
}
