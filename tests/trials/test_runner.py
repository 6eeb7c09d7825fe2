"""Training the runs of a sweep: several at once, stopped and continued, failing, diverging."""

from __future__ import annotations

import fcntl
import os
import signal
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from efftrain_cli.foundation.console import human
from efftrain_cli.foundation.errors import (
    EfftrainError,
    OutOfMemoryError,
    StoppedError,
    UsageError,
)
from efftrain_cli.plan import cost, rates
from efftrain_cli.plan.rates import Rate, remember_rate
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.run.directory import run_path
from efftrain_cli.trials import runner
from efftrain_cli.trials.costs import Costs, costs_of
from efftrain_cli.trials.runner import TrialRunner, environments, pretrain_arguments
from efftrain_cli.trials.trial import Trial, Trunk, grid
from tests.fake_runs import val_loss
from tests.trials.stubs import Pretrain, both, plain, write_trial


def train(launch: Pretrain, title: str = "", **options: Any) -> list[str]:
    """Train the trials that a launch knows; return how each ended."""
    trainer = TrialRunner(Path("state"), launch=launch, **options)
    return [run.status for run in trainer.train([*launch.by_name.values()], title)]


def cores(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let this machine have so many processor cores."""
    every = set(range(number))
    monkeypatch.setattr(runner.os, "sched_getaffinity", lambda pid: every, raising=False)


def test_a_stopped_sweep_continues_without_training_anything_twice(folder):
    """A run that diverges is a result."""
    trials = both(0, 1)
    first = Pretrain(trials, {"warm-seed0": 4, "plain-seed1": -signal.SIGTERM})
    with pytest.raises(StoppedError, match="plain-seed1 was stopped"):
        train(first)
    assert first.calls == ["plain-seed0", "warm-seed0", "plain-seed1"]
    second = Pretrain(trials)
    assert train(second) == ["finished", "diverged", "finished", "finished"]
    assert second.calls == ["resume plain-seed1", "warm-seed1"]
    third = Pretrain(trials)
    train(third)
    assert third.calls == []


def test_lines_count_all_runs_in_the_order_of_their_ends(folder, monkeypatch, capsys):
    """One of four is trained already; of the others the first started ends last, and one diverges.
    Of 7,680 tokens a third has taken 10 s. --quiet leaves what diverged."""
    cores(monkeypatch, 3)
    clock = Clock()
    monkeypatch.setattr(runner, "time", clock)
    trials = [*both(0), *plain(1, 2)]
    write_trial(trials[0])
    for is_quiet in (False, True):
        monkeypatch.setattr(runner, "silent", lambda is_quiet=is_quiet: is_quiet)
        launch = Pretrain(trials, {"plain-seed2": 4})
        launch.on_launch = lambda name, launch=launch: setattr(
            launch.children["warm-seed0"], "left", 3
        )
        train(launch, "look 1", jobs=3)
        assert launch.most == 3
        ended = "[3/4] plain-seed2: diverged, 10 s; about 5 s left\n"
        if is_quiet:
            assert capsys.readouterr().err == ended
            break
        assert capsys.readouterr().err.splitlines() == [
            "look 1: 3 of 4 runs to train",
            f"[2/4] plain-seed1: val loss {val_loss(100, 1, 1.0):.4f}, 10 s; about 20 s left",
            ended.strip(),
            "tokens of 7,680: 5,120",
            f"[4/4] warm-seed0: val loss {val_loss(100, 0, 1.3):.4f}, 30 s",
        ]
        for trial in trials[1:]:
            rmtree(run_path(trial.name))


class Clock:
    """Stands for `time`: each sleep takes 10 s."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 10


def test_the_arguments_of_a_run():
    """On a GPU a run looks itself whether it fits; a branch begins with its trunk's checkpoint."""
    branch = Trial("a.toml", ("optim.lr=1",), 3, "n", trunk=Trunk("t", 15, 3840))
    begin = ["--recipe", "a.toml", "--seed", "3", "--name", "n", "--from", "t@15"]
    assert pretrain_arguments(branch, "new", "cuda:0", 2) == [
        *("pretrain", "--device", "cuda:0", "--devices", "2"),
        *(*begin, "--set", "optim.lr=1"),
    ]
    probe = replace(branch, until=7)
    assert pretrain_arguments(probe, "unfinished", "cuda:0", 1) == [
        *("pretrain", "--device", "cuda:0", "--devices", "1", "--steps", "7", "--no-probe"),
        *("--resume", "n", "--from-start"),
    ]
    assert "--no-probe" in pretrain_arguments(branch, "new", "cpu", 1)


def test_threads_are_divided_and_gpus_dealt_out(monkeypatch, tmp_path):
    cores(monkeypatch, 16)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environments(1, "cuda") == [("cuda", {})]
    assert environments(4, "cpu") == [("cpu", {"OMP_NUM_THREADS": "3", "EFFTRAIN_JOBS": "4"})] * 4
    assert environments(16, "cpu")[0][1] == {"OMP_NUM_THREADS": "1", "EFFTRAIN_JOBS": "16"}
    monkeypatch.setattr(runner, "Path", lambda dev: tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    for visible, gpus in ((None, 2), ("4,,5,6,", 3)):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        devices = [device for device, _ in environments(4, "cuda")]
        assert devices == [f"cuda:{place % gpus}" for place in range(4)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environments(2, "cuda")[0][0] == "cuda", "not cuda:0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert environments(2, "auto")[0][0] == "auto"
    with pytest.raises(UsageError, match="use --jobs 16 or fewer"):
        environments(17, "cpu")
    with pytest.raises(UsageError, match="give one of the two"):
        TrialRunner(Path(), jobs=2, devices=2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_runs_saved(folder, monkeypatch, number):
    cores(monkeypatch, 4)
    trials = both(0, 1)
    launch = Pretrain(trials, polls=10**9)

    def stop(name: str) -> None:
        if len(launch.children) == 2:
            os.kill(os.getpid(), number)

    launch.on_launch = stop
    if signal.getsignal(number) == signal.SIG_IGN:  # tests run under nohup
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    with pytest.raises(StoppedError, match="every run is saved") as error:
        train(launch, jobs=2)
    assert error.value.exit_code == 75
    assert launch.calls == ["plain-seed0", "warm-seed0"]
    assert all(child.signals == [signal.SIGTERM] for child in launch.children.values())
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    "code, message, exit_code",
    [(6, "exit code 6", 6), (-9, "SIGKILL", 137), (2, "exit code 2", 2)],
)
def test_a_failure_ends_all_with_its_exit_code(folder, monkeypatch, code, message, exit_code):
    """F95: a signal by its name, and 128 + n; the other runs are saved."""
    cores(monkeypatch, 2)
    trials = both(0, 1)
    launch = Pretrain(trials, {"plain-seed0": code})
    launch.on_launch = lambda name: (
        setattr(launch.children[name], "left", 10**9) if name == "warm-seed0" else None
    )
    with pytest.raises(EfftrainError, match=f"plain-seed0 .*{message}") as error:
        train(launch, jobs=2)
    assert error.value.exit_code == exit_code
    assert "the last words" in str(error.value)
    assert launch.children["warm-seed0"].signals == [signal.SIGTERM]


def test_a_name_of_another_recipe_s_run_is_taken(folder):
    """A run of an older version, which knew fewer keys, is the same run."""
    train(Pretrain(plain(0)))
    path = folder / "runs" / "plain-seed0" / "recipe.toml"
    lines = path.read_text().splitlines()
    assert "repeat = true" in lines and 'text_field = "text"' in lines
    path.write_text("\n".join(line for line in lines if not line.startswith("text_field")))
    launch = Pretrain(plain(0))
    assert train(launch) == ["finished"] and launch.calls == []
    path.write_text(
        "\n".join(line for line in lines if not line.startswith("repeat"))
    )  # true here, false by default
    with pytest.raises(UsageError, match=r"exists with another recipe \(data\.repeat differ"):
        train(launch)
    assert launch.calls == []


# --- other processes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, calls",
    [(0, ["warm-seed0"]), (75, ["warm-seed0", "resume plain-seed0"])],
    ids=["finished", "given back unfinished"],
)
def test_a_run_of_another_process_is_waited_for(folder, monkeypatch, capsys, code, calls):
    """A baseline that a second race trains: its lock is held, then released."""
    trials = both(0)
    write_trial(trials[0], 75)
    lock = (run_path("plain-seed0") / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    launch = Pretrain(trials)

    def sleep(seconds: float) -> None:
        if not launch.under_way:
            write_trial(trials[0], code)
            lock.close()

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    assert train(launch) == ["finished", "finished"]
    assert launch.calls == calls
    assert "waiting for plain-seed0: another process trains them\n" in capsys.readouterr().err


# --- resources ------------------------------------------------------------------------------------


def test_more_runs_than_memory_holds_are_refused(folder, monkeypatch):
    recipe = load_recipe("plain.toml")
    each = cost.memory_bytes(recipe)
    monkeypatch.setattr(cost, "free_memory", lambda: each - 1)
    cost.check_memory([recipe], 1)
    with pytest.raises(OutOfMemoryError, match="use --jobs 1,"):
        cost.check_memory([recipe], 2)
    monkeypatch.setattr(cost, "free_memory", lambda: 2 * each)
    cost.check_memory([recipe], 2)
    with pytest.raises(
        OutOfMemoryError, match=r"use --jobs 2.*, which changes no result$"
    ) as error:
        cost.check_memory([recipe], 3)
    assert f"3 runs at once need about {human(3 * each, 'B')} of memory" in str(error.value)
    method = load_recipe("plain.toml", ["standardization_loss={weight=0.1}"])
    with pytest.raises(OutOfMemoryError, match=r", another result by a method$"):
        cost.check_memory([recipe, method], 3)
    cores(monkeypatch, 4)
    launch = Pretrain(plain(0, 1, 2))
    with pytest.raises(OutOfMemoryError):
        train(launch, jobs=3)
    assert launch.calls == []


def test_a_container_s_cache_of_files_counts_as_free(tmp_path, monkeypatch):
    """1,000 bytes allowed, 950 used, 300 + 400 of them by the cache: 750 can be taken."""
    monkeypatch.setattr(cost, "CONTROL_GROUP", tmp_path)
    assert cost.free_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.3)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("950\n")
    (tmp_path / "memory.stat").write_text(
        "anon 250\nfile 700\ninactive_file 300\nactive_file 400\n"
    )
    assert cost.free_memory() == 750


def test_disk_of_a_run_is_that_of_its_checkpoints(folder):
    recipe = load_recipe("plain.toml", ["checkpoint.keep=2"])
    # 320 x 32 tied, 32 x 32 positions, one block of 12 x 32^2 + 13 x 32, the last norm: 12 bytes
    # each
    parameters = 320 * 32 + 32 * 32 + 12 * 32 * 32 + 13 * 32 + 2 * 32
    assert cost.disk_bytes(recipe) == 2 * 12 * parameters + 11 * cost.ROW
    trials = plain(0, 1)
    write_trial(trials[0])
    assert costs_of(trials).disk == 3 * 12 * parameters + 11 * cost.ROW
    assert costs_of(trials[:1]) == Costs(0, 0, 0.0, 0), "it has what it needs"
    write_trial(trials[1], 75)
    assert costs_of(trials).tokens == 1280, "of 2,560 a half is trained"


def rate(**values: Any) -> None:
    """Keep a rate of a model of 7 x 64: 1.50336 MFLOP/s."""
    other = {"n_layer": 7, "n_embd": 64, "flops_per_token": 1e6, "flops_per_second": 1_503_360.0}
    place = {"device": "cpu", "device_kind": "cpu", "source": "test"}
    remember_rate(Rate(**{**other, **place, **values}))


def test_time_is_that_of_runs_of_the_same_shape(folder, monkeypatch):
    """6 x 35,712 + 2 x 12 x 32 x 32 = 238,848 FLOPs a token: 10 tokens/s with two layers by the
    benchmark, 8 by a run at twice that rate of which 40 % was training, 20 by one on a GPU that may
    be here; a start is 5 s."""
    recipe = load_recipe("plain.toml", ["model.n_layer=2"])
    assert rates.seconds_left(recipe, 80) is None
    rate(flops_per_second=2_388_480.0)
    assert rates.seconds_left(recipe, 80) == pytest.approx(5 + 8)
    assert rates.seconds_left(recipe, 0) == 0
    rate(n_layer=2, n_embd=32, flops_per_second=4_776_960.0, train_share=0.4)
    assert rates.seconds_left(recipe, 80) == pytest.approx(5 + 10)
    two = grid(["plain.toml"], (0, 1), {"model.n_layer": ["2"]})
    assert costs_of(two).seconds == pytest.approx(2 * (5 + 2560 / 8))
    monkeypatch.setattr(rates, "planned_device", lambda device: device)
    assert rates.seconds_left(recipe, 80) == pytest.approx(5 + 10)
    rate(device_kind="cuda", flops_per_second=4_776_960.0)
    assert rates.seconds_left(recipe, 80) == pytest.approx(5 + 4)
