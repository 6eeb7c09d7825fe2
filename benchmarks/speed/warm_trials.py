"""Wall time of a sweep of many short runs, over their training and evaluation.

    python benchmarks/speed/warm_trials.py [--runs 20] [--jobs 1]

A sweep that takes more than its runs' training and evaluation, 4 s, and 0.25 s a run ends with
exit code 1: Python, PyTorch and the package are imported once. Ratios of busy machines say little.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTINGS = (
    "model.n_layer=1",
    "model.n_embd=32",
    "model.n_head=2",
    "model.seq_len=64",
    "optim.warmup_steps=4",
    "train.tokens=80000",
    "train.compile=off",
)


def training_seconds(run: Path) -> float:
    """Return the seconds of a run's training, evaluation and checkpoints."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluation = sum(row.get("eval_seconds") or 0.0 for row in rows)
    return rows[-1]["train_seconds"] + rows[-1]["checkpoint_seconds"] + evaluation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "EFFTRAIN_RUNS": folder, "OMP_NUM_THREADS": "1"}
        program = [sys.executable, "-P", "-m", "efftrain_cli"]
        words = [word for setting in SETTINGS for word in ("--set", setting)]
        prepare = [*program, "prepare", "--recipe", "quickstart", *words]
        subprocess.run(prepare, env=environment, check=True, capture_output=True)

        seeds = f"0..{options.runs - 1}"
        sweep = [*program, "sweep", "quickstart", "--seeds", seeds, "--jobs", str(options.jobs)]
        start = time.perf_counter()
        subprocess.run([*sweep, *words], env=environment, check=True, capture_output=True)
        wall = time.perf_counter() - start
        training = sum(map(training_seconds, Path(folder).glob("*-seed*")))

    limit = training / options.jobs + 4 + 0.25 * options.runs
    print(f"{options.runs} runs, {options.jobs} at once: {wall:.1f} s, limit {limit:.1f} s")
    print(f"training and evaluation: {training:.1f} s")
    sys.exit(wall > limit)


if __name__ == "__main__":
    main()
