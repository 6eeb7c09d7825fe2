"""The benchmark: its figures are those of the steps that it ran."""

from __future__ import annotations

import inspect
import json
import time
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent

from efftrain_cli.bench import (
    PHASES,
    BenchResult,
    _shared_phases,
    bench,
    kernel_seconds,
    range_seconds,
)
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.training.memory import peak_resident_bytes
from tests.conftest import cli, python
from tests.tiny import changed, tiny_recipe

RECIPE = tiny_recipe(
    "model.n_embd=64",
    "model.seq_len=64",
    "data.tokenizer=bpe:512",
    "train.tokens=10_000",
    "train.micro_batch_tokens=256",
)


def test_figures_belong_together(tmp_path, monkeypatch):
    """Two micro-batches of four sequences. What was compiled before counts nothing."""
    monkeypatch.setattr("efftrain_cli.bench.compile_seconds", iter([1.0, 3.5]).__next__)
    counts = count(1.0)

    def step(rows: Any, device: torch.device) -> tuple[float, dict[str, Any]]:
        """Take a step, of one second more than the last."""
        return next(counts), next(rows)

    monkeypatch.setattr("efftrain_cli.bench._time_step", step)
    recipe = changed(RECIPE, "optim.name=muon", "optim.muon_lr=0.02")
    result = bench(recipe, torch.device("cpu"), steps=4, profile=tmp_path / "trace.json")
    assert (result.batch_size, result.seq_len, result.accumulation_steps) == (8, 64, 2)
    assert result.vocab_size == 512
    assert result.step_seconds == (4, 5, 6, 7), "after three"
    seconds = 5.5
    assert result.tokens_per_second == pytest.approx(512 / seconds)
    newton_schulz = 2 * 300 * 64**3  # of each of two blocks in a step
    work = 512 * result.flops_per_token + newton_schulz
    assert result.flops_per_second == pytest.approx(work / seconds)
    assert result.mfu is None
    assert (result.compiled_graphs, result.compile_seconds) == (0, 2.5)
    assert set(result.phases) == {*PHASES, "other"}
    assert sum(result.phases.values()) == pytest.approx(seconds)
    assert min(result.phases.values()) > 0, "every mark is in the loop"
    # The largest phase is the backward pass, about twice the forward's work.
    assert result.phases["backward"] > result.phases["optimizer"]

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert (names.count("optimizer"), names.count("forward")) == (3, 6), "of three steps"


def mark(name: str, start: float, end: float, kernels: tuple[float, ...] = ()) -> FunctionEvent:
    """A host event from `start` to `end` that launched kernels of so many microseconds each."""
    event = FunctionEvent(0, name, thread=0, start_us=start, end_us=end)
    for duration in kernels:
        event.append_kernel("kernel", 0, duration)
    return event


def test_phases_of_a_trace_are_added_up():
    """Two micro-batches: 100 + 80 us forward within 500 us of gradient, so 320 us backward."""
    marks = [
        mark("data", 0, 50),
        mark("gradient", 50, 550),
        mark("forward", 60, 160),
        mark("forward", 300, 380),
        mark("optimizer", 600, 700),
    ]
    milliseconds = {name: 1000 * value for name, value in range_seconds(marks).items()}
    assert milliseconds == pytest.approx(
        {"data": 0.05, "forward": 0.18, "backward": 0.32, "optimizer": 0.1, "measures": 0.0}
    )
    ops = [
        mark("aten::mm", 70, 75, (1000.0, 500.0)),  # in forward, and in the gradient around it
        mark("MmBackward0", 200, 205, (4000.0,)),
        mark("aten::add", 560, 565, (9.0,)),  # between phases
    ]
    milliseconds = {name: 1000 * value for name, value in kernel_seconds([*marks, *ops]).items()}
    assert milliseconds == pytest.approx(
        {"data": 0, "forward": 1.5, "backward": 4.0, "optimizer": 0, "measures": 0}, rel=1e-12
    )


def test_phases_of_several_devices_are_work_sum_and_wait():
    """Medians of three steps of a second; shards have no sum of their own."""
    rows: list[dict[str, Any]] = []
    for seconds in (0.125, 0.25, 0.5):
        rows.append({"wait_seconds": seconds, "comm_seconds": seconds / 2})
    assert _shared_phases(rows, 1.0) == {"work": 0.625, "sum": 0.125, "wait": 0.25}
    assert _shared_phases(rows, 0.25) == {"work": 0.0, "sum": 0.125, "wait": 0.25}
    rows[0]["comm_seconds"] = None
    assert _shared_phases(rows, 0.125) == {"work and traffic": 0.0, "wait": 0.25}
    assert _shared_phases(rows, 1.0) == {"work and traffic": 0.75, "wait": 0.25}


def test_a_trace_that_cannot_be_written_is_refused_before_the_steps(tmp_path, monkeypatch):
    """torch.profiler prints a line of its own then, and nothing fails."""
    monkeypatch.setattr("efftrain_cli.bench.bench", None)
    for trace, why in ((tmp_path, "Is a directory"), (tmp_path / "no" / "t.json", "No such file")):
        with pytest.raises(UsageError, match=rf"--profile {trace}: {why}.*\n  name another file"):
            cli("bench --recipe quickstart --profile", str(trace))


def test_command_prints_json_and_remembers_the_rate_for_plans(efftrain, tmp_path):
    shrunk = "--set train.batch_size=2 --set model.n_layer=1"
    began = time.monotonic()
    done = efftrain(
        f"bench --recipe quickstart {shrunk} --steps 2 --format json",
        EFFTRAIN_CACHE=str(tmp_path / "cache"),
    )
    figures = json.loads(done.stdout)
    assert 0 < sum(figures["step_seconds"]) < time.monotonic() - began
    assert "profiler" not in done.stderr
    assert figures["tokens_per_second"] > 0 and figures["phases"]["forward"] > 0
    (remembered,) = map(json.loads, (tmp_path / "cache" / "bench.jsonl").read_text().splitlines())
    assert remembered["flops_per_second"] == figures["flops_per_second"]
    assert (remembered["n_layer"], remembered["source"]) == (1, "bench of quickstart")
    assert remembered["device_kind"] == "cpu"


def test_the_table_of_a_bench(monkeypatch, tmp_path):
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path))
    phases = {"forward": 0.025, "backward": 0.05, "optimizer": 0.015, "other": 0.01}
    result = BenchResult(
        device="cpu",
        dtype="fp32",
        compiled=False,
        torch="2.13.0",
        threads=2,
        parameters=122_624,
        vocab_size=512,
        seq_len=64,
        batch_size=8,
        accumulation_steps=2,
        step_seconds=(0.11, 0.12, 0.09, 0.09),
        tokens_per_second=5120.0,
        flops_per_token=1e6,
        flops_per_second=5.12e9,
        mfu=None,
        peak_memory_bytes=(10**9,),
        compile_seconds=0.0,
        compiled_graphs=0,
        phases=phases,
    )
    monkeypatch.setattr("efftrain_cli.bench.bench", lambda *words, **options: result)
    shown = cli("bench --recipe small --device cpu").stdout
    assert shown.splitlines() == [
        "recipe  small: 123K parameters, vocabulary 512, 8 x 64 tokens in 2 accumulation steps",
        "device  cpu, fp32, eager, torch 2.13.0, 2 threads",
        "speed   5,120 tokens/s, 100.0 ms a step (median of 4; 90.0 to 120.0)",
        (
            "FLOPs   1 MFLOPs per token by 6 N + 12 L d T, logits included: 5.12 GFLOP/s, "
            "MFU N/A (peak of this device is not known)"
        ),
        "memory  1 GB at the peak",
        "compile 0.0 s, 0 graphs",
        "",
        "phase        a step  share",
        "forward    25.00 ms  25.0%",
        "backward   50.00 ms  50.0%",
        "optimizer  15.00 ms  15.0%",
        "other      10.00 ms  10.0%",
    ]
    result = replace(result, peak_memory_bytes=(10**9, 2 * 10**9), compiled=True, mfu=0.4)
    shown = cli("bench --recipe small --device cpu").stdout.splitlines()
    assert shown[1] == "device  2 x cpu, fp32, compiled, torch 2.13.0, 2 threads"
    assert shown[3].endswith(", MFU 40.0%") and shown[4] == "memory  1 GB, 2 GB at the peak"
    assert len((tmp_path / "bench.jsonl").read_text().splitlines()) == 1, "one device's speed"


def test_peak_memory_is_the_process_s_own():
    """A child of a large process is not large: getrusage would say so."""
    held = torch.ones(100_000_000)  # 400 MB
    imports = "import resource, sys; from pathlib import Path\n"
    measure = "before = peak_resident_bytes(); x = bytearray(10**8)\n"
    child = imports + inspect.getsource(peak_resident_bytes) + measure
    child += "print(before, peak_resident_bytes())"
    before, after = map(int, python(child).stdout.split())
    assert before < peak_resident_bytes() - held.nbytes // 2
    assert 80e6 < after - before < 140e6
