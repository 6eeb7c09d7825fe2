"""Read the published scores of references.toml: none of them was measured here."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Reference:
    """One published score; accuracies are fractions."""

    model: str
    protocol: str
    source: str
    task: str
    metric: str
    value: float


@cache
def read_references() -> list[Reference]:
    """Return every published score."""
    text = Path(__file__).with_name("references.toml").read_text(encoding="utf-8")
    references = []
    for measured in tomllib.loads(text)["measured"]:
        for score in measured.pop("scores"):
            references.append(Reference(**measured, **score))
    return references
