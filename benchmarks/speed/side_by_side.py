"""Blocks of training steps of efftrain and of a baseline, in alternation, in one process.

    python benchmarks/speed/side_by_side.py 4x128 --nanogpt FOLDER --threads 1
    python benchmarks/speed/side_by_side.py 6x384 --nanogpt FOLDER --set train.dtype=bf16
    python benchmarks/speed/side_by_side.py 6x384 --set 'progressive_layer_drop={theta=0.5,steps=1}'

FOLDER has nanoGPT's model.py; its loop is that of train.py on a CPU, in fp32, its GELU the erf
form unless `--gpt2-gelu`. Without it the baseline is efftrain without the settings of `--set`.
Ratios are the baseline's seconds over efftrain's in the same round: above 1, efftrain is faster. On
a busy machine `--cpu` compares CPU seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from efftrain_cli.bench import random_windows
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.training.build import build_state
from efftrain_cli.training.record import read_records
from efftrain_cli.training.stages import train_stages

SIZES = {
    "4x128": (4, 4, 128, 64, 12, 512),
    "6x384": (6, 6, 384, 256, 8, 512),
    "6x384-v50304": (6, 6, 384, 256, 8, 50304),
}
"""Layers, heads, width, context, batch, vocabulary."""

Steps = Callable[[int], None]
"""Trains so many steps."""


def efftrain(size: str, sets: Sequence[str], folder: Path) -> Steps:
    layers, heads, width, context, batch, vocabulary = SIZES[size]
    shape = [f"model.n_layer={layers}", f"model.n_head={heads}", f"model.n_embd={width}"]
    shape += [f"model.seq_len={context}", f"train.batch_size={batch}", "train.compile=off"]
    shape += [f"train.micro_batch_tokens={batch * context}", "train.tokens=1_000_000_000"]
    shape += ["eval={every = 1_000_000, windows = 1}", "optim.warmup_steps=100"]
    recipe = load_recipe("quickstart", [*shape, *sets])
    folder.mkdir()
    windows = random_windows(recipe, vocabulary, folder)
    state = build_state(recipe, vocabulary, torch.device("cpu"))
    records = train_stages(state, recipe, windows, windows.validation(1), None)

    def steps(count: int) -> None:
        read_records(state, recipe, [next(records) for _ in range(count)])

    return steps


def nanogpt(size: str, folder: Path, gpt2_gelu: bool) -> Steps:
    sys.path.insert(0, str(folder))
    from model import GPT, GPTConfig

    layers, heads, width, context, batch, vocabulary = SIZES[size]
    shape = {"n_layer": layers, "n_head": heads, "n_embd": width, "vocab_size": vocabulary}
    model = GPT(GPTConfig(block_size=context, dropout=0.0, bias=True, **shape))
    if gpt2_gelu:
        for block in model.transformer.h:
            block.mlp.gelu = torch.nn.GELU(approximate="tanh")
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    data = np.random.default_rng(0).integers(0, vocabulary, 2_000_000, dtype=np.uint16)

    def rows(starts: Sequence[int]) -> torch.Tensor:
        pieces = [torch.from_numpy(data[i : i + context].astype(np.int64)) for i in starts]
        return torch.stack(pieces)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(data) - context - 1, (batch,)).tolist()
        return rows(starts), rows([i + 1 for i in starts])

    upcoming = draw()
    iteration = 0

    def steps(count: int) -> None:
        nonlocal upcoming, iteration
        for _ in range(count):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1, (iteration + 1) / 100)
            _, loss = model(*upcoming)
            upcoming = draw()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if iteration % 10 == 0:
                loss.item()
            iteration += 1

    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--gpt2-gelu", action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        ours = efftrain(options.size, options.sets, Path(folder, "ours"))
        if options.nanogpt:
            theirs = nanogpt(options.size, options.nanogpt, options.gpt2_gelu)
        else:
            theirs = efftrain(options.size, [], Path(folder, "theirs"))
        for side in (ours, theirs):
            side(2 * options.steps)
        times: dict[Steps, list[float]] = {ours: [], theirs: []}
        for number in range(options.rounds):
            for side in (ours, theirs) if number % 2 else (theirs, ours):
                start = clock()
                side(options.steps)
                times[side].append((clock() - start) / options.steps)
    ratios = [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    print(
        f"{options.size}, {options.threads} threads, {torch.backends.cpu.get_cpu_capability()}:"
        f" {1000 * statistics.median(times[ours]):.1f} ms against"
        f" {1000 * statistics.median(times[theirs]):.1f} ms;"
        f" ratio {median:.3f}, quartiles {low:.3f} to {high:.3f}"
    )


if __name__ == "__main__":
    main()
