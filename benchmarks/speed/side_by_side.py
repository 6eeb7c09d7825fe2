"""Equal work through efftrain's trainer and through the plain loop of `reference_loop.py`, in
alternation.

    python benchmarks/speed/side_by_side.py                      the sizes that a CPU can do
    python benchmarks/speed/side_by_side.py --sizes 6x384 --processes 6 --json out.json

What bf16 gains:

    python benchmarks/speed/side_by_side.py --sizes 6x384 --dtype auto --reference-dtype fp32

Same shapes, random tokens, dtype, AdamW and clipping. Each round times a few steps of one, then of
the other; ratios are of the same round, so a machine that slows down slows both. Where a process's
memory comes to lie moves its ratio by a few percent for as long as it lives: each figure is the
median of all rounds of several processes, in parentheses the lowest and the highest process's
median. A ratio above 1 means that efftrain is the faster one. Beside wall time stands the
processes' CPU time, which neighbours on the machine disturb less. Peak memory is measured in a
process of its own for each side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference_loop import ReferenceLoop, Shape

from efftrain_cli.bench import peak_resident_bytes, random_windows, started_state, wait_for
from efftrain_cli.data.windows import Windows
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.recipe.sections import Data, Eval, Model, Optim, Train
from efftrain_cli.training import loop
from efftrain_cli.training.loop import train
from efftrain_cli.training.precision import compute_dtype
from efftrain_cli.training.record import read_records

SIZES = {
    "4x128": Shape(n_layer=4, n_head=4, n_embd=128, seq_len=64, batch_size=12, vocab_size=512),
    "6x384": Shape(n_layer=6, n_head=6, n_embd=384, seq_len=256, batch_size=8, vocab_size=512),
    "6x384-v50304": Shape(
        n_layer=6, n_head=6, n_embd=384, seq_len=256, batch_size=8, vocab_size=50304
    ),
    "gpt2-117m": Shape(
        n_layer=12, n_head=12, n_embd=768, seq_len=1024, batch_size=1, vocab_size=50304
    ),
    "gpt2-117m-cuda": Shape(
        n_layer=12, n_head=12, n_embd=768, seq_len=1024, batch_size=32, vocab_size=50304
    ),
}
Times = dict[str, list[tuple[float, float]]]
"""(wall, CPU) seconds per step of each round, by side."""
STEPS = {"4x128": 20, "6x384": 2, "6x384-v50304": 1, "gpt2-117m": 1, "gpt2-117m-cuda": 5}


def recipe_of(shape: Shape, dtype: str) -> Recipe:
    """The recipe that trains `shape` in one micro-batch a step, without evaluations."""
    return Recipe(
        model=Model(
            n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd, seq_len=shape.seq_len
        ),
        data=Data(tokenizer=f"bpe:{shape.vocab_size}"),
        optim=Optim(lr=6e-4),
        train=Train(
            tokens=10**15,
            batch_size=shape.batch_size,
            micro_batch_tokens=shape.batch_size * shape.seq_len,
            dtype="bf16" if dtype == "bf16" else "fp32",
        ),
        eval=Eval(every=10**9),
    )


def our_step(
    shape: Shape, dtype: str, device: torch.device, windows: Windows
) -> Callable[[], None]:
    """A function that trains one step through `train()` and reads its record, as pretrain does."""
    recipe = recipe_of(shape, dtype)
    state = started_state(recipe, shape.vocab_size, device)
    stepping = train(state, recipe, windows, windows.validation(1))
    pending = []

    def step() -> None:
        pending.append(next(stepping))
        # On CUDA pretrain reads about once a second; on a CPU after every step.
        if device.type == "cpu" or len(pending) == 8:
            rows = read_records(state, recipe, pending)
            json.dumps(rows)
            pending.clear()

    return step


def reference_step(
    shape: Shape, dtype: str, device: torch.device, windows: Windows
) -> Callable[[], None]:
    """A function that trains one step of the plain loop; it reads its loss every tenth step, as
    nanoGPT does."""
    tokens = windows.shards.ids[0]
    loop = ReferenceLoop(shape, np.asarray(tokens), device, dtype, compiled=device.type == "cuda")

    def step() -> None:
        loss = loop.step()
        if loop.iteration % 10 == 0:
            loss.item()

    return step


def timed(step: Callable[[], None], steps: int, device: torch.device) -> tuple[float, float]:
    """(wall, CPU) seconds per step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def compare(
    name: str, dtype: str, device: torch.device, rounds: int, reference_dtype: str | None = None
) -> dict[str, object]:
    """Ratios of reference time to ours over `rounds` alternating rounds; the reference in our dtype
    unless it is given."""
    shape, steps = SIZES[name], STEPS[name]
    with tempfile.TemporaryDirectory() as folder:
        windows = random_windows(recipe_of(shape, dtype), shape.vocab_size, Path(folder))
        sides = {
            "ours": our_step(shape, dtype, device, windows),
            "reference": reference_step(shape, reference_dtype or dtype, device, windows),
        }
        for step in sides.values():
            timed(step, 2 if device.type == "cuda" else 1, device)
        times: Times = {side: [] for side in sides}
        for i in range(rounds):
            for side in sorted(sides, reverse=bool(i % 2)):
                times[side].append(timed(sides[side], steps, device))
    return summary(name, dtype, [times])


def summary(name: str, dtype: str, processes: list[Times]) -> dict[str, object]:
    """Throughput and ratios of what one or several processes measured."""
    tokens = SIZES[name].batch_size * SIZES[name].seq_len
    result: dict[str, object] = {"size": name, "dtype": dtype, "times": processes}
    for side in ("ours", "reference"):
        seconds = [wall for times in processes for wall, _ in times[side]]
        result[f"{side}_tokens_per_second"] = tokens / statistics.median(seconds)
    for index, clock in enumerate(("wall", "cpu")):
        ratios = [
            [
                theirs[index] / ours[index]
                for ours, theirs in zip(times["ours"], times["reference"], strict=True)
            ]
            for times in processes
        ]
        medians = [statistics.median(process) for process in ratios]
        result |= {
            f"{clock}_ratio": statistics.median(ratio for process in ratios for ratio in process),
            f"{clock}_ratio_low": min(medians),
            f"{clock}_ratio_high": max(medians),
        }
    return result


def compare_in_processes(
    name: str, dtype: str, device: str, rounds: int, processes: int, reference_dtype: str
) -> dict[str, object]:
    """`compare` in several processes, one after the other; the ratios of all."""
    command = [
        sys.executable,
        __file__,
        "--times-of",
        name,
        "--dtype",
        dtype,
        "--device",
        device,
        "--rounds",
        str(rounds),
    ]
    command += ["--reference-dtype", reference_dtype]
    outputs = [
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        for _ in range(processes)
    ]
    return summary(name, dtype, [json.loads(output) for output in outputs])


class Clocked:
    """A gradient's computation with a clock around each step."""

    def __init__(self, gradient: Any, clocked: Callable[..., Any]) -> None:
        self._gradient = gradient
        self._compute = clocked(gradient.__call__)

    def __call__(self, *arguments: object) -> object:
        return self._compute(*arguments)

    def __getattr__(self, name: str) -> object:
        return getattr(self._gradient, name)


def overhead(name: str, dtype: str, device: torch.device) -> float:
    """Share of a step's wall time that is neither forward, backward nor optimizer: data, planning,
    stability measures, records. Timed inside `train()` by clocks around the two functions that do
    the work, the device awaited at both ends."""
    shape, inside = SIZES[name], [0.0]

    def clocked(work: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            wait_for(device)
            start = time.perf_counter()
            result = work(*arguments)
            wait_for(device)
            inside[0] += time.perf_counter() - start
            return result

        return call

    build, update = loop.build_gradient, loop.update
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        windows = random_windows(recipe_of(shape, dtype), shape.vocab_size, Path(folder))
        loop.build_gradient = lambda *arguments: Clocked(build(*arguments), clocked)
        loop.update = clocked(update)
        try:
            step = our_step(shape, dtype, device, windows)
            for i in range(
                3 + max(8, 4 * STEPS[name])
            ):  # on CUDA records are read at every eighth step
                inside[0] = 0.0
                wall, _ = timed(step, 1, device)
                if i >= 3:
                    shares.append(1 - inside[0] / wall)
        finally:
            loop.build_gradient, loop.update = build, update
    return statistics.mean(shares)


def peak_memory(name: str, dtype: str, device: str, side: str) -> int:
    """Bytes that a process of its own needs for three steps of one side."""
    command = [
        sys.executable,
        __file__,
        "--memory-of",
        side,
        "--sizes",
        name,
        "--dtype",
        dtype,
        "--device",
        device,
    ]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def memory_here(name: str, dtype: str, device: torch.device, side: str) -> int:
    """Runs three steps and returns this process's peak, bytes: resident size on a CPU, allocated
    memory on CUDA."""
    shape = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        windows = random_windows(recipe_of(shape, dtype), shape.vocab_size, Path(folder))
        step = (our_step if side == "ours" else reference_step)(shape, dtype, device, windows)
        timed(step, 3, device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=["4x128", "6x384", "6x384-v50304", "gpt2-117m"]
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16", "auto"], default="fp32")
    parser.add_argument(
        "--reference-dtype",
        choices=["fp32", "bf16"],
        help="of the plain loop, where it is not to be ours",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5, help="in each process")
    parser.add_argument(
        "--processes", type=int, default=5, help="one after the other, for each size"
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument(
        "--no-overhead", action="store_true", help="do not measure what a step does beside its work"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--memory-of", choices=["ours", "reference"], help=argparse.SUPPRESS)
    parser.add_argument("--times-of", choices=SIZES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = compute_dtype(load_recipe("small", [f"train.dtype={options.dtype}"]), device)
    if options.memory_of:
        print(memory_here(options.sizes[0], dtype, device, options.memory_of))
        return
    if options.times_of:
        print(
            json.dumps(
                compare(options.times_of, dtype, device, options.rounds, options.reference_dtype)[
                    "times"
                ][0]
            )
        )
        return
    machine = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads"
    )
    print(
        f"{machine}, torch {torch.__version__}, {dtype} (plain loop:"
        f" {options.reference_dtype or dtype}), {datetime.now(UTC).date()}, {options.processes} x"
        f" {options.rounds} rounds\n"
    )
    print(
        "size           ours tok/s   ref tok/s   wall ratio (low-high)   CPU ratio (low-high)  "
        " memory ratio   overhead"
    )
    results = []
    for name in options.sizes:
        reference_dtype = options.reference_dtype or dtype
        result = compare_in_processes(
            name, dtype, options.device, options.rounds, options.processes, reference_dtype
        )
        if not options.no_memory:
            ours, theirs = (
                peak_memory(name, wanted, options.device, side)
                for side, wanted in (("ours", dtype), ("reference", reference_dtype))
            )
            result |= {"ours_bytes": ours, "reference_bytes": theirs}
        if not options.no_overhead:
            result["overhead"] = overhead(name, dtype, device)
        results.append(result)
        beside = f"{result['overhead']:8.2%}" if "overhead" in result else "       -"
        memory = (
            f"{result['ours_bytes'] / result['reference_bytes']:.2f}"
            if "ours_bytes" in result
            else "-"
        )
        print(
            f"{name:13s} {result['ours_tokens_per_second']:11,.0f}"
            f" {result['reference_tokens_per_second']:11,.0f}   {result['wall_ratio']:.3f}"
            f" ({result['wall_ratio_low']:.2f}-{result['wall_ratio_high']:.2f})      "
            f" {result['cpu_ratio']:.3f}"
            f" ({result['cpu_ratio_low']:.2f}-{result['cpu_ratio_high']:.2f})      {memory:>8s}    "
            f" {beside}",
            flush=True,
        )
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "machine": machine,
                    "torch": torch.__version__,
                    "dtype": dtype,
                    "reference_dtype": options.reference_dtype or dtype,
                    "results": results,
                    "date": str(datetime.now(UTC).date()),
                    "rounds": options.rounds,
                    "processes": options.processes,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
