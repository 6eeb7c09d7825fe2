"""Seconds in which saving blocks training, with and without the hashes of its manifest.

    python benchmarks/speed/checkpoint_cost.py [--saves 3] [--folder DISK]

The state is that of GPT-2 117M: fp32 weights and both of Adam's moments, 1.49 GB.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from efftrain_cli.training import checkpoint
from efftrain_cli.training.build import build_state


def seconds_of(function: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU seconds."""
    start, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("."))
    options = parser.parse_args()
    recipe = load_recipe("gpt2-117m")
    state = build_state(recipe, 50257, torch.device("cpu"))
    files = {
        "optimizer.safetensors": state.optimizer.tensors(),
        "model.safetensors": state.weights(),
    }
    sha256_of = checkpoint.sha256_of
    folder = Path(tempfile.mkdtemp(prefix=".checkpoint-cost.", dir=options.folder))
    times: dict[str, list[tuple[float, float]]] = {}
    try:
        for number in range(options.saves + 1):
            for kind in ("without hashes", "save", "read and verify"):
                path = folder / str(number)
                checkpoint.sha256_of = (lambda _: "") if kind == "without hashes" else sha256_of
                if kind == "read and verify":
                    used = seconds_of(lambda path=path: checkpoint.load(path, state, recipe))
                else:
                    shutil.rmtree(path, ignore_errors=True)
                    text = dump_recipe(recipe)
                    arguments = (path, state.progress, text, files)
                    used = seconds_of(lambda words=arguments: checkpoint.write(*words))
                if number:  # the first warms the disk's cache up
                    times.setdefault(kind, []).append(used)
            shutil.rmtree(path)
    finally:
        shutil.rmtree(folder)
    for kind, pairs in times.items():
        wall, cpu = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"{kind:16} {wall:6.2f} s, {cpu:6.2f} s of CPU time")


if __name__ == "__main__":
    main()
