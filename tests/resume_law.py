"""Exact resume, as a law that every method's tests can ask for: a checkpoint of any step continues as if nothing had
happened."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product

import torch

from efftrain_cli.foundation.step import Batch, Progress, StepPlan
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.state import (
    TrainState,
    load_tensors,
    progress_from_json,
    progress_to_json,
)
from efftrain_cli.training.trainer import read_records, train
from tests.fake_runs import without_times
from tests.tiny import VOCAB_SIZE, assert_equal, fresh, tensors_of


class RandomTokens:
    """Stands in for a corpus: tokens in which each mostly tells the next, a function of the window's position."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def window(self, position: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(position)
        noise = torch.randint(VOCAB_SIZE, (self.seq_len + 1,), generator=generator)
        ids = [0]
        for value in noise.tolist()[1:]:
            ids.append((5 * ids[-1] + 1) % VOCAB_SIZE if value % 4 else value)
        return torch.tensor(ids)

    def validation(self, windows: int = 2) -> torch.Tensor:
        return torch.stack([self.window(10**6 + number) for number in range(windows)])

    def batch(self, plan: StepPlan, rank: int = 0, world_size: int = 1) -> Batch:
        positions = range(plan.window_start, plan.window_start + plan.windows)
        starts = [plan.seq_len * number for number in range(plan.sequences_per_window)]
        places = list(product(positions, starts))[: plan.batch_size]
        ids = torch.stack([self.window(p)[start : start + plan.seq_len + 1] for p, start in places])
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def run(
    state: TrainState, recipe: Recipe, until: int | None = None, windows: int = 2
) -> list[dict]:
    """Train a state on made tokens and return the rows."""
    data = RandomTokens(recipe.model.seq_len)
    rows = []
    for record in train(state, recipe, data, data.validation(windows), until):  # type: ignore[arg-type]
        rows += read_records(state, recipe, [record])
    return rows


def timeless(progress: Progress) -> Progress:
    return progress._replace(train_seconds=0.0)


def assert_resumes_exactly_at_every_step(recipe: Recipe) -> list[dict]:
    """Trains to the end of the budget; then, from what a checkpoint of every step holds, the two steps after it, in a
    state that was another before: weights, moments, progress and rows must be equal to the last bit. Returns the rows
    of the run.

    Two steps rather than all: equal states at step k + 2 for every k have equal futures. Progress goes through its
    JSON; the tensors stay in memory, as their way to the disk and back is the same for every method.
    """
    data = RandomTokens(recipe.model.seq_len)
    val = data.validation()
    state = fresh(recipe)
    rows, tensors, progresses, saved, method_tensors = [], [], [], [], []
    for record in train(state, recipe, data, val):  # type: ignore[arg-type]
        rows += read_records(state, recipe, [record])
        tensors.append(tensors_of(state))
        method_tensors.append(
            {name: tensor.clone() for name, tensor in state.method_tensors.items()}
        )
        progresses.append(timeless(state.progress))
        saved.append(json.dumps(progress_to_json(state.progress), allow_nan=False))
    last = state.progress.step
    for step in range(last):
        resumed = fresh(replace(recipe, seed=recipe.seed + 1))
        optimizer = resumed.optimizer.tensors().keys()
        load_tensors(
            resumed,
            {name: tensor for name, tensor in tensors[step].items() if name not in optimizer},
            {name: tensors[step][name] for name in optimizer},
        )
        # In another order, as a file may have them, and as copies: what is in flight must not be changed by a step.
        resumed.method_tensors = {
            name: method_tensors[step][name].clone()
            for name in sorted(method_tensors[step], reverse=True)
        }
        resumed.progress = progress_from_json(json.loads(saved[step]))
        until = min(step + 2, last)
        again = run(resumed, recipe, until)
        assert timeless(resumed.progress) == progresses[until], f"resumed after step {step}"
        assert_equal(tensors_of(resumed), tensors[until], step)
        assert_equal(resumed.method_tensors, method_tensors[until], step)
        expected = rows[step + 1 : until + 1] if step else rows[: until + 1]
        for want, have in zip(expected, again, strict=True):
            keys = without_times(want).keys() - {"val_loss"}  # a run cut at a step evaluates it
            assert {key: want[key] for key in keys} == {key: have[key] for key in keys}
    return rows


def assert_tokens_are_those_of_the_data(rows: list[dict], recipe: Recipe) -> None:
    """The tokens of a run, counted from the targets that the data handed out, not from what the trainer says."""
    data, counted = RandomTokens(recipe.model.seq_len), 0
    for before, row in pairwise(rows):
        size, length = row["batch_size"], row["seq_len"]
        plan = StepPlan(row["step"], 0.0, size, length, 1, before["windows"], 1, (1.0,), False)
        counted += data.batch(plan).targets.numel()
        assert row["tokens"] == counted
        assert row["total_flops"] - before["total_flops"] == row["flops"]
