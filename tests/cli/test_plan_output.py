"""`efftrain pretrain --plan`: what a run costs, before anything is spent."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from efftrain_cli.cli import plan_output
from efftrain_cli.run.rates import Rate, remember_bench
from tests.cli.test_names import NO_TORCH
from tests.conftest import cli, python
from tests.fake_runs import write_run
from tests.terminal import on_terminal

RECIPE = """
[model]
n_layer = 2
n_head = 2
n_embd = 32
seq_len = 32
[data]
tokenizer = "bpe:300"
[optim]
lr = 3e-3
[train]
tokens = 10_240
batch_size = 8
dtype = "fp32"
[checkpoint]
keep = 3
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path


def plan(*words: str) -> dict[str, str]:
    """The lines of what it costs, by their first word."""
    done = cli("pretrain", "--recipe", "tiny.toml", "--plan", *words)
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line[:1].isalpha()]
    return {name: rest for name, rest in lines}


def rate(flops: float, source: str, layers: int = 2, device: str = "cpu", day: int = 1) -> Rate:
    time = f"2026-01-{day:02}T00:00:00+00:00"
    return Rate(
        flops_per_second=flops,
        flops_per_token=6.0 * 12 * layers * 32**2,
        n_layer=layers,
        n_embd=32,
        device=device,
        source=source,
        time=time,
    )


def test_flops_memory_and_disk_are_those_of_the_formulas(home):
    """320 rows of vocabulary: N = 2 (12 x 32^2 + 13 x 32) + 2 x 32 + 320 x 32 = 35,712, and 1,024 more of positions.
    10,240 tokens of 6 N + 12 x 2 x 32 x 32 FLOPs are 2.446 GFLOPs; 12 bytes a parameter are 440.8 kB."""
    shown = plan()
    assert shown["compute"] == "2.45 GFLOPs in 40 steps: 36.7K parameters with a vocabulary of 300"
    assert shown["disk"] == "3 checkpoints of 440.8 kB"
    assert "in fp32" in shown["memory"] and "8 x 32 tokens" in shown["memory"]
    assert shown["time"].startswith("not known")
    assert plan("--steps", "20")["compute"].startswith("1.22 GFLOPs in 20 steps")
    assert plan("--set", "data.tokenizer=elsewhere/")["cost"].startswith(
        "known once the data is prepared"
    )


def test_time_is_estimated_by_the_bench_of_this_machine(home):
    remember_bench(rate(2.446e7, "bench of same", day=1))
    remember_bench(rate(1e9, "bench of other", layers=9, day=2))
    assert (
        plan()["time"]
        == "about 1 min 40 s of training, at the 24.5 MFLOP/s of bench of same (cpu, 2026-01-01)"
    )
    remember_bench(rate(2.446e8, "bench of same, later", day=3))
    assert "about 10 s of training" in plan()["time"], "the newest of the same shape"
    remember_bench(rate(1e15, "bench of same", device="NVIDIA H100", day=4))
    assert "later" in plan("--device", "cpu")["time"]
    assert "NVIDIA H100" in plan("--device", "cuda")["time"]
    # Another machine's are not ours: a home folder may be shared.
    path = home / "cache" / "bench.jsonl"
    path.write_text("no json\n" + path.read_text().replace(os.uname().nodename, "elsewhere"))
    assert plan()["time"].startswith("not known")


def test_without_a_bench_the_newest_run_is_taken(home):
    """fake_runs: 100 steps of 1,024 x 6e5 FLOPs in 5 s are 12.288 GFLOP/s, of a model of 2 x 64."""
    write_run(home / "runs", "small", 0)
    shown = plan()["time"]
    assert "about 199 ms of training, at the 12.3 GFLOP/s of run small-seed0 (Some CPU" in shown
    assert "a model of 2 x 64: take it as a rough guess" in shown
    write_run(home / "runs", "brief", 0, steps=9)
    assert plan()["time"] == shown, "a few steps are slower than those that follow"
    (home / "runs" / "small-seed0" / "origin.json").write_text("[")
    assert plan()["time"].startswith("not known"), "one damaged run hides nothing else"
    write_run(home / "runs", "tenth", 0, steps=10)
    assert "of run tenth-seed0" in plan()["time"]


def test_runs_of_the_same_shape_come_first_then_the_nearest_flops_per_token(home):
    """The plan's model needs 238,848 FLOPs per token; 13 minutes of the own run must not become a later bench's 47."""
    near = rate(1e8, "bench of near", layers=3, day=1)
    remember_bench(near.model_copy(update={"flops_per_token": 3e5}))
    far = rate(1e6, "bench of far", layers=9, day=2)
    remember_bench(far.model_copy(update={"flops_per_token": 9e6}))
    assert "bench of near" in plan()["time"]
    same = rate(2e8, "bench of same", day=1)
    remember_bench(same.model_copy(update={"flops_per_token": 238_848.0}))
    assert "bench of same" in plan()["time"]
    # A run of 2 x 64 is another model; one of 2 x 32 is this one, older than the benches or not.
    write_run(home / "runs", "wide", 0)
    assert "bench of same" in plan()["time"]
    own = write_run(home / "runs", "own", 0)
    recipe = (own / "recipe.toml").read_text()
    (own / "recipe.toml").write_text(recipe.replace("n_embd = 64", "n_embd = 32"))
    assert "12.3 GFLOP/s of run own-seed0" in plan()["time"]


def test_a_narrow_terminal_cuts_no_number_short(home, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    done = cli("pretrain", "--recipe", "tiny.toml", "--plan")
    assert [
        line.split()[:6]
        for line in done.stdout.splitlines()
        if line.endswith(("first step", "last step"))
    ] == [
        ["1", "256", "32", "8", "256", "0.003"],
        ["40", "10,240", "32", "8", "256", "0"],
    ]


def test_a_narrow_terminal_breaks_costs_between_words(home):
    shown = on_terminal(home, 60, "pretrain", "tiny.toml", "--plan")
    costs = shown[shown.index("compute") :].splitlines()
    assert [line for line in costs if len(line) > 60] == []
    time = next(place for place, line in enumerate(costs) if line.startswith("time"))
    assert costs[time + 1].startswith(" " * 11)
    words = " ".join(" ".join(costs[time : time + 2]).split())
    assert words.endswith("`efftrain bench` with the same recipe measures it")


def test_a_plan_needs_no_pytorch(home):
    code = (
        NO_TORCH
        + "sys.argv = ['efftrain', *sys.argv[1:]]\nfrom efftrain_cli.__main__ import main; main()"
    )
    words = ["pretrain", "--recipe", "tiny.toml", "--plan"]
    assert "2.45 GFLOPs" in python(code, *words, cwd=home).stdout


def test_json_is_one_document_with_the_costs(home):
    """40 steps of 256 tokens; memory holds 16 bytes a weight at least, each of 3 checkpoints 12."""
    done = cli("pretrain", "--recipe", "tiny.toml", "--plan", "--format", "json")
    found = json.loads(done.stdout)
    assert (found["schema_version"], found["steps"][-1]["step"]) == (1, 40)
    costs = found["cost"]
    assert (costs["steps"], costs["seconds"], costs["vocab_size"]) == (40, None, 300)
    assert costs["memory_bytes"] > 16 * costs["parameters"]
    assert costs["disk_bytes"] == 3 * 12 * costs["parameters"]


def test_a_plan_says_what_is_missing_too_large_and_left_out(home, monkeypatch):
    monkeypatch.setattr(plan_output, "machine_memory", lambda: 10**6)
    (home / "large.toml").write_text(RECIPE.replace("n_embd = 32", "n_embd = 64"))
    words = ["large.toml", "--set", "data.train=none.txt", "--set", "seq_len_warmup.steps=40"]
    words += ["--set", "seq_len_warmup.multiple=1", "--device", "cpu"]
    done = cli("pretrain", *words, "--plan")
    assert "\ntext       missing: data.train = 'none.txt': no such file" in done.stdout
    assert "\n           does not fit: this machine has 1.0 MB in all" in done.stdout
    (memory,) = [line for line in done.stdout.splitlines() if line.startswith("memory ")]
    assert memory.endswith(" in fp32 for micro-batches of 8 x 32 tokens") and len(memory) <= 80
    # 24 lengths from 9 to 32 follow the first; 12 changes are shown.
    assert "\n... 12 more changes; every step: --format csv" in done.stdout


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_driver_that_hangs_says_nothing_of_the_gpu(device, monkeypatch):
    def hang(query: list[str], timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(query, timeout)

    monkeypatch.setattr(plan_output, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(plan_output.subprocess, "run", hang)
    assert plan_output.memory_of(device) == ("the GPU", 0)
