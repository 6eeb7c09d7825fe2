"""Measure a recipe's speed on this device, and the parts of a step's time (`efftrain bench`).

Whole steps are timed through the same `train()` that pretrain uses. Its marks (`record_function`)
divide a step into phases, in further steps under torch.profiler. Data are random tokens in a shard
of their own, read like a corpus.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from efftrain_cli.data.corpus import ShardWriter, TokenShards
from efftrain_cli.data.windows import Windows
from efftrain_cli.foundation.step import Progress
from efftrain_cli.model.flops import flops_per_token, peak_flops
from efftrain_cli.plan.plan import plan_step
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sizes import likely_vocabulary
from efftrain_cli.training import dist
from efftrain_cli.training.build import build_state
from efftrain_cli.training.compiling import compile_seconds, compiled_graphs, compiles
from efftrain_cli.training.device import compute_dtype, wait_for
from efftrain_cli.training.loop import train
from efftrain_cli.training.memory import building_errors, peak_resident_bytes
from efftrain_cli.training.record import read_records

PHASES = ("data", "forward", "backward", "optimizer", "measures")
MARKS = ("data", "forward", "gradient", "optimizer", "measures")
"""Names of `record_function` in `train()`: a gradient's is around forward and backward."""
PROFILED_STEPS = 3
WARMUP = 3
"""Steps before those that are timed."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Figures of one benchmark; seconds are medians over steps."""

    device: str
    dtype: str
    compiled: bool
    torch: str
    threads: int
    parameters: int
    vocab_size: int
    seq_len: int
    batch_size: int
    accumulation_steps: int
    step_seconds: tuple[float, ...]
    """Seconds of each timed step; rates are those of the median."""
    tokens_per_second: float
    flops_per_token: float
    """6 N + 12 n_layer n_head head_dim seq_len, logits included."""
    flops_per_second: float
    """FLOP/s of whole steps, Muon's Newton-Schulz iterations included."""
    mfu: float | None
    """Share of the device's peak matmul rate; None if the peak is unknown."""
    peak_memory_bytes: tuple[int, ...]
    """Of each device: most memory allocated in CUDA, or the process's largest resident size on a
    CPU."""
    compile_seconds: float
    compiled_graphs: int
    phases: dict[str, float]
    """Seconds per step, which they add up to: data, forward, backward, optimizer, measures of
    stability, other (planning, records, an idle device). On several devices: work, sum (of
    gradients, the wait for the slowest included), wait (what the update did not hide of the
    all-reduce of flags); of shards, whose traffic is part of the passes: work and traffic, wait."""


def random_windows(recipe: Recipe, vocab_size: int, folder: Path) -> Windows:
    """Write random tokens, those of eight steps, to a shard; return windows over them."""
    seq_len = recipe.model.seq_len
    tokens = 8 * recipe.train.batch_size * seq_len
    random = np.random.default_rng(0)
    writer = ShardWriter(folder / "bench.bin", vocab_size)
    writer.add(random.integers(vocab_size, size=tokens, dtype=np.uint32))
    writer.close()
    shards = TokenShards(writer.path, writer.split, vocab_size)
    return Windows(shards, seq_len, recipe.seed, pin_memory=torch.cuda.is_available())


def bench(
    recipe: Recipe, device: torch.device, steps: int = 10, profile: Path | None = None
) -> BenchResult:
    """Time `steps` steps after `WARMUP` ones, at full length and full batch, then the phases of
    `PROFILED_STEPS`.

    Of several ranks, all call it; the times are this one's.

    Args:
        profile: where to write torch.profiler's trace of the steps whose phases are timed, for
            chrome://tracing.
    """
    recipe = _without_schedules(recipe)
    on_cuda = device.type == "cuda"
    vocab_size = likely_vocabulary(recipe.data.tokenizer)
    compiling = compile_seconds()
    graphs = compiled_graphs()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory() as folder:
        windows = random_windows(recipe, vocab_size, Path(folder))
        with building_errors(recipe, vocab_size, device):
            state = build_state(recipe, vocab_size, device)
        # As after step 1: no evaluation of step 0 precedes the timed steps.
        state.progress = Progress(step=1)
        stepping = train(state, recipe, windows, windows.validation(1))
        rows = (read_records(state, recipe, [record])[0] for record in stepping)
        timed = [_time_step(rows, device) for _ in range(WARMUP + steps)][WARMUP:]
        step_seconds = tuple(seconds for seconds, _ in timed)
        median = statistics.median(step_seconds)
        memory = peak_resident_bytes()
        if on_cuda:
            memory = torch.cuda.max_memory_allocated(device)
        memories = dist.gather_objects(memory)
        if dist.world_size() == 1:
            phases = phase_seconds(rows, device, median, profile)
        else:
            phases = _shared_phases([row for _, row in timed], median)
    plan = plan_step(recipe, state.progress, state.sharing[1])
    tokens = plan.batch_size * plan.seq_len
    model = state.model
    per_token = flops_per_token(model.config, plan.seq_len, sum(plan.keep)).with_logits
    of_optimizer = recipe.optim.facts.step_flops(model.config)
    flops_per_second = (per_token * tokens + of_optimizer) / median
    name = "cpu"
    if on_cuda:
        name = torch.cuda.get_device_name(device)
    dtype = compute_dtype(recipe, device)
    peak = peak_flops(name, dtype)
    mfu = None
    if peak is not None:
        mfu = flops_per_second / (peak * dist.world_size())
    return BenchResult(
        device=name,
        dtype=dtype,
        compiled=compiles(recipe, device),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        parameters=model.parameter_count,
        vocab_size=vocab_size,
        seq_len=plan.seq_len,
        batch_size=plan.batch_size,
        accumulation_steps=plan.accumulation_steps,
        step_seconds=step_seconds,
        tokens_per_second=tokens / median,
        flops_per_token=per_token,
        flops_per_second=flops_per_second,
        mfu=mfu,
        peak_memory_bytes=tuple(memories),
        compile_seconds=compile_seconds() - compiling,
        compiled_graphs=compiled_graphs() - graphs,
        phases=phases,
    )


def _without_schedules(recipe: Recipe) -> Recipe:
    """Return the recipe with full steps from the first on, without an end or an evaluation: what
    most of a run is."""
    changes: dict[str, Any] = {}
    for method in recipe.methods.values():
        changes |= method.without_schedule()
    train = replace(recipe.train, tokens=sys.maxsize)
    evaluation = replace(recipe.eval, every=sys.maxsize)
    return replace(recipe, **changes, train=train, eval=evaluation)


def _time_step(
    rows: Iterator[dict[str, Any]], device: torch.device
) -> tuple[float, dict[str, Any]]:
    """Return the seconds and the row of the next step."""
    wait_for(device)
    start = time.perf_counter()
    row = next(rows)
    wait_for(device)
    return time.perf_counter() - start, row


def _shared_phases(rows: Sequence[dict[str, Any]], step_seconds: float) -> dict[str, float]:
    """Divide a step of `step_seconds` into what the ranks do by themselves and together."""
    wait = statistics.median(row["wait_seconds"] for row in rows)
    work = step_seconds - wait
    sums = [row["comm_seconds"] for row in rows]
    if None in sums:
        return {"work and traffic": max(0.0, work), "wait": wait}
    in_sums = statistics.median(sums)
    return {"work": max(0.0, work - in_sums), "sum": in_sums, "wait": wait}


def phase_seconds(
    rows: Iterator[dict[str, Any]],
    device: torch.device,
    step_seconds: float,
    trace: Path | None = None,
) -> dict[str, float]:
    """Divide a step of `step_seconds` into phases, by their share of `PROFILED_STEPS` steps under
    torch.profiler.

    Args:
        rows: takes a whole step for each row.
        trace: where to write the profiler's trace of these steps.

    Returns:
        Seconds of each phase, and of what is outside all of them, "other". Their sum is
        `step_seconds`.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for steps in (1, PROFILED_STEPS):  # a profiler's own start slows the first step
        with torch_profile(activities=activities) as profiler:
            start = time.perf_counter()
            for _ in islice(rows, steps):
                pass
            wait_for(device)
            seconds = time.perf_counter() - start
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    events = profiler.events()
    if device.type == "cuda":
        # Kernels take as long without a profiler, but the host launches them later with one.
        phases = kernel_seconds(events)
        seconds = max(PROFILED_STEPS * step_seconds, sum(phases.values()))
    else:
        phases = range_seconds(events)
    phases["other"] = seconds - sum(phases.values())
    return {phase: step_seconds * part / seconds for phase, part in phases.items()}


def range_seconds(events: Iterable[FunctionEvent]) -> dict[str, float]:
    """Return the seconds that the host spent in each phase."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for phase, start, end in _phase_ranges(events):
        duration = (end - start) / 1e6
        seconds[phase] += duration
        if phase == "forward":
            seconds["backward"] -= duration
    return seconds


def kernel_seconds(events: Iterable[FunctionEvent]) -> dict[str, float]:
    """Return the seconds of the device's kernels, by the phase in which the host launched them.

    Any thread may have launched them: autograd has threads of its own.
    """
    events = list(events)
    ranges = sorted(_phase_ranges(events), key=lambda phase_range: PHASES.index(phase_range[0]))
    seconds = dict.fromkeys(PHASES, 0.0)
    for event in events:
        launched = event.time_range.start
        # "forward" is in the list before "backward", whose range is around it.
        for phase, start, end in ranges:
            if start <= launched < end:
                seconds[phase] += sum(kernel.duration for kernel in event.kernels) / 1e6
                break
    return seconds


def _phase_ranges(events: Iterable[FunctionEvent]) -> list[tuple[str, float, float]]:
    """Return (phase, start, end) of the host's marks, in microseconds.

    The range of "backward" is that of the whole gradient, with those of "forward" inside.
    """
    ranges = []
    for event in events:
        if event.name in MARKS and event.device_type == DeviceType.CPU:
            phase = "backward" if event.name == "gradient" else event.name
            span = event.time_range
            ranges.append((phase, span.start, span.end))
    return ranges
