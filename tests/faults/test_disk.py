"""A disk that fills up while a run trains, for real: a small tmpfs in a mount namespace of its
own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.launch import Laboratory, Process

# The run directory becomes a tmpfs of SIZE bytes that only this process sees; at its end the
# content is copied to "after".
TMPFS = """
import atexit, ctypes, os, shutil, sys
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
user, group = os.getuid(), os.getgid()
if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
    os._exit(99)
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"0 {user} 1")
Path("/proc/self/gid_map").write_text(f"0 {group} 1")
root = Path(os.environ["EFFTRAIN_RUNS"])
root.mkdir(exist_ok=True)
if libc.mount(b"tmpfs", str(root).encode(), b"tmpfs", 0, b"size=SIZE"):
    os._exit(99)

import efftrain_cli.cli.app as app
run_app = app.run_app

def copying():
    try:
        run_app()
    finally:
        (root / "filler").unlink(missing_ok=True)
        shutil.copytree(root, "after")

app.run_app = copying

def fill():
    with open(root / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65536))
        except OSError:
            pass
        try:
            while True:
                file.write(bytes(16))
        except OSError:
            pass

def make_room():
    (root / "filler").unlink()

from efftrain_cli.data.windows import Windows
batch = Windows.batch

def acting(self, plan, *rest):
    {FULL_FROM: fill, ROOM_FROM: make_room}.get(plan.step, int)()
    return batch(self, plan, *rest)

Windows.batch = acting
"""


def on_small_disk(
    lab: Laboratory,
    recipe: str,
    *,
    size: int = 8 << 20,
    full_from: int = 0,
    room_from: int = 0,
    more: str = "",
) -> Process:
    inject = (
        TMPFS.replace("SIZE", str(size))
        .replace("FULL_FROM", str(full_from or -1))
        .replace("ROOM_FROM", str(room_from or -2))
    )
    process = lab.train(recipe=recipe, inject=inject + more, code=None)
    if process.code == 99:
        pytest.skip("no user namespaces with mounts here")
    return process


def rows(lab: Laboratory) -> list[int]:
    lines = (lab.folder / "after" / "r" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def events(lab: Laboratory, kind: str) -> list[dict]:
    lines = (lab.folder / "after" / "r" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_the_disk_fills_up_and_is_freed(lab):
    """F15, F17: training goes on, the checkpoint of step 5 stays, rows wait in memory and none is
    lost."""
    recipe = lab.recipe(keep="1")
    warn_often = "\nimport efftrain_cli.run.lines as lines\nlines.JsonLines.WARN_EVERY = 3600.0\n"
    process = on_small_disk(lab, recipe, full_from=7, room_from=13, more=warn_often)
    errors = process.errors
    assert process.code == 0, errors
    assert rows(lab) == list(range(21))
    assert errors.count("metrics.jsonl: No space left on device;") == 1, (
        "one warning an hour was asked for"
    )
    assert [event["step"] for event in events(lab, "save_failed")] == [10]
    assert "bytes needed, 0 bytes free" in events(lab, "save_failed")[0]["reason"]
    assert [event["step"] for event in events(lab, "checkpoint")] == [5, 15, 20]
    folder = lab.folder / "after" / "r" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000020"]
    # And the run is the same as one with room.
    lab.train("whole", recipe=recipe)
    shutil.copytree(lab.folder / "after" / "r", lab.run("r"))
    lab.assert_equal_runs("r", "whole", 20)


def test_too_little_disk_at_the_start(lab):
    """F16: nothing is begun, nothing is left."""
    process = on_small_disk(lab, lab.recipe(), size=3 << 20)
    assert process.code == 6
    assert "bytes needed, 3,145,728 bytes free" in process.errors
    assert list((lab.folder / "after").iterdir()) == []


def test_a_gap_in_the_rows_is_flagged(lab):
    """F17: rows that a killed process could not write any more are missed at the resume."""
    lab.train("r", "--steps", "10")
    path: Path = lab.run("r") / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[4:8] + lines[10:]))
    assert "rows of steps 8 to 9 are missing" in lab.resume("r", "--steps", "11").errors
    assert [(event["first"], event["last"]) for event in lab.events("r", "gap")] == [(3, 3), (8, 9)]
