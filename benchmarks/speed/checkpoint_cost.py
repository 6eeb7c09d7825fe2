"""Seconds in which saving blocks training.

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
from efftrain_cli.training import checkpoint
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
    wall = []
    cpu = []
    with tempfile.TemporaryDirectory(prefix=".checkpoint-cost.", dir=options.folder) as folder:
        path = Path(folder, "checkpoint")
        for _ in range(options.saves + 1):
            shutil.rmtree(path, ignore_errors=True)
            start, used = time.perf_counter(), time.process_time()
            checkpoint.write(path, state.progress, dump_recipe(recipe), files)
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - used)
    # The first save warms the disk's cache up.
    seconds, busy = statistics.median(wall[1:]), statistics.median(cpu[1:])
    print(f"{seconds:.2f} s, {busy:.2f} s of CPU time")


if __name__ == "__main__":
    main()
