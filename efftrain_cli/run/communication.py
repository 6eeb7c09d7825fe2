"""How long the devices of a run communicated, by its rows."""

from __future__ import annotations

from pathlib import Path

from efftrain_cli.run.metrics import last_row, latest_rows, to_float


def communication(run: Path) -> str:
    """Describe the time for gradient sums and waiting in a sentence, "" if it was not measured.

    It is not measured on one device and of shards. Rows that cannot be read are left out.
    """
    if last_row(run).get("comm_seconds") is None:
        return ""
    import numpy as np

    names = ("seconds", "comm_seconds", "wait_seconds", "seq_len")
    rows = latest_rows(run)
    table = np.array([[to_float(row.get(name)) for row in rows] for name in names])
    table = table[:, np.isfinite(table[1:3]).all(0) & (table[0] > 0)]
    if not table.size:
        return ""
    seconds, sums, waits, lengths = table
    text = (
        f"{sums.sum() / seconds.sum():.0%} of the time went into adding up gradients, "
        f"{waits.sum() / seconds.sum():.0%} into waiting for each other"
    )
    bound = sums > seconds / 2
    if not bound.any():
        return text
    longest = int(lengths[bound].max())
    return (
        f"{text}; the sum was more than half of {bound.sum():,} of {len(seconds):,} steps,"
        f" of up to {longest:,} tokens a sequence: fewer devices lose less there"
    )
