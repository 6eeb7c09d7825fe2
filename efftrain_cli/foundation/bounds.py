"""The largest sizes that are believed: a number beyond them is a mistake or an attack."""

from __future__ import annotations

LAYERS = 1 << 10
"""Transformer blocks of a model."""
HEADS = 1 << 10
"""Attention heads of a block."""
WIDTH = 1 << 17
"""Channels of the residual stream."""
CONTEXT = 1 << 20
"""Positions of a model."""
VOCABULARY = 1 << 24
"""Token ids."""
RUNS = 10_000
"""Runs of a sweep or study; each has a folder."""
MISTAKES = 100
"""Mistakes of a recipe that are told; more are counted."""
