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


class _Cursor:
    """How far a file has been read."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0

    def records(self) -> Iterator[dict[str, Any]]:
        """What has been written since; a half-written line waits."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            # Only whole lines are read past: a resume cuts a torn last one off, and may write others in its place at
            # once.
            file.seek(self.position)
            *lines, _ = file.read().split(b"\n")
            for line in lines:
                self.position += len(line) + 1
                record = parse(line)
                if record is not None:
                    yield record


def as_written(paths: Sequence[Path], poll_seconds: float) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Records of the files in file order, with their file, until standard input closes and none is left."""
    cursors = [_Cursor(path) for path in paths]
    open_ = True
    while True:
        for cursor in cursors:
            for record in cursor.records():
                yield cursor.path, record
        if not open_:
            return
        open_ = not _input_closed(poll_seconds)


def _input_closed(seconds: float) -> bool:
    """Waits for at most `seconds`; True as soon as standard input has ended."""
    try:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return bool(ready) and not os.read(sys.stdin.fileno(), 4096)
    except (OSError, ValueError):
        time.sleep(seconds)
        return True
