"""Trains every case as one rank of several, and has rank 0 write what came of it: losses and digests. Started by
test_ranks.py, once per world size: `ranks_run.py TEXT OUT`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

import torch

from efftrain_cli.data.prepare import prepare
from efftrain_cli.data.windows import Windows
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training import gradient, replicated
from efftrain_cli.training import ranks as ranks_module
from efftrain_cli.training.compiling import compile_parts, compile_whole
from efftrain_cli.training.devices import Devices
from efftrain_cli.training.joining import joined
from efftrain_cli.training.ranks import Ranks
from efftrain_cli.training.replicated import OverlappedAllReduce
from efftrain_cli.training.stages import set_stage, train_stages
from efftrain_cli.training.state import TrainState, load_tensors, model_tensors
from efftrain_cli.training.strategy import choose_strategy, is_sharded
from efftrain_cli.training.trainer import StepRecord
from tests.tiny import fresh

CPU = torch.device("cpu")
STEPS, STOP = 8, 4  # evaluated after both, whether or not a run stops there
BASE = """
[model]
n_layer = 3
n_head = 2
n_embd = 32
seq_len = 32
[data]
train = "TEXT"
tokenizer = "bpe:300"
valid_fraction = 0.05
[optim]
lr = 3e-3
warmup_steps = 2
[train]
tokens = 1_000_000
batch_size = 16
micro_batch_tokens = 64
dtype = "fp32"
[eval]
every = 4
windows = 7
internals = 3
"""
CASES = {
    "baseline": "",
    "muon": '[optim]\nname = "muon"\nmuon_lr = 0.02',
    "length warmup": "[seq_len_warmup]\nstart = 8\nsteps = 6\nmode = 'reshape'",
    "length warmup at constant tokens": "[seq_len_warmup]\nstart = 8\nsteps = 6\nbatch = 'tokens'",
    "batch warmup": "[batch_size_warmup]\nstart = 8\nincrement = 4\nsequences = 40",
    "layer dropping": "[progressive_layer_drop]\ntheta = 0.5\nsteps = 4",
    "simigrad": "[simigrad]\ntarget = 0.9\nmin_batch_size = 8\nmax_batch_size = 32\nquantum = 4",
    "standardization": '[standardization_loss]\nweight = 0.3\nsites = "ln_input"\nmoments = "token"',
    "growth": '[[stages]]\nmodel = { n_head = 1, n_embd = 16 }\nswitch = { rule = "steps", value = 3 }\n'
    '[[stages]]\noperators = ["width"]\nrewarmup_steps = 2',
}


SHARDED = {
    "baseline": "",
    "length warmup": CASES["length warmup"],
    # Of one sequence each, so that some ranks have none of 5 left.
    "batch warmup": "[batch_size_warmup]\nstart = 5\nincrement = 11\nsequences = 20",
    "llama": '[model]\narch = "llama"\nn_kv_head = 1\nqk_norm = true\ntied = false',
}
"""Cases that are trained once with the state replicated and once with shares of it."""


BESIDE = {
    "baseline": "",
    "compiled": "",
    "batch warmup": SHARDED["batch warmup"],
    "layer dropping": CASES["layer dropping"],
    "standardization": CASES["standardization"],
}
"""Cases that are trained with the sum of gradients after the backward pass and beside it."""


def recipe_of(
    folder: Path, text: str, extra: str, train: str = "micro_batch_tokens = 64"
) -> Recipe:
    """The recipe of a case; `extra` may repeat [optim] or [model] to add keys to it."""
    base = BASE.replace("TEXT", text).replace("micro_batch_tokens = 64", train)
    section = extra.partition("\n")[0]
    if section in ("[optim]", "[model]"):
        first, bracket, rest = extra.partition("\n[")
        base, extra = base.replace(section, first), bracket + rest
    path = folder / "case.toml"
    path.write_text(f"{base}\n{extra}\n")
    return load_recipe(str(path))


def whole(
    state: TrainState, devices: Devices
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Model and optimizer tensors; of shares on rank 0 alone."""
    tensors: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = {}, {}
    if devices.computes_alone or devices.ranks.rank == 0:
        tensors = devices.full_state_dict(state)
    devices.after_stop(state)
    return tensors


def digest(everything: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]) -> str:
    sha = hashlib.sha256()
    for tensors in everything:
        for name in sorted(tensors):
            sha.update(
                tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
    return sha.hexdigest()


def main(text: str, out: str) -> None:
    torch.set_num_threads(1)
    with joined() as ranks:
        folder = Path(out).parent / f"rank{ranks.rank}-of-{ranks.world_size}"
        folder.mkdir(exist_ok=True)
        found = {}
        for name, extra in CASES.items():
            for lanes in (None, 4):
                section = f"\n[parallel]\nlanes = {lanes}" if lanes else ""
                recipe = recipe_of(
                    folder, text, extra + section if not extra.startswith("[optim]") else extra + ""
                )
                if lanes and extra.startswith("[optim]"):
                    continue
                found[name + (" in lanes" if lanes else "")] = case(recipe, ranks)
        for name, extra in SHARDED.items():
            for strategy in ("replicate", "shard"):
                train = "micro_batch_tokens = 32"
                if (
                    name == "length warmup"
                ):  # blocks are gathered again where they are computed again
                    train += "\nactivation_checkpointing = true"
                recipe = recipe_of(
                    folder, text, f"{extra}\n[parallel]\nstrategy = '{strategy}'", train
                )
                found[f"{name}, {strategy}"] = case(recipe, ranks)
        for name, extra in BESIDE.items():
            train = "micro_batch_tokens = 32"
            if name == "compiled":
                train += '\ncompile = "on"'
            recipe = recipe_of(folder, text, extra, train)
            found[f"{name}, beside"] = sums_beside(recipe, ranks)
        if ranks.rank == 0:
            Path(out).write_text(json.dumps(found))


def case(recipe: Recipe, ranks: Ranks) -> dict[str, object]:
    corpus = prepare(recipe.data)
    data = Windows(corpus.train, recipe.model.seq_len, recipe.seed)
    val = Windows(corpus.valid, recipe.model.seq_len, 0).validation(recipe.eval.windows)

    def run(state: TrainState, until: int, devices: Devices) -> list[dict[str, object]]:
        rows = []
        for record in train_stages(state, recipe, data, val, until, devices):
            if isinstance(record, StepRecord) and record.result is not None:
                result, plan = record.result, record.plan
                rows.append(
                    {
                        "step": plan.step,
                        "loss": float(result.scalars["loss"]),
                        "grad_norm": float(result.scalars["grad_norm"]),
                        "batch_size": plan.batch_size,
                        "accumulation_steps": plan.accumulation_steps,
                        "blocks": result.blocks_executed,
                        "sqrt_v": [
                            float(v)
                            for name, v in sorted(result.scalars.items())
                            if name.startswith("adam_")
                        ],
                        "internals": {
                            n: float(v)
                            for n, v in result.scalars.items()
                            if "_h." in n or n == "entropy"
                        },
                        "dots": result.simigrad_dots,
                        "val_loss": None if record.val_loss is None else float(record.val_loss),
                    }
                )
        return rows

    undisturbed = fresh(recipe, corpus.vocab_size)
    devices = choose_strategy(recipe, undisturbed, ranks, CPU)
    rows = run(undisturbed, STEPS, devices)
    stopped = fresh(recipe, corpus.vocab_size)
    first = choose_strategy(recipe, stopped, ranks, CPU)
    before = run(stopped, STOP, first)
    resumed = fresh(recipe, corpus.vocab_size)
    if stopped.progress.stage:
        set_stage(resumed, recipe, stopped.progress.stage)
    tensors = whole(stopped, first)
    if tensors[0]:
        load_tensors(resumed, *tensors)
    if is_sharded(recipe, ranks):
        ranks.broadcast(model_tensors(resumed).values())
        ranks.broadcast(resumed.optimizer.tensors().values())
    second = choose_strategy(recipe, resumed, ranks, CPU)
    resumed.progress = stopped.progress
    after = run(resumed, STEPS, second)
    alone = replace(recipe, parallel=None) if is_sharded(recipe, ranks) else recipe
    state = fresh(recipe, corpus.vocab_size)
    copies = choose_strategy(alone, state, ranks, CPU)
    one = next(islice(train_stages(state, alone, data, val, 1, copies), 1, None))
    shares = [
        data.batch(one.plan, rank, ranks.world_size).tokens.tolist()
        for rank in range(ranks.world_size)
    ]
    return {
        "rows": rows,
        "resumed": [*before, *after],
        "digest": digest(whole(undisturbed, devices)),
        "resumed_digest": digest(whole(resumed, second)),
        "batch": [row for share in shares for row in share],
    }


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

    return aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=backward)(
        graph, inputs
    )


def sums_beside(recipe: Recipe, ranks: Ranks) -> dict[str, object]:
    """Losses and digests of a few steps with sums after and beside the backward pass, in buckets of which the model
    fills several, and the most of them that were sent before the pass had ended."""
    corpus = prepare(recipe.data)
    data = Windows(corpus.train, recipe.model.seq_len, recipe.seed)
    val = Windows(corpus.valid, recipe.model.seq_len, 0).validation(recipe.eval.windows)
    early: list[int] = []
    begin, send, finish = (
        OverlappedAllReduce.begin,
        OverlappedAllReduce._send,
        OverlappedAllReduce.finish,
    )
    sent_at: list[int] = []
    BACKWARD_GRAPHS.clear()

    def beginning(self: OverlappedAllReduce, losses: Sequence[torch.Tensor]) -> None:
        sent_at.clear()
        begin(self, losses)

    def sending(self: OverlappedAllReduce) -> None:
        sent_at.append(len(BACKWARD_GRAPHS))
        send(self)

    def finishing(self: OverlappedAllReduce) -> None:
        """A graph's gradients arrive together at its end: what is sent after the last graph is not early."""
        last = len(BACKWARD_GRAPHS)
        early.append(sum(at < last or not last for at in sent_at))
        finish(self)

    found: dict[str, object] = {}
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
                state = fresh(recipe, corpus.vocab_size)
                devices = choose_strategy(recipe, state, ranks, CPU)
                records = [
                    record
                    for record in train_stages(state, recipe, data, val, 5, devices)
                    if record.result is not None
                ]
            losses = [float(record.result.scalars["loss"]) for record in records]
            found[name] = [losses, digest((model_tensors(state), state.optimizer.tensors()))]
    return {**found, "early": max(early, default=0)}


if __name__ == "__main__":
    main(*sys.argv[1:])
