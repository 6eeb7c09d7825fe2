"""The model of many devices, by numbers worked out by hand."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.plan.cluster import Cluster, ClusterPlan, plan_cluster, step_time
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.recipe.sections import Model, Parallel
from tests.conftest import cli
from tests.tiny import changed, tiny_recipe

EIGHT = Cluster(devices=8, flops_per_second=1e14, bandwidth=1e11, latency=0.0)
RECIPE = tiny_recipe(
    "model.n_embd=32",
    "model.seq_len=32",
    "data.tokenizer=bpe:300",
    "train.tokens=3840",
    "train.batch_size=6",
)


def test_replicas_add_up_once_around_a_ring():
    """4 TFLOPs at 100 TFLOP/s: 40 ms. 4 GB at 100 GB/s, 2 * 7/8 times: 70 ms."""
    time = step_time(EIGHT, flops=4e12, parameters=10**9)
    assert time == pytest.approx((0.040, 0.070, 0.110)) and time.is_bound
    assert step_time(EIGHT, flops=4e12, parameters=10**9, sums=2).network == pytest.approx(0.140)
    # Lanes: 4 GB in each of three rounds of pairs.
    assert step_time(EIGHT, flops=4e12, parameters=10**9, lanes=True).network == pytest.approx(
        0.120
    )


def test_shards_gather_twice_and_scatter_once_per_micro_batch_beside_the_computation():
    """Each is half a ring of 70 ms: 105 ms per micro-batch."""
    time = step_time(EIGHT, flops=4e12, parameters=10**9, sharded_micro_batches=2)
    assert time == pytest.approx((0.040, 0.210, 0.210))
    time = step_time(EIGHT, flops=4e13, parameters=10**9, sharded_micro_batches=2)
    assert time == pytest.approx((0.400, 0.210, 0.400))


def test_a_ring_has_latency():
    """2 * 3 messages of 10 microseconds."""
    assert replace(EIGHT, devices=4, latency=1e-5).ring(0) == pytest.approx(6e-5)
    assert replace(EIGHT, devices=1).ring(4e9) == 0


SHARDED = {"parallel": Parallel(strategy="shard")}


@pytest.mark.parametrize("parallel", [{}, SHARDED], ids=["replicas", "shards"])
def test_efficiency_counts_the_sequences_of_the_busiest_device(parallel):
    """Six sequences, one at a time, on four devices: two rounds for the first ones, so 6 of 8
    places are used."""
    recipe = replace(RECIPE, **parallel)
    free = replace(EIGHT, devices=4, bandwidth=math.inf)
    assert plan_cluster(recipe, free).efficiency == pytest.approx(0.75)
    assert plan_cluster(recipe, replace(free, devices=2)).efficiency == pytest.approx(1)


def bound_steps(plan: ClusterPlan) -> int:
    return sum(count for _, _, count in plan.bound)


def test_short_steps_of_a_warmup_are_bound_by_the_network_first():
    warming = changed(RECIPE, "seq_len_warmup={start = 8, steps = 12}")
    cluster = replace(EIGHT, devices=2, flops_per_second=1e9)
    whole = plan_cluster(RECIPE, cluster)
    # Half as fast as would hold up a full step.
    slow = replace(
        cluster, bandwidth=cluster.bandwidth * whole.full.network / whole.full.compute * 2
    )
    plan = plan_cluster(warming, slow)
    lengths = {seq_len for _, seq_len, _ in plan.bound}
    assert min(lengths) == 8 and max(lengths) < 32 and 0 < bound_steps(plan) < plan.steps
    assert not plan.full.is_bound
    all_bound = plan_cluster(warming, replace(slow, bandwidth=slow.bandwidth / 4))
    assert bound_steps(all_bound) == all_bound.steps


def test_shards_divide_the_state_and_not_the_activations():
    """A billion parameters at 16 bytes on 8 devices: 14 GB less on each, but for gathered blocks of
    4 x 2 x 50 MB and the embedding."""
    large = replace(
        RECIPE,
        model=Model(n_layer=20, n_head=16, n_embd=2048, seq_len=32),
        train=replace(RECIPE.train, batch_size=8),
    )
    replicas, shards = (plan_cluster(replace(large, **how), EIGHT) for how in ({}, SHARDED))
    saved = replicas.memory_bytes - shards.memory_bytes
    assert saved == pytest.approx(14e9 - 0.4e9, rel=0.03)


def test_steps_that_measure_similarity_add_up_twice():
    measuring = changed(
        RECIPE,
        f"train.tokens={8 * 32 * 21}",
        "train.batch_size=8",
        "simigrad={target = 0.5, min_batch_size = 8, max_batch_size = 64, interval = 7}",
    )
    free = replace(EIGHT, flops_per_second=math.inf)
    plan = plan_cluster(measuring, free)
    usual = step_time(
        free, flops=0, parameters=36_736
    ).network  # 320 rows of 32, 32 positions, two blocks, a norm
    # 18 of 21 steps add up once, 3 twice.
    assert plan.seconds == pytest.approx(24 * usual, rel=0.01)


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(UsageError, match="a step of 6 sequences cannot be shared by 8 devices"):
        plan_cluster(RECIPE, EIGHT)


SHAPE = ["model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.seq_len=32"]


@pytest.fixture
def benched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which `efftrain bench` has measured 1 GFLOP/s."""
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path))
    rate = {"flops_per_second": 1e9, "flops_per_token": 1e6, "n_layer": 2, "n_embd": 32}
    rate |= {"device": "cpu", "device_kind": "cpu", "source": "bench"}
    line = {"machine": os.uname().nodename, "time": "2026-01-01T00:00:00+00:00", **rate}
    (tmp_path / "bench.jsonl").write_text(json.dumps(line) + "\n")


def plan_of(*arguments: str) -> Result:
    sets = [word for key in SHAPE for word in ("--set", key)]
    return cli("pretrain", "--recipe", "unstable-slw", *sets, "--plan", *arguments)


def test_pretrain_plans_for_several_devices_from_a_benchmark(benched):
    result = plan_of("--devices", "8", "--nodes", "2", "--bandwidth", "0.001")
    recipe = load_recipe("unstable-slw", SHAPE)
    want = plan_cluster(recipe, Cluster(devices=8, flops_per_second=1e9, bandwidth=1e6))
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("devices ")]
    assert line.startswith("devices    8 on 2 nodes, 0.001 GB/s: ")
    assert f"efficiency {want.efficiency:.0%}, " in line and "modelled, not measured" in line
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("network ")]
    assert line.startswith(f"network    holds up {bound_steps(want):,} step")
    assert "devices " not in plan_of().stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--devices", "6", "--nodes", "4", "--bandwidth", "9"], "not a multiple of --nodes 4"),
        (["--devices", "8"], "add --bandwidth GB/s"),
        (["--nodes", "2"], "add --bandwidth GB/s"),
        (["--bandwidth", "9"], "give --plan --devices N"),
        (["--devices", "2", "--bandwidth", "9", "--format", "csv"], "no --format"),
    ],
)
def test_options_that_do_not_belong_together(benched, arguments, message):
    with pytest.raises(UsageError, match=message):
        plan_of(*arguments)


def test_without_a_measurement_it_names_bench(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="`efftrain bench` with the same recipe"):
        plan_of("--devices", "2", "--bandwidth", "9")
