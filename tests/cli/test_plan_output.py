"""`efftrain pretrain --plan`: what a run costs, before anything is spent."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from efftrain_cli.cli import plan_output
from efftrain_cli.run.rates import Rate, remember_rate
from tests.cli.test_names import NO_TORCH
from tests.conftest import cli, python, sets
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


def plan(options: str = "") -> dict[str, str]:
    """The lines of what it costs, by their first word."""
    done = cli(f"pretrain --recipe tiny.toml --plan {options}")
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line[:1].isalpha()]
    return {name: rest for name, rest in lines}


def rate(source: str, flops: float, day: int, **values: Any) -> None:
    """Keep a rate of that day, by default of a model of 2 x 32 on the CPU."""
    shape = {"n_layer": 2, "n_embd": 32, "flops_per_token": 6.0 * 12 * 2 * 32**2}
    place = {"device": "cpu", "device_kind": "cpu", "time": f"2026-01-{day:02}T00:00:00+00:00"}
    remember_rate(Rate(**{**shape, **place, **values}, source=source, flops_per_second=flops))


GPU = {"device": "Tesla V100-SXM2-16GB", "device_kind": "cuda"}


def test_flops_memory_and_disk_are_those_of_the_formulas(home):
    """320 rows of vocabulary: N = 2 (12 x 32^2 + 13 x 32) + 2 x 32 + 320 x 32 = 35,712, and 1,024
    more of positions. 10,240 tokens of 6 N + 12 x 2 x 32 x 32 FLOPs are 2.446 GFLOPs; 12 bytes a
    parameter are 440.8 kB."""
    shown = plan()
    assert shown["compute"] == "2.45 GFLOPs in 40 steps: 36.7K parameters with a vocabulary of 300"
    assert shown["disk"] == "3 checkpoints of 440.8 kB"
    assert "in fp32" in shown["memory"] and "8 x 32 tokens" in shown["memory"]
    assert shown["time"].startswith("not known")
    assert plan("--steps 20")["compute"].startswith("1.22 GFLOPs in 20 steps")
    assert plan("--set data.tokenizer=elsewhere/")["cost"].startswith(
        "known once the data is prepared"
    )


def test_time_is_estimated_by_the_bench_of_this_machine(home):
    rate("bench of same", 2.446e7, 1)
    rate("bench of other", 1e9, 2, n_layer=9, flops_per_token=6.0 * 12 * 9 * 32**2)
    assert (
        plan()["time"]
        == "about 1 min 40 s of training, at the 24.5 MFLOP/s of bench of same (cpu, 2026-01-01)"
    )
    rate("bench of same, later", 2.446e8, 3)
    assert "about 10 s of training" in plan()["time"], "the newest of the same shape"
    # Another machine's are not ours: a home folder may be shared.
    path = home / "cache" / "bench.jsonl"
    path.write_text("no json\n" + path.read_text().replace(os.uname().nodename, "elsewhere"))
    assert plan()["time"].startswith("not known")


def test_a_device_of_another_kind_says_nothing_of_this_one(home, monkeypatch):
    rate("bench on the GPU", 1e15, 1, **GPU)
    assert plan("--device cpu")["time"].startswith("not known")
    rate("bench on the CPU", 1e9, 2)
    assert "bench on the CPU" in plan("--device cpu")["time"]
    assert "bench on the GPU (Tesla V100" in plan("--device cuda:1")["time"]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "bench on the GPU" in plan()["time"], "training would take it"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "bench on the CPU" in plan()["time"]


def test_rows_of_a_run_from_elsewhere_are_no_measurement(home):
    """A run that was copied here has rows, but trained on another machine."""
    write_run(home / "runs", "small", 0)
    assert plan()["time"].startswith("not known")


def test_runs_of_the_same_shape_come_first_then_the_nearest_flops_per_token(home):
    """The plan's model needs 238,848 FLOPs per token; 13 minutes of the own run must not become a
    later bench's 47."""
    rate("bench of near", 1e8, 1, n_layer=3, flops_per_token=3e5)
    rate("bench of far", 1e6, 2, n_layer=9, flops_per_token=9e6)
    assert "bench of near" in plan()["time"]
    rate("bench of same", 2e8, 1, flops_per_token=238_848.0)
    assert "bench of same" in plan()["time"]
    # A run of 2 x 64 is another model; one of 2 x 32 is this one, older than the benches or not.
    rate("run wide", 1.2e10, 3, n_embd=64, flops_per_token=6e5, trained="a", tokens_per_second=1.0)
    assert "bench of same" in plan()["time"]
    rate("run own", 1.2288e10, 1, flops_per_token=6e5, trained="b", tokens_per_second=1.0)
    # 10,240 tokens of 238,848 FLOPs at 12.288 GFLOP/s are 0.199 s.
    assert plan()["time"] == (
        "about 199 ms of training, at the 12.3 GFLOP/s of run own (cpu, 2026-01-01)"
    )


def test_another_model_s_speed_is_a_rough_guess(home):
    rate("bench of wide", 1e9, 1, n_embd=64)
    assert plan()["time"].endswith(", a model of 2 x 64: take it as a rough guess")


def test_a_narrow_terminal_cuts_no_number_short(home, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    done = cli("pretrain --recipe tiny.toml --plan")
    assert [
        line.split()[:6]
        for line in done.stdout.splitlines()
        if line.endswith(("first step", "last step"))
    ] == [
        ["1", "256", "32", "8", "256", "0.003"],
        ["40", "10,240", "32", "8", "256", "0"],
    ]


def test_a_narrow_terminal_does_without_tokens_per_step(home):
    wide = on_terminal(home, 80, "pretrain", "tiny.toml", "--plan")
    narrow = on_terminal(home, 60, "pretrain", "tiny.toml", "--plan")
    assert wide.split("\n")[0].split() == [
        "step",
        "tokens",
        "seq_len",
        "batch",
        "tokens/step",
        "lr",
    ]
    assert narrow.split("\n")[0].split() == ["step", "tokens", "seq_len", "batch", "lr"]
    assert narrow.split("\n")[1].split()[:5] == ["1", "256", "32", "8", "0.003"]


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
    done = cli("pretrain --recipe tiny.toml --plan --format json")
    found = json.loads(done.stdout)
    assert (found["schema_version"], found["steps"][-1]["step"]) == (1, 40)
    costs = found["cost"]
    assert (costs["steps"], costs["seconds"], costs["vocab_size"]) == (40, None, 300)
    assert costs["memory_bytes"] > 16 * costs["parameters"]
    assert costs["disk_bytes"] == 3 * 12 * costs["parameters"]


def test_a_plan_says_what_is_missing_too_large_and_left_out(home, monkeypatch):
    monkeypatch.setattr(plan_output, "machine_memory", lambda: 10**6)
    (home / "large.toml").write_text(RECIPE.replace("n_embd = 32", "n_embd = 64"))
    changes = sets("data.train=none.txt", "seq_len_warmup.steps=40", "seq_len_warmup.multiple=1")
    done = cli("pretrain large.toml --device cpu --plan", *changes)
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


def test_memory_is_that_of_the_device_that_training_takes(monkeypatch):
    """A GPU of 81,559 MiB; without it, 7 bytes of this machine."""
    asked = subprocess.CompletedProcess([], 0, "81559\n81559\n")
    monkeypatch.setattr(plan_output, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(plan_output.subprocess, "run", lambda *words, **options: asked)
    monkeypatch.setattr(plan_output, "machine_memory", lambda: 7)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert plan_output.memory_of("auto") == ("the GPU", 81_559 * 2**20)
    assert plan_output.memory_of("cpu") == ("this machine", 7)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert plan_output.memory_of("auto") == ("this machine", 7)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    assert plan_output.memory_of("auto") == ("this machine", 7)
