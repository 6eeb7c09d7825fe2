"""What a recipe is expected to cost on many devices: a model of a step's time and of memory, from
the rate of one device and the bandwidth of the slowest link. No torch.

    compute   FLOPs of the device with most sequences / rate
    ring      2 (W - 1) / W bytes / bandwidth + 2 (W - 1) latency: each byte passes the slowest link
              of a ring twice

Replicas: compute + ring(gradient, fp32), one after the other, although on CUDA a part of the ring
hides behind the last backward pass. Shards: PyTorch gathers a block's weights twice and scatters
its gradient once per micro-batch, each half a ring, beside the computation: max(compute, all of
it). Nothing else is counted: neither data, evaluation, saving, nor what a slow device costs the
others. The update is part of the rate.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.step import StepPlan
from efftrain_cli.model.flops import block_parameters, inner_parameters, parameter_count
from efftrain_cli.plan.cost import likely_vocabulary, planned_dtype, training_bytes
from efftrain_cli.plan.plan import (
    accumulation_steps,
    assumed_result,
    model_config,
    plan_run,
)
from efftrain_cli.recipe.recipe import Recipe

LATENCY = 10e-6
"""Seconds of one message between two devices."""
BUCKET_BYTES = 1 << 26
"""Of a flat copy in which gradients are added up; four of them are under way at once."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices, and what is known of them."""

    devices: int
    flops_per_second: float
    """Of one device, over whole steps."""
    bandwidth: float
    """Bytes per second of the slowest link of a ring: out of a device, or out of a node if there
    are several."""
    latency: float = LATENCY

    def ring(self, size: float) -> float:
        """Return the seconds in which `size` bytes of every device are added up on all: twice
        around a ring."""
        return 2 * (self.devices - 1) * (size / self.devices / self.bandwidth + self.latency)


class StepTime(NamedTuple):
    """Seconds of one step."""

    compute: float
    network: float
    total: float

    @property
    def is_bound(self) -> bool:
        """Whether the network takes longer than computing."""
        return self.network > self.compute


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """What a recipe is expected to need on a cluster."""

    full: StepTime
    """Of the usual step with most tokens."""
    seconds: float
    """All steps."""
    efficiency: float
    """Seconds on one device / (seconds x devices)."""
    memory_bytes: int
    """Of one device."""
    bound: tuple[tuple[int, int, int], ...]
    """(batch size, sequence length, steps) of the kinds of steps that are bound by the network."""
    steps: int


def step_time(
    cluster: Cluster,
    *,
    flops: float,
    parameters: int,
    sharded_micro_batches: int = 0,
    sums: int = 1,
    lanes: bool = False,
) -> StepTime:
    """Return the time of a step.

    Args:
        flops: of the device that computes most.
        parameters: of the model.
        sharded_micro_batches: of one device, if the model is sharded; 0: replicas.
        sums: gradients that are added up, 2 if those of a batch's halves are compared.
        lanes: whether whole gradients are exchanged in pairs.
    """
    compute = flops / cluster.flops_per_second
    gradient = 4.0 * parameters
    if sharded_micro_batches:
        network = 1.5 * sharded_micro_batches * cluster.ring(gradient)
        return StepTime(compute, network, max(compute, network))
    network = sums * cluster.ring(gradient)
    if lanes:
        rounds = (cluster.devices - 1).bit_length()
        network = sums * rounds * (gradient / cluster.bandwidth + cluster.latency)
    return StepTime(compute, network, compute + network)


def memory_per_device(recipe: Recipe, devices: int, sequences: int, seq_len: int) -> int:
    """Return one device's bytes: activations; the state, or its share and two gathered blocks."""
    dtype = planned_dtype(recipe)
    config = model_config(recipe, likely_vocabulary(recipe.data.tokenizer))
    state = training_bytes(recipe, config, 0, seq_len, dtype=dtype, ranks=devices)
    whole = training_bytes(recipe, config, sequences, seq_len, dtype=dtype, ranks=devices)
    if not recipe.is_sharded:
        if devices > 1:
            whole += 4 * BUCKET_BYTES
        return whole
    tables = parameter_count(config) - inner_parameters(config)
    return state // devices + (whole - state) + 4 * (2 * block_parameters(config) + tables)


StepKind = tuple[int, int, bool]
"""(batch size, sequence length, whether the halves' gradients are compared): steps of one kind cost
the same."""


def plan_cluster(recipe: Recipe, cluster: Cluster) -> ClusterPlan:
    """Return what the whole of a recipe needs, sharded if it says so.

    Raises:
        UsageError: a step has fewer sequences than there are devices, or the recipe has a ring.
    """
    if recipe.delayed_gradients is not None:
        raise UsageError(
            "a ring of Ouroboros's modules passes activations, for which this model has no term\n "
            " --set ouroboros=false plans the rest"
        )
    vocab_size = likely_vocabulary(recipe.data.tokenizer)
    parameters = parameter_count(model_config(recipe, vocab_size))
    kinds: Counter[StepKind] = Counter()
    flops: defaultdict[StepKind, float] = defaultdict(float)
    plans: dict[StepKind, StepPlan] = {}
    for plan, progress in plan_run(recipe):
        kind = plan.batch_size, plan.seq_len, plan.measure_similarity
        kinds[kind] += 1
        flops[kind] += assumed_result(recipe, plan, vocab_size, progress.stage).flops
        plans[kind] = plan

    def tokens_and_count(kind: StepKind) -> tuple[int, int]:
        batch_size, seq_len, _ = kind
        return batch_size * seq_len, kinds[kind]

    largest = max(kinds, key=tokens_and_count)
    smallest = min(batch for batch, _, _ in kinds)
    if smallest < cluster.devices:
        raise UsageError(
            f"a step of {smallest} sequences cannot be shared by {cluster.devices} devices:"
            " each needs one\n"
            f"  use at most --devices {smallest},"
            f" or raise train.batch_size (now {recipe.train.batch_size}) or the start of its warmup"
        )
    times = {}
    for kind, count in kinds.items():
        plan = plans[kind]
        cut = accumulation_steps(recipe, plan.batch_size, plan.seq_len, cluster.devices)
        here = cut // cluster.devices
        # The larger micro-batches come first.
        busiest = plan._replace(accumulation_steps=cut).first_sequence(here)
        times[kind] = step_time(
            cluster,
            flops=flops[kind] / count * busiest / plan.batch_size,
            parameters=parameters,
            sharded_micro_batches=here * recipe.is_sharded,
            sums=1 + plan.measure_similarity,
            lanes=recipe.lanes is not None,
        )
    seconds = sum(count * times[kind].total for kind, count in kinds.items())
    alone = sum(flops.values()) / cluster.flops_per_second
    batch_size, seq_len, _ = largest
    cut = accumulation_steps(recipe, batch_size, seq_len, cluster.devices)
    sequences = math.ceil(batch_size / cut)
    bound = []
    for kind, count in kinds.items():
        if times[kind].is_bound:
            bound.append((*kind[:2], count))
    return ClusterPlan(
        full=times[largest],
        seconds=seconds,
        efficiency=alone / (seconds * cluster.devices),
        memory_bytes=memory_per_device(recipe, cluster.devices, sequences, seq_len),
        bound=tuple(bound),
        steps=kinds.total(),
    )
