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
from efftrain_cli.foundation.errors import EfftrainError, LostProcessError, StoppedError
from efftrain_cli.foundation.signals import Stop, interruptible, rescued_by, stop_on_signals
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training.devices import Devices, Rewinding
from efftrain_cli.training.memory import memory_errors
from efftrain_cli.training.ranks import Ranks, as_described, described
from efftrain_cli.training.session import Session, choose_device, fresh_state, prepare_session
from efftrain_cli.training.stages import set_stage, train_stages
from efftrain_cli.training.state import (
    TrainState,
    model_tensors,
    progress_from_json,
    progress_to_json,
)
from efftrain_cli.training.strategy import choose_strategy


def start_workers(
    run: Path, state: TrainState, session: Session, until: int | None, attempt: int = 0
) -> Devices:
    """Give the other ranks the recipe and, bit for bit, the state, just before training.

    Return what carries the run. `attempt` counts, from 0: after each `release` they start again.

    Raises:
        UsageError: another rank has other versions, recipe or data.
        LostProcessError: another rank has ended.
    """
    ranks = session.ranks
    if not ranks.is_single_process:
        ranks.store_set(
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
        _broadcast(ranks, state, session.recipe)
    return choose_strategy(session.recipe, state, ranks, session.device)


def release(devices: Devices) -> None:
    """Have the other ranks stop training, as rank 0 has left this state for another, and wait for the next start.

    Raises:
        Stop: a rank was asked to stop.
    """
    devices.rewind()


def dismiss(ranks: Ranks, attempt: int) -> None:
    """Let the other ranks end, after `attempt` starts and as many releases."""
    ranks.store_set(f"start/{attempt}", {"recipe": None})


def run_worker(device: str, ranks: Ranks) -> None:
    """Train as rank 0 does, on another rank, and write nothing, until training ends or this rank is dismissed.

    Raises:
        StoppedError: the ranks have agreed to stop.
        EfftrainError: any fault a user can act on.
    """
    try:
        _run_worker(device, ranks)
    except (StoppedError, LostProcessError):
        raise
    except EfftrainError as error:  # rank 0 cannot know it, so this rank says it
        print(f"error: rank {ranks.rank}: {error}", file=sys.stderr)
        raise


def _run_worker(device: str, ranks: Ranks) -> None:
    with stop_on_signals():
        path: str | None = None
        for attempt in count():
            start = ranks.store_get(f"start/{attempt}")
            if start["recipe"] is None:
                return
            try:
                if start["recipe"] != path:
                    path = str(start["recipe"])
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
                return _train_along(start, session)
            except Stop:
                raise StoppedError(f"rank {ranks.rank} has stopped") from None
            except Rewinding:
                continue


def _train_along(start: Mapping[str, Any], session: Session) -> None:
    """Train from the state that rank 0 broadcasts, to the end or until it will broadcast another."""
    recipe, ranks, until = session.recipe, session.ranks, start["until"]
    state = fresh_state(session)
    progress = progress_from_json(start["progress"])
    if progress.stage:
        set_stage(state, recipe, progress.stage)
    state.progress = progress
    state.method_tensors = as_described(start["method_tensors"], session.device)
    _broadcast(ranks, state, recipe)
    devices = choose_strategy(recipe, state, ranks, session.device)
    with memory_errors(recipe, summarize_plan(recipe, progress, session.corpus.vocab_size, until)):
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
"""Read by NCCL when the devices first exchange something. Sums in a switch (NVLS) come in another order from call to
call (NCCL's issue 1497)."""


def fix_sums(recipe: Recipe) -> None:
    """Has NCCL add up in one order if the recipe asks for deterministic kernels; the user's own setting is kept."""
    if recipe.train.deterministic:
        for name, value in NCCL_THAT_REPEATS.items():
            os.environ.setdefault(name, value)


def _broadcast(ranks: Ranks, state: TrainState, recipe: Recipe) -> None:
    fix_sums(recipe)
    ranks.barrier()
    for tensors in (model_tensors(state), state.optimizer.tensors(), state.method_tensors):
        ranks.broadcast(tensors.values())


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
