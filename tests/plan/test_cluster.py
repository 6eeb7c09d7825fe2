"""The model of many devices, by numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.plan.cluster import Cluster, plan_cluster, step_time
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sections import Data, Model, Optim, Train

EIGHT = Cluster(
    devices=8,
    nodes=2,
    flops_per_second=1e14,
    bandwidth=1e11,
    between=math.inf,
    memory_bandwidth=1e12,
)
RECIPE = Recipe(
    model=Model(n_layer=2, n_head=2, n_embd=32, seq_len=32),
    optim=Optim(lr=1e-3),
    data=Data(tokenizer="bpe:300"),
    train=Train(tokens=6 * 32 * 20, batch_size=6, micro_batch_tokens=32, dtype="fp32"),
)


def test_replicas_add_up_once_around_a_ring_and_all_make_the_whole_update() -> None:
    """4 TFLOPs at 100 TFLOP/s: 40 ms. 4 GB at 100 GB/s, 2 * 7/8 times: 70 ms. 28 GB at 1 TB/s: 28 ms."""
    time = step_time("replicate", EIGHT, flops=4e12, parameters=10**9)
    assert (time.compute, time.communication, time.update) == pytest.approx((0.040, 0.070, 0.028))
    assert time.total == pytest.approx(0.138) and time.is_bound
    measuring = step_time("replicate", EIGHT, flops=4e12, parameters=10**9, sums=2)
    assert measuring.communication == pytest.approx(0.140)
    # Lanes: 4 GB in each of three rounds of pairs.
    assert step_time(
        "replicate", EIGHT, flops=4e12, parameters=10**9, lanes=True
    ).communication == pytest.approx(0.120)


def test_shards_gather_twice_and_scatter_once_per_micro_batch_beside_the_computation() -> None:
    """Each is half a ring of 70 ms: 105 ms per micro-batch; an eighth of 28 ms of update."""
    time = step_time("shard", EIGHT, flops=4e12, parameters=10**9, micro_batches=2)
    assert time.communication == pytest.approx(0.210) and time.total == pytest.approx(0.2135)
    assert step_time(
        "shard", EIGHT, flops=4e13, parameters=10**9, micro_batches=2
    ).total == pytest.approx(0.4035)


def test_a_hybrid_adds_up_its_shares_between_nodes() -> None:
    """Four devices: 1.5 * 2 * 3/4 * 40 ms = 90 ms. Two nodes at 50 GB/s: 2 * 1/2 * 80 ms. A quarter of the update."""
    time = step_time("hybrid", replace(EIGHT, between=5e10), flops=4e12, parameters=10**9)
    assert time.communication == pytest.approx(0.170) and time.total == pytest.approx(0.177)


def test_a_ring_is_as_fast_as_its_slowest_link_and_has_latency() -> None:
    assert replace(EIGHT, between=1e10).ring(4e9) == pytest.approx(0.7)
    assert replace(EIGHT, devices=4, latency=1e-5).ring(0) == pytest.approx(6e-5)
    assert replace(EIGHT, nodes=1, between=1e9).ring(4e9) == replace(EIGHT, nodes=1).ring(4e9), (
        "one node sends nothing out"
    )
    assert replace(EIGHT, devices=1).ring(4e9) == 0


def test_efficiency_counts_the_sequences_of_the_busiest_device() -> None:
    """Six sequences, one at a time, on four devices: two rounds for the first ones, so 6 of 8 places are used."""
    free = replace(EIGHT, devices=4, nodes=1, bandwidth=math.inf, memory_bandwidth=math.inf)
    assert [plan.efficiency for plan in plan_cluster(RECIPE, free, "fp32")] == pytest.approx(
        [0.75, 0.75]
    )
    assert [
        plan.efficiency for plan in plan_cluster(RECIPE, replace(free, devices=2), "fp32")
    ] == pytest.approx([1, 1])


def test_short_steps_of_a_warmup_are_bound_by_the_network_first() -> None:
    warming = replace(RECIPE, seq_len_warmup=SeqLenWarmup(start=8, steps=12))
    cluster = replace(EIGHT, devices=2, nodes=1, flops_per_second=1e9)
    (whole, _) = plan_cluster(RECIPE, cluster, "fp32")
    # Half as fast as would hold up a full step.
    slow = replace(
        cluster, bandwidth=cluster.bandwidth * whole.full.communication / whole.full.compute * 2
    )
    (plan, _) = plan_cluster(warming, slow, "fp32")
    lengths = {seq_len for _, seq_len, _ in plan.bound}
    assert min(lengths) == 8 and max(lengths) < 32 and 0 < plan.bound_steps < plan.steps
    assert not plan.full.is_bound
    (all_bound, _) = plan_cluster(warming, replace(slow, bandwidth=slow.bandwidth / 4), "fp32")
    assert all_bound.bound_steps == all_bound.steps


def test_shards_divide_the_state_and_not_the_activations() -> None:
    """A billion parameters at 16 bytes on 8 devices: 14 GB less on each, but for gathered blocks of 4 x 2 x 50 MB and
    the embedding."""
    large = replace(
        RECIPE,
        model=Model(n_layer=20, n_head=16, n_embd=2048, seq_len=32),
        train=replace(RECIPE.train, batch_size=8),
    )
    (replicas, shards) = plan_cluster(large, replace(EIGHT, nodes=1), "fp32")
    saved = replicas.memory_bytes - shards.memory_bytes
    assert saved == pytest.approx(14e9 - 0.4e9, rel=0.03)


def test_methods_that_need_whole_gradients_are_replicated() -> None:
    measuring = replace(
        RECIPE,
        train=replace(RECIPE.train, tokens=8 * 32 * 21, batch_size=8),
        simigrad=SimiGrad(target=0.5, min_batch_size=8, max_batch_size=64, interval=7),
    )
    (plan,) = plan_cluster(measuring, replace(EIGHT, nodes=1), "fp32")
    usual = step_time(
        "replicate", replace(EIGHT, nodes=1), flops=0, parameters=35_936
    ).communication
    assert plan.strategy == "replicate" and plan.full.communication == pytest.approx(
        usual, rel=0.05
    )  # 18 of 21 steps add up once


@pytest.mark.parametrize(
    ("devices", "nodes", "message"),
    [(8, 1, "a step of 6 sequences"), (6, 4, "not a multiple of --nodes 4")],
)
def test_what_cannot_be_dealt_is_refused(devices: int, nodes: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_cluster(RECIPE, replace(EIGHT, devices=devices, nodes=nodes), "fp32")
