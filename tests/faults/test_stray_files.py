"""Stray files, links and pipes in a run directory, and names with control characters."""

from __future__ import annotations

import fcntl
import json
import os
import shutil

import pytest

from efftrain_cli.foundation.errors import EfftrainError, RunLockedError
from efftrain_cli.run.directory import RunDirectory
from efftrain_cli.run.manifest import verify_checkpoint
from efftrain_cli.run.small_files import read_run
from efftrain_cli.training.loading import find_checkpoint
from tests.conftest import invoke
from tests.fake_runs import write_run
from tests.faults.damage import call, save_step


def test_stray_files_and_links_among_checkpoints_are_left_alone(random_run):
    """F63, F85: `runs checkpoints` lists them."""
    folder = random_run / "checkpoints"
    elsewhere = random_run.parent.parent / "elsewhere"
    shutil.copytree(folder / "step-00000010", elsewhere)
    (folder / "notes.txt").write_text("mine")
    (folder / "rsync.tmp").write_text("another program's")
    (folder / "upload.tmp").mkdir()
    (folder / "step-00000099").write_text("a file")
    (folder / "step-00000050").symlink_to(elsewhere)
    (folder / "step-00000051").symlink_to(random_run / "nowhere")
    (folder / "step-00000012.tmp").mkdir()
    (folder / ".step-00000012.efftrain-7.tmp").mkdir()  # what a killed save leaves
    with RunDirectory.open("r") as owned:
        assert find_checkpoint(owned.path, None) == folder / "step-00000010"
        owned.purge_checkpoints(1)
    assert {path.name for path in folder.iterdir()} == {
        "notes.txt",
        "rsync.tmp",
        "upload.tmp",
        "step-00000012.tmp",
        "step-00000099",
        "step-00000050",
        "step-00000051",
        "step-00000010",
    }
    assert (folder / "rsync.tmp").read_text() == "another program's"
    code, output = call("runs", "checkpoints", "r")
    assert code == 0 and output.count("no checkpoint") == 7
    assert call("runs", "verify", "r")[0] == 0


def test_a_save_whose_place_is_taken(run):
    """F63, F69: what is in the way is renamed, not written through and not removed."""
    folder = run.path / "checkpoints"
    (folder / "step-00000015").write_text("mine")
    (folder / "step-00000016").symlink_to(run.path.parent)
    (folder / "step-00000017").symlink_to(run.path / "nowhere")
    before = list(run.path.parent.iterdir())
    for step in (15, 16, 17):
        save_step(run, step)
        verify_checkpoint(folder / f"step-000000{step}")
        assert os.path.lexists(folder / f"step-000000{step}.left")
    assert (folder / "step-00000015.left").read_text() == "mine"
    assert list(run.path.parent.iterdir()) == before


# --- control characters ---------------------------------------------------------------------------

ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\n\x9b31m\u202e\u2028"


def test_control_characters_never_reach_the_terminal(tmp_path, monkeypatch):
    """F70: in run names, origins, events, recipes and what damaged lines say."""
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path))
    origin = {
        "recipe": f"small{ESCAPES}",
        "device": ESCAPES,
        "command": ["pretrain", ESCAPES],
        ESCAPES: ESCAPES,
    }
    events = [
        {"event": f"spike{ESCAPES}", "time": ESCAPES, ESCAPES: ESCAPES, "deep": [{"a": ESCAPES}]}
    ]
    more = f"[data]\ntrain = {json.dumps(ESCAPES)}\n"
    write_run(tmp_path, "small", 0, origin=origin, events=events, more=more)
    write_run(tmp_path, "small", 1, name=f"evil{ESCAPES[:-4]}x")
    (write_run(tmp_path, "small", 2) / "origin.json").write_text(
        json.dumps({"schema_version": 9, "efftrain": ESCAPES})
    )
    with (tmp_path / "small-seed0" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": ESCAPES, "segment": 0}) + "\n")
    forbidden = set(ESCAPES) - {"\n", *"[]2J0;owned31m"}
    for words in (
        ("runs", "list"),
        ("runs", "show", "small-seed0"),
        ("compare", "small-seed0", "small-seed0"),
        ("runs", "verify", "small-seed0"),
    ):
        result = invoke(*words)
        assert isinstance(result.exception, (EfftrainError, SystemExit, type(None))), words
        # Messages of errors are escaped where they are printed.
        assert not forbidden & set(result.output), words
    assert "\\x1b[2J" in invoke("runs", "show", "small-seed0").output
    assert read_run(tmp_path / "small-seed0").origin["device"].isprintable()


def test_a_lock_file_names_no_foreign_owner_unescaped(random_run):
    with (random_run / "lock").open("w") as lock:
        lock.write(ESCAPES)
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunLockedError) as raised:
            RunDirectory.open("r")
    assert "\x1b" not in str(raised.value)
