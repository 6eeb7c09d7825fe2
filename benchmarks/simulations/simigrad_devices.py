"""What a study's schedules of the batch size would cost on data-parallel devices:
docs/evidence/simigrad.md's table of hours.

    python benchmarks/simulations/simigrad_devices.py STUDY ARM ... --seed 10

Reads the batch of every step of the arms' runs. Each stands for a step of GPT-2 117M with `--times`
as many sequences of 1,024 tokens; its time is that of docs/scaling.md's model for replicas and
their update, with two sums of gradients where SimiGrad measured. That a large model's schedule
would look alike is an assumption: only the steps were trained, and at a small size.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from efftrain_cli.model.flops import flops_per_token, parameter_count
from efftrain_cli.plan.cluster import Cluster, step_time
from efftrain_cli.plan.cost import likely_vocabulary
from efftrain_cli.plan.plan import model_config
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.run.directory import existing_run
from efftrain_cli.run.metrics import latest_rows

# 300 TFLOP/s a device, 300 GB/s within a node of 8, 50 GB/s out of it.
CLUSTERS = {
    1: Cluster(devices=1, flops_per_second=3e14, bandwidth=3e11),
    8: Cluster(devices=8, flops_per_second=3e14, bandwidth=3e11),
    64: Cluster(devices=64, flops_per_second=3e14, bandwidth=5e10),
}
UPDATE = 28 / 2e12
"""Seconds of the update a parameter, which every replica makes whole: 28 bytes at 2 TB/s."""


def seconds(row: Mapping[str, object], recipe: Recipe, cluster: Cluster, times: int) -> float:
    """The modelled time of one step of a run."""
    config = model_config(recipe, likely_vocabulary(recipe.data.tokenizer))
    most = -(-int(str(row["batch_size"])) * times // cluster.devices)
    flops = (
        most
        * recipe.model.seq_len
        * flops_per_token(config, config.seq_len, config.n_layer).with_logits
    )
    sums = 2 if row.get("simigrad_similarity") is not None else 1
    parameters = parameter_count(config)
    return (
        step_time(cluster, flops=flops, parameters=parameters, sums=sums).total
        + UPDATE * parameters
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study")
    parser.add_argument("arms", nargs="+", metavar="ARM")
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--times", type=int, default=64)
    options = parser.parse_args()
    recipe = load_recipe("gpt2-117m")
    print("| arm | steps | " + " | ".join(f"on {devices}" for devices in CLUSTERS) + " |")
    print("|---|--:|" + "--:|" * len(CLUSTERS))
    first: list[float] = []
    for arm in options.arms:
        rows = [
            row
            for row in latest_rows(existing_run(f"{options.study}-{arm}-seed{options.seed}"))
            if row.get("batch_size")
        ]
        times = [
            sum(seconds(row, recipe, cluster, options.times) for row in rows)
            for cluster in CLUSTERS.values()
        ]
        first = first or times
        cells = (
            f"{time:,.0f} s, {round(100 * (time / base - 1)):+d} %".replace("+0 ", "0 ")
            for time, base in zip(times, first, strict=True)
        )
        print(f"| {arm} | {len(rows)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
