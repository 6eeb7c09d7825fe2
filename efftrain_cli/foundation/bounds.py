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
LINE_BYTES = 64 << 20
"""Bytes of a line of text: a damaged or hostile archive may hold one of any length."""
UNPACKED_BYTES = 1 << 28
"""Bytes that a compressed file may unpack to, or UNPACKED_TIMES its own size where that is more."""
UNPACKED_TIMES = 1000
"""Times its own size; text packs to a tenth, and gzip's best is a thousandth."""
JSON_BYTES = 256 << 20
"""Bytes of a .json file that is read whole, as a list of records is; longer ones are read as JSON
lines."""
