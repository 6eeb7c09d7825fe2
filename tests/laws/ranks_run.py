"""Trains the cases of a law as one rank of several, and has rank 0 write what came of them:
`ranks_run.py LAW OUT`.

Started by test_ranks.py, test_ring.py and test_every_value.py, once per number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training import gradient, replicated
from efftrain_cli.training import ranks as ranks_module
from efftrain_cli.training.compiling import compile_parts, compile_whole
from efftrain_cli.training.joining import joined
from efftrain_cli.training.ranks import ALONE, Ranks, describe_tensors, empty_tensors
from efftrain_cli.training.replicated import OverlappedAllReduce
from efftrain_cli.training.stages import set_stage, train_stages
from efftrain_cli.training.state import TrainState, load_tensors
from efftrain_cli.training.trainer import StepRecord, evaluate, read_records
from efftrain_cli.training.worker import share_state
from tests.fake_runs import without_times
from tests.laws.every_value import OF_TRAINING, overrides_of
from tests.resume_law import RandomTokens
from tests.tiny import CPU, FOUR_BLOCKS, METHODS, fresh, tiny_recipe

Found = dict[str, Any]


# --- a training -----------------------------------------------------------------------------------


def trained(recipe: Recipe, ranks: Ranks, steps: int, stop: int | None = None) -> Found:
    """Return rows and digests of a training that is stopped after step `stop` and goes on as a
    resumed run does."""
    session = SimpleNamespace(recipe=recipe, ranks=ranks, device=CPU)
    data = RandomTokens(recipe.model.seq_len)
    val = data.validation(3)
    state = fresh(recipe)
    rows = []
    digests = []
    for until in (stop, steps):
        if until is None:
            continue
        devices = share_state(state, session)  # type: ignore[arg-type]
        for record in train_stages(state, recipe, data, val, until, devices):  # type: ignore[arg-type]
            if isinstance(record, StepRecord) and record.result is not None:
                rows += map(without_times, read_records(state, recipe, [record]))

        # Of shards, and after a stop, rank 0 alone has the whole.
        whole: tuple[Tensors, Tensors] = ({}, {})
        if ranks.rank == 0:
            whole = devices.full_state_dict(state)
        devices.after_stop(state)
        digests.append([digest(tensors) for tensors in (*whole, state.method_tensors)])
        if until == stop:
            state = resumed(recipe, ranks, state, whole)
    return {"rows": rows, "digests": digests}


def resumed(
    recipe: Recipe, ranks: Ranks, stopped: TrainState, whole: tuple[Tensors, Tensors]
) -> TrainState:
    """Return a state of the size of `stopped`; that of rank 0 has its tensors."""
    state = fresh(recipe)
    if stopped.progress.stage:
        set_stage(state, recipe, stopped.progress.stage)
    state.progress = stopped.progress
    in_flight = ranks.all_gather_json(describe_tensors(stopped.method_tensors))[0]
    state.method_tensors = empty_tensors(in_flight, CPU)
    if ranks.rank == 0:
        load_tensors(state, *whole)
        state.method_tensors = stopped.method_tensors
    return state


def digest(tensors: Tensors) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        flat = tensors[name].detach().contiguous().reshape(-1)
        sha.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


# --- copies and shards ----------------------------------------------------------------------------

STEPS, STOP = 8, 4
SIZE = [
    "model={n_layer = 3, n_head = 2, n_embd = 32, seq_len = 32}",
    "optim={lr = 3e-3, warmup_steps = 2, grad_clip = 0.5}",
    "train.tokens=1_000_000",
    "train.batch_size=16",
    "eval={every = 4, internals = 3}",  # evaluated after the stop, whether or not a run stops there
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
    "growth": [
        "stages=[{model = {n_head = 1, n_embd = 16}, switch = {rule = 'steps', value = 3}}, "
        "{operators = ['width'], rewarmup_steps = 2}]",
    ],
}
SHARDED = {
    "none": [],
    "lengths": [*CASES["lengths"], *METHODS["recompute"]],
    # Of one sequence each, so that some ranks have none of 5 left.
    "batches": ["batch_size_warmup={start = 5, increment = 11, sequences = 20}"],
    "llama": ["model.arch=llama", "model.n_kv_head=1", "model.qk_norm=true", "model.tied=false"],
}
"""Cases that are trained once with the state replicated and once with shards of it."""
BESIDE = {
    "none": [],
    "compiled": ["train.compile=on"],
    "batches": SHARDED["batches"],
    "layer dropping": CASES["layer dropping"],
    "standardization": CASES["standardization"],
}
"""Cases that are trained with the sum of gradients after the backward pass and beside it."""


def copies_and_shards(ranks: Ranks) -> Found:
    found: Found = {"first evaluation": first_evaluation(ranks)}

    def train_case(name: str, *overrides: str) -> None:
        recipe = tiny_recipe(*SIZE, *overrides)
        found[name] = trained(recipe, ranks, STEPS)
        found[f"{name}, resumed"] = trained(recipe, ranks, STEPS, STOP)

    for name, overrides in CASES.items():
        train_case(name, "train.micro_batch_tokens=64", *overrides)
    for name, overrides in SHARDED.items():
        for strategy in ("replicate", "shard"):
            section = f"parallel.strategy={strategy}"
            train_case(f"{name}, {strategy}", *overrides, section)
    for name, overrides in BESIDE.items():
        found[f"{name}, beside"] = sums_beside(tiny_recipe(*SIZE, *overrides), ranks)
    return found


def first_evaluation(ranks: Ranks) -> float:
    """Return the validation loss of fresh weights over five windows, two at a time."""
    recipe = tiny_recipe(*SIZE)
    windows = RandomTokens(recipe.model.seq_len).validation(5)
    return float(evaluate(fresh(recipe).model, windows, 64, "fp32", ranks))


BACKWARD_GRAPHS: list[None] = []
"""One entry for each compiled backward graph that has run."""


def counted(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
    """Compiles nothing, and counts the backward graphs that run; each is one node of autograd."""
    from torch._dynamo.backends.common import aot_autograd

    def backward(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        def run(*arguments: torch.Tensor) -> object:
            gradients = graph.forward(*arguments)
            BACKWARD_GRAPHS.append(None)
            return gradients

        return run

    compiler = aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=backward)
    return compiler(graph, inputs)


def sums_beside(recipe: Recipe, ranks: Ranks) -> Found:
    """Return five steps with sums after and beside the backward pass, in buckets of which the model
    fills several, and the most of them that were sent before the pass had ended."""
    early: list[int] = []
    begin = OverlappedAllReduce.begin
    send = OverlappedAllReduce._send
    finish = OverlappedAllReduce.finish
    sent_at: list[int] = []
    BACKWARD_GRAPHS.clear()

    def beginning(self: OverlappedAllReduce, losses: Sequence[torch.Tensor]) -> None:
        sent_at.clear()
        begin(self, losses)

    def sending(self: OverlappedAllReduce) -> None:
        sent_at.append(len(BACKWARD_GRAPHS))
        send(self)

    def finishing(self: OverlappedAllReduce) -> None:
        """A graph's gradients arrive together at its end: what is sent after the last graph is not
        early."""
        last = len(BACKWARD_GRAPHS)
        early.append(sum(at < last or not last for at in sent_at))
        finish(self)

    found: Found = {}
    with (
        mock.patch.object(ranks_module, "BUCKET", 4000),
        mock.patch.multiple(OverlappedAllReduce, begin=beginning, _send=sending, finish=finishing),
        mock.patch.multiple(
            gradient,
            compile_whole=partial(compile_whole, backend=counted),
            compile_parts=partial(compile_parts, backend=counted),
        ),
    ):
        for name, kinds in (("after", frozenset[str]()), ("beside", frozenset({"cpu"}))):
            with mock.patch.object(replicated, "OVERLAPPING", kinds):
                found[name] = trained(recipe, ranks, 5)
    return {**found, "early": max(early, default=0)}


# --- rings ----------------------------------------------------------------------------------------

MUON = METHODS["muon"]
LENGTHS = ["seq_len_warmup={start = 8, steps = 6, multiple = 1}"]
MEAN = ["ouroboros.embedding_gradient=mean"]
BY_MODULE = ["ouroboros.clip=module"]
RINGS: dict[int, dict[str, list[str]]] = {  # by K
    2: {"plain": []},
    3: {
        "plain": ["ouroboros.warmup_steps=2"],
        "mean, muon, by module": [*MEAN, *MUON, *BY_MODULE, "ouroboros.warmup_steps=2"],
        "lengths": LENGTHS,
    },
    4: {
        "plain": [],
        "mean": [*MEAN, "ouroboros.split=[0, 1, 1, 2]"],
        "muon, by module": [*MUON, *BY_MODULE],
    },
}


def rings(ranks: Ranks) -> Found:
    found: Found = {}
    size = [*FOUR_BLOCKS, "train.tokens=768", "checkpoint.every=1000", "eval.internals=3"]
    for modules, cases in RINGS.items():
        if ranks.world_size % (modules - 1):
            continue
        count = ranks.world_size // (modules - 1)
        for name, overrides in cases.items():
            if count > 1 and name != "plain":
                continue
            recipe = load_recipe("small", [*size, f"ouroboros.modules={modules}", *overrides])
            case = f"K = {modules}, {count} x, {name}"
            found[case] = {"ring": trained(recipe, ranks, steps=12, stop=6)}
            if ranks.rank == 0:
                found[case]["one"] = trained(recipe, ALONE, steps=12, stop=6)
    return found


# --- every value of [model] and [optim] -----------------------------------------------------------


def every_value(ranks: Ranks) -> Found:
    """Return the losses of three steps: alone, as copies and as shards."""

    def losses(overrides: list[str], ranks: Ranks) -> list[float]:
        rows = trained(load_recipe("small", overrides), ranks, steps=3)["rows"]
        return [row["loss"] for row in rows]

    found: Found = {}
    for value in OF_TRAINING:
        overrides = overrides_of(value)
        found[value] = {"alone": losses(overrides, ALONE)}
        for strategy in ("replicate", "shard"):
            try:
                found[value][strategy] = losses(
                    [*overrides, f"parallel.strategy={strategy}"], ranks
                )
            except RecipeError:
                found[value][strategy] = "refused"
    return found


def main(law: str, out: str) -> None:
    torch.set_num_threads(1)
    with joined() as ranks:
        found = {"ranks": copies_and_shards, "rings": rings, "every_value": every_value}[law](ranks)
        if ranks.rank == 0:
            Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
