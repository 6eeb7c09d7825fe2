"""Trains every case of Ouroboros as one rank of rings, has rank 0 train it alone too, and writes what came of both.
Started by test_ring.py, once per number of ranks: `ring_run.py OUT`."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from efftrain_cli.foundation.step import Batch, StepPlan
from efftrain_cli.methods.ouroboros import Ouroboros
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training.joining import joined
from efftrain_cli.training.ranks import ALONE, Ranks
from efftrain_cli.training.state import TrainState, model_tensors
from efftrain_cli.training.strategy import choose_strategy
from efftrain_cli.training.trainer import train
from tests.resume_law import RandomTokens
from tests.tiny import FOUR_BLOCKS, fresh

STEPS, STOP = 12, 6
MUON = ["optim.name=muon", "optim.muon_lr=0.02"]
LENGTHS = ["seq_len_warmup={start = 8, steps = 6, multiple = 1}"]
CASES: dict[int, dict[str, tuple[list[str], dict[str, object]]]] = {  # by K
    2: {"stash": ([], {}), "replay": ([], {"variant": "replay"})},
    3: {
        "stash": ([], {"warmup_steps": 2}),
        "stash, mean, muon, by module": (
            MUON,
            {"embedding_gradient": "mean", "clip": "module", "warmup_steps": 2},
        ),
        "replay": ([], {"variant": "replay"}),
        "replay, mean, muon": (MUON, {"variant": "replay", "embedding_gradient": "mean"}),
        "stash, lengths": (LENGTHS, {}),
        "replay, lengths": (LENGTHS, {"variant": "replay", "warmup_steps": 1}),
    },
    4: {
        "stash": ([], {}),
        "stash, mean": ([], {"embedding_gradient": "mean", "split": (0, 1, 1, 2)}),
        "stash, muon": (MUON, {"clip": "module"}),
        "replay": ([], {"variant": "replay", "warmup_steps": 3}),
        "replay, muon": (MUON, {"variant": "replay"}),
    },
}


class SharedTokens(RandomTokens):
    """RandomTokens whose batches are dealt to ranks as a corpus's are."""

    def batch(self, plan: StepPlan, rank: int = 0, world_size: int = 1) -> Batch:
        whole = super().batch(plan)
        first, last = (
            plan.first_sequence(plan.accumulation_steps * r // world_size) for r in (rank, rank + 1)
        )
        return Batch(whole.tokens[first:last], whole.targets[first:last])


def recipe_of(modules: int, overrides: list[str], keys: dict[str, object]) -> Recipe:
    return replace(
        load_recipe(
            "small",
            [
                *FOUR_BLOCKS,
                "train.tokens=768",
                "checkpoint.every=1000",
                "eval.internals=3",
                *overrides,
            ],
        ),
        ouroboros=Ouroboros(modules=modules, **keys),
    )  # type: ignore[arg-type]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(
            name.encode()
            + tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return sha.hexdigest()


def trained(recipe: Recipe, ranks: Ranks) -> dict[str, object]:
    """Losses, norms and digests of a training, and of one that stops in the middle and goes on."""
    data = SharedTokens(recipe.model.seq_len)
    val = torch.stack([data.window(10**6 + number) for number in range(3)])
    rows: list[list[float | None]] = []
    entropies: list[float] = []

    def run(state: TrainState, until: int) -> None:
        devices = choose_strategy(recipe, state, ranks, state.model.device)
        for record in train(state, recipe, data, val, until, devices):  # type: ignore[arg-type]
            if record.result is not None:
                scalars = record.result.scalars
                named = [
                    name
                    for name in scalars
                    if name in ("loss", "grad_norm")
                    or name.startswith("ouroboros")
                    or "_h." in name
                ]
                values = [float(scalars[name]) for name in sorted(named)]
                entropies.extend(float(scalars[n]) for n in scalars if n == "entropy")
                val_loss = None if record.val_loss is None else float(record.val_loss)
                rows.append([None if value != value else value for value in values] + [val_loss])

    state = fresh(recipe)
    run(state, STOP)
    middle = state_digest(state)
    if not ranks.is_single_process:  # what a resumed run's first rank would share
        in_flight = {
            name: (list(t.shape), str(t.dtype).removeprefix("torch."))
            for name, t in state.method_tensors.items()
        }
        ranks.store_set(f"middle/{trained.calls}", in_flight) if ranks.rank == 0 else None  # type: ignore[attr-defined]
        if ranks.rank:
            heard = ranks.store_get(f"middle/{trained.calls}")  # type: ignore[attr-defined]
            state.method_tensors = {
                name: torch.empty(shape, dtype=getattr(torch, kind))
                for name, (shape, kind) in heard.items()
            }
        for tensors in (model_tensors(state), state.optimizer.tensors(), state.method_tensors):
            ranks.broadcast(tensors.values())
        trained.calls += 1  # type: ignore[attr-defined]
    run(state, STEPS)
    return {"rows": rows, "entropies": entropies, "middle": middle, "end": state_digest(state)}


trained.calls = 0  # type: ignore[attr-defined]


def state_digest(state: TrainState) -> dict[str, str]:
    return {
        "model": digest(model_tensors(state)),
        "optimizer": digest(state.optimizer.tensors()),
        "in flight": digest(state.method_tensors),
    }


def main(out: str) -> None:
    torch.set_num_threads(1)
    with joined() as ranks:
        found = {}
        for modules, cases in CASES.items():
            if ranks.world_size % (modules - 1):
                continue
            rings = ranks.world_size // (modules - 1)
            for name, (overrides, keys) in cases.items():
                if rings > 1 and name not in ("stash", "replay"):
                    continue
                recipe = recipe_of(modules, overrides, keys)
                ring = trained(recipe, ranks)
                if ranks.rank == 0:
                    found[f"K = {modules}, {rings} x, {name}"] = {
                        "ring": ring,
                        "one": trained(recipe, ALONE),
                    }
        if ranks.rank == 0:
            Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
