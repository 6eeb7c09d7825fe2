"""Two processes with a thread each, against one with two threads: what ranks cost.

    python benchmarks/speed/two_processes.py [--rounds 3] [--steps 5]

`efftrain bench` of 6 x 384 on one device with two threads and on two devices (gloo), in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

SETS = ("model.n_layer=6", "model.n_embd=384", "model.n_head=6")


def bench(devices: int, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "efftrain_cli", "bench", "--recipe", "small"]
    for key in SETS:
        command += ["--set", key]
    command += ["--device", "cpu", "--devices", str(devices), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(2 // devices)}
    output = subprocess.check_output([*command, "--format", "json"], env=environment)
    return json.loads(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    results: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for _ in range(options.rounds):
        for devices, found in results.items():
            found.append(bench(devices, options.steps))
    rates = {n: [each["tokens_per_second"] for each in found] for n, found in results.items()}
    ratio = statistics.median(b / a for a, b in zip(rates[1], rates[2], strict=True))
    print(f"two processes reach {ratio:.2f} of one's tokens/s; their step, ms:")
    for phase in results[2][0]["phases"]:
        seconds = statistics.median(each["phases"][phase] for each in results[2])
        print(f"  {phase:10} {1000 * seconds:8.1f}")


if __name__ == "__main__":
    main()
