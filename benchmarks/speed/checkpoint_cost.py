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
from pathlib import Path

import torch

from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from efftrain_cli.training import checkpoint, loading
from efftrain_cli.training.build import build_state


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
    text = dump_recipe(recipe)
    sha256_of = checkpoint.sha256_of
    times: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix=".checkpoint-cost.", dir=options.folder) as folder:
        path = Path(folder, "checkpoint")
        for number in range(options.saves + 1):
            for kind in ("without hashes", "save", "read and verify"):
                checkpoint.sha256_of = (lambda _: "") if kind == "without hashes" else sha256_of
                if kind != "read and verify":
                    shutil.rmtree(path, ignore_errors=True)
                start, cpu = time.perf_counter(), time.process_time()
                if kind == "read and verify":
                    loading.load(path, state, recipe)
                else:
                    checkpoint.write(path, state.progress, text, files)
                used = (time.perf_counter() - start, time.process_time() - cpu)
                if number:  # the first warms the disk's cache up
                    times.setdefault(kind, []).append(used)
    for kind, pairs in times.items():
        wall, cpu = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"{kind:16} {wall:6.2f} s, {cpu:6.2f} s of CPU time")


if __name__ == "__main__":
    main()
