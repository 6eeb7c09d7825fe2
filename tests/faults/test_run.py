"""The run directory: who owns it, what it may be called, and what its rows and screen promise."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
from collections.abc import Iterator
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from efftrain_cli.foundation.console import make_console
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.run.directory import RunDirectory, new_run
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.training import display as screen_module
from efftrain_cli.training.display import TrainingDisplay
from tests.fake_runs import read_jsonl
from tests.faults.damage import call, contents
from tests.faults.stalls import WINDOWS, stalled
from tests.launch import Laboratory, Process, wait_until


def test_one_owner(lab):
    """F31: a second process is refused; a dead owner's lock is taken over."""
    first = stalled(lab, lab.recipe(), WINDOWS["data"][0], name="r")
    before = (lab.run("r") / "events.jsonl").read_text()
    assert f"process {first.pid} on " in lab.resume(code=7).errors
    assert (lab.run("r") / "events.jsonl").read_text() == before

    first.kill(signal.SIGKILL)
    first.wait()
    lab.resume("r")


def test_names_that_could_leave_the_folder(tmp_path):
    """F32."""
    bad = ("../../x", "/abs", "", "CON.txt", "résumé", "-rf", "a\n", "..", "a b", "x" * 65)
    for name in bad:
        with pytest.raises(UsageError), new_run(name, "", {}):
            pass
        with pytest.raises(UsageError):
            RunDirectory.open(name)
    assert list(tmp_path.iterdir()) == []
    with new_run("A.b_c-9", "", {}):
        pass
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["A.b_c-9"]


def test_what_a_killed_start_left_goes_with_the_next(tmp_path):
    """F1: and nothing of a start that is under way, or of another run."""
    left, under_way, other = (
        tmp_path / "runs" / f".{name}.efftrain-{number}.tmp"
        for name, number in [("r", 1), ("r", 2), ("r2", 3)]
    )
    for folder in (left, under_way, other):
        folder.mkdir(parents=True)
        (folder / "lock").touch()
    with (under_way / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with new_run("r", "", {}):
            pass
    assert not left.exists() and under_way.exists() and other.exists()


def test_a_run_that_is_a_symbolic_link(tmp_path):
    """F32."""
    with new_run("real", "", {}):
        pass
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "recipe.toml").write_text("")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="symbolic link"):
        RunDirectory.open("link")
    with pytest.raises(UsageError, match="symbolic link"), new_run("link", "", {}):
        pass
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["recipe.toml"]


def test_a_taken_name_is_never_overwritten(random_run, monkeypatch):
    """F33; F31: and a run that another process owns is not continued, said before PyTorch is
    imported."""
    before = contents(random_run)
    monkeypatch.setitem(sys.modules, "efftrain_cli.pretrain", None)
    with RunDirectory.open("r"):
        assert call("pretrain", "--resume", "r")[0] == 7
        monkeypatch.setenv("EFFTRAIN_PARENT", "1")  # whose launcher has asked
        with pytest.raises(ModuleNotFoundError):
            call("pretrain", "--resume", "r")
    code, message = call("pretrain", "--recipe", "small", "--name", "r")
    assert code == 2 and "--resume r" in message and "r-2" in message
    assert contents(random_run) == before


def test_two_starts_at_the_same_moment(tmp_path):
    """F33: the name is decided by one rename; another process had it first."""
    path = tmp_path / "runs" / "r"
    with pytest.raises(UsageError, match="exists already"), new_run("r", "second", {}):
        path.mkdir()
        (path / "recipe.toml").write_text("first")
    assert (path / "recipe.toml").read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


def test_a_torn_last_line(tmp_path):
    """F30, writer's side: a torn row or event is cut off before anything is added; nothing else is
    touched."""
    with new_run("r", "", {}) as run:
        run.log([{"step": 0, "segment": 0}])
    path = tmp_path / "runs" / "r"
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(path / name, "a") as file:
            file.write('{"step": 7, "segm')
    with RunDirectory.open("r") as run:
        run.log([{"step": 1, "segment": 1}])
        run.event("resume", {})
    assert [row["step"] for row in latest_rows(path)] == [0, 1]
    assert read_jsonl(path / "events.jsonl")[-1]["event"] == "resume"


@pytest.mark.slow
def test_secrets_stay_out(lab):
    """F53: in no file of the run, and in no output; wandb's own files included."""
    secrets = {"WANDB_API_KEY": "5ec2e7" + "a1" * 17, "HF_TOKEN": "hf_5ec2e7TokenTokenTokenToken"}
    lab.train("r", "--steps", "3", "--wandb", "offline", **secrets)
    failing = lab.train(
        "s", recipe=lab.recipe("bad", train='"owner/dataset"'), **secrets, code=None
    )
    assert failing.code in (2, 3)
    read = 0
    for path in [*lab.folder.rglob("*")]:
        if path.is_file():
            content = path.read_bytes()
            read += 1
            for secret in secrets.values():
                assert secret.encode() not in content, path
    assert read > 10


# --- rows -----------------------------------------------------------------------------------------


def test_seconds_add_up_to_the_wall(lab):
    """F43, F46: slow evaluations, a slow save and a jumping clock are told apart from training, and
    nothing is counted twice."""
    inject = """
import time
from pathlib import Path
import efftrain_cli.foundation.files as files
import efftrain_cli.training.loop as loop
evaluate, fsync, clock = loop.evaluate, files.fsync, time.time
started = clock()

def slow_evaluate(*args):
    time.sleep(0.1)
    return evaluate(*args)

def slow_fsync(path):
    if Path(path).is_dir():  # files are flushed side by side, their folder after them
        time.sleep(0.07)
    return fsync(path)

loop.evaluate, files.fsync = slow_evaluate, slow_fsync
time.time = lambda: clock() + (86_400 if clock() - started > 0.5 else 0)
"""
    lab.train(inject=inject)
    rows = read_jsonl(lab.run("r") / "metrics.jsonl")
    parts = ("seconds", "compile_seconds", "eval_seconds", "checkpoint_seconds", "other_seconds")
    total = sum(row.get(part, 0.0) for row in rows for part in parts)
    assert total == pytest.approx(rows[-1]["wall_seconds"], rel=0.01)
    assert sum(row["eval_seconds"] for row in rows) >= 5 * 0.1
    assert sum(row["checkpoint_seconds"] for row in rows) >= 3 * 0.07
    assert all(row["eval_seconds"] == 0 for row in rows if row["val_loss"] is None)
    assert not [row for row in rows if row.get("wait_seconds")], "one process waits for none"
    train_seconds = sum(row["seconds"] for row in rows[1:])
    assert rows[-1]["train_seconds"] == pytest.approx(train_seconds, rel=1e-9)
    assert train_seconds < rows[-1]["wall_seconds"] - 5 * 0.1 - 3 * 0.07
    assert rows[-1]["tokens"] / train_seconds == pytest.approx(
        sum(row["tokens_per_second"] * row["seconds"] for row in rows[1:]) / train_seconds, rel=1e-3
    )


def test_tokens_and_flops_are_what_was_computed(lab):
    """F44, F45: against an independent count of the targets and of the blocks that ran."""
    inject = """
import torch
from efftrain_cli.model.block import Block
from efftrain_cli.model.gpt import GPT
head_loss_sum, forward = GPT.head_loss_sum, Block.forward

def counted(self, x, targets, *rest):
    if torch.is_grad_enabled():
        with open("counted", "a") as file:
            print("targets", targets.numel(), x.shape[1], file=file)
    return head_loss_sum(self, x, targets, *rest)

def counted_block(self, x, *rest):
    if torch.is_grad_enabled():
        with open("counted", "a") as file:
            print("block", x.shape[0] * x.shape[1], x.shape[1], file=file)
    return forward(self, x, *rest)

GPT.head_loss_sum, Block.forward = counted, counted_block
"""
    dropping = "[progressive_layer_drop]\ntheta = 0.5\nsteps = 20\n"
    lengths = "[seq_len_warmup]\nstart = 8\nsteps = 12\n"
    lab.train(recipe=lab.recipe(extra=dropping + lengths), inject=inject)
    targets = flops = 0
    n, rows = 64, 320
    for line in (lab.folder / "counted").read_text().splitlines():
        kind, tokens, seq_len = line.split()[0], *map(int, line.split()[1:])
        if kind == "targets":
            targets += tokens
            flops += tokens * 6 * (rows * n + 2 * n)
        else:
            flops += tokens * (6 * (12 * n * n + 13 * n) + 12 * n * seq_len)
    last = lab.rows("r")[-1]
    assert last["tokens"] == targets
    assert last["total_flops"] == pytest.approx(flops, rel=1e-12)
    assert last["windows"] * 32 == last["tokens"] + last["tokens_discarded"]
    assert all(row.get("mfu") is None for row in lab.rows("r")), "a CPU has no peak in the table"


# --- screen ---------------------------------------------------------------------------------------


def test_lines_of_a_long_run(monkeypatch, capfd):
    """F42: at least a line in 30 s, at most 3,000 lines in a million steps of 70 ms."""
    now, printed = [0.0], []
    monkeypatch.setattr(screen_module.time, "monotonic", lambda: now[0])
    with TrainingDisplay(make_console(), total_tokens=10**9, tokens=0, steps=10**6) as screen:

        def print_line(text: str) -> None:
            printed.append(now[0])
            screen._printed = now[0]

        monkeypatch.setattr(screen, "_print_line", print_line)
        row = {"tokens": 1, "loss": 3.0, "val_loss": None, "tokens_per_second": 1e4}
        for second in range(1, 168):
            now[0] = float(second)
            screen.show({**row, "step": second})
        assert printed == [*range(1, 121, 10), 139, 167], "more often in the first two minutes"
        for step in range(168, 10**6, 100):
            now[0] += 7.0
            screen.show({**row, "step": step})
        screen._ended.set()
    assert 2000 < len(printed) <= 3000
    assert max(b - a for a, b in pairwise(printed)) <= 30


def test_the_time_left_goes_by_the_pace_after_the_first_step(monkeypatch):
    """A first step of 60 s, then 1 s each: 97 of 100 steps are left after the third."""
    now, shown = [0.0], []
    monkeypatch.setattr(screen_module.time, "monotonic", lambda: now[0])
    with TrainingDisplay(make_console(), total_tokens=100, tokens=0, steps=100) as screen:
        for step, time in enumerate((60.0, 61.0, 62.0), 1):
            now[0] = time
            row = {"step": step, "tokens": step, "loss": 3.0, "val_loss": None}
            screen.show(row)
            shown.append(screen._text())
        screen._ended.set()
    assert "ETA" not in shown[0]
    assert shown[1].endswith("ETA 1 min 38 s") and shown[2].endswith("ETA 1 min 37 s")


def test_a_narrow_bar_keeps_the_time_left(monkeypatch):
    """Its line has 46 columns, 8 of which are the bar's."""
    now = [0.0]
    monkeypatch.setattr(screen_module.time, "monotonic", lambda: now[0])
    console = Console(width=46, file=StringIO(), force_terminal=True)
    with TrainingDisplay(console, total_tokens=100, tokens=0, steps=100) as screen:
        for step in (1, 2):
            now[0] += 1.0
            row = {"step": step, "tokens": step, "loss": 3.0, "tokens_per_second": 1.35e4}
            screen.show({**row, "val_loss": 4.0})
        assert screen._text() == "step 2/100  loss 3.000  ETA 1 min 38 s"
        console.width = 80
        assert screen._text().split("  ")[2:4] == ["val 4.000", "13.5K tok/s"]


def test_a_line_while_nothing_happens(monkeypatch, capfd):
    """F42: also where one step takes minutes."""
    monkeypatch.setattr(TrainingDisplay, "SILENCE", 0.2)
    with TrainingDisplay(make_console(), total_tokens=10, tokens=0, steps=10):
        for _ in range(2):
            wait_until(lambda: "still running" in capfd.readouterr().out)


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """A terminal of 40 columns: (what reads its output, the path that a process writes to)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    yield ours, os.ttyname(theirs)
    os.close(ours)
    os.close(theirs)


def start_into(lab: Laboratory, out: str | Path, *more: str, inject: str, **env: str) -> Process:
    """A run that prints into `out`."""
    args, err = ("pretrain", "--recipe", lab.recipe(), "--name", "r", *more), lab.folder / "err"
    return lab.zygote.start(*args, cwd=lab.folder, out=Path(out), err=err, inject=inject, **env)


def on_terminal(lab: Laboratory, terminal: tuple[int, str], kind: str) -> str:
    ours, path = terminal
    process = start_into(lab, path, inject="import os\nos.environ.pop('COLUMNS', None)", TERM=kind)
    content = b""
    while select.select([ours], [], [], 0.05)[0] or not process.ended():
        if select.select([ours], [], [], 0)[0]:
            content += os.read(ours, 65536)
    assert process.wait() == 0, (lab.folder / "err").read_text()
    return content.decode()


def test_a_narrow_terminal(lab, terminal):
    """F42: a bar, no line wider than the terminal but for a word that no line can hold, such as a
    path: it stays whole."""
    content = on_terminal(lab, terminal, "xterm")
    assert "\x1b[" in content
    assert content.rfind("\x1b[?25h") > content.rfind("\x1b[?25l") > 0, "the cursor comes back"
    for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", content)):
        *label, word = line.split() or [""]
        assert len(line) <= 40 or (len(label) <= 1 and len(word) > 40), line


def test_a_dumb_terminal(lab, terminal):
    """F42: lines, and not one escape sequence."""
    content = on_terminal(lab, terminal, "dumb")
    assert "\x1b" not in content
    assert re.search(r"step 20/20 +loss", content)


def test_a_reader_that_goes_away(lab):
    """F42: `efftrain pretrain ... | head -1` ends without a word about pipes, and what was trained
    is saved."""
    pipe = lab.folder / "pipe"
    os.mkfifo(pipe)
    inject = """
import time
from efftrain_cli.training.display import TrainingDisplay
show = TrainingDisplay.show

def show_slowly(self, row):
    time.sleep(0.1)
    show(self, row)

TrainingDisplay.show, TrainingDisplay.FIRST_INTERVAL = show_slowly, 0.2
"""
    process = start_into(lab, pipe, "--no-probe", inject=inject)
    with open(pipe) as reader:
        assert reader.readline().endswith("\n")
        process.wait_for(lambda: lab.last_step("r") >= 2)
    assert process.wait(30) == 75
    errors = (lab.folder / "err").read_text()
    assert "Traceback" not in errors
    assert "Broken" not in errors
    assert "stopped by a closed output after step" in errors
    assert lab.checkpoints("r")[-1] == f"step-{lab.last_step('r'):08d}"
