"""Disks and streams that refuse: EIO, EROFS, ESTALE, a full standard output, a directory that goes
away."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import DiskError
from efftrain_cli.run.lines import JsonLines, read_lines
from efftrain_cli.run.metrics import latest_rows

REFUSE_SAVES = """
import errno, os
import efftrain_cli.training.checkpoint as checkpoint
write_tensors, refused = checkpoint.write_tensors, 0

def refusing(path, tensors):
    global refused
    if "step-00000010" in str(path) and refused < TIMES:
        refused += 1
        raise OSError(errno.KIND, os.strerror(errno.KIND), str(path))
    return write_tensors(path, tensors)

checkpoint.write_tensors = refusing
"""


def test_a_save_that_is_refused_once(lab):
    """F64: a warning that names the fault; training goes on and saves later."""
    inject = REFUSE_SAVES.replace("KIND", "EIO").replace("TIMES", "1")
    errors = lab.train(inject=inject).errors
    assert "not saved, training goes on." in errors and "Input/output error" in errors
    assert [event["step"] for event in lab.events("r", "save_failed")] == [10]
    assert lab.checkpoints("r") == ["step-00000015", "step-00000020"]


def test_a_last_save_that_is_refused(lab):
    """F64: exit 6 at the end, with its event; the checkpoint before is the one to go on from."""
    inject = REFUSE_SAVES.replace("KIND", "EROFS").replace("TIMES", "99")
    errors = lab.train("r", "--steps", "10", inject=inject, code=6).errors
    assert "Read-only file system\n  make room, or make it readable and writable" in errors
    assert lab.checkpoints("r") == ["step-00000005"]
    assert lab.events("r", "end")[-1]["status"] == "disk"
    lab.resume()


@pytest.mark.parametrize("command", ["pretrain", pytest.param("sweep", marks=pytest.mark.slow)])
def test_a_warning_that_cannot_be_written_ends_nothing(lab, command):
    """F57, F101: both outputs are full before step 1. A sweep trains too; only its comparison is
    lost then, with exit 6."""
    recipe = lab.recipe(warmup_steps="50")
    name = ("--name", "r") if command == "pretrain" else ("--seeds", "0")
    full = Path("/dev/full")
    process = lab.zygote.start(command, recipe, *name, cwd=lab.folder, out=full, err=full)
    assert process.wait(60) == (0 if command == "pretrain" else 6)
    run = "r" if command == "pretrain" else "tiny-seed0"
    assert lab.events(run, "end")[-1]["status"] == "finished"
    assert lab.checkpoints(run)[-1] == "step-00000020"


def test_a_log_that_fills_up_while_training(lab):
    """F17, F57: standard output is a file whose writes fail from step 8 on, with EIO."""
    inject = """
import errno, os
import efftrain_cli.foundation.console as console
from efftrain_cli.data.windows import Windows
from efftrain_cli.training.display import TrainingDisplay
TrainingDisplay.FIRST_INTERVAL = 0.0
batch, write, broken = Windows.batch, console._Output.write, []

def breaking(self, plan, *rest):
    if plan.step == 9:
        broken.append(os.open("/dev/full", os.O_WRONLY))
        os.dup2(broken[0], 1)
        os.dup2(broken[0], 2)
    return batch(self, plan, *rest)

Windows.batch = breaking
"""
    assert "step 3/20" in lab.train(inject=inject).output
    assert lab.events("r", "end")[-1]["status"] == "finished"


# --- rows that the disk refuses until the end -----------------------------------------------------


class Disk:
    """Stands for `os` in the writer of lines: takes `room` bytes, then refuses."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __getattr__(self, name: str):
        return getattr(os, name)

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        written = os.write(descriptor, data[: self.room])
        self.room -= written
        return written


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def row(step: int) -> dict[str, object]:
    return {"step": step, "segment": 0, "loss": step / 7}


def test_rows_that_cannot_be_written_are_kept_beside_and_put_back(rows, monkeypatch, capfd):
    """F67: the disk fails in the middle of a line and stays broken; the next start loses
    nothing."""
    file = JsonLines(rows)
    file.write([row(0), row(1)])
    monkeypatch.setattr("efftrain_cli.run.lines.os", Disk(25))
    for step in range(2, 6):
        file.write([row(step)])
    assert capfd.readouterr().err.count("Input/output error") == 1
    with pytest.raises(
        DiskError,
        match=r"the last 4 lines could not be written; they are in metrics\.jsonl\.unwritten",
    ) as raised:
        file.close()
    assert raised.value.exit_code == 6
    monkeypatch.undo()
    assert [entry["step"] for entry in read_lines(rows)] == [0, 1]
    JsonLines(rows).close()
    assert read_lines(rows) == [row(step) for step in range(6)]
    assert not rows.with_name("metrics.jsonl.unwritten").exists()


def test_rows_that_are_lost_are_counted(rows, monkeypatch):
    """F67: nothing can be written beside it either."""

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    file = JsonLines(rows)
    monkeypatch.setattr("efftrain_cli.run.lines.os", Disk(0))
    monkeypatch.setattr("efftrain_cli.run.lines.write_whole", refuse)
    file.write([row(1), row(2)])
    with pytest.raises(
        DiskError,
        match=r"the last 2 lines could not be written \(Read-only file system\) and are lost",
    ):
        file.close()


def test_a_disk_that_comes_back_gets_all_rows(rows, monkeypatch):
    """F17: in order, whole lines, none twice, whatever part of a line was written."""
    disk = Disk(0)
    file = JsonLines(rows)
    monkeypatch.setattr("efftrain_cli.run.lines.os", disk)
    for step in range(30):
        disk.room = step * 7 % 90
        file.write([row(step)])
    assert len(read_lines(rows)) < 30
    disk.room = 1 << 20
    file.sync()
    file.close()
    assert read_lines(rows) == [row(step) for step in range(30)]


# --- a run directory that goes away ---------------------------------------------------------------

GO_AWAY = """
import os
from efftrain_cli.data.windows import Windows
batch = Windows.batch

def moving(self, plan, *rest):
    if plan.step == 8:
        os.rename("runs/r", "runs/other")
    return batch(self, plan, *rest)

Windows.batch = moving
"""


def test_a_run_directory_that_goes_away_while_it_trains(lab):
    """F73: exit 6 at the next save, after step 10, and nothing is made anew; what was saved is
    sound."""
    errors = lab.train(inject=GO_AWAY, code=6).errors
    assert re.search(r"runs/r was renamed or deleted while .*; it is now .*/runs/other\n", errors)
    assert not lab.run("r").exists()
    assert lab.checkpoints("other")[-1] == "step-00000005"
    lab.resume("other")
    assert len(latest_rows(lab.run("other"))) == 21


def test_a_number_that_is_not_finite_is_null_in_a_line(rows):
    file = JsonLines(rows)
    file.write(
        [{"step": 1, "lr": float("inf"), "deep": [float("nan"), {"a": -float("inf")}], "loss": 1.5}]
    )
    file.close()
    assert read_lines(rows) == [{"step": 1, "lr": None, "deep": [None, {"a": None}], "loss": 1.5}]
