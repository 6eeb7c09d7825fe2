"""The choice of a run's strategy, made once, from its recipe and the processes that it was started
as."""

from __future__ import annotations

from itertools import product

import torch

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.methods.ouroboros import Ouroboros
from efftrain_cli.model.gpt import GPT
from efftrain_cli.plan.plan import accumulation_steps
from efftrain_cli.plan.preview import PlanSummary
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.delayed_gradients import DelayedGradients
from efftrain_cli.training.devices import Devices
from efftrain_cli.training.ranks import Ranks
from efftrain_cli.training.replicated import Replicated
from efftrain_cli.training.rings import Rings
from efftrain_cli.training.sharded import Sharded
from efftrain_cli.training.state import TrainState


def choose_strategy(
    recipe: Recipe,
    state: TrainState,
    ranks: Ranks,
    device: torch.device,
) -> Devices:
    """Return the devices of a run of `recipe` from `state`, which all ranks hold alike.

    Each rank may keep a shard of `state` on its `device`.
    """
    if ranks.is_single_process:
        return single_device(recipe, state.model, state.method_tensors)
    if recipe.delayed_gradients:
        return Rings(recipe, state, ranks)
    if is_sharded(recipe, ranks):
        return Sharded(recipe, state, ranks, device)
    check_every = None
    if recipe.parallel is not None:
        check_every = recipe.parallel.check_every
    return Replicated(ranks, recipe.lanes, check_every)


def single_device(
    recipe: Recipe,
    model: GPT,
    method_tensors: Tensors | None = None,
) -> Devices:
    """Return the devices of a run of `recipe` in this process alone.

    `method_tensors` are those of the state, read in each step and not changed; None: the state has
    none.
    """
    if recipe.delayed_gradients:
        if method_tensors is None:
            method_tensors = {}
        return DelayedGradients(recipe, model, method_tensors)
    return Devices(lanes=recipe.lanes)


def overlaps_sum(recipe: Recipe, ranks: Ranks) -> bool:
    """Return whether replicas add up their gradients during the backward pass."""
    return not ranks.is_single_process and not recipe.lanes


def is_sharded(recipe: Recipe, ranks: Ranks) -> bool:
    """Return whether each of these ranks keeps a shard of the state."""
    return recipe.is_sharded and not ranks.is_single_process


def loading_device(recipe: Recipe, ranks: Ranks, device: torch.device) -> torch.device:
    """Return the device on which the whole model is built: a shard's device may be too small."""
    if is_sharded(recipe, ranks):
        return torch.device("cpu")
    return device


def sharing_facts(recipe: Recipe, ranks: Ranks) -> dict[str, object]:
    """Return the number of processes and lanes, for a run's origin.json."""
    return {"world_size": ranks.world_size, "lanes": recipe.lanes}


def note_on_change(recipe: Recipe, changed: list[str]) -> str:
    """Describe the effect that changed facts have on a continued run."""
    if changed == ["devices"] and recipe.lanes:
        return f"by parallel.lanes = {recipe.lanes} the same bits"
    return "the last bits of the results may differ"


def check_ranks(recipe: Recipe, summary: PlanSummary, ranks: Ranks) -> None:
    """Check that these ranks can share a run.

    Raises:
        UsageError: a step has fewer sequences than there are ranks, or the lanes cannot be dealt to
            them.
    """
    if ranks.is_single_process:
        return
    ring = recipe.delayed_gradients
    sharing = ranks.world_size
    what = "devices"
    if ring:
        _check_ring(ring, recipe, ranks)
        sharing //= ring.devices
        what = "rings"

    smallest = summary.smallest_batch
    for method in recipe.methods.values():
        least, _ = method.batch_bounds(recipe.train.batch_size)
        smallest = min(smallest, least)
    if smallest < sharing:
        raise UsageError(
            f"a step of {smallest} sequences cannot be shared by {sharing} {what}: each needs one\n"
            f"use at most --devices {smallest * ranks.world_size // sharing},"
            f" or raise train.batch_size (now {recipe.train.batch_size}) or the start of its warmup"
        )
    lanes = recipe.lanes
    cut = [name for name, method in recipe.methods.items() if method.cut_matters()]
    if not lanes and cut and not _cut_alike(recipe, summary, sharing):
        most = min(smallest, max(ranks.world_size, 4))
        raise UsageError(
            f"[{cut[0]}] depends on how a step is cut into micro-batches,"
            f" which {sharing} {what} cut differently from one\n"
            f"set parallel.lanes = {1 << most.bit_length() - 1}:"
            " every number of devices that divides it cuts a step the same way"
        )
    if lanes and lanes % ranks.world_size:
        raise UsageError(
            f"parallel.lanes = {lanes} is not a multiple of the {ranks.world_size} devices\n"
            "use 2, 4, ... devices up to that number, or set parallel = false"
        )


def _cut_alike(recipe: Recipe, summary: PlanSummary, sharing: int) -> bool:
    """Return whether `sharing` devices cut every step into as many micro-batches as one does."""
    shapes = set(summary.shapes)
    if "steps" in recipe.varies:
        for method in recipe.methods.values():
            least, most = method.batch_bounds(recipe.train.batch_size)
            sizes = range(least, most + 1, max(1, method.batch_multiple()))
            shapes |= set(product(sizes, {seq_len for _, seq_len in summary.shapes}))
    return all(
        accumulation_steps(recipe, *shape, sharing) == accumulation_steps(recipe, *shape)
        for shape in shapes
    )


def _check_ring(section: Ouroboros, recipe: Recipe, ranks: Ranks) -> None:
    """Check that these ranks can form rings."""
    if ranks.world_size % section.devices:
        raise UsageError(
            f"ouroboros.modules = {section.modules} makes rings of {section.devices} devices,"
            f" and {ranks.world_size} were started\n"
            f"start {section.devices} of them or a multiple, or one alone, which computes the same;"
            " or choose another ouroboros.modules"
        )
    if section.cosine_every:
        raise UsageError(
            "ouroboros.cosine_every needs the whole model at once,"
            " and in a ring each device computes only its own modules\n"
            "set it to 0, or train on one device"
        )
    if recipe.standardization_loss:
        raise UsageError(
            "[standardization_loss] adds terms within the modules,"
            " which a ring does not carry between its devices\n"
            "train on one device, or set standardization_loss = false"
        )
