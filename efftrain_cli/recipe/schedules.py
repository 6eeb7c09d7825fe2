"""The learning-rate schedules: what follows the warmup. Others ask a schedule for its properties,
not for its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
DecayShape = Literal["linear", "1-sqrt", "cosine", "square"]


@dataclass(frozen=True)
class Schedule:
    """How the learning rate goes from its peak to `min_lr`."""

    share: Callable[[float], float]
    """x -> share of the way from min_lr up to the peak. x is the share of the decay that is over,
    above 0 and below 1; without an end, the warmup's length relative to what is trained, at most
    1."""
    has_end: bool = True
    """Whether min_lr is reached, at decay_tokens or decay_steps. If not, the rate depends on no
    budget."""
    has_plateau: bool = False
    """Whether the peak is kept until the last optim.decay_share."""
    needs_warmup: bool = False
    """Whether the decay is relative to the length of the warmup."""


def _cosine(x: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * x))


def _linear(x: float) -> float:
    return 1 - x


def _one_minus_sqrt(x: float) -> float:
    """Fall steeply at first: Hägele et al. 2024, arXiv 2405.18392, section 3."""
    return 1 - math.sqrt(x)


def _square(x: float) -> float:
    return 1 - x**2


def _constant(x: float) -> float:
    return 1.0


SCHEDULES: dict[str, Schedule] = {
    "cosine": Schedule(_cosine),
    "linear": Schedule(_linear),
    "constant": Schedule(_constant, has_end=False),
    "wsd": Schedule(_linear, has_plateau=True),
    # Vaswani et al. 2017, arXiv 1706.03762, section 5.3.
    "inverse_sqrt": Schedule(math.sqrt, has_end=False, needs_warmup=True),
}

DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": _linear,
    "1-sqrt": _one_minus_sqrt,
    "cosine": _cosine,
    "square": _square,
}
"""`Schedule.share` of the decay that follows a plateau, by optim.decay_shape."""


def has_end(name: object) -> bool:
    """Return whether a schedule ends; taken for granted of one that a newer version wrote."""
    return name not in SCHEDULES or SCHEDULES[str(name)].has_end
