"""F19, F80, F84: several processes of one run stop together, and a dead one ends all of them
with the last step saved."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, cli, sets
from tests.fake_runs import read_jsonl
from tests.launch import Laboratory, Process

pytestmark = pytest.mark.slow
LONG = ("train.tokens=1_000_000", "data.repeat=true", "eval.every=1000")


def launch(
    lab: Laboratory,
    *args: str,
    inject: str = "",
    everywhere: str = "",
    **env: str,
) -> Process:
    """Start a run r on two devices; `inject` is run first in rank 1, `everywhere` in the other."""
    folder = lab.folder / "inject"
    folder.mkdir()
    indented = "".join(f"    {line}\n" for line in inject.splitlines())
    others = "".join(f"    {line}\n" for line in everywhere.splitlines())
    start = f"import os\nif os.environ.get('RANK') == '1':\n    pass\n{indented}"
    start += f"elif 'RANK' in os.environ:\n    pass\n{others}"
    (folder / "sitecustomize.py").write_text(start)
    words = [*lab.words("r"), *sets(*LONG), *args, "--devices", "2"]
    return lab.start(*words, PYTHONPATH=f"{folder}{os.pathsep}{REPOSITORY}", **env)


def process_of(run: Process, rank: int) -> int:
    """Return the process id of a rank."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = environment.read_text(errors="replace").split("\0")
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
    cli("runs verify r")
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


LATE = """
import time
import efftrain_cli.training.loop as loop
update = loop.update
def late(*args):
    time.sleep(0.3)
    return update(*args)
loop.update = late
"""


def test_no_step_waits_for_the_flags_of_a_slower_rank(lab):
    """Rank 1 updates 0.3 s later: its flags were on their way before. Rank 0 goes on to the next
    sum of gradients, and waits there."""
    end(launch(lab, "--steps", "4", inject=LATE))
    rows = read_jsonl(lab.run("r") / "metrics.jsonl")[2:]
    assert [row["wait_seconds"] < 0.1 < 0.2 < row["comm_seconds"] for row in rows] == [True] * 3


def test_a_killed_rank_ends_the_run_and_its_last_checkpoint_is_sound(lab):
    run = launch(lab)
    reach(lab, run, 7)
    os.kill(process_of(run, 1), signal.SIGKILL)
    message = "error: rank 1 was ended by SIGKILL\n  resume the run from its last checkpoint"
    end(run, 128 + signal.SIGKILL, message, timeout=60)
    assert 0 < saved(lab) <= lab.last_step("r")


def test_ten_kills_of_random_ranks(lab):
    """F80: SIGKILL at random moments; the resumed run ends as an undisturbed one."""
    recipe = lab.recipe(tokens="25600")  # 200 steps
    lab.train("whole", "--devices 2", recipe=recipe, timeout=300)
    generator = random.Random(1)
    command = (*lab.words("r", recipe), "--devices", "2")
    for _ in range(10):
        run = lab.start(*command)
        step = lab.last_step("r") + generator.randrange(1, 10)
        reach(lab, run, step)
        time.sleep(generator.uniform(0, 0.1))
        os.kill(process_of(run, generator.randrange(2)), signal.SIGKILL)
        end(run, 128 + signal.SIGKILL, "was ended by SIGKILL", timeout=60)
        command = ("pretrain", "--no-probe", "--resume", "r", "--from-start", "--devices", "2")
    end(lab.start(*command), timeout=300)
    lab.assert_equal_runs("r", "whole", 200)


CALLS = """
from efftrain_cli.model.gpt import GPT
import signal, torch
embed, calls = GPT.embed, 0

def faulty(self, *args):
    global calls
    calls += torch.is_grad_enabled()
    x = embed(self, *args)
    if torch.is_grad_enabled() and calls == 7:
        FAULT
    return x

GPT.embed = faulty
"""
"""A fault of rank 1 alone in its seventh micro-batch, which is that of step 7."""
MEMORY = "raise RuntimeError('DefaultCPUAllocator: not enough memory')"


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
@pytest.mark.parametrize(
    "fault, code, message",
    [
        ("x = x * float('nan')", 4, "step 7: the loss or a gradient is not finite"),
        (MEMORY, 5, "rank 1: out of memory"),
        ("raise ValueError('timed out')", 1, "ValueError: timed out"),
    ],
)
def test_a_fault_of_one_rank_ends_all(lab, fault, code, message, strategy):
    """F80: each prints its own; what all of them have is printed once."""
    args = sets(f"parallel.strategy={strategy}")
    run = launch(lab, *args, inject=CALLS.replace("FAULT", fault))
    assert run.wait(120) == code, run.errors
    assert run.errors.count(message) == 1, run.errors
    assert ("Traceback" in run.errors) == (code == 1)
    assert code == 1 or "no answer" not in run.errors, "rank 1 has said why"
    assert saved(lab) == (6 if code == 4 else 5)


def test_a_rank_that_hangs_ends_all_by_the_limit_of_the_group(lab):
    """F80: rank 1 stands still until it is told to end."""
    patience = "import datetime, efftrain_cli.training.dist as d\n"
    patience += "d.PATIENCE = datetime.timedelta(seconds=10)"
    inject = f"{patience}\n{CALLS.replace('FAULT', 'signal.pause()')}"
    run = launch(lab, inject=inject, everywhere=patience)
    assert run.wait(90) == 1, run.errors
    assert "no answer from another process of the run" in run.errors
    assert saved(lab) == 5


def test_clocks_an_hour_apart_decide_nothing(lab):
    """F84: neither the time of day nor the monotonic clock, which counts from each machine's own
    start."""
    clocks = ("time", "monotonic", "perf_counter")
    inject = "import time\n" + "".join(
        f"time.{name} = lambda read=time.{name}: read() + 3600\n" for name in clocks
    )
    end(launch(lab, "--steps", "6", inject=inject))
    assert lab.last_step("r") == saved(lab) == 6
    for row in read_jsonl(lab.run("r") / "metrics.jsonl")[1:]:
        for name in ("seconds", "comm_seconds", "wait_seconds"):
            assert 0 <= row[name] < 600


FLIP = """
import efftrain_cli.training.loop as loop
update, calls = loop.update, []
def flipping(state, *args):
    result = update(state, *args)
    calls.append(1)
    if len(calls) == 3:
        state.model.wpe.weight.data.view(loop.torch.int32)[0, 0] ^= 1
    return result
loop.update = flipping
"""
"""The last bit of one weight of rank 1 flips after step 3."""


def test_weights_that_differ_are_found_before_they_are_saved(lab):
    """F91: at the save after step 5."""
    end(launch(lab, inject=FLIP), 1, "step 5: the ranks' weights differ", timeout=90)
    assert lab.checkpoints("r") == []
