"""TensorBoard as another reader of metrics.jsonl: the same rows under the same names as wandb has.

Written by the package `tensorboard` alone (extra of the same name); neither torch nor TensorFlow is
imported. The files are made anew whenever a reading begins, from the rows that count, so a resume
leaves no step twice.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.files import make_folder
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.trackers.rows import follow_run, grouped


def check_installed() -> None:
    """Check that the extra `tensorboard` is there.

    Raises:
        UsageError: it is not.
    """
    if find_spec("tensorboard") is None:
        raise UsageError(
            "TensorBoard is not installed\n"
            "  in the folder of efftrain's source: `pip install '.[tensorboard]'`"
        )


def write(run: Path, follow: bool = False) -> tuple[Path, int]:
    """Write a run's rows to RUN/tensorboard, which is emptied first; return the folder and the
    number of rows.

    Args:
        follow: write the rows that are logged until standard input closes, too.

    Raises:
        UsageError: tensorboard is not installed.
    """
    check_installed()
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = run / "tensorboard"
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    writer = EventFileWriter(str(folder))

    count = 0
    last = -1
    for row in chain(latest_rows(run), follow_run(run) if follow else ()):
        if row["step"] <= last:
            continue
        count += 1
        last = row["step"]
        values = []
        for tag, value in grouped(row).items():
            if isinstance(value, (int, float)):
                values.append(Summary.Value(tag=tag, simple_value=float(value)))
        time = float(row.get("wall_seconds") or 0)
        writer.add_event(Event(step=last, wall_time=time, summary=Summary(value=values)))
    writer.close()
    return folder, count
