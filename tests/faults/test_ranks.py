"""F19, F80, F82, F84: several processes of one run stop together, and a dead one ends all of them with the last step
saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from efftrain_cli.compare.reading import read_numbers
from tests.conftest import REPOSITORY
from tests.fake_runs import read_jsonl
from tests.launch import start_efftrain, wait_until, write_recipe

pytestmark = pytest.mark.slow


class Launched:
    """`efftrain pretrain --devices 2` in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        *args: str,
        probe: bool = False,
        inject: str = "",
        sleeper: int = 1,
        **env: str,
    ) -> None:
        """`inject` is run first in rank `sleeper`."""
        self.folder = folder
        write_recipe(folder, "train.tokens=1_000_000", "data.repeat=true", "eval.every=1000")
        self.environment = {
            "PYTHONPATH": f"{folder / 'inject'}{os.pathsep}{REPOSITORY}",
            "EFFTRAIN_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            **env,
        }
        (folder / "inject").mkdir()
        indented = "".join(f"    {line}\n" for line in inject.splitlines())
        (folder / "inject" / "sitecustomize.py").write_text(
            f"import os\nif os.environ.get('RANK') == '{sleeper}':\n    pass\n{indented}"
        )
        args = (*args, "--devices", "2") if probe else (*args, "--devices", "2", "--no-probe")
        self.process = self.start("pretrain", "--recipe", "r.toml", "--name", "r", *args)

    def start(self, *args: str) -> subprocess.Popen[str]:
        return start_efftrain(self.folder, *args, **self.environment)

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.last_step() >= step, self.process)

    def last_step(self) -> int:
        file = self.folder / "runs" / "r" / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=-1)

    def rank(self, number: int) -> int:
        """Process id of a rank."""
        for task in Path("/proc").glob("[0-9]*/environ"):
            try:
                words = task.read_bytes().split(b"\0")
            except OSError:
                continue
            if (
                f"RANK={number}".encode() in words
                and f"EFFTRAIN_PARENT={self.process.pid}".encode() in words
            ):
                return int(task.parent.name)
        raise AssertionError(f"rank {number} is not running")

    def end(self, code: int = 0, message: str = "", timeout: float = 120) -> str:
        """Wait for the end and return standard error, which has `message` once and no traceback."""
        _, errors = self.process.communicate(timeout=timeout)
        assert self.process.returncode == code, errors
        assert "Traceback" not in errors and (not message or errors.count(message) == 1), errors
        return errors

    def is_sound(self) -> bool:
        """The newest checkpoint passes verification."""
        return self.start("checkpoint", "verify", "r").wait(timeout=60) == 0

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "runs" / "r" / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def saved(self) -> int:
        """Step of the newest checkpoint."""
        folders = (self.folder / "runs" / "r" / "checkpoints").glob("step-????????")
        return max(int(path.name.removeprefix("step-")) for path in folders)


@pytest.mark.parametrize("to", ["launcher", "one rank", "one rank, sharded"])
def test_a_signal_stops_all_ranks_after_the_same_step(tmp_path, to):
    """To the launcher, or to rank 1 alone; then one process goes on where two have stopped."""
    run = Launched(
        tmp_path, "--set", f"parallel.strategy={'shard' if 'sharded' in to else 'replicate'}"
    )
    run.wait_for_step(3)
    os.kill(run.process.pid if to == "launcher" else run.rank(1), signal.SIGTERM)
    errors = run.end(75, "stopped by", timeout=60)
    assert "continue with `efftrain pretrain --resume r`" in errors
    step = run.last_step()
    assert run.saved() == step
    row = json.loads((tmp_path / "runs" / "r" / "metrics.jsonl").read_text().splitlines()[3])
    assert 0 < row["wait_seconds"] < row["seconds"]
    assert (
        row["comm_seconds"] is None if "sharded" in to else 0 < row["comm_seconds"] < row["seconds"]
    )

    resumed = run.start(
        "pretrain", "--resume", "r", "--no-probe", "--steps", str(step + 2), "--devices", "1"
    )
    assert resumed.wait(timeout=120) == 0, resumed.communicate()[1]
    assert run.last_step() == step + 2


def test_lanes_train_after_the_probe_too(tmp_path):
    """And one device goes on where two have stopped: with the same bits, so nothing else may be said."""
    run = Launched(tmp_path, "--set", "parallel.lanes=4", "--steps", "3", probe=True)
    run.end()
    assert run.last_step() == 3
    resumed = run.start("pretrain", "--resume", "r", "--no-probe", "--steps", "4")
    _, errors = resumed.communicate(timeout=120)
    assert (
        resumed.returncode == 0
        and "note: continued with devices 2 -> 1: by parallel.lanes = 4 the same bits" in errors
    )
    marks = read_numbers(tmp_path / "runs" / "r").marks
    assert "ran on 2 and 1 devices" in [mark.text for mark in marks]


def test_a_killed_rank_ends_the_run_with_its_last_step_saved(tmp_path):
    run = Launched(tmp_path)
    run.wait_for_step(3)
    os.kill(run.rank(1), signal.SIGKILL)
    assert run.end(128 + signal.SIGKILL).splitlines() == [
        "error: rank 1 was ended by SIGKILL; the others have stopped",
        "resume the run from its last checkpoint",
    ]
    assert run.saved() == run.last_step()


OTHER_SOURCE = "import efftrain_cli.training.joining as j\nj.source_hash = lambda: 'another'"
OTHER_VERSION = "import efftrain_cli\nefftrain_cli.__version__ = '0.0.0'"


@pytest.mark.parametrize(
    "args, inject, message",
    [
        (("--device", "cuda:0"), "", "give one of the two"),
        (("--set", "train.batch_size=1"), "", "cannot be shared by 2 devices"),
        (("--set", "parallel.lanes=3"), "", "must be a power of two"),
        ((), "import sys\nsys.argv += ['--steps', '7']", "command: ["),
        ((), OTHER_SOURCE, "source: 'another' on rank 1"),
        ((), OTHER_VERSION, "efftrain: '0.0.0' on rank 1"),
    ],
)
def test_what_ranks_do_not_share_is_refused_once(tmp_path, args, inject, message):
    """F82, F90."""
    run = Launched(tmp_path, *args, inject=inject)
    run.end(2, message, timeout=90)
    assert run.last_step() == -1
    # Versions are compared when the processes join, by then rank 0 has made the run.
    assert (tmp_path / "runs" / "r").exists() == (inject == OTHER_VERSION)


CALLS = """
from efftrain_cli.model.gpt import GPT
import torch, time
embed, calls = GPT.embed, 0

def faulty(self, *args):
    global calls
    calls += torch.is_grad_enabled()
    x = embed(self, *args)
    if torch.is_grad_enabled() and calls == 5:
        FAULT
    return x

GPT.embed = faulty
"""
"""A fault of rank 1 alone in its fifth micro-batch, which is that of step 5."""


@pytest.mark.parametrize(
    "fault, code, message, strategy",
    [
        (
            "time.sleep(1000)",
            1,
            "rank 1 did not answer in time; all 2 processes end",
            "replicate",
        ),
        ("x = x * float('nan')", 4, "step 5: the loss or a gradient is not finite", "replicate"),
        ("x = x * float('nan')", 4, "step 5: the loss or a gradient is not finite", "shard"),
        (
            "raise RuntimeError('DefaultCPUAllocator: not enough memory')",
            5,
            "rank 1: out of memory",
            "replicate",
        ),
    ],
)
def test_a_fault_of_one_rank_ends_all_with_one_message(tmp_path, fault, code, message, strategy):
    """F80."""
    args = ("--set", f"parallel.strategy={strategy}")
    run = Launched(tmp_path, *args, inject=CALLS.replace("FAULT", fault), EFFTRAIN_HANG_SECONDS="3")
    run.end(code, message)
    assert run.last_step() == (5 if code == 4 else 4) and run.saved() == 4 and run.is_sound()


def test_every_rank_probes_its_memory(tmp_path):
    fault = "raise RuntimeError('DefaultCPUAllocator: not enough memory')"
    run = Launched(tmp_path, probe=True, inject=CALLS.replace("FAULT", fault).replace("5", "1"))
    run.end(5, "rank 1: out of memory in the largest micro-batch planned")
    assert run.last_step() == -1


def test_a_first_rank_that_was_halted_is_found_by_the_second(tmp_path):
    """F80: nothing in it can run, nor can the store that it keeps."""
    run = Launched(tmp_path, EFFTRAIN_HANG_SECONDS="3")
    run.wait_for_step(7)
    os.kill(run.rank(0), signal.SIGSTOP)
    run.end(1, "rank 0 did not answer in time; all 2 processes end")
    assert run.saved() == 5 and run.is_sound()


BORDERS = {
    "after the first step": ("trainer.apply_step", 1),
    "before an evaluation": ("trainer.evaluate", 2),
    "after an evaluation": ("trainer.decide_by_evaluation", 1),
    "before the sum": ("devices.Devices.exchange_flags", 4),
}


@pytest.mark.parametrize("sleeper", [0, 1])
@pytest.mark.parametrize("border", BORDERS)
def test_a_rank_that_stops_at_a_border_of_phases_is_found(tmp_path, border, sleeper):
    """F92: with a limit of 2 s, 40 s in declared phases."""
    name, call = BORDERS[border]
    module, _, attribute = name.partition(".")
    inject = f"""
import os, sys, time
def stopping():
    import efftrain_cli.training.{module} as module
    where, _, name = "{attribute}".rpartition(".")
    where = getattr(module, where) if where else module
    work, calls = getattr(where, name), []
    def stop(*args, **keywords):
        calls.append(1)
        if len(calls) == {call}:
            time.sleep(1000)
        return work(*args, **keywords)
    setattr(where, name, stop)
stopping()
"""
    run = Launched(
        tmp_path,
        "--set",
        "eval.every=5",
        inject=inject,
        sleeper=sleeper,
        EFFTRAIN_HANG_SECONDS="2",
    )
    run.end(1, f"rank {sleeper} did not answer in time; all 2 processes end")


def test_clocks_an_hour_apart_decide_nothing(tmp_path):
    """F84: neither the time of day nor the monotonic clock, which counts from each machine's own start."""
    clocks = ("time", "monotonic", "perf_counter")
    inject = "import time\n" + "".join(
        f"time.{name} = lambda read=time.{name}: read() + 3600\n" for name in clocks
    )
    run = Launched(tmp_path, "--steps", "6", inject=inject, EFFTRAIN_HANG_SECONDS="5")
    run.end()
    assert run.last_step() == run.saved() == 6 and run.is_sound()
    rows = read_jsonl(tmp_path / "runs" / "r" / "metrics.jsonl")
    assert all(
        0 <= row[name] < 600
        for row in rows[1:]
        for name in ("seconds", "comm_seconds", "wait_seconds")
    )


def test_all_ranks_rewind(tmp_path):
    run = Launched(
        tmp_path,
        "--on-divergence",
        "rewind",
        "--steps",
        "8",
        inject=CALLS.replace("FAULT", "x = x * float('nan')"),
    )
    run.end()
    ((start, end, skipped),) = [
        (e["from_step"], e["to_step"], e["skipped_windows"]) for e in run.events("rewind")
    ]
    assert (start, end, skipped) == (5, 4, [16, 20])  # four windows a step
    assert run.last_step() == run.saved() == 8


FLIP = """
import efftrain_cli.training.trainer as trainer
apply_step, calls = trainer.apply_step, []
def flipping(state, *args):
    result = apply_step(state, *args)
    calls.append(1)
    if len(calls) == 3:
        state.model.wpe.weight.data.view(trainer.torch.int32)[0, 0] ^= 1
    return result
trainer.apply_step = flipping
"""
"""The last bit of one weight of rank 1 flips after step 3."""


@pytest.mark.parametrize(
    "check_every, found, saved", [("4", 4, None), ("1000", 5, None), ("2", 4, 2)]
)
def test_weights_that_differ_are_found_before_they_are_saved(tmp_path, check_every, found, saved):
    """F91: at the save after step 5, or before."""
    every = ("--set", "checkpoint.every=2") if saved else ()
    run = Launched(tmp_path, "--set", f"parallel.check_every={check_every}", *every, inject=FLIP)
    run.end(1, f"step {found}: the weights of rank 0, 1 differ", timeout=90)
    checkpoints = sorted((tmp_path / "runs" / "r" / "checkpoints").glob("step-????????"))
    assert [path.name for path in checkpoints] == ([f"step-{saved:08d}"] if saved else [])
