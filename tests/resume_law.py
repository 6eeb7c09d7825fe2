"""Exact resume, as a law that every method's tests can ask for: a checkpoint of any step continues
as if nothing had happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from efftrain_cli.foundation.step import Batch, Progress, StepPlan
from efftrain_cli.recipe.recipe import Recipe, dump_recipe
from efftrain_cli.run.directory import checkpoint_path
from efftrain_cli.training.loading import load
from efftrain_cli.training.record import StepRecord, read_records
from efftrain_cli.training.stages import train_stages
from efftrain_cli.training.state import TrainState
from tests.fake_runs import without_times
from tests.tiny import VOCAB_SIZE, assert_equal, fresh
from tests.trained_run import read_checkpoint, write_checkpoint


class RandomTokens:
    """Stands in for a corpus: tokens in which each mostly tells the next, a function of the
    window's position."""

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
        first = plan.first_sequence(plan.accumulation_steps * rank // world_size)
        end = plan.first_sequence(plan.accumulation_steps * (rank + 1) // world_size)
        sequences = []
        for position, start in places:
            sequences.append(self.window(position)[start : start + plan.seq_len + 1])
        ids = torch.stack(sequences)[first:end]
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def run(
    state: TrainState, recipe: Recipe, until: int | None = None, windows: int = 2
) -> list[dict]:
    """Train a state on made tokens and return the rows."""
    data = RandomTokens(recipe.model.seq_len)
    rows = []
    for record in train_stages(state, recipe, data, data.validation(windows), until):  # type: ignore[arg-type]
        if isinstance(record, StepRecord):
            rows += read_records(state, recipe, [record])
    return rows


def timeless(progress: Progress) -> Progress:
    return progress._replace(train_seconds=0.0)


def assert_resumes_exactly(recipe: Recipe, after: Sequence[int] = ()) -> list[dict]:
    """Trains to the end of the budget; then, from the checkpoint of every step, or of the steps
    `after` alone, a step or two on, in a state that was another before: weights, moments, progress
    and rows must be equal to the last bit. Returns the rows of the run.

    Equal states have equal futures, so no part need be trained to the end.
    """
    with TemporaryDirectory() as folder:
        data = RandomTokens(recipe.model.seq_len)
        state = fresh(recipe)
        rows = []
        for record in train_stages(state, recipe, data, data.validation()):  # type: ignore[arg-type]
            if isinstance(record, StepRecord):
                rows += read_records(state, recipe, [record])
                step = state.progress.step
                if not after or step in range(after[0], after[-1] + 3):
                    path = checkpoint_path(Path(folder), step)
                    write_checkpoint(path, state, dump_recipe(recipe))
        for step in after or range(state.progress.step):
            _assert_resumes(Path(folder), recipe, step, rows)
    return rows


def _assert_resumes(folder: Path, recipe: Recipe, step: int, rows: list[dict]) -> None:
    resumed = fresh(replace(recipe, seed=recipe.seed + 1))
    load(checkpoint_path(folder, step), resumed, recipe)
    # In another order, as a file may have them.
    backwards = dict(reversed(resumed.in_flight.items()))
    resumed.in_flight.clear()
    resumed.in_flight.update(backwards)
    until = min(step + (2 if step % 3 == 1 else 1), rows[-1]["step"])
    again = run(resumed, recipe, until)

    progress, model, optimizer, in_flight = read_checkpoint(checkpoint_path(folder, until))
    assert timeless(resumed.progress) == timeless(progress), f"resumed after step {step}"
    assert_equal(resumed.weights(), model, step)
    assert_equal(resumed.optimizer.tensors(), optimizer, step)
    assert_equal(resumed.in_flight, in_flight, step)
    expected = rows[step + 1 : until + 1] if step else rows[: until + 1]
    for want, have in zip(expected, again, strict=True):
        keys = without_times(want).keys() - {"val_loss"}  # a run cut at a step evaluates it
        assert {key: want[key] for key in keys} == {key: have[key] for key in keys}


def assert_tokens_are_those_of_the_data(rows: list[dict], recipe: Recipe) -> None:
    """The tokens of a run, counted from the targets that the data handed out, not from what the
    trainer says."""
    data, counted = RandomTokens(recipe.model.seq_len), 0
    for before, row in pairwise(rows):
        size, length = row["batch_size"], row["seq_len"]
        plan = StepPlan(row["step"], 0.0, size, length, 1, before["windows"], 1, (1.0,), False)
        counted += data.batch(plan).targets.numel()
        assert row["tokens"] == counted
        assert row["total_flops"] - before["total_flops"] == row["flops"]
