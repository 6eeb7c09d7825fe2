"""What a recipe is expected to cost on many devices: a model of a step's time and of memory, from a rate and
bandwidths. No torch.

    compute   FLOPs of the device with most sequences / rate
    update    28 bytes a parameter (AdamW reads four tensors and writes three, fp32) / memory bandwidth
    ring      2 (W - 1) / W bytes / bandwidth + 2 (W - 1) latency: each byte passes the slowest link of a ring twice

Replicas: compute + ring(gradient, fp32) + update, one after the other, although on CUDA a part of
the ring hides behind the last backward pass. Shards: PyTorch gathers a block's weights
twice and scatters its gradient once per micro-batch, each half a ring, beside the computation: max(compute, all of it)
+ update / W. Hybrid: shards within a node and replicas between nodes, whose shares of the gradient are added up once
per step; efftrain has not built it. Nothing else is counted: neither data, evaluation, saving, nor what a slow device
costs the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.step import StepPlan
from efftrain_cli.model.flops import block_parameters, inner_parameters, parameter_count
from efftrain_cli.plan.cost import gradient_copies, likely_vocabulary, training_bytes
from efftrain_cli.plan.plan import (
    accumulation_steps,
    assumed_result,
    model_config,
    model_parameters,
    padded_vocab_size,
    plan_run,
)
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sections import Parallel

STRATEGIES = ("replicate", "shard", "hybrid")
UPDATE_BYTES = 28
BUCKET_BYTES = 1 << 26
"""Of a flat copy in which gradients are added up; four of them are under way at once."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices, and what is known of them."""

    devices: int
    nodes: int = 1
    flops_per_second: float
    """Of one device, in forward and backward passes."""
    bandwidth: float
    """Bytes per second out of one device, within a node."""
    between: float = float("inf")
    """Bytes per second out of one node, all its links together."""
    memory_bandwidth: float
    """Bytes per second of one device's memory."""
    latency: float = 0.0
    """Seconds of one message between two devices."""

    @property
    def slowest(self) -> float:
        """Bytes per second of the slowest link; of one node that is the one between its devices."""
        return min(self.bandwidth, self.between) if self.nodes > 1 else self.bandwidth

    def ring(
        self, size: float, devices: int | None = None, bandwidth: float | None = None
    ) -> float:
        """Seconds in which that many bytes of every device are added up on all: twice around a ring."""
        count = devices or self.devices
        return 2 * (count - 1) * (size / count / (bandwidth or self.slowest) + self.latency)


class StepTime(NamedTuple):
    """Seconds of one step."""

    compute: float
    communication: float
    update: float
    total: float

    @property
    def is_bound(self) -> bool:
        """Whether communication takes longer than computation."""
        return self.communication > self.compute


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """What one strategy is expected to need."""

    strategy: str
    full: StepTime
    """Of the usual step with most tokens."""
    seconds: float
    """All steps."""
    efficiency: float
    """Seconds on one device / (seconds x devices)."""
    memory_bytes: int
    """Of one device."""
    bound: tuple[tuple[int, int, int], ...]
    """(batch size, sequence length, steps) of the kinds of steps that are bound by communication."""
    steps: int

    @property
    def bound_steps(self) -> int:
        """Steps that are bound by communication."""
        return sum(count for _, _, count in self.bound)


def step_time(
    strategy: str,
    cluster: Cluster,
    *,
    flops: float,
    parameters: int,
    micro_batches: int = 1,
    sums: int = 1,
    lanes: bool = False,
) -> StepTime:
    """The time of a step.

    Args:
        flops: of the device that computes most.
        parameters: of the model.
        micro_batches: of one device.
        sums: gradients that are added up, 2 where those of a batch's halves are compared.
        lanes: whether whole gradients are exchanged in pairs.
    """
    compute = flops / cluster.flops_per_second
    update = UPDATE_BYTES * parameters / cluster.memory_bandwidth
    gradient = 4.0 * parameters
    if strategy == "replicate":
        communication = sums * cluster.ring(gradient)
        if lanes:
            rounds = (cluster.devices - 1).bit_length()
            communication = sums * rounds * (gradient / cluster.slowest + cluster.latency)
        return StepTime(compute, communication, update, compute + communication + update)
    if strategy == "shard":
        share = cluster.devices
        communication = 1.5 * micro_batches * cluster.ring(gradient)
    else:
        share = cluster.devices // cluster.nodes
        communication = 1.5 * micro_batches * cluster.ring(gradient, share, cluster.bandwidth)
        communication += cluster.ring(gradient, cluster.nodes, cluster.between)
    return StepTime(
        compute, communication, update / share, max(compute, communication) + update / share
    )


def memory_per_device(
    recipe: Recipe, strategy: str, cluster: Cluster, sequences: int, seq_len: int, dtype: str
) -> int:
    """Bytes of one device, by `training_bytes`: activations, and the state or its share and two gathered blocks."""
    config = model_config(recipe, likely_vocabulary(recipe.data.tokenizer))
    copies = gradient_copies(recipe, cluster.devices)
    recompute = recipe.train.activation_checkpointing is True

    state, whole = (
        training_bytes(
            config,
            count,
            seq_len,
            dtype=dtype,
            compiled=False,
            recompute=recompute,
            gradients=copies,
        )
        for count in (0, sequences)
    )
    if strategy == "replicate":
        return whole + (4 * BUCKET_BYTES if cluster.devices > 1 else 0)
    share = cluster.devices if strategy == "shard" else cluster.devices // cluster.nodes
    tables = parameter_count(config) - inner_parameters(config)
    return state // share + (whole - state) + 4 * (2 * block_parameters(config) + tables)


def _can_be_sharded(recipe: Recipe) -> bool:
    try:
        replace(recipe, parallel=Parallel(strategy="shard"))
    except ValueError:  # a rule of the recipe
        return False
    return True


def plan_cluster(recipe: Recipe, cluster: Cluster, dtype: str = "bf16") -> list[ClusterPlan]:
    """What each strategy that the recipe's methods allow needs for the whole of it.

    Raises:
        UsageError: the devices cannot be dealt to the nodes, a step has fewer sequences than there are devices, or the
            recipe has a ring.
    """
    if cluster.devices % cluster.nodes:
        raise UsageError(
            f"--devices {cluster.devices} is not a multiple of --nodes {cluster.nodes}\ngive the devices of all nodes together"
        )
    if recipe.late_gradients is not None:
        raise UsageError(
            "a ring of Ouroboros's modules passes activations, for which this model has no term\nset ouroboros = false to plan the rest"
        )
    rows = padded_vocab_size(recipe, likely_vocabulary(recipe.data.tokenizer))
    parameters = model_parameters(recipe, rows)
    kinds: Counter[tuple[int, int, bool]] = Counter()
    flops: defaultdict[tuple[int, int, bool], float] = defaultdict(float)
    plans: dict[tuple[int, int, bool], StepPlan] = {}
    for plan, progress in plan_run(recipe):
        kind = plan.batch_size, plan.seq_len, plan.measure_similarity
        kinds[kind] += 1
        flops[kind] += assumed_result(recipe, plan, rows, progress.stage).flops
        plans[kind] = plan
    updates = kinds.total() * UPDATE_BYTES * parameters / cluster.memory_bandwidth
    alone = sum(flops.values()) / cluster.flops_per_second + updates
    largest = max(kinds, key=lambda kind: (kind[0] * kind[1], kinds[kind]))
    smallest = min(batch for batch, _, _ in kinds)
    if smallest < cluster.devices:
        raise UsageError(
            f"a step of {smallest} sequences cannot be shared by {cluster.devices} devices: each needs one\n"
            f"use at most --devices {smallest}, or raise train.batch_size (now {recipe.train.batch_size}) or the start of its warmup"
        )
    found = []
    for strategy in STRATEGIES:
        if strategy == "hybrid" and cluster.nodes in (1, cluster.devices):
            continue
        if strategy != "replicate" and not _can_be_sharded(recipe):
            continue
        times = {}
        for kind, count in kinds.items():
            plan = plans[kind]
            cut = accumulation_steps(recipe, plan.batch_size, plan.seq_len, cluster.devices)
            here = cut // cluster.devices
            busiest = plan._replace(accumulation_steps=cut).first_sequence(
                here
            )  # the larger micro-batches come first
            times[kind] = step_time(
                strategy,
                cluster,
                flops=flops[kind] / count * busiest / plan.batch_size,
                parameters=parameters,
                micro_batches=here,
                sums=2 if plan.measure_similarity else 1,
                lanes=recipe.lanes is not None,
            )
        seconds = sum(count * times[kind].total for kind, count in kinds.items())
        sequences = -(-largest[0] // accumulation_steps(recipe, *largest[:2], cluster.devices))
        found.append(
            ClusterPlan(
                strategy=strategy,
                full=times[largest],
                seconds=seconds,
                efficiency=alone / (seconds * cluster.devices),
                memory_bytes=memory_per_device(
                    recipe, strategy, cluster, sequences, largest[1], dtype
                ),
                bound=tuple((*kind[:2], kinds[kind]) for kind in kinds if times[kind].is_bound),
                steps=kinds.total(),
            )
        )
    return found
