"""A run on several devices: rank 0 starts the other ranks from its state; they train with it and
write nothing."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from efftrain_cli import __version__
from efftrain_cli.foundation.errors import StoppedError, UsageError
from efftrain_cli.foundation.signals import Stop, interruptible, rescued_by, stop_on_signals
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training.devices import Devices
from efftrain_cli.training.memory import memory_errors
from efftrain_cli.training.ranks import Ranks, describe_tensors, empty_tensors
from efftrain_cli.training.session import (
    Session,
    choose_device,
    fresh_state,
    prepare_session,
    probe_seconds,
)
from efftrain_cli.training.stages import set_stage, train_stages
from efftrain_cli.training.state import (
    TrainState,
    model_tensors,
    progress_from_json,
    progress_to_json,
)
from efftrain_cli.training.strategy import choose_strategy


def start_workers(
    run: Path,
    state: TrainState,
    session: Session,
    until: int | None,
    probes: bool = False,
) -> None:
    """Start the other ranks' preparation to train from `state`; `share_state` then sends it.

    Args:
        probes: the ranks probe memory, as rank 0 does meanwhile.

    Raises:
        UsageError: another rank has other versions or data.
        LostProcessError: another rank has ended.
    """
    if session.ranks.is_single_process:
        return
    session.ranks.store_set(
        "start",
        {
            "recipe": str((run / "recipe.toml").resolve()),
            "until": until,
            "probes": probes,
            "progress": progress_to_json(state.progress),
            "method_tensors": describe_tensors(state.method_tensors),
        },
    )
    _check_facts(session)


def release_workers(ranks: Ranks) -> None:
    """End the other ranks, which wait for `start_workers`: there is nothing to train."""
    if not ranks.is_single_process:
        ranks.store_set("start", {})
        ranks.barrier()


def share_state(state: TrainState, session: Session) -> Devices:
    """Copy rank 0's state to all ranks, bit for bit; return the devices. All ranks call it."""
    recipe = session.recipe
    ranks = session.ranks
    if not ranks.is_single_process:
        fix_sums(recipe)
        ranks.barrier()
        for tensors in (model_tensors(state), state.optimizer.tensors(), state.method_tensors):
            ranks.broadcast(tensors.values())
    return choose_strategy(recipe, state, ranks, session.device)


def run_worker(device: str, ranks: Ranks) -> None:
    """Train as rank 0 does, on another rank, and write nothing, until training ends.

    Raises:
        StoppedError: the ranks have agreed to stop.
        EfftrainError: any fault a user can act on.
    """
    try:
        with stop_on_signals():
            _run_worker(device, ranks)
    except Stop:
        raise StoppedError(f"rank {ranks.rank} has stopped") from None
    except UsageError as error:  # other commands make the same mistake on all ranks
        print(f"error: rank {ranks.rank}: {error}", file=sys.stderr)
        raise


def _run_worker(device: str, ranks: Ranks) -> None:
    start = ranks.store_get("start")
    if not start:
        return ranks.barrier()
    # A stop meanwhile has nothing to save.
    with interruptible(rescuable=True), rescued_by(lambda: None):
        recipe = load_recipe(start["recipe"])
        session = prepare_session(recipe, choose_device(device, ranks))
    session = replace(session, ranks=ranks)
    _check_facts(session)
    state = fresh_state(session)
    progress = progress_from_json(start["progress"])
    if progress.stage:
        set_stage(state, recipe, progress.stage)
    state.progress = progress
    state.method_tensors = empty_tensors(start["method_tensors"], session.device)
    _train(state, session, start["until"], start["probes"])


def _train(state: TrainState, session: Session, until: int | None, probes: bool) -> None:
    """Train from the state of rank 0 to the end.

    Raises:
        Stop: the ranks have agreed to stop.
    """
    recipe = session.recipe
    summary = summarize_plan(recipe, state.progress, session.corpus.vocab_size, until)
    with memory_errors(recipe, summary):
        if probes:
            probe_seconds(session, state, summary)
        devices = share_state(state, session)
        try:
            for _ in train_stages(
                state, recipe, session.train_data, session.val_windows, until, devices
            ):
                pass
        except Stop:
            devices.after_stop(state)
            raise
        devices.end(state)


NCCL_THAT_REPEATS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
"""Environment variables that NCCL reads at the first exchange. Sums in a switch (NVLS) change their
order from call to call (NCCL's issue 1497)."""


def fix_sums(recipe: Recipe) -> None:
    """Make NCCL add up in one order if the recipe asks for deterministic kernels; keep the user's
    settings."""
    if recipe.train.deterministic:
        for name, value in NCCL_THAT_REPEATS.items():
            os.environ.setdefault(name, value)


def _check_facts(session: Session) -> None:
    """Compare the facts that must be the same on every rank. The recipe is rank 0's."""
    session.ranks.check_alike(
        {
            "efftrain": __version__,
            "torch": torch.__version__,
            "device": session.device.type,
            "training data": session.corpus.train.sha256,
            "validation data": session.corpus.valid.sha256,
            "tokenizer": session.corpus.tokenizer_sha256,
        }
    )
