"""`efftrain runs list|show|rm`."""

from __future__ import annotations

import fcntl
import json
import re
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import Result

from efftrain_cli.compare import reading
from efftrain_cli.compare.show import fits, print_tables
from efftrain_cli.foundation.errors import DataError, UsageError
from efftrain_cli.run.metrics import read_metrics as read
from efftrain_cli.run_list import format_cell, read_runs, remove_runs, table_of_runs
from tests.conftest import cli
from tests.fake_runs import rows_of, write_run


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path))
    return tmp_path


def run(line: str) -> Result:
    return cli(f"runs {line}")


def test_list_says_status_recipe_seed_tokens_and_best_loss(root):
    write_run(root, "small", 3)
    write_run(root, "half", 0, steps=50, budget=102400)
    write_run(root, "none", 0, rows=[])
    (root / "none-seed0" / "metrics.jsonl").unlink()
    write_run(root, "future", 0, origin={"schema_version": 99})
    (root / "no-run").mkdir()
    found = {row.name: row for row in read_runs().itertuples(index=False)}
    assert {name: summary.status for name, summary in found.items()} == {
        "small-seed3": "finished",
        "half-seed0": "crashed",
        "none-seed0": "not started",
        "future-seed0": "unreadable",
    }
    small = found["small-seed3"]
    assert (small.recipe, small.seed, small.tokens, small.budget) == ("small", 3, 102400, 102400)
    expected = min(row["val_loss"] for row in rows_of(100, 3) if row["val_loss"] is not None)
    assert small.best_val_loss == expected and small.age_seconds < 60
    out = run("list")
    assert f"{expected:.4f}" in out.stdout
    (half,) = (line.split() for line in out.stdout.splitlines() if line.startswith("half"))
    assert half[4:6] == ["51.2K", "102.4K"]
    assert "is newer: update efftrain" in out.stderr
    value = json.loads(run("list 'small-*' --format json").stdout)
    assert [entry["name"] for entry in value] == ["small-seed3"]


SWEPT = "sweep-small-muon-lr1e-3-n-layer2-tokens4096"
"""Name of a run of a sweep over three settings: with its seed 49 characters."""


def listed(width: int) -> list[str]:
    """The lines of `runs list --sort name` in a terminal of so many columns."""
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=True, no_color=True, highlight=False)
    table = table_of_runs(read_runs(sort="name"), partial(fits, console=console))
    print_tables(console, [table])
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    return [line.rstrip() for line in plain.splitlines()]


def test_list_keeps_names_whole_and_leaves_out_columns_in_a_narrow_terminal(root):
    """A run is one line at 80 columns, and two at 60."""
    for seed in (1, 2):
        write_run(root, "small", seed, name=f"{SWEPT}-seed{seed}")
    head = "run status recipe seed tokens budget best loss age"
    assert " ".join(listed(120)[0].split()) == head
    at_80 = listed(80)
    assert " ".join(at_80[0].split()).startswith("run status tokens best loss")
    assert at_80[2].startswith(f"{SWEPT}-seed1 finished 102.4K 3.2")
    assert at_80[3].startswith(f"{SWEPT}-seed2 finished 102.4K 3.2")
    first, its_values, second, *_ = listed(60)
    assert (first, second) == (f"{SWEPT}-seed1", f"{SWEPT}-seed2")
    assert its_values.startswith("  finished, best loss 3.2")
    assert listed(30)[::2][:2] == [first, second], "a terminal breaks what is wider than it"


def test_list_takes_a_beginning_or_a_recipe_as_other_commands_do(root):
    write_run(root, "small", 1)
    write_run(root, "small", 11, name="mine")
    write_run(root, "small-slw", 1)
    named = {}
    for name in ("small", "small-s", "small-seed1", "min", "*1"):
        named[name] = list(read_runs([name], sort="name").name)
    assert named == {
        "small": ["mine", "small-seed1"],
        "small-s": ["small-seed1", "small-slw-seed1"],
        "small-seed1": ["small-seed1"],
        "min": ["mine"],
        "*1": ["small-seed1", "small-slw-seed1"],
    }
    assert len(read_runs(["small", "mine", "m*"])) == 2, "each once"
    assert "no runs called x in" in (out := run("list x").stdout) and "`efftrain runs list`" in out


@pytest.mark.parametrize(
    "seconds, shown", [(59, "59 s"), (3599, "59 min"), (7500, "2 h"), (4 * 86400, "4.0 days")]
)
def test_an_age_has_one_unit(seconds, shown):
    assert format_cell("age_seconds", seconds) == shown


def test_a_grown_run_has_its_own_name_and_best_loss(root):
    """Its first rows are its parent's: of those up to step 50 none is its own result."""
    write_run(root, "small", 0, steps=50)
    rows = rows_of(50, 0, speed=3.0) + rows_of(100, 0, first=51)
    grown = {"run": "small-seed0", "checkpoint": "step-00000050", "model_sha256": "0"}
    origin = {"recipe": "small-seed0", "grown_from": grown}
    write_run(root, "wide", 0, rows=rows, origin=origin)
    write_run(root, "new", 0, rows=rows[:51], budget=102400, origin=origin)
    found = read_runs(sort="name").set_index("name")
    assert list(found.recipe) == ["new", "small", "wide"]
    own = [row["val_loss"] for row in rows[51:] if row["val_loss"] is not None]
    parents = [row["val_loss"] for row in rows[:51] if row["val_loss"] is not None]
    assert found.best_val_loss["wide-seed0"] == min(own) > min(parents)
    assert np.isnan(found.best_val_loss["new-seed0"]), "it has not trained a step"
    assert "wide" in compare("wide small") and "small-seed0" not in compare("wide small")


def compare(names: str) -> str:
    """The recipes' names in the output of `efftrain compare`."""
    return cli(f"compare {names} --format csv").stdout


def test_the_frame_of_runs_has_each_setting_that_differs(root):
    write_run(root, "small", 0)
    write_run(root, "small", 1, lr=2e-3)
    frame = read_runs(sort="name")
    assert list(frame["optim.lr"]) == [1e-3, 2e-3]
    assert "optim.weight_decay" not in frame and list(frame.seed) == [0, 1]
    # As made: 100 steps of 1,024 tokens, 0.05 s a step, 6e5 FLOPs a token.
    assert list(frame.updates) == [100, 100]
    assert (frame.seconds[0], frame.flops[0]) == (5.0, 102400 * 6e5)
    last = rows_of(100, 0)[-1]
    assert frame.final_loss[0] == last["val_loss"]


@pytest.mark.filterwarnings("error")
def test_runs_that_differ_in_many_settings_are_one_frame(root):
    keys = [f"key_{i}" for i in range(150)]
    for seed in (0, 1):
        settings = "".join(f"{key} = {seed}\n" for key in keys)
        write_run(root, "small", seed, more=f"\n[many]\n{settings}")
    frame = read_runs(sort="name")
    assert [list(frame[f"many.{key}"]) for key in keys] == [[0, 1]] * 150


def test_list_of_nothing(root):
    assert "no runs in" in run("list").stdout
    assert "no runs called x-\\* in".replace("\\", "") in run("list 'x-*'").stdout


def test_a_recipe_that_is_no_toml_is_damage_and_a_warning_of_two_lines(root):
    path = write_run(root, "small", 0) / "recipe.toml"
    path.write_text(path.read_text() + "x = [\n")
    with pytest.raises(DataError, match=r"recipe.toml is damaged: Invalid value"):
        run("verify small-seed0")
    warning = run("list").stderr
    assert "\n  Restore it from a copy of the run" in warning and "\\n" not in warning


def test_a_locked_run_is_running(root):
    path = write_run(root, "small", 0, steps=50, budget=102400)
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_runs().status[0] == "running"
        with pytest.raises(UsageError, match="still running: small-seed0\n  stop with Ctrl-C"):
            remove_runs(["small-*"])
    assert read_runs().status[0] == "crashed"


def test_show_says_everything(root):
    # Evaluation takes 11 x 0.25 s; 1.25 s of the wall time is nobody's.
    rows = [row | {"wall_seconds": row["step"] * 0.09} for row in rows_of(100, 0)]
    write_run(
        root, "small", 0, rows=rows, events=[{"event": "start", "time": "T", "device": "cpu"}]
    )
    out = run("show small-seed0").stdout
    for word in (
        "finished",
        "tokens per training second",
        "20.48K",
        "start",
        "device cpu",
        "optim.lr",
        "data.valid_hash",
    ):
        assert word in out
    assert "marks" not in out
    # One run needs no letter, and a value that it lacks no line.
    assert not re.search(r"^ +A *$|^study|-$", out, re.MULTILINE)
    assert f" {'b' * 16} " in out and "b" * 17 not in out  # a hash of 64 digits
    # F43: the parts of the time and what they add up to.
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for part in ("train 5 s", "eval 2.75 s", "other 1.25 s", "wall 9 s"):
        assert part in lines
    assert "device cpu" in out and "budget 102.4K" in lines
    with pytest.raises(UsageError, match="did you mean small-seed0"):
        run("show small-seed1")


def test_numbers_of_events_have_their_units(root):
    events = [
        {"event": "memory", "time": "T", "host_bytes": 355_500_032, "device_bytes": 10**400},
        {"event": "growth", "time": "T", "flops": 3.8e12, "seconds": 150.0},
        {"event": "diverged", "time": "T", "window_tokens": [0, 128]},
    ]
    write_run(root, "small", 0, events=events)
    out = run("show small-seed0").stdout
    assert "host_bytes 355.5 MB, device_bytes 1000" in out
    assert "flops 3.8 TFLOPs, seconds 2 min 30 s" in out
    assert "window_tokens [0, 128]" in out


def test_a_run_that_was_not_started_is_at_no_step(root):
    write_run(root, "small", 0, rows=[])
    (root / "small-seed0" / "metrics.jsonl").unlink()
    out = run("show small").stdout
    assert re.search("^marks +unfinished: not started *$", out, re.MULTILINE)


def test_show_reads_the_rows_once(root, monkeypatch):
    write_run(root, "small", 0)
    reads = []
    monkeypatch.setattr(reading, "read_metrics", lambda *words: reads.append(words) or read(*words))
    run("show small-seed0")
    assert len(reads) == 1


def test_rm_asks_and_removes_only_what_was_named(root):
    for seed in range(3):
        write_run(root, "small", seed)
    with pytest.raises(UsageError, match="no terminal to ask on\n  give --yes"):
        run("rm small-seed0")
    assert (root / "small-seed0").exists()
    assert "removed 2 runs" in run("rm 'small-seed[01]' --yes").stdout
    assert sorted(path.name for path in root.iterdir()) == [".removed", "small-seed2"]
    assert len(list((root / ".removed").iterdir())) == 2
    with pytest.raises(UsageError, match=r"matches 'x\*'\n  `efftrain runs list`"):
        run("rm 'x*' --yes")


def test_rm_removes_a_run_whose_recipe_cannot_be_kept(root):
    write_run(root, "small", 0)
    (root / ".removed").write_text("a file where the folder of recipes would be")
    run("rm small-seed0 --yes")
    assert not (root / "small-seed0").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc", "a/b", ""])
def test_rm_stays_inside_the_folder_of_runs(root, name):
    with pytest.raises(UsageError):
        remove_runs([name])


def test_rm_follows_no_link(root, tmp_path_factory):
    outside = write_run(tmp_path_factory.mktemp("outside"), "kept", 0)
    (root / "link").symlink_to(outside)
    with pytest.raises(UsageError, match="symbolic link"):
        remove_runs(["link"])
    with pytest.raises(UsageError):
        remove_runs(["lin*"])
    inner = write_run(root, "small", 0)
    (inner / "elsewhere").symlink_to(outside)
    run("rm small-seed0 --yes")
    assert not inner.exists() and (outside / "recipe.toml").exists()


def test_show_as_json_holds_the_numbers_unrounded(root):
    rows = rows_of(100, 0)
    path = write_run(
        root, "small", 0, rows=rows, events=[{"event": "start", "time": "T", "device": "cpu"}]
    )
    value = json.loads(run("show small --format json").stdout)
    losses = [row["val_loss"] for row in rows if row["val_loss"] is not None]
    assert value["measures"]["best_loss"] == min(losses)
    assert (value["status"], value["steps"], value["tokens"], value["seed"]) == (
        "finished",
        100,
        102400,
        0,
    )
    assert value["events"] == [{"event": "start", "time": "T", "device": "cpu"}]
    assert value["recipe"]["optim"]["lr"] == 1e-3 and value["origin"]["torch"] == "2.13.0+cpu"
    (path / "metrics.jsonl").unlink()
    assert json.loads(run("show small --format json").stdout)["status"] == "not started"


def test_list_is_sorted_as_asked(root):
    write_run(root, "b", 0, steps=100, speed=3.0)
    write_run(root, "a", 0, steps=50, speed=1.0)
    write_run(root, "c", 0, rows=[])
    (root / "c-seed0" / "metrics.jsonl").unlink()

    def order(by: str) -> str:
        listed = json.loads(run(f"list --sort {by} --format json").stdout)
        return "".join(entry["name"][0] for entry in listed)

    assert order("name") == "abc"
    assert order("loss") == "bac", "the faster run has the lower loss; one without a loss is last"
    assert order("tokens") == "bac"


def test_the_last_save_is_counted(root):
    """No row comes after the save at the end; its seconds are in the event."""
    rows = [
        row | {"checkpoint_seconds": 1.0 if row["step"] == 51 else 0.0} for row in rows_of(100, 0)
    ]
    events = [{"event": "start", "time": "T"}]
    events += [
        {"event": "checkpoint", "time": "T", "step": step, "seconds": s}
        for step, s in ((50, 1.0), (100, 2.5))
    ]
    write_run(root, "small", 0, rows=rows, events=events)
    seconds = json.loads(run("show small --format json").stdout)["seconds"]
    assert seconds["checkpoint_seconds"] == 3.5
    assert seconds["wall_seconds"] == 100 * 0.06 + 2.5
