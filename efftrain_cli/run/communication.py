"""What the devices of a run have spent on each other, from its rows."""

from __future__ import annotations

from pathlib import Path

from efftrain_cli.run.metrics import last_row, latest_rows


def communication(run: Path) -> str | None:
    """In a sentence, with the steps that the network, not computing, has bound; None where nobody measured: on one
    device, or of shards.

    Rows that cannot be read are left out: a run that has been trained to its end has ended well.
    """
    if last_row(run).get("comm_seconds") is None:
        return None

    import numpy as np

    names = ("seconds", "comm_seconds", "wait_seconds", "seq_len")
    columns = np.array(
        [[row.get(name) for name in names] for row in latest_rows(run)], float
    ).reshape(-1, 4)
    columns = columns[np.isfinite(columns[:, 1:3]).all(1) & (columns[:, 0] > 0)]
    if not len(columns):
        return None
    seconds, sums, waits, lengths = columns.T
    text = f"{sums.sum() / seconds.sum():.0%} of the time went into adding up gradients, {waits.sum() / seconds.sum():.0%} into waiting for each other"
    bound = sums > seconds / 2
    if not bound.any():
        return text
    longest = int(lengths[bound].max())
    return f"{text}; the sum was more than half of {bound.sum():,} of {len(seconds):,} steps, of up to {longest:,} tokens a sequence: fewer devices lose less there"
