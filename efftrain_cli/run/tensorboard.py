"""TensorBoard as another reader of metrics.jsonl: the same rows under the same names as wandb has.

Written by the package `tensorboard` alone (extra of the same name); neither torch nor TensorFlow is imported. The files
are made anew whenever a reading begins, from the rows that count, so a resume or a rewind leaves no step twice.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.files import make_folder
from efftrain_cli.run.columns import grouped
from efftrain_cli.run.lines import follow_lines
from efftrain_cli.run.metrics import latest_rows

FOLDER = "tensorboard"


class Writer:
    """An event file in `folder`, which is emptied first.

    Raises:
        UsageError: tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise UsageError(
                f"TensorBoard cannot be imported ({error}); install it with: pip install 'efftrain[tensorboard]'"
            ) from None
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)
        self._writer = EventFileWriter(str(folder))

    def add(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl, at its step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {
            tag: float(value)
            for tag, value in grouped(row).items()
            if isinstance(value, (int, float))
        }
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        self._writer.add_event(
            Event(
                step=int(row["step"]),
                wall_time=float(row.get("wall_seconds") or 0),
                summary=Summary(value=values),
            )
        )

    def close(self) -> None:
        """Brings everything to the file."""
        self._writer.close()


def write(run: Path, follow: bool = False, poll_seconds: float = 1.0) -> tuple[Path, int]:
    """Writes the run's rows, with `follow` also those that are written until standard input closes; returns the folder
    and the number of rows.

    Raises:
        UsageError: tensorboard is not installed.
    """
    folder = run / FOLDER
    writer = Writer(folder)
    count, last = 0, -1
    later = (
        (row for _, row in follow_lines([run / "metrics.jsonl"], poll_seconds)) if follow else ()
    )
    for row in chain(latest_rows(run), later):
        if isinstance(row.get("step"), int) and row["step"] > last:
            writer.add(row)
            count, last = count + 1, row["step"]
    writer.close()
    return folder, count
