"""`efftrain bench`: how fast a recipe trains on the present device, and where the time of a step goes.

Whole steps are timed through the same `train()` that pretrain uses. Phases are timed in separate steps, made of the
same functions with the device awaited after each; so phases may add up to a little more than a whole step on CUDA. Data
are random tokens in a shard of their own, read the way a corpus is.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from efftrain_cli.data.shards import ShardWriter
from efftrain_cli.data.windows import Windows
from efftrain_cli.foundation.step import Batch, Progress, StepPlan
from efftrain_cli.methods.ouroboros import Ouroboros
from efftrain_cli.model.flops import peak_flops
from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.plan.cost import likely_vocabulary
from efftrain_cli.plan.plan import optimizer_flops, plan_step
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.build import build_state, compute_dtype
from efftrain_cli.training.compiling import compile_seconds, compiled_graphs, compiles
from efftrain_cli.training.devices import Devices
from efftrain_cli.training.gradient import build_forward_backward, build_objective
from efftrain_cli.training.memory import building_errors, peak_resident_bytes
from efftrain_cli.training.ranks import ALONE, Ranks
from efftrain_cli.training.state import TrainState
from efftrain_cli.training.stopwatch import wait_for
from efftrain_cli.training.strategy import choose_strategy
from efftrain_cli.training.trainer import StepRecord, read_records, train, update

P = ParamSpec("P")
T = TypeVar("T")
PHASES = ("data", "forward", "backward", "optimizer", "measures")


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
    tokens_per_step: int
    seq_len: int
    batch_size: int
    accumulation_steps: int
    steps: int
    seconds_per_step: float
    seconds_per_step_low: float
    """Fastest step."""
    seconds_per_step_high: float
    """Slowest step."""
    tokens_per_second: float
    flops_per_token: float
    """(6 N + 12 n_layer n_embd seq_len), logits included."""
    flops_per_second: float
    """Of whole steps, Muon's Newton-Schulz iterations included."""
    mfu: float | None
    """Share of the device's peak matmul rate; None where the peak is not known."""
    peak_memory_bytes: int
    """Most memory allocated on the CUDA device, or the process's largest resident size on a CPU."""
    compile_seconds: float
    compiled_graphs: int
    phases: dict[str, float]
    """Seconds per step: data, forward, backward, optimizer, measures (stability and loss), other (planning, records).
    On several devices: work, sum (of gradients), exchange (the agreement before it), wait (for the slowest); of shards,
    whose traffic is part of the passes: work and traffic, exchange, wait."""
    devices: int = 1
    peak_memory_by_device: tuple[int, ...] = ()
    """As peak_memory_bytes, of every rank."""
    flops_per_token_recomputed: float | None = None
    """With Ouroboros: those of running late modules forward a second time included."""
    ring_speed_limit: float | None = None
    """With Ouroboros: at most so many times as fast as one device, by arithmetic."""

    @property
    def overhead(self) -> float:
        """Share of a step that is not forward, backward or optimizer; on several devices, that is not the first of the
        phases."""
        if self.devices > 1:
            return 1 - next(iter(self.phases.values())) / sum(self.phases.values())
        work = self.phases["forward"] + self.phases["backward"] + self.phases["optimizer"]
        return 1 - work / sum(self.phases.values())


def started_state(recipe: Recipe, vocab_size: int, device: torch.device) -> TrainState:
    """A fresh state that counts as after step 1, so that no evaluation of step 0 stands before the steps to be
    timed."""
    state = build_state(recipe, vocab_size, device)
    state.progress = Progress(step=1, schedule_step=1)
    return state


def random_windows(recipe: Recipe, vocab_size: int, folder: Path) -> Windows:
    """Windows over random tokens in a shard on disk, enough for a few hundred steps or 20 million tokens."""
    tokens = max(
        4 * recipe.model.seq_len,
        min(20_000_000, 300 * recipe.train.batch_size * recipe.model.seq_len),
    )
    writer = ShardWriter(folder, "bench", vocab_size=vocab_size, eot_id=vocab_size - 1)
    ids = np.random.Generator(np.random.Philox(0)).integers(
        0, vocab_size - 1, tokens, dtype=np.uint32
    )
    writer.add(ids, "random tokens")
    writer.close()
    return Windows(
        writer.opened(), recipe.model.seq_len, recipe.seed, pin_memory=torch.cuda.is_available()
    )


def bench(
    recipe: Recipe,
    device: torch.device,
    steps: int = 10,
    warmup: int = 3,
    profile: Path | None = None,
    ranks: Ranks = ALONE,
) -> BenchResult:
    """Times `steps` steps after `warmup` ones, at full length and full batch, then the phases of half as many. Of
    several ranks, all call it; the times are this one's. To `profile` goes torch.profiler's trace of two whole steps,
    for chrome://tracing."""
    # The schedule's first steps are not what a run is made of: benchmark the full length and batch.
    recipe = replace(
        recipe,
        **{
            name: value
            for method in recipe.methods.values()
            for name, value in method.without_schedule().items()
        },
        train=replace(recipe.train, tokens=10**15),
        eval=replace(recipe.eval, every=10**9),
    )
    vocab_size = likely_vocabulary(recipe.data.tokenizer)
    compiling = compile_seconds()
    graphs = compiled_graphs()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory() as folder:
        windows = random_windows(recipe, vocab_size, Path(folder))
        with building_errors(recipe, vocab_size, device):
            state = started_state(recipe, vocab_size, device)
        model = state.model
        devices = choose_strategy(recipe, state, ranks, device)
        stepping = train(state, recipe, windows, windows.validation(1), devices=devices)
        times, rows = [], []
        for i in range(warmup + steps):
            wait_for(device)
            start = time.perf_counter()
            (row,) = read_records(state, recipe, [next(stepping)])
            wait_for(device)
            if i >= warmup:
                times.append(time.perf_counter() - start)
                rows.append(row)
        memory = (
            torch.cuda.max_memory_allocated(device)
            if device.type == "cuda"
            else peak_resident_bytes()
        )
        memories = ranks.all_gather_json(memory)
        if ranks.is_single_process:
            phases = phase_seconds(recipe, state, windows, device, max(3, steps // 2), stepping)
        else:
            phases = _shared_phases(times, rows, devices)
        if profile is not None:
            _profile(stepping, profile, device)
        section = recipe.late_gradients
    rings = ranks.world_size // (1 if section is None else section.devices)
    plan = plan_step(recipe, state.progress, max(1, rings))
    tokens = plan.batch_size * plan.seq_len
    median = statistics.median(times)
    dtype = compute_dtype(recipe.train.dtype, device)
    per_token = model.flops_per_token(plan.seq_len, sum(plan.keep)).with_logits
    flops_per_second = (per_token * tokens + optimizer_flops(recipe, model.config)) / median
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops(name, dtype)
    return BenchResult(
        device=name,
        dtype=dtype,
        compiled=compiles(recipe, device),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        parameters=model.parameter_count,
        vocab_size=vocab_size,
        tokens_per_step=tokens,
        seq_len=plan.seq_len,
        batch_size=plan.batch_size,
        accumulation_steps=plan.accumulation_steps,
        steps=steps,
        seconds_per_step=median,
        seconds_per_step_low=min(times),
        seconds_per_step_high=max(times),
        tokens_per_second=tokens / median,
        flops_per_token=per_token,
        flops_per_second=flops_per_second,
        mfu=None if peak is None else flops_per_second / (peak * ranks.world_size),
        peak_memory_bytes=memory,
        compile_seconds=compile_seconds() - compiling,
        compiled_graphs=compiled_graphs() - graphs,
        phases=phases,
        devices=ranks.world_size,
        peak_memory_by_device=tuple(memories),
        flops_per_token_recomputed=_recomputed(section, model, per_token, ranks),
        ring_speed_limit=None if section is None else section.ring_speed(model.config),
    )


def _recomputed(
    section: Ouroboros | None, model: GPT, per_token: float, ranks: Ranks
) -> float | None:
    if section is None:
        return None
    again = (
        not ranks.is_single_process or section.variant == "replay"
    )  # a delay line of gradients on one device runs nothing again
    return per_token * (1 + section.recomputed_share(model.config)) if again else per_token


def _shared_phases(
    times: Sequence[float], rows: Sequence[dict[str, Any]], devices: Devices
) -> dict[str, float]:
    """Median seconds per step of what the ranks do by themselves, and together. An exchange is timed right after
    another, when nobody waits for the slowest."""
    exchanges = []
    for _ in range(21):
        start = time.perf_counter()
        devices.sync_stop_flag(0)
        exchanges.append(time.perf_counter() - start)
    exchange = statistics.median(exchanges)
    sums, waits = ([row[name] for row in rows] for name in ("comm_seconds", "wait_seconds"))
    work = statistics.median(t - (s or 0.0) - w for t, s, w in zip(times, sums, waits, strict=True))
    return {
        **(
            {"work and traffic": work}
            if None in sums
            else {"work": work, "sum": statistics.median(sums)}
        ),
        "exchange": exchange,
        "wait": statistics.median(max(0.0, wait - exchange) for wait in waits),
    }


def phase_seconds(
    recipe: Recipe,
    state: TrainState,
    windows: Windows,
    device: torch.device,
    steps: int,
    stepping: Iterator[StepRecord],
) -> dict[str, float]:
    """Median seconds per step of each phase, the device awaited after each; "other" is what a whole step of `stepping`,
    taken in the same round, needs beyond them.

    Forward and backward are split by running the same micro-batches' loss alone first: a gradient's forward pass and
    the loss alone do the same work but for what autograd keeps.
    """
    forward_backward = build_forward_backward(recipe, state.model, device, state.method_tensors)
    objective = build_objective(recipe, state.model, device)
    measured: dict[str, list[float]] = {phase: [] for phase in (*PHASES, "other")}

    def timed(phase: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        wait_for(device)
        start = time.perf_counter()
        result = work(*args, **kwargs)
        wait_for(device)
        measured[phase].append(time.perf_counter() - start)
        return result

    def batch_of(plan: StepPlan) -> Batch:
        return windows.batch(plan).to(device)

    def forward(plan: StepPlan, batch: Batch) -> None:
        for part in Devices().cut(batch, plan):
            objective(part.tokens, part.targets, None, None)

    for i in range(steps + 1):
        timed("other", lambda: read_records(state, recipe, [next(stepping)]))
        plan = plan_step(recipe, state.progress)
        batch = timed("data", batch_of, plan)
        with attention_kernels(device, same_shape=True):
            timed("forward", forward, plan, batch)
        loss = timed("backward", forward_backward, batch, plan).scalars["loss"]
        measured["backward"][-1] -= measured["forward"][-1]
        timed("optimizer", update, state, plan.lr, recipe.optim.grad_clip, loss)
        timed("measures", state.optimizer.measures)
        measured["other"][-1] -= sum(measured[phase][-1] for phase in PHASES)
        if i == 0:  # the first round warms up
            for times in measured.values():
                times.clear()
    return {phase: max(0.0, statistics.median(times)) for phase, times in measured.items()}


def _profile(stepping: Iterator[StepRecord], path: Path, device: torch.device) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with torch_profile(activities=activities) as profiler:
        for _ in islice(stepping, 2):
            pass
        wait_for(device)
    profiler.export_chrome_trace(str(path))
