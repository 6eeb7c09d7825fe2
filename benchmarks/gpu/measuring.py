"""What the pieces share: figures, parts, a training to be timed, and the device's own readings."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from efftrain_cli.bench import random_windows, started_state, wait_for
from efftrain_cli.data.windows import Windows
from efftrain_cli.model.flops import peak_flops
from efftrain_cli.plan.cost import likely_vocabulary
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training.compiling import compile_seconds, compiled_graphs
from efftrain_cli.training.loop import train
from efftrain_cli.training.precision import compute_dtype
from efftrain_cli.training.record import StepRecord, read_records
from efftrain_cli.training.state import TrainState

Figure = dict[str, object]
"""One line of the table: name, value, unit, note, and for rates details."""

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the parts share."""

    device: torch.device
    smoke: bool
    folder: Path
    """For what need not be kept."""


@dataclass(frozen=True)
class Part:
    """One thing to measure; its figures are kept as they come."""

    name: str
    work: Callable[[Bench], Iterator[Figure]]
    seconds: float
    """Seconds it may take, by estimate for one H200 with an empty compiler cache. It is not begun
    with less time left, and stopped after them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """If not empty, the part runs in a process of its own with these variables: they are read once,
    when PyTorch is loaded."""


def figure(name: str, value: object, unit: str = "", note: str = "") -> Figure:
    return {"name": name, "value": value, "unit": unit, "note": note}


def check(name: str, error: float, limit: float) -> Figure:
    """A relative error ||a - b|| / ||b|| with its verdict."""
    return figure(
        name, error, "rel. error", f"{'ok' if error <= limit else 'WRONG'}, limit {limit:g}"
    )


def worst_gradient(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None]
) -> tuple[str, float]:
    """Return the parameter whose gradient is furthest from the wanted one, and its ||a - b|| /
    ||b||.

    Each parameter is judged by itself: the norm of all together hides a small gradient that is
    lost. A missing gradient counts as zero, and one that should be zero and is not as infinitely
    wrong.
    """
    errors = {}
    for name, wanted in want.items():
        a = got[name]
        b = torch.zeros(()) if wanted is None else wanted.double()
        difference = float(torch.linalg.vector_norm(b if a is None else a.double() - b))
        norm = float(torch.linalg.vector_norm(b))
        errors[name] = difference / norm if norm else (float("inf") if difference else 0.0)
    worst = max(errors, key=lambda name: errors[name])
    return worst, errors[worst]


def check_gradients(
    name: str,
    got: Mapping[str, Tensor | None],
    want: Mapping[str, Tensor | None],
    limit: float,
) -> Figure:
    """The largest relative error of a parameter's gradient, with its verdict."""
    parameter, error = worst_gradient(got, want)
    verdict = "ok" if error <= limit else "WRONG"
    note = f"{verdict}, limit {limit:.2g}; worst of {len(want)} parameters: {parameter}"
    return figure(name, error, "rel. error", note)


def relative(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """||a - b|| / ||b|| over lists of tensors."""
    difference = sum(
        float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True)
    )
    return (difference / sum(float(y.double().square().sum()) for y in b)) ** 0.5


def recipe_for(
    bench: Bench,
    name: str = "gpt2-117m",
    *,
    sequences: int = 32,
    micro_batches: int = 2,
    sets: Sequence[str] = (),
    shrink: bool = True,
) -> Recipe:
    """A shipped recipe at `micro_batches` of `sequences` full-length sequences a step, without end
    and without evaluation.

    In a smoke run the model is tiny, unless `shrink` is False.
    """
    # "on": a compiler that fails must not be measured as eager code.
    shape = ["train.compile=on", *sets]
    if bench.smoke:
        sequences, micro_batches = min(sequences, 2), min(micro_batches, 2)
        shape += ["data.tokenizer=bpe:512", "train.compile=off"]
        shape += [
            f"model.{key}" for key in ("n_layer=2", "n_head=2", "n_embd=32", "seq_len=32") if shrink
        ]
    recipe = load_recipe(name, shape)
    return replace(
        recipe,
        train=replace(
            recipe.train,
            tokens=10**15,
            batch_size=sequences * micro_batches,
            micro_batch_tokens=sequences * recipe.model.seq_len,
        ),
        eval=replace(recipe.eval, every=10**9),
        optim=replace(recipe.optim, decay_tokens=None, warmup_steps=10, lr=1e-4, min_lr=0.0),
    )


@dataclass(frozen=True)
class Training:
    recipe: Recipe
    state: TrainState
    windows: Windows
    stepping: Iterator[StepRecord]
    folder: tempfile.TemporaryDirectory[str]

    def rows(self, steps: int) -> list[dict[str, object]]:
        """The rows of so many steps, each read before the next begins."""
        return [
            read_records(self.state, self.recipe, [next(self.stepping)])[0] for _ in range(steps)
        ]


def training(bench: Bench, recipe: Recipe, residual_dtype: torch.dtype | None = None) -> Training:
    """A fresh training of `recipe` on random tokens; nothing of earlier ones is left compiled or
    allocated."""
    torch._dynamo.reset()
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
    vocab_size = likely_vocabulary(recipe.data.tokenizer)
    folder = tempfile.TemporaryDirectory(dir=bench.folder)
    windows = random_windows(recipe, vocab_size, Path(folder.name))
    state = started_state(recipe, vocab_size, bench.device)
    if residual_dtype is not None:
        state.model.residual_dtype = residual_dtype
    return Training(
        recipe, state, windows, train(state, recipe, windows, windows.validation(1)), folder
    )


class DeviceReadings:
    """Clock, power and temperature of the device while the context is open, sampled by nvidia-smi
    five times a second."""

    _FIELDS = ("clocks.sm", "power.draw", "temperature.gpu")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process: subprocess.Popen[str] | None = None
        self.medians: dict[str, float] = {}

    def __enter__(self) -> DeviceReadings:
        if self._device.type == "cuda" and shutil.which("nvidia-smi"):
            # nvidia-smi numbers all devices of the machine; the visible ones are known by their
            # identity.
            identity = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
            command = [
                "nvidia-smi",
                f"--query-gpu={','.join(self._FIELDS)}",
                "--format=csv,noheader,nounits",
                "-lms",
                "200",
            ]
            self._process = subprocess.Popen(
                [*command, "-i", identity], stdout=subprocess.PIPE, text=True
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        output, _ = self._process.communicate()
        samples = []
        for line in output.splitlines():
            try:
                samples.append([float(value) for value in line.split(",")])
            except ValueError:
                continue  # "[N/A]", or a line cut off at the end
        columns = zip(
            *(sample for sample in samples if len(sample) == len(self._FIELDS)), strict=True
        )
        self.medians = {
            name: statistics.median(column)
            for name, column in zip(self._FIELDS, columns, strict=False)
        }


def rates(bench: Bench, run: Training, rounds: int = 5, steps: int = 5, warmup: int = 3) -> Figure:
    """Tokens/s and what belongs to it, over `rounds` of `steps` steps; nothing waits within a
    round."""
    if bench.smoke:
        rounds, steps = 2, 1
    seconds, graphs = compile_seconds(), compiled_graphs()
    run.rows(warmup)
    seconds, graphs = compile_seconds() - seconds, compiled_graphs() - graphs
    times, before = [], run.state.progress
    with DeviceReadings(bench.device) as readings:
        for _ in range(rounds):
            wait_for(bench.device)
            start = time.perf_counter()
            records = [next(run.stepping) for _ in range(steps)]
            read_records(run.state, run.recipe, records)
            wait_for(bench.device)
            times.append((time.perf_counter() - start) / steps)
    tokens = (run.state.progress.tokens - before.tokens) / (rounds * steps)
    flops = (run.state.progress.flops - before.flops) / (rounds * steps)
    median = statistics.median(times)
    cuda = bench.device.type == "cuda"
    name = torch.cuda.get_device_name(bench.device) if cuda else "cpu"
    peak = peak_flops(name, compute_dtype(run.recipe, bench.device))
    memory: Figure = {}
    if cuda:
        statistic = torch.cuda.memory_stats(bench.device)
        memory = {
            "peak_bytes": torch.cuda.max_memory_allocated(bench.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(bench.device),
            "alloc_retries": statistic["num_alloc_retries"],
        }
    return {
        "tokens_per_second": tokens / median,
        "tokens_per_second_low": tokens / max(times),
        "tokens_per_second_high": tokens / min(times),
        "seconds_per_step": median,
        "tokens_per_step": tokens,
        "flops_per_second": flops / median,
        "mfu": None if peak is None else flops / median / peak,
        "compile_seconds": seconds,
        "graphs": graphs,
        "rounds": rounds,
        "steps": steps,
        **memory,
        **readings.medians,
    }


def rate_figure(name: str, rate: Figure) -> Figure:
    """A rate as a line of the table."""
    parts = ["MFU n/a" if rate["mfu"] is None else f"MFU {rate['mfu']:.1%}"]
    parts.append(f"{rate['tokens_per_second_low']:,.0f} to {rate['tokens_per_second_high']:,.0f}")
    parts.append(f"{rate['graphs']} graphs in {rate['compile_seconds']:.0f} s")
    if "peak_bytes" in rate:
        parts.append(
            f"{rate['peak_bytes'] / 2**30:.1f} GiB, {rate['reserved_bytes'] / 2**30:.1f} reserved"
        )  # type: ignore
        parts.append(f"{rate['alloc_retries']} allocator retries")
    if "clocks.sm" in rate:
        parts.append(
            f"{rate['clocks.sm']:.0f} MHz, {rate['power.draw']:.0f} W,"
            f" {rate['temperature.gpu']:.0f} C"
        )
    return figure(name, rate["tokens_per_second"], "tokens/s", ", ".join(parts)) | {"details": rate}


def rate_part(
    name: str,
    recipe: Callable[[Bench], Recipe],
    seconds: float = 60,
    residual: torch.dtype | None = None,
    **environment: str,
) -> Part:
    """The part that trains a recipe and gives its rate; out of memory is an answer too."""

    def work(bench: Bench) -> Iterator[Figure]:
        try:
            yield rate_figure(name, rates(bench, training(bench, recipe(bench), residual)))
        except torch.OutOfMemoryError:
            yield figure(name, None, "", "out of memory")

    return Part(name, work, seconds, environment)


def repeated_seconds(bench: Bench, work: Callable[[], object], times: int = 10) -> float:
    """Seconds per call, mean of `times` after three to warm up."""
    for _ in range(3):
        work()
    wait_for(bench.device)
    start = time.perf_counter()
    for _ in range(times):
        work()
    wait_for(bench.device)
    return (time.perf_counter() - start) / times


def child_environment(bench: Bench) -> dict[str, str]:
    """For processes of their own: runs and token shards go to the bench's folder, the code is this
    checkout's."""
    return {
        **os.environ,
        "EFFTRAIN_RUNS": str(bench.folder / "runs"),
        "EFFTRAIN_CACHE": str(bench.folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
