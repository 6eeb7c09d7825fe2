"""Parts of a study with a tuning of their own, and what it chose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from efftrain_cli.compare.reading import RunNumbers

Edge = tuple[str, Literal["low", "high"]]
"""A recipe key, and a side of its grid."""


@dataclass(frozen=True)
class Tried:
    """A point of an arm's tuning grid."""

    settings: tuple[str, ...]
    """`key=value` of the point."""
    runs: tuple[RunNumbers, ...]
    """By tuning seed."""

    @property
    def losses(self) -> list[float | None]:
        """Final validation loss by tuning seed, nats per token; None if the run diverged."""
        return [run.final_loss for run in self.runs]


@dataclass(frozen=True)
class Tuned:
    """What tuning showed for one arm in one block."""

    arm: str
    seeds: tuple[int, ...]
    """Seeds that are judged with its settings."""
    settings: tuple[str, ...] = ()
    """`key=value` overrides that its judged runs get; empty if the arm is not tuned."""
    tried: tuple[Tried, ...] = ()
    """Every point of its grid."""
    warnings: tuple[str, ...] = ()
    edges: tuple[Edge, ...] = ()
    """Sides of its grid at which the best value is: the true optimum may lie beyond."""


@dataclass(frozen=True)
class Block:
    """A part of a study with a tuning of its own: one of `blocks`, or the whole study."""

    tuning: tuple[int, ...]
    """Seeds that choose every arm's settings."""
    seeds: tuple[int, ...]
    """Seeds that are judged with these settings."""
    grown: tuple[Edge, ...] = ()
    """Sides at which every grid of the key has got a point more, in their order."""
    tuned: tuple[Tuned, ...] = field(default=(), compare=False)
    """What each arm is trained with; empty until all of the block's tuning runs have ended."""
