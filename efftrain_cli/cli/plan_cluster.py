"""`efftrain plan-cluster`."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.options import Overrides, RecipeOption
from efftrain_cli.foundation.errors import UsageError


@app.command(
    "plan-cluster",
    rich_help_panel="This machine",
    examples=("efftrain plan-cluster --recipe small --devices 8 --bandwidth 9 --flops 1e11",),
)
def plan_cluster(
    recipe: RecipeOption,
    devices: Annotated[int, Option(min=1, help="Devices, of all nodes together.")],
    bandwidth: Annotated[float, Option(min=1e-6, help="GB/s out of one device, within a node.")],
    nodes: Annotated[int, Option(min=1, help="Nodes.")] = 1,
    between: Annotated[
        float | None, Option(min=1e-6, help="GB/s out of one node, all its links together.")
    ] = None,
    flops: Annotated[
        float | None,
        Option(min=1.0, help="FLOP/s of one device in training; default: as measured here."),
    ] = None,
    memory_bandwidth: Annotated[
        float, Option(min=1e-3, help="GB/s of one device's memory.")
    ] = 2000.0,
    latency: Annotated[
        float, Option(min=0, help="Microseconds of a message between two devices.")
    ] = 10.0,
    set_: Overrides = None,
) -> None:
    """Predict step time, memory and efficiency on many devices, from a rate and bandwidths; trains nothing.

    The model is stated in docs/scaling.md. It says where short steps, such as
    those of a sequence length warmup, wait for the network.
    """
    from efftrain_cli.foundation.console import (
        Row,
        counted,
        human_bytes,
        human_flops,
        human_seconds,
        table_lines,
    )
    from efftrain_cli.plan.cluster import Cluster
    from efftrain_cli.plan.cluster import plan_cluster as plan
    from efftrain_cli.recipe.recipe import load_recipe
    from efftrain_cli.run.rates import measured_rate

    loaded = load_recipe(recipe, set_ or [])
    if nodes > 1 and between is None:
        raise UsageError(
            f"--nodes {nodes} are joined by a network\ngive its speed as --between GB/s out of one node, 50 for 400 Gb/s"
        )
    source = "as given"
    if flops is None:
        rate = measured_rate("auto", loaded)
        if rate is None:
            raise UsageError(
                "nothing was measured here yet\ngive --flops, or run `efftrain bench` with the same recipe"
            )
        flops, source = rate.flops_per_second, f"by {rate.source} ({rate.device}, {rate.time[:10]})"
    cluster = Cluster(
        devices=devices,
        nodes=nodes,
        flops_per_second=flops,
        bandwidth=bandwidth * 1e9,
        between=float("inf") if between is None else between * 1e9,
        memory_bandwidth=memory_bandwidth * 1e9,
        latency=latency * 1e-6,
    )
    dtype = "fp32" if loaded.train.dtype in ("fp32", "tf32") else "bf16"
    plans = plan(loaded, cluster, dtype)
    joined = "" if nodes == 1 else f", {between:g} GB/s between {nodes} nodes"
    print(
        f"assumed    {human_flops(flops)}/s per device, {source}; {bandwidth:g} GB/s between devices{joined}; memory at "
        f"{memory_bandwidth:g} GB/s, {latency:g} microseconds a message, {dtype}\n"
    )
    rows: list[Row] = []
    for each in plans:
        full = each.full
        step = map(human_seconds, (full.total, full.compute, full.communication, full.update))
        run = (
            f"{each.efficiency:.0%}",
            human_bytes(each.memory_bytes),
            human_seconds(each.seconds),
        )
        rows.append((each.strategy, *step, *run))
    head = ("strategy", "full step", "compute", "network", "update", "efficiency", "memory", "run")
    print("\n".join([*table_lines(head, rows), ""]))
    for each in plans:
        if each.bound:
            batch, seq_len, _ = max(each.bound, key=lambda kind: kind[0] * kind[1])
            print(
                f"{each.strategy}: {counted(each.bound_steps, 'step')} of {each.steps:,} are bound by the network, up to "
                f"{batch:,} x {seq_len:,} tokens: it takes longer there than computing"
            )
    if len(plans) == 1:
        print("a recipe with these methods can only be replicated: its parts cannot be sharded")
    if len(plans) == 3:
        print(
            "hybrid shards within a node and replicates between nodes: a prediction only, efftrain has not built it"
        )
