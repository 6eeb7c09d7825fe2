"""A run on several devices: what its first rank tells the others before they train together, and all that the others
do."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from efftrain_cli import __version__
from efftrain_cli.foundation.errors import EfftrainError, LostProcessError, StoppedError, UsageError
from efftrain_cli.foundation.signals import Stop, interruptible, rescued_by, stop_on_signals
from efftrain_cli.methods.ouroboros import Ouroboros
from efftrain_cli.plan.preview import PlanSummary, summarize_plan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training.memory import memory_errors
from efftrain_cli.training.ranks import Ranks, Rewinding, as_described, described
from efftrain_cli.training.session import Session, choose_device, fresh_state, prepare_session
from efftrain_cli.training.sharding import END, REWIND, shard_state
from efftrain_cli.training.stages import set_stage, train_stages
from efftrain_cli.training.state import (
    TrainState,
    model_tensors,
    progress_from_json,
    progress_to_json,
)


def check_ranks(recipe: Recipe, summary: PlanSummary, ranks: Ranks) -> None:
    """Refuses a run that these ranks cannot share.

    Raises:
        UsageError: a step has fewer sequences than there are ranks, or the lanes cannot be dealt to them.
    """
    if ranks.alone:
        return
    ring = recipe.late_gradients
    if ring is not None:
        _check_ring(ring, recipe, ranks)
    sharing = ranks.world_size // (1 if ring is None else ring.devices)
    smallest = min(
        (method.batch_bounds(recipe.train.batch_size)[0] for method in recipe.methods.values()),
        default=summary.smallest_batch,
    )
    smallest = min(smallest, summary.smallest_batch)
    if smallest < sharing:
        raise UsageError(
            f"a step of {smallest} sequences cannot be shared by {sharing} {'devices' if ring is None else 'rings'}: each needs one\n"
            f"use at most --devices {smallest * ranks.world_size // sharing}, or raise train.batch_size (now {recipe.train.batch_size}) or the start of its warmup"
        )
    lanes = recipe.lanes
    cut = [name for name, method in recipe.methods.items() if method.cut_matters()]
    if lanes is None and cut:
        raise UsageError(
            f"[{cut[0]}] depends on how a step is cut into micro-batches, which {ranks.world_size} devices cut differently from one\n"
            f"set parallel.lanes = {max(ranks.world_size, 4)}, so that any number of devices cuts it the same way"
        )
    if lanes is not None and lanes % ranks.world_size:
        raise UsageError(
            f"parallel.lanes = {lanes} is not a multiple of the {ranks.world_size} devices\n"
            "use 2, 4, ... devices up to that number, or set parallel = false"
        )


def _check_ring(section: Ouroboros, recipe: Recipe, ranks: Ranks) -> None:
    """Refuses what no ring of these ranks can do."""
    if ranks.world_size % section.devices:
        raise UsageError(
            f"ouroboros.modules = {section.modules} makes rings of {section.devices} devices, and {ranks.world_size} were started\n"
            f"start {section.devices} of them or a multiple, or one alone, which computes the same; or choose another ouroboros.modules"
        )
    if section.cosine_every:
        raise UsageError(
            "ouroboros.cosine_every needs the whole model at once, and in a ring each device computes only its own modules\n"
            "set it to 0, or train on one device"
        )
    if recipe.standardization_loss is not None:
        raise UsageError(
            "[standardization_loss] adds terms within the modules, which a ring does not carry between its devices\n"
            "train on one device, or set standardization_loss = false"
        )


def lead(
    run: Path, state: TrainState, session: Session, until: int | None, attempt: int = 0
) -> None:
    """Rank 0, just before training: gives the others the recipe, and the state bit for bit. `attempt` counts, from 0:
    after each `release` they are led again.

    Raises:
        UsageError: another rank has other versions, recipe or data.
        LostProcessError: another rank has ended.
    """
    ranks = session.ranks
    if ranks.alone:
        return
    ranks.enter("prepare")
    ranks.announce(
        f"start/{attempt}",
        {
            "recipe": str((run / "recipe.toml").resolve()),
            "until": until,
            "progress": progress_to_json(state.progress),
            "method_tensors": described(state.method_tensors),
        },
    )
    if not attempt:
        ranks.check_alike(_facts(session))
    _share(ranks, state, session.recipe)
    shard_state(state, session.recipe, ranks, session.device)


def release(state: TrainState, ranks: Ranks) -> None:
    """Rank 0 has left this state for another: the others stop training, and wait to be led again or dismissed.

    Raises:
        Stop: a rank was asked to stop.
    """
    if state.shards is not None:
        state.shards.lead(REWIND)
    else:
        ranks.rewind()
    ranks.enter("prepare")


def dismiss(ranks: Ranks, attempt: int) -> None:
    """Rank 0 has nothing more to train, after `attempt` leads and as many releases."""
    ranks.announce(f"start/{attempt}", {"recipe": None})


def follow(device: str, ranks: Ranks) -> None:
    """All that a rank other than 0 does: it trains as rank 0 does, and writes nothing. Ends with the training that it
    was led into, or where it is dismissed.

    Raises:
        StoppedError: the ranks have agreed to stop.
        EfftrainError: any fault a user can act on.
    """
    try:
        _follow(device, ranks)
    except (StoppedError, LostProcessError):
        raise
    except EfftrainError as error:  # rank 0 cannot know it, so this rank says it
        print(f"error: rank {ranks.rank}: {error}", file=sys.stderr)
        raise


def _follow(device: str, ranks: Ranks) -> None:
    with stop_on_signals():
        path: str | None = None
        for attempt in count():
            heard = ranks.hear(f"start/{attempt}")
            if heard["recipe"] is None:
                return
            try:
                if heard["recipe"] != path:
                    path = str(heard["recipe"])
                    with (
                        interruptible(rescuable=True),
                        rescued_by(lambda: None),
                    ):  # nothing is to be saved here
                        session = replace(
                            prepare_session(load_recipe(path), choose_device(device, ranks)),
                            ranks=ranks,
                        )
                if not attempt:
                    ranks.check_alike(_facts(session))
                return _train_along(heard, session)
            except Stop:
                raise StoppedError(f"rank {ranks.rank} has stopped") from None
            except Rewinding:
                ranks.enter("prepare")


def _train_along(heard: Mapping[str, Any], session: Session) -> None:
    """Trains from the state that rank 0 shares, to the end or until it will share another."""
    recipe, ranks, until = session.recipe, session.ranks, heard["until"]
    state = fresh_state(session)
    progress = progress_from_json(heard["progress"])
    if progress.stage:
        set_stage(state, recipe, progress.stage)
    state.progress = progress
    state.method_tensors = as_described(heard["method_tensors"], session.device)
    _share(ranks, state, recipe)
    shard_state(state, recipe, ranks, session.device)
    with memory_errors(recipe, summarize_plan(recipe, progress, session.corpus.vocab_size, until)):
        try:
            for _ in train_stages(
                state, recipe, session.train_data, session.val_windows, until, ranks
            ):
                pass
        except Stop:
            if state.shards is not None:
                state.shards.serve(state, END)
            raise
        if state.shards is not None:
            state.shards.serve(state, END)
        ranks.end(state.progress.step)


NCCL_THAT_REPEATS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
"""Read by NCCL when the devices first exchange something. Sums in a switch (NVLS) come in another order from call to
call (NCCL's issue 1497)."""


def fix_sums(recipe: Recipe) -> None:
    """Has NCCL add up in one order if the recipe asks for deterministic kernels; the user's own setting is kept."""
    if recipe.train.deterministic:
        for name, value in NCCL_THAT_REPEATS.items():
            os.environ.setdefault(name, value)


def _share(ranks: Ranks, state: TrainState, recipe: Recipe) -> None:
    fix_sums(recipe)
    ranks.share(model_tensors(state))
    ranks.share(state.optimizer.tensors())
    ranks.share(state.method_tensors)


def _facts(session: Session) -> dict[str, str]:
    """What must be the same on every rank. The recipe is rank 0's."""
    return {
        "efftrain": __version__,
        "torch": torch.__version__,
        "device": session.device.type,
        "training data": session.corpus.train.sha256,
        "validation data": session.corpus.valid.sha256,
        "tokenizer": session.corpus.tokenizer_sha256,
    }
