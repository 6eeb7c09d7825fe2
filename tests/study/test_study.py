"""Real training: a study that is stopped by Ctrl-C and by kill -9, finished, judged, and never
trains a run twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import start_efftrain, wait_until

SMALL = """\
seeds = "5..6"
baseline = "plain"
set = ["train.tokens=12800"]
[[primary]]
measure = "final_loss"
direction = "equivalent"
margin = 4.0
[[arms]]
name = "plain"
recipe = "plain.toml"
[[arms]]
name = "warm"
recipe = "warm.toml"
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return start_efftrain(folder, "study", "small.toml", "--device", "cpu", *words)


def rows_of(folder: Path) -> int:
    return sum(
        path.read_text().count("\n") for path in (folder / "runs").glob("small-*/metrics.jsonl")
    )


def trainers(folder: Path) -> list[int]:
    """Processes that train in the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                if b"pretrain" in command and (entry / "cwd").resolve() == folder.resolve():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts processes by /proc")
def test_a_study_survives_ctrl_c_and_kill_9(folder):
    (folder / "small.toml").write_text(SMALL)
    first = start(folder, "--jobs", "2")
    wait_until(lambda: rows_of(folder) > 4, first)
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 75 and "every run is saved" in errors, errors
    assert trainers(folder) == []
    before = rows_of(folder)
    second = start(folder, "--jobs", "2")
    wait_until(lambda: rows_of(folder) > before + 4, second)
    second.kill()
    second.wait(timeout=60)
    wait_until(lambda: not trainers(folder), timeout=120)  # they save and end by themselves
    third = start(folder, "--jobs", "2", "--format", "json")
    out, errors = third.communicate(timeout=600)
    assert third.returncode == 0, errors
    assert "warm equivalent in final loss" in errors
    found = json.loads(out)
    assert found["complete"] and [verdict["outcome"] for verdict in found["verdicts"]] == [
        "equivalent"
    ]
    for run in (folder / "runs").glob("small-*-seed*"):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["step"] == 50 or "warm" in run.name
        events = [
            json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()
        ]
        assert events.count("start") == 1
    assert not list((folder / "runs").rglob("owner.json")), "no run is owned"
    again = start(folder)
    out, errors = again.communicate(timeout=120)
    assert again.returncode == 0 and "\nwarm is equivalent to plain in final loss" in f"\n{out}"
    assert errors == "", "nothing is left to train"


BLOCKS = """\
blocks = 4
baseline = "plain"
set = ["train.tokens=2560"]
[[primary]]
measure = "final_loss"
direction = "equivalent"
margin = 4.0
[tuning]
grow = 0
grid = { "optim.lr" = [1e-3, 2e-3] }
[[arms]]
name = "plain"
recipe = "plain.toml"
[[arms]]
name = "warm"
recipe = "warm.toml"
"""


@pytest.mark.slow
def test_a_study_of_four_blocks_is_tuned_and_judged(folder):
    (folder / "small.toml").write_text(BLOCKS)
    done = start(folder, "--jobs", "2", "--format", "json")
    out, errors = done.communicate(timeout=900)
    assert done.returncode == 0, errors
    found = json.loads(out)
    (verdict,) = found["verdicts"]
    assert verdict["outcome"] == "equivalent" and len(verdict["seeds"]) == 4
    # Each of four blocks chose for both arms; one arm's two settings have other losses.
    assert len(found["tuning"]["arms"]) == 8
    for arm in found["tuning"]["arms"]:
        losses = {tuple(tried["losses"]) for tried in arm["tried"]}
        assert len(losses) == 2 and len(arm["seeds"]) == 1
        (seed,) = arm["seeds"]
        recipe = (folder / "runs" / f"small-{arm['arm']}-seed{seed}" / "recipe.toml").read_text()
        assert f"lr = {arm['chosen'][0].removeprefix('optim.lr=')}" in recipe
    assert len(list((folder / "runs").glob("small-*-seed*"))) == 4 * 2 * 3
    assert not any("tuned on" in label["text"] for label in found["labels"])
