"""Are two processes with a thread each as fast as one with two? Run by hand, on a quiet machine
with two cores or more:

    python benchmarks/speed/two_processes.py                 all: 20 minutes on two AVX2 cores
    python benchmarks/speed/two_processes.py 6x384 exchange  a part: 6x384, 117m, exchange

`efftrain bench` of one recipe, on one device with two threads and on two devices (gloo) with one
thread each, in turn; medians over the rounds. Then the agreement before each sum, timed when nobody
waits for the slowest, on two and four processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

SHAPES = {
    "6x384": (3, ("small", "model.n_layer=6", "model.n_embd=384", "model.n_head=6")),
    "117m": (
        1,
        (
            "gpt2-117m",
            "model.seq_len=512",
            "train.batch_size=4",
            "train.micro_batch_tokens=1024",
            "train.compile=off",
        ),
    ),
}
"""Rounds; recipe and overrides. A step of 117m has 2,048 tokens: more of them would make the sum's
share smaller."""
PARTS = (*SHAPES, "exchange")
EXCHANGE_MS = 2.0
RATIO = 0.9


def bench(recipe: str, *sets: str, devices: int, threads: int, steps: int) -> dict[str, Any]:
    words = [word for key in sets for word in ("--set", key)]
    command = [
        sys.executable,
        "-m",
        "efftrain_cli",
        "bench",
        "--recipe",
        recipe,
        *words,
        "--device",
        "cpu",
        "--format",
        "json",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [*command, "--devices", str(devices), "--steps", str(steps)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout)


def median(found: list[dict[str, Any]], key: str) -> float:
    return statistics.median(float(each[key]) for each in found)


def compare(name: str) -> None:
    rounds, (recipe, *sets) = SHAPES[name]
    one, two = [], []
    for _ in range(rounds):
        one.append(bench(recipe, *sets, devices=1, threads=2, steps=5))
        two.append(bench(recipe, *sets, devices=2, threads=1, steps=5))
    ratio = median(one, "seconds_per_step") / median(two, "seconds_per_step")
    phases = {
        phase: statistics.median(each["phases"][phase] for each in two)
        for phase in two[0]["phases"]
    }
    print(
        f"{name}: {one[0]['parameters']:,} parameters, {one[0]['tokens_per_step']:,} tokens a step,"
        f" {rounds} {'rounds' if rounds > 1 else 'round'} of 5 steps\n  one process, two threads   "
        f"   {median(one, 'tokens_per_second'):8.0f} tokens/s\n  two processes, a thread each "
        f" {median(two, 'tokens_per_second'):8.0f} tokens/s: {ratio:.2f} of it"
        f" ({'at least' if ratio >= RATIO else 'BELOW'} {RATIO})\n  of"
        f" {1000 * median(two, 'seconds_per_step'):.0f} ms: "
        + ", ".join(f"{p} {1000 * s:.1f} ms" for p, s in phases.items()),
        flush=True,
    )


def exchange() -> None:
    for devices in (2, 4):
        found = [
            bench("small", devices=devices, threads=1, steps=5)["phases"]["exchange"]
            for _ in range(3)
        ]
        milliseconds = 1000 * statistics.median(found)
        verdict = (
            f" ({'under' if milliseconds < EXCHANGE_MS else 'NOT under'} {EXCHANGE_MS:.0f} ms)"
            if devices == 4
            else ""
        )
        print(f"exchange, {devices} processes: {milliseconds:.2f} ms{verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default all")
    parts = parser.parse_args().parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    for part in parts:
        exchange() if part == "exchange" else compare(part)


if __name__ == "__main__":
    main()
