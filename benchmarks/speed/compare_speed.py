"""How long `efftrain compare` takes on many long runs, and how much memory.

    python benchmarks/speed/compare_speed.py [--runs 50] [--steps 100000]

Makes synthetic run directories (about 3 GB for 50 runs of 100,000 steps) in a temporary folder.
Reads them all in a process of its own, whose imports are not counted, and compares them in further
ones, once for each format. Prints wall seconds, CPU seconds of that process and its largest
resident memory, of which mapped pages of metrics.jsonl are part.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from efftrain_cli.run.lines import sealed  # noqa: E402
from tests.fake_runs import rows_of, val_loss, write_run  # noqa: E402

RECIPES = 5
EVERY = 100
READ = """
import sys, time
from pathlib import Path
from efftrain_cli.run.reading import load_run
import pyarrow.json
paths = sorted(Path(sys.argv[1]).glob("recipe*"))
start = time.monotonic(), time.process_time()
rows = sum(load_run(path).facts["updates"] for path in paths)
print(rows, time.monotonic() - start[0], time.process_time() - start[1])
"""
"""Reads the runs in the folder given; prints their rows, wall seconds and CPU seconds."""


def make_runs(root: Path, runs: int, steps: int) -> None:
    """Writes the runs. Seeds of a recipe differ in their validation losses only."""
    for i in range(RECIPES):
        speed = 1.0 + 0.1 * i
        rows = rows_of(steps, i, 40 * speed / steps * 3, every=EVERY)
        lines = [sealed(row) + "\n" for row in rows]
        for seed in range(runs // RECIPES):
            draw = random.Random(seed)
            for step in range(0, steps + 1, EVERY):
                loss = val_loss(step, seed, 40 * speed / steps * 3) + draw.gauss(0, 0.001)
                lines[step] = sealed(rows[step] | {"val_loss": loss}) + "\n"
            more = "" if i == 0 else f"\n[progressive_layer_drop]\ntheta = {0.5 + 0.05 * i}\n"
            path = write_run(root, f"recipe{i}", seed, steps=steps, more=more, rows=[])
            with (path / "metrics.jsonl").open("w") as file:
                file.writelines(lines)


def measure_reading(root: Path) -> tuple[int, float, float]:
    """Rows, wall seconds and CPU seconds of reading all runs for a comparison."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", READ, str(root)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    rows, wall, cpu = done.stdout.split()
    return int(float(rows)), float(wall), float(cpu)


def measure(root: Path, *words: str) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and largest resident MiB of `efftrain compare WORDS`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "efftrain_cli", "compare", "recipe*", *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "EFFTRAIN_RUNS": str(root)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    wall = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, after.ru_maxrss / 1024


def main() -> None:
    """Makes the runs, compares them and prints what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=50, help=f"number of runs, a multiple of {RECIPES}"
    )
    parser.add_argument(
        "--steps", type=int, default=100_000, help=f"steps of each run, a multiple of {EVERY}"
    )
    parser.add_argument(
        "--folder", type=Path, help="keep the runs here, and use those that are there"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not list(folder.glob("recipe*")):
            make_runs(folder, options.runs, options.steps)
        size = sum(path.stat().st_size for path in folder.glob("*/metrics.jsonl"))
        print(
            f"{options.runs} runs of {options.steps:,} steps, {size / 1e9:.2f} GB of metrics.jsonl"
        )
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        rows, wall, cpu = measure_reading(folder)
        print(f"read   {wall:6.1f} s wall  {cpu:6.1f} s CPU  {rows:,} rows, without imports")
        for words in (("--format", "table"), ("--format", "html", "-o", os.devnull)):
            wall, cpu, memory = measure(folder, *words)
            print(f"{words[1]:6} {wall:6.1f} s wall  {cpu:6.1f} s CPU  {memory:6.0f} MiB")


if __name__ == "__main__":
    main()
