"""F19, F80, F82, F84: several processes of one run stop together, and a dead one ends all of them
with the last step saved."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from efftrain_cli.run.reading import load_run
from tests.conftest import REPOSITORY, sets
from tests.fake_runs import read_jsonl
from tests.launch import Laboratory, Process

pytestmark = pytest.mark.slow
LONG = ("train.tokens=1_000_000", "data.repeat=true", "eval.every=1000")


def launch(
    lab: Laboratory,
    *args: str,
    probe: bool = False,
    inject: str = "",
    rank: int = 1,
    **env: str,
) -> Process:
    """Start a run r on two devices; `inject` is run first in one rank."""
    folder = lab.folder / "inject"
    folder.mkdir()
    indented = "".join(f"    {line}\n" for line in inject.splitlines())
    start = f"import os\nif os.environ.get('RANK') == '{rank}':\n    pass\n{indented}"
    (folder / "sitecustomize.py").write_text(start)
    words = [*lab.words("r"), *sets(*LONG), *args, "--devices", "2"]
    if probe:
        words.remove("--no-probe")
    return lab.start(*words, PYTHONPATH=f"{folder}{os.pathsep}{REPOSITORY}", **env)


def process_of(run: Process, rank: int) -> int:
    """Return the process id of a rank."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = environment.read_text().split("\0")
        except OSError:
            continue
        if {f"RANK={rank}", f"EFFTRAIN_PARENT={run.pid}"} <= set(words):
            return int(environment.parent.name)
    raise AssertionError(f"rank {rank} is not running")


def reach(lab: Laboratory, run: Process, step: int) -> None:
    run.wait_for(lambda: lab.last_step("r") >= step, timeout=300)


def end(run: Process, code: int = 0, message: str = "", timeout: float = 120) -> str:
    """Wait for the end and return standard error, which has `message` once and no traceback."""
    assert run.wait(timeout) == code, run.errors
    assert "Traceback" not in run.errors, run.errors
    assert not message or run.errors.count(message) == 1, run.errors
    return run.errors


def saved(lab: Laboratory) -> int:
    """Return the step of the newest checkpoint, which is verified."""
    lab.call("runs", "verify", "r")
    return int(lab.checkpoints("r")[-1].removeprefix("step-"))


@pytest.mark.parametrize("to", ["launcher", "one rank", "one rank, sharded"])
def test_a_signal_stops_all_ranks_after_the_same_step(lab, to):
    """To the launcher, or to rank 1 alone; then one process goes on where two have stopped."""
    strategy = "shard" if "sharded" in to else "replicate"
    run = launch(lab, *sets(f"parallel.strategy={strategy}"))
    reach(lab, run, 3)
    os.kill(run.pid if to == "launcher" else process_of(run, 1), signal.SIGTERM)
    errors = end(run, 75, "stopped by", timeout=60)
    assert "continue: efftrain pretrain --resume r" in errors
    step = lab.last_step("r")
    assert saved(lab) == step
    row = read_jsonl(lab.run("r") / "metrics.jsonl")[3]
    assert 0 < row["wait_seconds"] < row["seconds"]
    if strategy == "shard":
        assert row["comm_seconds"] is None
    else:
        assert 0 < row["comm_seconds"] < row["seconds"]
    lab.resume("r", "--steps", str(step + 2), "--devices", "1", timeout=120)
    assert lab.last_step("r") == step + 2


def test_one_device_goes_on_where_two_have_stopped(lab):
    end(launch(lab, "--steps", "3", probe=True))
    assert lab.last_step("r") == 3
    errors = lab.resume("r", "--steps", "4", timeout=120).errors
    assert "continued with devices 2 -> 1: the last bits of the results may differ" in errors
    assert "continued with devices 2 -> 1" in load_run(lab.run("r")).notes
    again = lab.resume("r", "--steps 4 --devices 2", timeout=120)
    assert again.output.startswith("nothing to train: run r is after step 4 already")


def test_a_killed_rank_ends_the_run_with_its_last_step_saved(lab):
    run = launch(lab)
    reach(lab, run, 3)
    os.kill(process_of(run, 1), signal.SIGKILL)
    assert end(run, 128 + signal.SIGKILL).splitlines() == [
        "error: rank 1 was ended by SIGKILL; the others have stopped",
        "  resume the run from its last checkpoint",
    ]
    assert saved(lab) == lab.last_step("r")


OTHER_SOURCE = "import efftrain_cli.training.joining as j\nj.source_hash = lambda: 'another'"
OTHER_VERSION = "import efftrain_cli\nefftrain_cli.__version__ = '0.0.0'"


@pytest.mark.parametrize(
    "args, inject, message",
    [
        (("--device", "cuda:0"), "", "give one of the two"),
        (("--set", "train.batch_size=1"), "", "cannot be shared by 2 devices"),
        ((), "import sys\nsys.argv += ['--steps', '7']", "command: ["),
        ((), OTHER_SOURCE, "source: 'another' on rank 1"),
        ((), OTHER_VERSION, "efftrain: '0.0.0' on rank 1"),
    ],
)
def test_what_ranks_do_not_share_is_refused_once(lab, args, inject, message):
    """F82, F90."""
    end(launch(lab, *args, inject=inject), 2, message, timeout=90)
    assert lab.last_step("r") == -1
    # Versions are compared when rank 0 has made the run.
    assert lab.run("r").exists() == (inject == OTHER_VERSION)


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
def test_a_fault_of_one_rank_ends_all_with_one_message(lab, fault, code, message, strategy):
    """F80."""
    args = sets(f"parallel.strategy={strategy}")
    inject = CALLS.replace("FAULT", fault)
    end(launch(lab, *args, inject=inject, EFFTRAIN_HANG_SECONDS="3"), code, message)
    assert lab.last_step("r") == (5 if code == 4 else 4) and saved(lab) == 4


def test_every_rank_probes_its_memory(lab):
    fault = "raise RuntimeError('DefaultCPUAllocator: not enough memory')"
    run = launch(lab, probe=True, inject=CALLS.replace("FAULT", fault).replace("5", "1"))
    end(run, 5, "rank 1: out of memory in the largest micro-batch planned")
    assert lab.last_step("r") == -1


def test_a_first_rank_that_was_halted_is_found_by_the_second(lab):
    """F80: nothing in it can run, nor can the store that it keeps."""
    run = launch(lab, EFFTRAIN_HANG_SECONDS="3")
    reach(lab, run, 7)
    os.kill(process_of(run, 0), signal.SIGSTOP)
    end(run, 1, "rank 0 did not answer in time; all 2 processes end")
    assert saved(lab) == 5


BORDERS = {
    "after the first step": ("trainer.apply_step", 1),
    "before an evaluation": ("trainer.evaluate", 2),
    "after an evaluation": ("trainer.decide_by_evaluation", 1),
    "before the sum": ("devices.Devices.exchange_flags", 4),
}


@pytest.mark.parametrize("sleeper", [0, 1])
@pytest.mark.parametrize("border", BORDERS)
def test_a_rank_that_stops_at_a_border_of_phases_is_found(lab, border, sleeper):
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
    args = sets("eval.every=5")
    run = launch(lab, *args, inject=inject, rank=sleeper, EFFTRAIN_HANG_SECONDS="2")
    end(run, 1, f"rank {sleeper} did not answer in time; all 2 processes end")


def test_clocks_an_hour_apart_decide_nothing(lab):
    """F84: neither the time of day nor the monotonic clock, which counts from each machine's own
    start."""
    clocks = ("time", "monotonic", "perf_counter")
    inject = "import time\n" + "".join(
        f"time.{name} = lambda read=time.{name}: read() + 3600\n" for name in clocks
    )
    end(launch(lab, "--steps", "6", inject=inject, EFFTRAIN_HANG_SECONDS="5"))
    assert lab.last_step("r") == saved(lab) == 6
    for row in read_jsonl(lab.run("r") / "metrics.jsonl")[1:]:
        for name in ("seconds", "comm_seconds", "wait_seconds"):
            assert 0 <= row[name] < 600


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
def test_weights_that_differ_are_found_before_they_are_saved(lab, check_every, found, saved):
    """F91: at the save after step 5, or before."""
    args = sets(f"parallel.check_every={check_every}", f"checkpoint.every={saved or 5}")
    run = launch(lab, *args, inject=FLIP)
    end(run, 1, f"step {found}: the weights of rank 0, 1 differ", timeout=90)
    assert lab.checkpoints("r") == ([f"step-{saved:08d}"] if saved else [])
