"""What the devices of a run have spent on each other, from its rows."""

from __future__ import annotations

from pathlib import Path

from efftrain_cli.run.rows import last_row, read_rows


def communication(run: Path) -> str | None:
    """In a sentence, with the steps that the network, not computing, has bound; None where nobody measured: on one device, or of shards.

    Raises:
        DataError: the run's rows cannot be read.
    """
    if last_row(run).get("comm_seconds") is None:
        return None  # without what reads tables, whose import takes a second

    import numpy as np

    columns = read_rows(run, ("seconds", "comm_seconds", "wait_seconds", "seq_len")).columns
    there = np.isfinite(columns["comm_seconds"]) & (columns["seconds"] > 0)
    if not there.any():
        return None
    seconds, sums, waits, lengths = (columns[name][there] for name in ("seconds", "comm_seconds", "wait_seconds", "seq_len"))
    text = f"{sums.sum() / seconds.sum():.0%} of the time went into adding up gradients, {waits.sum() / seconds.sum():.0%} into waiting for each other"
    bound = sums > seconds / 2
    if not bound.any():
        return text
    longest = int(lengths[bound].max())
    return f"{text}; the sum was more than half of {bound.sum():,} of {len(seconds):,} steps, of up to {longest:,} tokens a sequence: fewer devices lose less there"
