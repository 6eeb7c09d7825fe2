"""Records of JSON-lines files as they are written by another process."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from efftrain_cli.run.lines import parse


def as_written(paths: Sequence[Path], poll_seconds: float) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Records of the files in file order, with their file, until standard input closes and none is left."""
    position = dict.fromkeys(paths, 0)
    closed = False
    while True:
        for path in paths:
            lines: list[bytes] = []
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                # Only whole lines are read past: a resume cuts a torn last one off, and may write others in its place.
                file.seek(position[path])
                *lines, _ = file.read().split(b"\n")
            for line in lines:
                position[path] += len(line) + 1
                if (record := parse(line)) is not None:
                    yield path, record
        if closed:
            return
        closed = _input_closed(poll_seconds)


def _input_closed(seconds: float) -> bool:
    """Waits for at most `seconds`; True as soon as standard input has ended."""
    try:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return bool(ready) and not os.read(sys.stdin.fileno(), 4096)
    except (OSError, ValueError):
        time.sleep(seconds)
        return True
