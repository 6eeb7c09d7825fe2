"""`efftrain runs list|show|rm`."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import time

import numpy as np
import pytest
from typer.testing import Result

from efftrain_cli.cli import runs as runs_commands
from efftrain_cli.foundation.console import human
from efftrain_cli.foundation.errors import DataError, UsageError
from efftrain_cli.run_list import glance, read_runs, remove_runs
from tests.conftest import cli, python
from tests.fake_runs import rows_of, write_run
from tests.terminal import on_terminal

DIVERGED = [{"event": "diverged", "step": 50}]
BRANCH = {"parent": "p", "step": 50, "sha256": "s"}


def run(line: str) -> Result:
    return cli(f"runs {line}")


def test_list_says_how_each_run_ended_and_what_it_reached(root):
    write_run(root, "small", 3)
    write_run(root, "half", 0, steps=50, budget=102400)
    path = write_run(root, "none", 0, rows=[])
    (path / "metrics.jsonl").unlink()
    os.utime(path / "recipe.toml", (0, time.time() - 5400))
    write_run(root, "future", 0, origin={"schema_version": 99})
    (root / "no-run").mkdir()
    os.utime(root / "half-seed0" / "metrics.jsonl", (0, time.time() + 5400))
    out = run("list --sort loss")
    head, first, *others = [line.split() for line in out.stdout.splitlines()]
    assert head == ["run", "status", "tokens", "val", "loss", "age"]
    final = rows_of(100, 3)[-1]["val_loss"]
    assert first[:4] == ["small-seed3", "finished", "102K", f"{final:.4f}"]
    assert others[0][:3] == ["half-seed0", "crashed", "51.2K"]
    assert others[0][4:] == ["0", "s"]
    assert sorted(others[1:])[1] == ["none-seed0", "not", "started", "0", "1", "h"]
    by_tokens = run("list --sort tokens").stdout.splitlines()
    order = ["run", "small-seed3", "half-seed0", "none-seed0", "future-seed0"]
    assert [line.split()[0] for line in by_tokens] == order
    assert "has format 99" in out.stderr and "\n  update efftrain" in out.stderr
    values = json.loads(run("list --format json").stdout)
    assert round(values[-1]["age_seconds"] / 60) == 90
    assert values[0]["age_seconds"] == 0, "clocks differ"
    found = {
        value["name"]: (value["status"], value["updates"], value["tokens"]) for value in values
    }
    assert found == {
        "small-seed3": ("finished", 100, 102400),
        "half-seed0": ("crashed", 50, 51200),
        "none-seed0": ("not started", 0, 0),
        "future-seed0": ("unreadable", None, None),
    }


def test_a_study_and_a_search_are_a_line_each(root, monkeypatch):
    """One of the study's three runs is under way, another has diverged."""
    write_run(root, "small", 0)
    for seed, options in enumerate(({}, {"events": DIVERGED}, {"steps": 50, "budget": 102400})):
        write_run(root, "warm-a", seed, **options)
    (root / "warm-study").mkdir()
    (root / "warm-study" / "runs.txt").write_text("warm-a-seed0\nwarm-a-seed1\nwarm-a-seed2\n")
    write_run(root / "small-tune" / "probes", "probe", 7)
    _, *lines = run("list --sort name").stdout.splitlines()
    assert [line.split()[:6] for line in lines[1:]] == [
        ["small-tune", "search,", "1", "of", "1", "run"],
        ["warm", "study,", "2", "of", "3", "runs"],
    ]
    assert len(run("list warm small-tune").stdout.splitlines()) == 5
    monkeypatch.setattr(runs_commands, "SHOWN", 1)
    assert run("list").stdout.splitlines()[-1] == "... 2 more: --all"
    assert len(run("list --all").stdout.splitlines()) == 4


SWEPT = "sweep-small-muon-lr1e-3-n-layer2-tokens4096"
"""Name of a run of a sweep over three settings: with its seed 49 characters."""


def test_list_is_a_line_a_run_at_80_columns(root):
    for seed in (1, 2):
        write_run(root, "small", seed, name=f"{SWEPT}-seed{seed}")
    write_run(root, "half", 0, steps=50, budget=102400)
    head, *lines = on_terminal(root, 80, "runs", "list", "--sort", "name").splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 80
    assert head.split() == ["run", "status", "val", "loss", "age"], "without tokens"
    final = rows_of(100, 1)[-1]["val_loss"]
    assert lines[1].split()[:3] == [f"{SWEPT}-seed1", "finished", f"{final:.4f}"]


@pytest.mark.parametrize(
    ("event", "status"),
    [
        ({"event": "end", "status": "paused"}, "stopped"),
        ({"event": "signal", "signal": "SIGTERM"}, "stopped"),
        (DIVERGED[0], "diverged"),
        ({"event": "end", "status": "outofmemory"}, "crashed"),
        ({"event": "resume", "step": 50}, "crashed"),
    ],
)
def test_a_glance_says_how_a_run_ended(root, event, status):
    """Its last event says so; without an end, tokens and budget do."""
    path = write_run(root, "small", 0, steps=50, budget=102400, events=[event])
    assert glance(path).status == status
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert glance(path).status == "50 %"
        path.joinpath("recipe.toml").write_text("[train]\ntokens = 25600\n")
        assert glance(path).status == "100 %"
    rows = rows_of(50, 0)
    whole = write_run(root, "whole", 0, steps=50, rows=rows, events=[event])
    assert glance(whole).status == ("diverged" if status == "diverged" else "finished")
    rows[-1]["val_loss"] = None
    unevaluated = write_run(root, "unevaluated", 0, steps=50, rows=rows, events=[event])
    assert glance(unevaluated).status == status, "F102"


def test_a_thousand_runs_are_listed_within_a_second_and_a_half(root):
    """CPU seconds with startup, and no heavy library; only the newest twenty are shown."""
    made = write_run(root, "small", 0, rows=rows_of(20, 0))
    for number in range(1, 1000):
        shutil.copytree(made, root / f"small-seed{number}", copy_function=os.link)
    code = (
        "import resource, sys\nfrom efftrain_cli.__main__ import main\n"
        "sys.argv = ['efftrain', *sys.argv[1:]]\n"
        "try:\n    main()\nfinally:\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    heavy = {'torch', 'scipy', 'pandas', 'numpy'} & sys.modules.keys()\n"
        "    print(used.ru_utime + used.ru_stime, *heavy)\n"
    )
    *shown, last = python(code, "runs", "list", cwd=root).stdout.splitlines()
    assert float(last) < 1.5, "seconds, and what was imported"
    assert len(shown) == 22 and shown[-1] == "... 980 more: --all"


def test_list_takes_a_beginning_or_a_recipe_as_other_commands_do(root):
    write_run(root, "small", 1)
    write_run(root, "small", 11, name="mine")
    write_run(root, "small-slw", 1)
    assert sorted(read_runs(["small", "m*"]).name) == ["mine", "small-seed1"], "each once"
    named = json.loads(run("list small-s --format json").stdout)
    assert sorted(value["name"] for value in named) == ["small-seed1", "small-slw-seed1"]
    assert "no runs called x in" in run("list x").stdout


def test_a_grown_run_has_its_own_name_and_best_loss(root):
    """Its first rows are its parent's: of those up to step 50 none is its own result."""
    rows = rows_of(50, 0, speed=3.0) + rows_of(100, 0, first=51)
    origin = {"recipe": "small-seed0", "grown_from": {"checkpoint": "step-00000050"}}
    write_run(root, "wide", 0, rows=rows, origin=origin)
    write_run(root, "new", 0, rows=rows[:51], budget=102400, origin=origin)
    found = read_runs().set_index("recipe").best_val_loss
    assert found["wide"] == rows_of(100, 0)[-1]["val_loss"] > rows[50]["val_loss"]
    assert np.isnan(found["new"]), "it has not trained a step"


def test_a_recipe_that_is_no_toml_is_damage_and_a_warning_of_two_lines(root):
    path = write_run(root, "small", 0) / "recipe.toml"
    path.write_text(path.read_text() + "x = [\n")
    with pytest.raises(DataError, match=r"recipe.toml is damaged: Invalid value"):
        run("verify small-seed0")
    warning = run("list").stderr
    assert "\n  Restore it from a copy of the run" in warning and "\\n" not in warning


def test_a_running_run_is_not_removed(root):
    path = write_run(root, "small", 0)
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="still running: small-seed0\n  stop with Ctrl-C"):
            remove_runs(["small-*"])


def test_show_prints_each_number_once(root):
    """2.5 bytes a target; 100 steps of 1,024 tokens, 0.05 s and 6e5 FLOPs a token."""
    rows = rows_of(100, 0)
    command = ["efftrain", "pretrain", "small", "--set", "optim.lr=1e-3", "--set=train.tokens=9"]
    origin = {"command": command, "branch": BRANCH}
    path = write_run(root, "small", 0, rows=rows, origin=origin)
    (path / "checkpoints").mkdir()
    out = run("show small-seed0").stdout
    head, *lines, disk = out.splitlines()
    assert re.fullmatch(r"small-seed0, finished \d{4}-\d\d-\d\d \d\d:\d\d", head)
    losses = [row["val_loss"] for row in rows if row["val_loss"] is not None]
    ratio = max(row["loss_ratio"] for row in rows if row.get("loss_ratio"))
    bits = losses[-1] / math.log(2) / 2.5
    assert lines == [
        f"result  val loss {losses[-1]:.4f} nats/token, {bits:.2f} bits/byte",
        "spent   100 steps, 102K tokens, 61.4 GFLOPs, 5 s on Some CPU",
        "branch  of p at step 50; 30.7 GFLOPs of its own",
        f"stable  largest loss ratio {ratio:.2f}; 0 jumps",
        "recipe  small, seed 0, optim.lr=1e-3, train.tokens=9",
        "text    stdlib, gpt2",
    ]
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    assert disk == f"disk    {human(size, 'B')} in runs/small-seed0"
    with pytest.raises(UsageError, match="did you mean small-seed0"):
        run("show small-seed1")


def test_show_says_what_an_unfinished_run_lacks(root):
    """Half of its tokens, a jump of the validation loss, a resume, and no loss at its last step."""
    rows = rows_of(55, 0)
    rows[20]["val_loss"] = 2 * rows[10]["val_loss"]
    rows[55]["val_loss"] = None
    write_run(root, "small", 0, rows=rows, budget=112640, events=[{"event": "resume"}])
    head, result, spent, stable, *_, notes, _ = run("show small-seed0").stdout.splitlines()
    assert head.startswith("small-seed0, crashed ") and result.endswith(" after step 50")
    assert spent.startswith("spent   55 steps, 56.3K of 113K tokens, ")
    assert stable.endswith("; 1 jump") and notes == "notes   resumed 1x"


def test_show_of_a_run_that_has_just_begun(root):
    data = '\n[data]\ntrain = ["a.txt", "b.txt"]\ntokenizer = "bpe:9"\n'
    path = write_run(root, "small", 0, rows=[], more=data, origin={"branch": BRANCH})
    (path / "zeroshot.json").write_text("[]")
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        head, *lines, _ = run("show small-seed0").stdout.splitlines()
    assert head.startswith("small-seed0, running, last row 2")
    assert lines == [
        "result  no validation loss yet",
        "recipe  small, seed 0, no changes",
        "text    a.txt, b.txt, bpe:9",
        "scores  in zeroshot.json",
    ]


def test_rm_asks_and_removes_only_what_was_named(root):
    for seed in range(3):
        write_run(root, "small", seed)
    with pytest.raises(UsageError, match="no terminal to ask on\n  give --yes"):
        run("rm small-seed0")
    assert (root / "small-seed0").exists()
    assert "removed 2 runs" in run("rm 'small-seed[01]' --yes").stdout
    assert [path.name for path in root.iterdir()] == ["small-seed2"]
    with pytest.raises(UsageError, match=r"no run 'x\*' in .*\n  `efftrain runs list`"):
        run("rm 'x*' --yes")


@pytest.mark.parametrize("name", ["../outside", ""])
def test_rm_stays_inside_the_folder_of_runs(root, name):
    with pytest.raises(UsageError):
        remove_runs([name])


def test_rm_of_a_race_leaves_its_baseline_and_the_runs_of_others(root):
    for name in ("base-seed1", "own-seed1", "both-seed1"):
        write_run(root, "small", 1, name=name)
    (root / "base.races").touch()
    for race, runs in (("race-1", "base-seed1 own-seed1 both-seed1"), ("race-2", "both-seed1")):
        (root / race).mkdir()
        (root / race / "study.toml").touch()
        (root / race / "runs.txt").write_text(runs)
    assert [path.name for path in remove_runs(["race-1"])] == ["own-seed1", "race-1"]


def test_rm_follows_no_link(root, tmp_path_factory):
    outside = write_run(tmp_path_factory.mktemp("outside"), "kept", 0)
    (root / "link").symlink_to(outside)
    with pytest.raises(UsageError, match="symbolic link"):
        remove_runs(["link"])
    with pytest.raises(UsageError, match="symbolic link"):
        remove_runs(["lin*"])
    inner = write_run(root, "small", 0)
    (inner / "elsewhere").symlink_to(outside)
    run("rm small-seed0 --yes")
    assert not inner.exists() and (outside / "recipe.toml").exists()


def test_show_as_json_holds_the_numbers_unrounded(root):
    path = write_run(root, "small", 0)
    losses = [row["val_loss"] for row in rows_of(100, 0) if row["val_loss"] is not None]
    value = json.loads(run("show small --format json").stdout)
    assert value["facts"]["best loss"] == min(losses) and value["curve"]["val_loss"] == losses
    assert (value["status"], value["seed"], value["facts"]["updates"]) == ("finished", 0, 100)
    assert value["events"] == [{"event": "start", "time": "T"}]
    assert value["recipe"]["optim"]["lr"] == 1e-3 and value["origin"]["torch"] == "2.13.0+cpu"
    assert value["seconds"]["eval"] == pytest.approx(11 * 0.25)
    (path / "metrics.jsonl").unlink()
    assert json.loads(run("show small --format json").stdout)["status"] == "not started"


def test_a_removal_asks_on_a_terminal(root):
    path = write_run(root, "small", 0)
    shown = on_terminal(root, 80, "runs", "rm", "small-seed0", answer="n\n")
    assert "Remove 1 run for good? [y/N]" in shown and path.exists()
    write_run(root, "small", 1)
    shown = on_terminal(root, 80, "runs", "rm", "small-*", answer="y\n")
    assert "Remove 2 runs for good? [y/N]" in shown and not path.exists()
