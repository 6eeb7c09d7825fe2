"""Sequence length warmup (Li, Zhang, He, NeurIPS 2022, arXiv 2108.06084)."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from efftrain_cli.section import SECTION


@dataclass(frozen=True, kw_only=True, config=SECTION)
class SeqLenWarmup:
    """Sequence length warmup: train on short sequences first and lengthen them over `steps` optimizer steps."""

    start: int = 8
    """seqlen_s, the length of the first sequences, in tokens."""
    steps: int
    """T, optimizer steps until the full length is reached."""
    multiple: int = 8
    """Lengths are rounded down to a multiple of this, in tokens."""
    pacing: Literal["linear", "root", "discrete"] = "linear"
    """How the length grows with the step."""
    degree: int = 2
    """Degree of the root, with pacing = "root"."""
    mode: Literal["truncate", "reshape"] = "truncate"
    """What becomes of the rest of a full-length window: dropped, or cut into further short sequences."""
    lengths: tuple[int, ...] = ()
    """With pacing = "discrete": the length of each phase, in tokens."""
    until: tuple[int, ...] = ()
    """With pacing = "discrete": the last step of each phase but the final one."""
