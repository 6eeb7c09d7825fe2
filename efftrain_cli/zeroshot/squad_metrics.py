"""Compute SQuAD's two measures of an answer (Rajpurkar et al. 2016): exact match and token F1.

lm-evaluation-harness 0.4.13 takes them, for ReCoRD, from a module of transformers that version 5 no
longer has, so the task cannot even be loaded. `stand_in` puts these in that module's place.
"""

from __future__ import annotations

import re
import string
import sys
from collections import Counter
from importlib import import_module
from types import ModuleType

_PLACE = "transformers.data.metrics"


def normalize(answer: str) -> str:
    """Return the answer in lower case, without punctuation, articles, extra spaces, in order."""
    text = "".join(
        character for character in answer.lower() if character not in set(string.punctuation)
    )
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def compute_exact(gold: str, predicted: str) -> int:
    """Return 1 if the normalized answers are equal, else 0."""
    return int(normalize(gold) == normalize(predicted))


def compute_f1(gold: str, predicted: str) -> float:
    """Return the harmonic mean of precision and recall over the normalized answers' words."""
    gold_words = normalize(gold).split()
    words = normalize(predicted).split()
    if not gold_words or not words:
        return float(gold_words == words)
    common = sum((Counter(gold_words) & Counter(words)).values())
    return 2 * common / (len(gold_words) + len(words))


def stand_in() -> None:
    """Make `transformers.data.metrics.squad_metrics` importable if transformers lacks it."""
    try:
        import_module(f"{_PLACE}.squad_metrics")
    except ImportError:
        module = ModuleType(f"{_PLACE}.squad_metrics")
        vars(module).update(compute_exact=compute_exact, compute_f1=compute_f1)
        sys.modules[_PLACE] = ModuleType(_PLACE)
        sys.modules[module.__name__] = module
