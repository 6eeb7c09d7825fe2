"""Does the model of `pretrain --plan --devices` predict what `bench --devices 2` measures? On a
quiet machine:

    python benchmarks/simulations/cluster_model.py

Measured first, and put into the model: the rate of forward and backward passes and the bandwidth of
the update, of two processes side by side that know nothing of each other (so that the cores'
sharing of memory and clock is not taken for communication), and gloo's bandwidth and latency, from
sums of two sizes. Then the same recipe on two devices. Rounds alternate; medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

ROUNDS = 3
SIZES = (1 << 12, 1 << 23)
"""Elements."""


def bench(recipe: Sequence[str], *more: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "efftrain_cli",
        "bench",
        "--recipe",
        *recipe,
        "--device",
        "cpu",
        "--format",
        "json",
        *more,
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def figures(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(process.returncode)
    return json.loads(out)


def sum_seconds() -> list[float]:
    """Seconds of a sum over two processes, of each of SIZES: medians."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank"],
            env={**common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    outputs = [process.communicate()[0] for process in processes]
    return json.loads(outputs[0])


def rank() -> None:
    import torch

    from efftrain_cli.training.joining import joined

    torch.set_num_threads(1)
    with joined() as ranks:
        found = []
        for size in SIZES:
            tensor, seconds = torch.ones(size), []
            for _ in range(9):
                ranks.sync_stop_flag(0)
                start = time.perf_counter()
                ranks.all_reduce([tensor])
                seconds.append(time.perf_counter() - start)
            found.append(statistics.median(seconds))
        print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank()
        return
    from efftrain_cli.plan.cluster import Cluster, step_time

    recipe = [arguments.recipe, *(word for setting in arguments.set for word in ("--set", setting))]
    alone, together, sums = [], [], []
    for _ in range(ROUNDS):
        pair = [bench(recipe), bench(recipe)]
        alone += [figures(process) for process in pair]
        together.append(figures(bench(recipe, "--devices", "2")))
        sums.append(sum_seconds())
    small, large = (statistics.median(column) for column in zip(*sums, strict=True))
    step = alone[0]
    parameters = step["parameters"]
    update = statistics.median(f["phases"]["optimizer"] + f["phases"]["measures"] for f in alone)
    compute = statistics.median(f["seconds_per_step"] for f in alone) - update
    flops = step["flops_per_token"] * step["tokens_per_step"]
    cluster = Cluster(
        devices=2,
        flops_per_second=flops / compute,
        bandwidth=4 * (SIZES[1] - SIZES[0]) / (large - small),
        latency=small / 2,
    )
    summed = step_time(cluster, flops=flops / 2, parameters=parameters)
    predicted = summed.total + update  # each replica makes the whole update
    measured = statistics.median(f["seconds_per_step"] for f in together)
    low, high = (pick(f["seconds_per_step"] for f in together) for pick in (min, max))
    print(
        f"{arguments.recipe}, {parameters:,} parameters; gloo {cluster.bandwidth / 1e9:.2f} GB/s,"
        f" {1e6 * cluster.latency:.0f} us"
    )
    print(
        f"one process, beside another: {1000 * (compute + update):.0f} ms a step,"
        f" {1000 * update:.0f} of them the update"
    )
    print(
        f"two devices: predicted {1000 * predicted:.0f} ms ({1000 * summed.network:.0f} the sum),"
        f" measured {1000 * measured:.0f} ms ({1000 * low:.0f} to {1000 * high:.0f};"
        f" {1000 * statistics.median(f['phases']['sum'] for f in together):.0f} the sum):"
        f" {predicted / measured - 1:+.0%}"
    )


if __name__ == "__main__":
    main()
