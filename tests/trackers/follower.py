"""A run that is written while it is followed, in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from efftrain_cli.trackers import rows


def write_while_followed(patch: pytest.MonkeyPatch, run: Path, *pieces: str) -> None:
    """Add a piece to the rows of `run` at each look of who follows it, then close the input."""
    waiting = list(pieces)

    def look(seconds: float) -> bool:
        if not waiting:
            return True
        with (run / "metrics.jsonl").open("a") as file:
            file.write(waiting.pop(0))
        return False

    patch.setattr(rows, "_is_input_closed", look)
