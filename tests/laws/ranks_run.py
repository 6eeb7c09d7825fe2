"""Trains the cases of a law as one rank of several, and has rank 0 write what came of them:
`ranks_run.py LAW OUT`.

Started by test_ranks.py, test_ring.py and test_every_value.py, once per number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, load_recipe
from efftrain_cli.training import dist
from efftrain_cli.training.evaluation import evaluate
from efftrain_cli.training.loading import load
from efftrain_cli.training.record import StepRecord, read_records
from efftrain_cli.training.stages import train_stages
from efftrain_cli.training.state import TrainState
from tests.fake_runs import without_times
from tests.laws.every_value import OF_TRAINING, overrides_of
from tests.resume_law import RandomTokens
from tests.tiny import FOUR_BLOCKS, METHODS, fresh, tiny_recipe
from tests.trained_run import write_checkpoint

Found = dict[str, Any]
RANKS_RUN = "tests/laws/ranks_run.py"


# --- a training -----------------------------------------------------------------------------------


def trained(recipe: Recipe, path: Path, steps: int) -> Found:
    """Return what comes of a training that saves a checkpoint in the middle, `path`; and,
    "resumed", of another state that goes on from there."""
    state = fresh(recipe)
    found = came_to(state, train(state, recipe, steps, path))
    state = fresh(recipe)
    load(path, state, recipe)
    found["resumed"] = came_to(state, train(state, recipe, steps))
    return found


def train(
    state: TrainState, recipe: Recipe, until: int, path: Path | None = None
) -> list[dict[str, Any]]:
    """Train on to step `until` and return the rows; save at half of the way if there is a path."""
    data = RandomTokens(recipe.model.seq_len)
    rows = []
    for record in train_stages(state, recipe, data, data.validation(3), until):  # type: ignore[arg-type]
        if isinstance(record, StepRecord) and record.result is not None:
            rows += map(without_times, read_records(state, recipe, [record]))
            if path is not None and len(rows) == until // 2:
                save(state, recipe, path)
    return rows


def came_to(state: TrainState, rows: list[dict[str, Any]]) -> Found:
    state.settle()
    digests = [digest(tensors) for tensors in state.whole()]
    held = sum(parameter.numel() for parameter in state.parameters.values())
    return {"rows": rows, "digests": digests, "held": dist.gather_objects(held)}


def save(state: TrainState, recipe: Recipe, path: Path) -> None:
    """Write a checkpoint that every rank may read then."""
    state.settle()
    write_checkpoint(path, state, dump_recipe(recipe))
    dist.barrier()


def digest(tensors: Tensors) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        flat = tensors[name].detach().contiguous().reshape(-1)
        sha.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


# --- copies and shards ----------------------------------------------------------------------------

STEPS = 8
SIZE = [
    "model={n_layer = 3, n_head = 2, n_embd = 32, seq_len = 32}",
    "optim={lr = 3e-3, warmup_steps = 2, grad_clip = 0.5}",
    "train.tokens=1_000_000",
    "train.batch_size=16",
    "train.micro_batch_tokens=64",
    "eval={every = 4, internals = 3}",
]
CASES = {
    "none": [],
    "muon": METHODS["muon"],
    "lengths": ["seq_len_warmup={start = 8, steps = 6, mode = 'reshape'}"],
    "constant tokens": ["seq_len_warmup={start = 8, steps = 6, batch = 'tokens'}"],
    "batches": ["batch_size_warmup={start = 8, increment = 4, sequences = 40}"],
    "layer dropping": METHODS["layer dropping"],
    "simigrad": [
        "simigrad={target = 0.9, min_batch_size = 8, max_batch_size = 32, quantum = 4}",
    ],
    "standardization": ["standardization_loss={weight = 0.3, sites = 'ln_input'}"],
    "narrow sums": METHODS["accumulation"],
    "growth": [
        "stages=[{model = {n_head = 1, n_embd = 16}, switch = {rule = 'steps', value = 3}}, "
        "{operators = ['width'], rewarmup_steps = 2}]",
    ],
}
SHARDED = {
    "none": [],
    "simigrad": CASES["simigrad"],
    "standardization": CASES["standardization"],
    "compiled": ["train.compile=on"],
    "recomputed lengths": [*CASES["lengths"], *METHODS["recompute"]],
    # Of one sequence each, so that some ranks have none of 5 left.
    "odd batches": ["batch_size_warmup={start = 5, increment = 11, sequences = 20}"],
    "llama": ["model.arch=llama", "model.n_kv_head=1", "model.qk_norm=true", "model.tied=false"],
    "z-loss": METHODS["z-loss"],
    "uneven": ["model.n_embd=18"],
}
"""Cases that are trained once with copies of the state and once with shards of it."""
RESUMED = {name: tiny_recipe(*SIZE, *overrides) for name, overrides in CASES.items()}
for _name, _overrides in SHARDED.items():
    RESUMED[f"{_name}, sharded"] = tiny_recipe(*SIZE, *_overrides, "parallel.strategy=shard")
CROSSED = {1: 2, 2: 1, 4: 2}
"""Number of ranks -> that whose checkpoints they continue."""


def copies_and_shards(folder: Path) -> Found:
    found: Found = {"first evaluation": first_evaluation(tiny_recipe(*SIZE))}
    folder /= str(dist.world_size())
    for name, recipe in RESUMED.items():
        found[name] = trained(recipe, folder / name, STEPS)
    for name in [case for case in SHARDED if case not in CASES]:
        recipe = tiny_recipe(*SIZE, *SHARDED[name])
        state = fresh(recipe)
        found[name] = came_to(state, train(state, recipe, STEPS))
    return found


def crossed(folder: Path) -> Found:
    """Return the rows with which the checkpoints of another number of ranks go on."""
    found: Found = {}
    for name, recipe in RESUMED.items():
        state = fresh(recipe)
        load(folder / str(CROSSED[dist.world_size()]) / name, state, recipe)
        found[f"{name}, crossed"] = train(state, recipe, STEPS)
    return found


def first_evaluation(recipe: Recipe) -> float:
    """Return the loss of fresh weights on seven windows."""
    windows = RandomTokens(recipe.model.seq_len).validation(7)
    return float(evaluate(fresh(recipe), recipe, windows))


# --- rings ----------------------------------------------------------------------------------------

WITHOUT_CLIPPING = ["optim.grad_clip=0"]
LENGTHS = ["seq_len_warmup={start = 8, steps = 6, multiple = 1}"]
RINGS: dict[int, dict[str, list[str]]] = {  # by K
    3: {
        "plain": WITHOUT_CLIPPING,
        "clipped": [],
        "mean, muon, by module": [
            *METHODS["muon"],
            "ouroboros={embedding_gradient = 'mean', clip = 'module', warmup_steps = 2}",
        ],
        "lengths": [*LENGTHS, *WITHOUT_CLIPPING],
    },
    5: {"plain": WITHOUT_CLIPPING, "by module": ["ouroboros.clip=module"]},
}


def rings(folder: Path) -> Found:
    """Return the cases whose ring has as many devices as there are ranks; on one, all."""
    found: Found = {}
    size = [*FOUR_BLOCKS, "train.tokens=768", "eval.every=6", "checkpoint.every=1000"]
    for modules, cases in RINGS.items():
        if dist.world_size() not in (1, modules - 1):
            continue
        for name, overrides in cases.items():
            recipe = load_recipe("small", [*size, *overrides, f"ouroboros.modules={modules}"])
            case = f"K = {modules}, {name}"
            found[case] = trained(recipe, folder / str(dist.world_size()) / case, steps=12)
            if dist.world_size() == 1:
                state = fresh(recipe)
                load(folder / str(modules - 1) / case, state, recipe)
                found[f"{case}, from a ring"] = train(state, recipe, 12)
    return found


# --- every value of [model] and [optim] -----------------------------------------------------------


def every_value(folder: Path) -> Found:
    """Return the losses of three steps, as copies and as shards."""
    found: Found = {}
    for value in OF_TRAINING:
        found[value] = {}
        for strategy in ("replicate", "shard"):
            overrides = [*overrides_of(value), f"parallel.strategy={strategy}"]
            try:
                recipe = load_recipe("small", overrides)
            except RecipeError:
                found[value][strategy] = "refused"
                continue
            found[value][strategy] = [row["loss"] for row in train(fresh(recipe), recipe, 3)]
    return found


def main(law: str, out: str) -> None:
    torch.set_num_threads(1)
    laws = {
        "ranks": copies_and_shards,
        "crossed": crossed,
        "rings": rings,
        "every_value": every_value,
    }
    with dist.joined():
        found = laws[law](Path(out).parent)
        if dist.is_main():
            Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
