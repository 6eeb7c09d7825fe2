"""Staged training by growth operators (Shen et al., ICML 2022, arXiv 2203.06211)."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from efftrain_cli.section import SECTION


@dataclass(frozen=True, kw_only=True, config=SECTION)
class StagedGrowth:
    """Staged training: how a small model's whole training state is mapped to a larger model's."""

    moments: Literal["paper", "ema"] = "ema"
    """Adam moments of new blocks: as in the paper's released operator, or the true running averages."""
    symmetry: Literal["none", "offdiag", "noise"] = "offdiag"
    """What makes the copies of a widened model differ."""
    depth: Literal["identity", "zero_out_proj", "copy_interleave", "copy_append"] = "zero_out_proj"
    """What the new layers of a deepened model compute at first."""
