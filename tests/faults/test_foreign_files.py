"""Run directories that are damaged, newer, foreign or partly unreadable: the file, the reason, the
way out, and no traceback."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import pytest

from efftrain_cli.compare.comparison import compare
from efftrain_cli.run.reading import load_run
from efftrain_cli.run_list import read_runs
from tests.fake_runs import write_run
from tests.faults.damage import call, contents, seal

VERBS = [
    ("pretrain", "--resume", "r"),
    ("sample", "r", "--prompt", "x"),
    ("export", "r", "--out", "out"),
    ("grow", "r", "--operator", "width"),
    ("runs", "checkpoints", "r"),
    ("runs", "show", "r"),
    ("runs", "verify", "r"),
    ("wandb-sync", "r"),
]


# --- formats of a newer efftrain ------------------------------------------------------------------


def newer(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 2}))


def cut(path: Path) -> None:
    path.write_text('{"schema_version": 1, "recipe": "sm')


@pytest.mark.parametrize(
    "damage, message",
    [
        (newer, "origin.json has format 2, this efftrain reads formats up to 1"),
        (cut, "Restore it"),
        (Path.unlink, "Restore it"),
    ],
)
def test_an_origin_that_is_newer_or_damaged_is_refused_by_every_verb(random_run, damage, message):
    """F52, F56, F61: the message names both versions or the way out; nothing is written."""
    damage(random_run / "origin.json")
    before = contents(random_run.parent)
    for verb in VERBS:
        code, said = call(*verb)
        assert code == 3, (verb, said)
        assert "origin.json" in said and message in said
    assert contents(random_run.parent) == before
    assert call("runs", "rm", "r", "--yes")[0] == 0


@pytest.mark.parametrize("file", ["progress.json", "manifest.json"])
def test_a_checkpoint_of_a_newer_format_is_refused_and_not_taken_for_damaged(random_run, file):
    """F56: older checkpoints beside it are not fallen back to, and it is neither moved nor
    purged."""
    folder = random_run / "checkpoints"
    checkpoint = folder / "step-00000010"
    shutil.copytree(checkpoint, folder / "step-00000005")
    newer(checkpoint / file)
    if file == "progress.json":
        seal(checkpoint)
    before = contents(folder)
    for verb in VERBS[:4]:
        code, message = call(*verb)
        assert code == 3, (verb, message)
        assert f"{file} has format 2, this efftrain reads formats up to 1" in message
    assert contents(folder) == before


def test_an_origin_that_says_nothing_of_the_data(random_run):
    """F61: what a resume and a growth compare their text with."""
    origin = json.loads((random_run / "origin.json").read_text())
    (random_run / "origin.json").write_text(json.dumps({**origin, "data": {}}))
    for verb in (VERBS[0], VERBS[3]):
        code, message = call(*verb)
        assert code == 3
        assert "origin.json is damaged: its `data` does not say tokenizer_hash" in message


# --- one bad run among others ---------------------------------------------------------------------


def test_one_bad_run_hides_no_other(tmp_path, monkeypatch):
    """F61, F65: whatever is wrong with it, it is listed and named; the others are shown."""
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path))
    for seed in range(2):
        write_run(tmp_path, "small", seed)
    for name, content in (("cut", b'{"schema_version": 1, '), ("deep", b"[" * 100_000)):
        (write_run(tmp_path, "bad", 0, name=name) / "origin.json").write_bytes(content)
    recipes = (b"\xff", b"train = 3\n", b"a = " + b"[" * 5000)
    for seed, content in enumerate(recipes, 1):
        (write_run(tmp_path, "bad", seed) / "recipe.toml").write_bytes(content)
    for seed, file in ((4, "events.jsonl"), (5, "metrics.jsonl")):
        path = write_run(tmp_path, "bad", seed) / file
        path.unlink()
        path.mkdir()
    found = {entry.name: entry for entry in read_runs().itertuples()}
    assert len(found) == 9
    for name, entry in found.items():
        if name.startswith("small"):
            assert entry.status == "finished"
        else:
            assert entry.status == "unreadable", (name, entry)
            assert str(tmp_path / name) in entry.problem
    code, output = call("runs", "list")
    assert code == 0
    assert "small-seed0" in output and "unreadable" in output
    for name in found.keys() - {"small-seed0", "small-seed1"}:
        assert f"warning: {tmp_path / name}" in output


def test_compare_goes_on_with_the_runs_that_can_be_read(tmp_path, monkeypatch):
    """F61, F65: the others are compared, and the comparison says which run is left out, and why."""
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path))
    for seed in range(3):
        write_run(tmp_path, "small", seed)
        write_run(tmp_path, "other", seed, speed=1.3)
    cut(tmp_path / "small-seed1" / "origin.json")
    for form in ("table", "json"):
        code, output = call("compare", "small-*", "other-*", "--format", form)
        assert code == 0
        assert "left out" in output and "origin.json" in output and "is damaged" in output
    for path in tmp_path.glob("*/origin.json"):
        cut(path)
    assert call("compare", "small-*", "other-*")[0] == 3


# --- rows and events ------------------------------------------------------------------------------

ODD_EVENTS = [
    "null",
    '{"event": ["override"]}',
    '{"event": "override", "differences": [null, 7, ["a"]]}',
    '{"event": "resume", "device": {"a": [1]}, "torch": null, "threads": []}',
    '{"event": ' * 50_000,
    '{"event": ' + "9" * 5000 + "}",
    "\ufffd\x00",
    '{"event": "diverged", "step": "x"}',
]


def checked(line: str) -> str:
    """The line with the check value that its writer would give it."""
    return f'{line[:-1]}, "check": "{zlib.crc32(line.encode()):08x}"}}'


def test_odd_events_break_no_reader(tmp_path, monkeypatch):
    """F62."""
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path))
    path = write_run(tmp_path, "small", 0)
    for events in (ODD_EVENTS, *([event] for event in ODD_EVENTS)):
        (path / "events.jsonl").write_text("\n".join(map(checked, events)) + "\n")
        assert load_run(path).facts["updates"] == 100
        ended = any('"diverged"' in event for event in events)
        assert read_runs().status[0] == ("diverged" if ended else "finished")
    assert call("runs", "show", "small-seed0")[0] == 0


def test_runs_verify_names_file_line_and_reason(tmp_path, monkeypatch):
    """F59: and compare and runs show say that something was left out."""
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path))
    path = write_run(tmp_path, "small", 0)
    metrics = path / "metrics.jsonl"
    assert call("runs", "verify", "small-seed0") == (
        0,
        "small-seed0: 101 rows, 1 event, 0 checkpoints: no damage\n",
    )
    lines = metrics.read_text().splitlines()
    lines[40] = lines[40].replace('"tokens": 40960', '"tokens": 50960')
    metrics.write_text("\n".join(lines) + "\n")
    code, message = call("runs", "verify", "small-seed0")
    assert code == 3
    assert f"{metrics}, line 41: it does not match its check value" in message
    run = load_run(path)
    assert run.notes == ("1 damaged line left out",)
    shown = call("runs", "show", "small-seed0")[1]
    assert "\nnotes   1 damaged line left out\n" in shown
    other = load_run(write_run(tmp_path, "other", 0))
    assert f"{run.name}: {run.notes[0]}" in compare([run, other], allow=True).caveats
