"""The choice of a run's strategy, made once, from its recipe and the processes that it was started
as."""

from __future__ import annotations

import torch

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.methods.ouroboros import Ouroboros
from efftrain_cli.model.gpt import GPT
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
    return Replicated(ranks, check_every)


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
    return Devices()


def is_sharded(recipe: Recipe, ranks: Ranks) -> bool:
    """Return whether each of these ranks keeps a shard of the state."""
    return recipe.is_sharded and not ranks.is_single_process


def loading_device(recipe: Recipe, ranks: Ranks, device: torch.device) -> torch.device:
    """Return the device on which the whole model is built: a shard's device may be too small."""
    if is_sharded(recipe, ranks):
        return torch.device("cpu")
    return device


def check_ranks(recipe: Recipe, summary: PlanSummary, ranks: Ranks) -> None:
    """Check that these ranks can share a run.

    Raises:
        UsageError: a step has fewer sequences than there are ranks, or the ranks form no rings.
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


def _check_ring(section: Ouroboros, recipe: Recipe, ranks: Ranks) -> None:
    """Check that these ranks can form rings."""
    if ranks.world_size % section.devices:
        raise UsageError(
            f"ouroboros.modules = {section.modules} makes rings of {section.devices} devices,"
            f" and {ranks.world_size} were started\n"
            f"start {section.devices} of them or a multiple, or one alone, which computes the same;"
            " or choose another ouroboros.modules"
        )
    if recipe.standardization_loss:
        raise UsageError(
            "[standardization_loss] adds terms within the modules,"
            " which a ring does not carry between its devices\n"
            "train on one device, or set standardization_loss = false"
        )
