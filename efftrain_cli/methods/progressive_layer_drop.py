"""Progressive layer dropping (Zhang & He, NeurIPS 2020, arXiv 2010.13369)."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from efftrain_cli.section import SECTION


@dataclass(frozen=True, kw_only=True, config=SECTION)
class ProgressiveLayerDrop:
    """Progressive layer dropping: skip whole blocks at random, more of them later in training and deeper in the model."""

    theta: float = 0.5
    """Keep probability of the last block that the schedule approaches, in (0, 1]; 1 drops nothing."""
    steps: int
    """T, optimizer steps that set the pace gamma = 100 / T."""
    keep: Literal["equation", "code"] = "equation"
    """Keep probabilities and scale: the paper's equation, or the released code's mismatched pair."""
    granularity: Literal["step", "micro_step"] = "micro_step"
    """How often the gates are drawn."""
