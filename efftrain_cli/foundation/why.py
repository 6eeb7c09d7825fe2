"""Reasons: why something was not judged, why a number is missing, what a reader must know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Why:
    """A reason. Code reads `kind`; screens print `text`, whose words decide nothing."""

    kind: str
    text: str
