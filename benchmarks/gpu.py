"""Everything that is to be measured on a GPU, in one call of under ten minutes.

    python benchmarks/gpu.py --out bench-out              all pieces, most worthwhile first
    python benchmarks/gpu.py --pieces device speed        some of them
    python benchmarks/gpu.py --pieces pair --pair         one scaled-down pair of runs, several minutes
    python benchmarks/gpu.py --smoke --out DIR            on a CPU with tiny shapes: that the script itself works

Run it from the checkout's root, with efftrain installed or PYTHONPATH=. set. Each piece is measured, written to OUT/gpu.json and
kept, whatever happens to the next one; the same command run again does the pieces that are missing or failed. Needs no network
and no data: random tokens, and the standard library's source where runs are resumed. The table comes last.

FLOPs per token are 6 N + 12 n_layer n_embd seq_len, logits included; MFU is their share of the data sheet's dense peak.
Compilation is not part of any rate; its seconds stand beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from efftrain_cli.bench import phase_seconds, random_windows, started_state, vocab_size_of, wait_for
from efftrain_cli.methods.progressive_layer_drop import ProgressiveLayerDrop
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.model.cross_entropy import summed_cross_entropy
from efftrain_cli.model.flops import peak_flops
from efftrain_cli.model.gpt import GPT, run_eagerly
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training.compiling import (
    CompiledParts,
    compile_parts,
    compile_seconds,
    compile_whole,
    compiled_graphs,
)
from efftrain_cli.training.gradient import build_model, build_objective, compute_dtype
from efftrain_cli.training.state import TrainState
from efftrain_cli.training.trainer import StepRecord, read_records, train

Figure = dict[str, object]
"""One line of the table: name, value, unit, and a note or a verdict."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the pieces share."""

    device: torch.device
    smoke: bool
    folder: Path
    """For what need not be kept."""
    deadline: float
    """time.monotonic() at which no further variant is begun."""

    def left(self) -> float:
        """Seconds left of the budget."""
        return self.deadline - time.monotonic()


def figure(name: str, value: object, unit: str = "", note: str = "") -> Figure:
    return {"name": name, "value": value, "unit": unit, "note": note}


def check(name: str, error: float, limit: float) -> Figure:
    """A relative error ||a - b|| / ||b|| with its verdict."""
    return figure(name, error, "rel. error", f"{'ok' if error <= limit else 'WRONG'}, limit {limit:g}")


# --- training steps --------------------------------------------------------------------------------------------------


def recipe_for(bench: Bench, name: str = "gpt2-117m", *, sequences: int = 64, micro_batches: int = 2) -> Recipe:
    """A shipped recipe at `micro_batches` of `sequences` full-length sequences a step, without end and without evaluation."""
    shape = []
    if bench.smoke:
        sequences = min(sequences, 2)
        shape = [f"model.{key}" for key in ("n_layer=2", "n_head=2", "n_embd=32", "seq_len=32")]
        shape += ["data.tokenizer=bpe:512", "train.compile=off"]
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
        optim=replace(recipe.optim, decay_tokens=None, warmup_steps=10, lr=1e-4),
    )


@dataclass(frozen=True)
class Training:
    recipe: Recipe
    state: TrainState
    stepping: Iterator[StepRecord]
    folder: tempfile.TemporaryDirectory[str]

    def rows(self, steps: int) -> list[dict[str, object]]:
        """The rows of so many steps, each read before the next begins."""
        return [read_records(self.state, self.recipe, [next(self.stepping)])[0] for _ in range(steps)]


def training(bench: Bench, recipe: Recipe, residual_dtype: torch.dtype | None = None) -> Training:
    """A fresh training of `recipe` on random tokens."""
    vocab_size = vocab_size_of(recipe)
    folder = tempfile.TemporaryDirectory(dir=bench.folder)
    windows = random_windows(recipe, vocab_size, Path(folder.name))
    state = started_state(recipe, vocab_size, bench.device)
    if residual_dtype is not None:
        state.model.residual_dtype = residual_dtype
    return Training(recipe, state, train(state, recipe, windows, windows.validation(1)), folder)


def fresh_device(bench: Bench) -> None:
    """Forgets compiled graphs and frees what the last variant held."""
    torch._dynamo.reset()
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def rates(bench: Bench, run: Training, steps: int = 8, warmup: int = 3) -> Figure:
    """Tokens/s and what belongs to it; seconds are wall time per step over a block of steps that nothing waits for."""
    seconds, graphs = compile_seconds(), compiled_graphs()
    run.rows(warmup)
    seconds, graphs = compile_seconds() - seconds, compiled_graphs() - graphs
    blocks, tokens = [], 0
    for _ in range(3):
        wait_for(bench.device)
        start, before = time.perf_counter(), run.state.progress.tokens
        records = [next(run.stepping) for _ in range(max(1, steps // 3))]
        read_records(run.state, run.recipe, records)
        wait_for(bench.device)
        blocks.append((time.perf_counter() - start) / len(records))
        tokens = (run.state.progress.tokens - before) // len(records)
    per_token = run.state.model.flops_per_token().with_logits
    rate = tokens / statistics.median(blocks)
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"
    peak = peak_flops(name, compute_dtype(run.recipe.train.dtype, bench.device))
    return {
        "tokens_per_second": rate,
        "tokens_per_second_low": tokens / max(blocks),
        "tokens_per_second_high": tokens / min(blocks),
        "tokens_per_step": tokens,
        "flops_per_second": rate * per_token,
        "mfu": None if peak is None else rate * per_token / peak,
        "compile_seconds": seconds,
        "graphs": graphs,
        "peak_bytes": torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else None,
    }


def rate_figure(name: str, rate: Figure) -> Figure:
    mfu = "MFU n/a" if rate["mfu"] is None else f"MFU {rate['mfu']:.1%}"
    memory = "" if rate["peak_bytes"] is None else f", {rate['peak_bytes'] / 2**30:.1f} GiB"  # type: ignore
    note = f"{mfu}, compiled {rate['graphs']} graphs in {rate['compile_seconds']:.0f} s{memory}"
    return figure(name, rate["tokens_per_second"], "tokens/s", note) | {"details": rate}


# --- pieces ----------------------------------------------------------------------------------------------------------


def device_facts(bench: Bench) -> list[Figure]:
    """What the device is, and two ceilings measured on it."""
    figures = [figure("torch", torch.__version__), figure("python", platform.python_version())]
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        figures += [
            figure("device", properties.name, "", f"capability {properties.major}.{properties.minor}"),
            figure("memory", properties.total_memory / 2**30, "GiB"),
            figure("multiprocessors", properties.multi_processor_count),
            figure("CUDA, cuDNN", f"{torch.version.cuda}, {torch.backends.cudnn.version()}"),
        ]
    size, rows = (256, 64) if bench.smoke else (8192, 65536)
    for m, k, n in ((size, size, size), (rows, 768 // (12 if bench.smoke else 1), 3072 // (12 if bench.smoke else 1))):
        a, b = (torch.randn(shape, device=bench.device).bfloat16() for shape in ((m, k), (k, n)))
        seconds = repeated_seconds(bench, lambda a=a, b=b: a @ b)
        figures.append(figure(f"bf16 matmul {m} x {k} x {n}", 2 * m * k * n / seconds / 1e12, "TFLOP/s", "random data"))
    source = torch.empty(2**20 if bench.smoke else 2**31, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = repeated_seconds(bench, lambda: target.copy_(source))
    figures.append(figure("device copy", 2 * source.numel() / seconds / 1e12, "TB/s", "bytes read and written"))
    return figures


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


def speed(bench: Bench) -> list[Figure]:
    """GPT-2 117M as its recipe trains it: rate, phases, cost of the stability measures, profile."""
    fresh_device(bench)
    run = training(bench, recipe_for(bench, micro_batches=8))  # the recipe's own batch of 512
    rate = rates(bench, run, steps=9)
    figures = [rate_figure("117M, 8 x 64 x 1024, as shipped", rate)]
    seconds = rate["tokens_per_step"] / rate["tokens_per_second"]  # type: ignore
    measures = repeated_seconds(bench, run.state.optimizer.measures)
    figures.append(figure("stability measures", measures / seconds, "of a step", f"{1000 * measures:.2f} ms"))
    (bench.folder / "phases").mkdir()
    windows = random_windows(run.recipe, run.state.model.config.vocab_size, bench.folder / "phases")
    phases = phase_seconds(run.recipe, run.state, windows, bench.device, 3, run.stepping)
    figures += [figure(f"phase {name}", 1000 * value, "ms a step") for name, value in phases.items()]
    figures += profile(bench, run)
    return figures


def profile(bench: Bench, run: Training, most: int = 14) -> list[Figure]:
    """Where the device's time goes in two steps, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    cuda = bench.device.type == "cuda"
    with torch_profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        run.rows(2)
        wait_for(bench.device)
    events = [
        (event.self_device_time_total if cuda else event.self_cpu_time_total, event.count, event.key)
        for event in profiler.key_averages()
        if not cuda or "cuda" in str(event.device_type).lower()
    ]
    total = sum(time for time, _, _ in events) or 1.0
    events.sort(reverse=True)
    return [
        figure(f"  {name[:70]}", time / total, "of device time", f"{count} calls, {time / 2000:.2f} ms a step")
        for time, count, name in events[:most]
    ]


def correctness(bench: Bench) -> list[Figure]:
    """Each fast path against its reference, on a smaller model of the same kind."""
    fresh_device(bench)
    figures = []
    recipe = recipe_for(bench, sequences=8)
    if not bench.smoke:
        recipe = replace(recipe, model=replace(recipe.model, n_layer=4, seq_len=512))
    vocab_size = vocab_size_of(recipe)
    generator = torch.Generator().manual_seed(3)
    shape = (recipe.train.micro_batch_tokens // recipe.model.seq_len, recipe.model.seq_len)
    tokens = torch.randint(vocab_size, shape, generator=generator).to(bench.device)

    def gradients(dtype: str, compiled: str = "", residual: torch.dtype = torch.float32, plain_head: bool = False) -> list[Tensor]:
        """[loss, every gradient] of the same weights and tokens, one way or another."""
        used = replace(recipe, train=replace(recipe.train, dtype=dtype, compile="off"))
        model = build_model(used, vocab_size, bench.device)
        model.residual_dtype = residual
        backend = "aot_eager" if bench.smoke else "inductor"
        head = plain_head_of(model) if plain_head else model.head_loss_sum
        objective = build_objective(used, model, bench.device)
        if compiled == "whole":
            objective = compile_whole(used, objective, backend)
        parts = compile_parts(used, model, backend) if compiled == "blocks" else CompiledParts(run_eagerly, head)
        if plain_head or compiled == "blocks":
            with torch.autocast(bench.device.type, dtype=torch.bfloat16, enabled=dtype == "bf16"):
                loss = parts.head_loss_sum(model.run_blocks(model.embed(tokens), run_block=parts.block), tokens)
        else:
            loss = objective(tokens, tokens, None, None)["ce"]
        loss = loss / tokens.numel()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    truth = gradients("fp32", plain_head=True)
    ways: dict[str, list[Tensor]] = {
        "bf16 eager, plain head": gradients("bf16", plain_head=True),
        "bf16 eager, one-buffer head": gradients("bf16"),
        "bf16 eager, bf16 residual": gradients("bf16", residual=torch.bfloat16),
        "bf16 compiled whole, bf16 residual": gradients("bf16", "whole", residual=torch.bfloat16),
        "bf16 compiled blocks, bf16 residual": gradients("bf16", "blocks", residual=torch.bfloat16),
        "fp32 eager, one-buffer head": gradients("fp32"),
        "fp32 compiled whole": gradients("fp32", "whole"),
    }
    usual = relative(ways["bf16 eager, plain head"][1:], truth[1:])
    for name, way in ways.items():
        limit = 1e-4 if "fp32" in name else max(2e-2, (2.5 if "bf16 residual" in name else 1.5) * usual)
        figures.append(check(f"{name}: loss", relative(way[:1], truth[:1]), 1e-5 if "fp32" in name else 2e-3))
        figures.append(check(f"{name}: gradients", relative(way[1:], truth[1:]), limit))
    figures += attention_errors(bench)
    figures += head_errors(bench)
    return figures


def plain_head_of(model: GPT) -> Callable[[Tensor, Tensor], Tensor]:
    def head(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.head(x).flatten(0, -2).float(), targets.flatten(), reduction="sum")

    return head


def relative(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """||a - b|| / ||b|| over lists of tensors."""
    difference = sum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True))
    return (difference / sum(float(y.double().square().sum()) for y in b)) ** 0.5


def attention_errors(bench: Bench) -> list[Figure]:
    """Each attention kernel in bf16, output and gradients, against plain arithmetic in fp32; and its time."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (2, 2, 32, 16) if bench.smoke else (16, 12, 1024, 64)
    generator = torch.Generator().manual_seed(4)
    q, k, v, up = (torch.randn(shape, generator=generator).to(bench.device) for _ in range(4))

    def outputs(backend: SDPBackend, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        with sdpa_kernel([backend]):
            y = F.scaled_dot_product_attention(*inputs, is_causal=True)
            y.backward(up.to(dtype))
        return [y.detach(), *(x.grad for x in inputs if x.grad is not None)]

    truth = outputs(SDPBackend.MATH, torch.float32)
    figures = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        name = f"attention {backend.name.lower()} bf16"
        try:
            error = relative(outputs(backend, torch.bfloat16), truth)
            seconds = repeated_seconds(bench, lambda backend=backend: outputs(backend, torch.bfloat16), 5)
        except RuntimeError as problem:
            figures.append(figure(name, None, "", f"not available: {str(problem).splitlines()[0][:60]}"))
            continue
        figures.append(check(name, error, 1e-2) | {"seconds": seconds})
        figures.append(figure(f"{name}: forward and backward", 1000 * seconds, "ms", f"shape {shape}"))
    return figures


def head_errors(bench: Bench) -> list[Figure]:
    """The head's one-buffer cross-entropy against the plain form: gradients, time, memory."""
    tokens, d, vocab, rows = (64, 16, 500, 512) if bench.smoke else (16384, 768, 50257, 50304)
    generator = torch.Generator().manual_seed(6)
    x0 = torch.randn(tokens, d, generator=generator).to(bench.device)
    w0 = (0.05 * torch.randn(rows, d, generator=generator)).to(bench.device)
    y = torch.randint(vocab, (tokens,), generator=generator).to(bench.device)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w)[:, :vocab].float(), y, reduction="sum")

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return summed_cross_entropy(x, w, y, vocab)

    def gradients(form: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        x, w = x0.clone().requires_grad_(), w0.clone().requires_grad_()
        with torch.autocast(bench.device.type, dtype=torch.bfloat16):
            loss = form(x, w) / tokens
        loss.backward()
        assert x.grad is not None and w.grad is not None
        return [x.grad, w.grad]

    figures = [check("head, one buffer against plain, bf16", relative(gradients(ours), gradients(plain)), 1e-2)]
    forms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"plain": plain, "one buffer": ours}
    if not bench.smoke:
        forms["plain, compiled"] = torch.compile(plain)
    for name, form in forms.items():
        seconds = repeated_seconds(bench, lambda form=form: gradients(form), 5)
        memory = ""
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            gradients(form)
            memory = f"{(torch.cuda.max_memory_allocated() - held) / 2**30:.2f} GiB"
        figures.append(figure(f"head, {name}: {tokens} x {d} x {rows}", 1000 * seconds, "ms", memory))
    return figures


def reference(bench: Bench) -> list[Figure]:
    """Our trainer and the plain loop, in alternation."""
    from side_by_side import compare

    fresh_device(bench)
    name, dtype = ("4x128", "fp32") if bench.smoke else ("gpt2-117m-cuda", "bf16")
    result = compare(name, dtype, bench.device, 1 if bench.smoke else 4)
    note = f"{result['wall_ratio_low']:.3f} to {result['wall_ratio_high']:.3f}"
    return [
        figure("ours / plain loop, 117M 64 x 1024", result["wall_ratio"], "times as fast", note),
        figure("plain loop", result["reference_tokens_per_second"], "tokens/s"),
        figure("ours beside it", result["ours_tokens_per_second"], "tokens/s"),
    ]


def lengths(bench: Bench) -> list[Figure]:
    """Sequence length warmup over every multiple of 8 up to the full length: graphs, stalls, tokens/s by length."""
    fresh_device(bench)
    recipe = recipe_for(bench, micro_batches=1)
    full = recipe.model.seq_len
    steps = full // 4
    recipe = replace(recipe, seq_len_warmup=SeqLenWarmup(start=8, steps=steps))
    seconds, graphs = compile_seconds(), compiled_graphs()
    run = training(bench, recipe)
    rows = run.rows(steps + 20)
    compiled = [row for row in rows if row["compile_seconds"]]
    figures = [
        figure("lengths seen", len({row["seq_len"] for row in rows}), "", f"8 to {full} in steps of 8"),
        figure("graphs", compiled_graphs() - graphs, "", f"{compile_seconds() - seconds:.0f} s, in {len(compiled)} steps"),
    ]
    ratios = []
    for before, row, after in zip(rows, rows[1:], rows[2:], strict=False):
        same_length = row["seq_len"] == after["seq_len"]
        if same_length and before["seq_len"] != row["seq_len"] and row not in compiled and after not in compiled:
            ratios.append(row["seconds"] / after["seconds"])  # type: ignore
    if ratios:
        note = f"median {statistics.median(ratios):.2f}, of {len(ratios)}"
        figures.append(figure("first step at a length / second, at most", max(ratios), "times", note))
    quiet = [row for row in rows if row not in compiled]
    for length in sorted({8, full // 16, full // 8, full // 4, full // 2, full}):
        near = [row for row in quiet if abs(int(str(row["seq_len"])) - length) <= (8 if length < full else 0)]
        if near:
            rate = statistics.median(row["tokens_per_second"] for row in near)  # type: ignore
            figures.append(figure(f"at length {length}", rate, "tokens/s", f"{len(near)} steps"))
    return figures


def methods(bench: Bench) -> list[Figure]:
    """What layer dropping saves and SimiGrad's measurement costs, all with compiled blocks."""
    figures = []
    with mock.patch("efftrain_cli.training.gradient.compiles_blocks", lambda recipe, n_layer: True):
        dense_recipe = recipe_for(bench)
        size = dense_recipe.train.batch_size
        recipes = {
            "dense": dense_recipe,
            "layer dropping, theta 0.5": replace(
                dense_recipe, progressive_layer_drop=ProgressiveLayerDrop(theta=0.5, steps=0)
            ),
            "SimiGrad, measuring every step": replace(
                dense_recipe, simigrad=SimiGrad(target=0.5, min_batch_size=size, max_batch_size=size)
            ),
        }
        measured = {}
        for name, recipe in recipes.items():
            fresh_device(bench)
            run = training(bench, recipe)
            rate = rates(bench, run, steps=3)
            figures.append(rate_figure(f"117M by blocks, {name}", rate))
            rows = run.rows(24 if "dropping" in name else 6)
            measured[name] = [
                sum(row[column] for row in rows) / len(rows)  # type: ignore
                for column in ("seconds", "flops")
            ]
    dense, dropping, measuring = measured.values()
    saved, flops = 1 - dropping[0] / dense[0], 1 - dropping[1] / dense[1]
    figures.append(figure("layer dropping saves", saved, "of the time", f"{flops:.1%} of the FLOPs"))
    figures.append(figure("SimiGrad's measurement costs", measuring[0] / dense[0] - 1, "of a step"))
    return figures


def levers(bench: Bench) -> list[Figure]:
    """GPT-2 117M with one lever moved at a time; begun while time is left."""
    figures = []
    shipped = recipe_for(bench)

    def variant(name: str, recipe: Recipe, *patches: object, residual: torch.dtype | None = None, needs: float = 60) -> None:
        if bench.left() < needs and not bench.smoke:
            figures.append(figure(name, None, "", "no time left"))
            return
        fresh_device(bench)
        try:
            with ExitStack() as stack:
                for patch in patches:
                    stack.enter_context(patch)  # type: ignore
                figures.append(rate_figure(name, rates(bench, training(bench, recipe, residual), steps=6)))
        except Exception as error:
            figures.append(figure(name, None, "", f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"))

    def with_sequences(sequences: int) -> Recipe:
        return recipe_for(bench, sequences=sequences, micro_batches=max(1, 128 // sequences))

    eager = replace(shipped, train=replace(shipped.train, compile="off"))
    by_blocks = mock.patch("efftrain_cli.training.gradient.compiles_blocks", lambda recipe, n_layer: True)
    own_order = mock.patch("efftrain_cli.training.gradient.attention_kernels", lambda device, same_shape: nullcontext())
    variant("117M, eager", eager, needs=20)
    variant("117M, blocks compiled one by one", shipped, by_blocks, needs=40)
    variant("117M, attention in PyTorch's own order", shipped, own_order)
    variant("117M, fp32 residual stream", shipped, residual=torch.float32)
    variant("117M, micro-batches of 32", with_sequences(32))
    variant("117M, micro-batches of 128", with_sequences(128))
    variant("117M, micro-batches of 16", with_sequences(16))
    if bench.device.type == "cuda":
        import torch._inductor.config as inductor

        variant("117M, CUDA graphs", shipped, inductor.patch({"triton.cudagraphs": True}))
    return figures


def largest(bench: Bench) -> list[Figure]:
    """GPT-2 1.5B on one device."""
    figures = []
    for sequences in (16, 32, 8):
        name = f"1.5B, {sequences} x 1024"
        if figures and bench.left() < 60 and not bench.smoke:
            figures.append(figure(name, None, "", "no time left"))
            continue
        fresh_device(bench)
        try:
            run = training(bench, recipe_for(bench, "gpt2-1.5b", sequences=sequences, micro_batches=2))
            figures.append(rate_figure(name, rates(bench, run, steps=6, warmup=2)))
        except torch.OutOfMemoryError:
            figures.append(figure(name, None, "", "out of memory"))
        finally:
            run = None
    return figures


def child_environment(bench: Bench) -> dict[str, str]:
    """For processes of their own: runs and token shards go to the bench's folder, the code is this checkout's."""
    root = str(Path(__file__).resolve().parent.parent)
    return {
        **os.environ,
        "EFFTRAIN_RUNS": str(bench.folder / "runs"),
        "EFFTRAIN_CACHE": str(bench.folder / "cache"),
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }


def resume(bench: Bench) -> list[Figure]:
    """Runs stopped and resumed in processes of their own, with deterministic kernels and without."""
    half = 3 if bench.smoke else 50
    sizes = [] if bench.smoke else ["model.n_embd=256", "train.dtype=bf16"]
    environment = child_environment(bench)

    def begin(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "efftrain_cli", *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(processes: Sequence[subprocess.Popen[str]]) -> None:
        try:
            for process in processes:
                output, _ = process.communicate()
                if process.returncode:
                    raise RuntimeError(f"{process.args}: exit {process.returncode}\n{output[-1500:]}")
        finally:
            for process in processes:
                process.kill()

    def losses(name: str) -> list[float]:
        lines = (bench.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        by_step = {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}
        return [by_step[step] for step in range(half + 1, 2 * half + 1)]

    ways = {"deterministic": "true"} if bench.smoke else {"deterministic": "true", "any kernels": "false"}
    settings = [part for size in sizes for part in ("--set", size)]
    finish([begin("prepare", "--recipe", "quickstart")])
    first = []
    for i, value in enumerate(ways.values()):
        common = ["--recipe", "quickstart", *settings, "--set", f"train.deterministic={value}", "--no-probe"]
        first.append(begin("pretrain", *common, "--name", f"whole{i}", "--steps", str(2 * half)))
        first.append(begin("pretrain", *common, "--name", f"halves{i}", "--steps", str(half)))
    finish(first)
    finish([begin("pretrain", "--resume", f"halves{i}", "--steps", str(2 * half), "--no-probe") for i in range(len(ways))])
    figures = []
    for i, way in enumerate(ways):
        whole, halves = losses(f"whole{i}"), losses(f"halves{i}")
        error = max(abs(a - b) / abs(b) for a, b in zip(halves, whole, strict=True))
        limit = 0.0 if way == "deterministic" else 1e-3
        figures.append(check(f"resumed after {half} steps, {way}: loss, largest of {half}", error, limit))
    return figures


def pair(bench: Bench) -> list[Figure]:
    """GPT-2 117M with and without sequence length warmup, scaled down: one seed each, so no claim."""
    tokens, batch, warmup = (64 * 40, 2, 10) if bench.smoke else (40_000_000, 64, 200)
    figures = []
    for name in ("gpt2-117m-large-batch", "gpt2-117m-slw"):
        settings = [
            "data.train=stdlib", "data.tokenizer=bpe:8192", "data.repeat=true", f"train.tokens={tokens}",
            f"train.batch_size={batch}", "optim.decay_tokens=false", "optim.warmup_steps=30", "eval.windows=64",
            *(["seq_len_warmup.start=8", f"seq_len_warmup.steps={warmup}"] if name.endswith("slw") else []),
            *(["model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.seq_len=32", "data.tokenizer=bpe:512"]
              if bench.smoke else []),
        ]  # fmt: skip
        options = [part for setting in settings for part in ("--set", setting)]
        command = [sys.executable, "-m", "efftrain_cli", "pretrain", "--recipe", name, "--name", name, *options]
        done = subprocess.run(command, env=child_environment(bench), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: exit {done.returncode}\n{(done.stdout + done.stderr)[-1500:]}")
        rows = [json.loads(line) for line in (bench.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        last = rows[-1]
        ratios = [row["loss_ratio"] for row in rows if row.get("loss_ratio") is not None]
        note = f"{last['step']} steps, {last['train_seconds']:.0f} s, largest loss ratio {max(ratios):.2f}; one seed: no claim"
        figures.append(figure(name, last["val_loss"], "nats, validation", note))
    return figures


PIECES: dict[str, tuple[Callable[[Bench], list[Figure]], float]] = {
    "device": (device_facts, 30),
    "speed": (speed, 120),
    "correctness": (correctness, 120),
    "reference": (reference, 120),
    "lengths": (lengths, 160),
    "resume": (resume, 150),
    "methods": (methods, 120),
    "largest": (largest, 200),
    "levers": (levers, 400),
    "pair": (pair, 900),
}
"""Pieces in order of worth, with the most seconds that each may take."""


# --- running them ----------------------------------------------------------------------------------------------------


def attempt(piece: str, bench: Bench) -> dict[str, object]:
    """Runs a piece within its time; an error becomes part of the record."""
    work, most = PIECES[piece]

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"{piece} took more than {seconds:.0f} s")

    seconds = 1000.0 if bench.smoke else max(5.0, min(most, bench.left() + 20))
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    start = time.monotonic()
    try:
        record: dict[str, object] = {"status": "ok", "figures": work(bench)}
    except Exception as error:
        record = {"status": "failed", "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return record | {"seconds": time.monotonic() - start}


def show(results: dict[str, dict[str, object]]) -> None:
    """The table."""
    for piece, record in results.items():
        print(f"\n{piece}: {record['status']}, {record['seconds']:.0f} s")
        if "error" in record:
            print(f"  {str(record['error'])[:600]}")
        for line in record.get("figures", ()):  # type: ignore
            value = line["value"]
            if isinstance(value, float):
                value = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
            text = "-" if value is None else str(value)
            print(f"  {line['name']:72s} {text:>12s} {line['unit']:16s} {line['note']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for gpu.json")
    parser.add_argument("--pieces", nargs="+", choices=PIECES, default=[name for name in PIECES if name != "pair"])
    parser.add_argument("--pair", action="store_true", help="train the scaled-down pair too")
    parser.add_argument("--budget", type=float, default=540, help="seconds; no piece begins that has no time left")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--fresh", action="store_true", help="measure again what OUT/gpu.json holds already")
    parser.add_argument("--continued", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        sys.exit("no CUDA device: use --smoke to try the script on a CPU, or benchmarks/side_by_side.py to measure one")
    device = torch.device("cpu" if options.smoke else "cuda")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu.json"
    known = json.loads(path.read_text())["pieces"] if path.exists() and not options.fresh else {}
    # After a crash of the device the script starts itself anew; what failed is then left as it is.
    kept = {name: record for name, record in known.items() if record["status"] == "ok" or options.continued}
    deadline = time.monotonic() + options.budget if options.continued is None else options.continued
    pieces = [name for name in options.pieces if name != "pair"] + (["pair"] if options.pair else [])
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(device=device, smoke=options.smoke, folder=Path(folder), deadline=deadline)
        for piece in pieces:
            if piece in kept:
                continue
            if bench.left() < 30 and piece != "pair" and not options.smoke:
                print(f"{piece}: no time left; run the same command again", flush=True)
                continue
            record = attempt(piece, bench)
            kept[piece] = record
            print(f"{piece}: {record['status']}, {record['seconds']:.0f} s", flush=True)
            written = {
                "date": str(datetime.now(UTC).date()),
                "command": sys.argv,
                "smoke": options.smoke,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
                "torch": torch.__version__,
                "pieces": kept,
            }
            path.write_text(json.dumps(written, indent=1, default=str))
            broken = "CUDA error" in str(record.get("error")) or "device-side assert" in str(record.get("error"))
            if broken:  # nothing works any more in this process
                arguments = [*sys.argv, "--continued", str(deadline)]
                os.execv(sys.executable, [sys.executable, *arguments])
    show(kept)
    if any(record["status"] != "ok" for record in kept.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
