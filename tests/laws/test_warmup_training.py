"""The warmups in the training loop: what is trained on, what is counted, and that neutral settings
change no bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from efftrain_cli.data.windows import Windows
from efftrain_cli.foundation.step import Progress
from efftrain_cli.plan.plan import after_step, assumed_result, plan_step
from efftrain_cli.training.loop import train
from tests.resume_law import RandomTokens, run
from tests.tiny import changed, fresh, tiny_recipe, windows_of

FULL, BATCH = 32, 6
RECIPE = tiny_recipe(
    "model.seq_len=32",
    "optim={lr = 3e-3, warmup_steps = 3}",
    "train.tokens=2304",
    "train.batch_size=6",
    "train.micro_batch_tokens=64",
    "eval={every = 5, windows = 2}",
)
LONG = ["train.tokens=1_000_000", "seq_len_warmup={start = 8, steps = 1000}"]
TWO_STAGE = "seq_len_warmup={pacing = 'discrete', lengths = [8, 32], until = [5]}"
RAMP = "batch_size_warmup={start = 2, increment = 2, sequences = 20}"
LINEAR = "seq_len_warmup={start = 8, steps = 9}"
WARMUPS = {
    "linear": [LINEAR],
    "root": [LINEAR, "seq_len_warmup.pacing=root"],
    "reshape": [LINEAR, "seq_len_warmup.mode=reshape"],
    "tokens": [LINEAR, "seq_len_warmup.batch=tokens"],
    "two-stage tokens": [TWO_STAGE, "seq_len_warmup.batch=tokens"],
    "two-stage": [TWO_STAGE],
    "batch": [RAMP],
    "switch": ["batch_size_warmup={start = 2, increment = 4, switch = ['1.2K']}"],
    "both": [LINEAR, RAMP],
}


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Windows:
    """Tokens 0, 1, 2, ... so that every token tells where it stood."""
    folder = tmp_path_factory.mktemp("shards")
    return windows_of(folder, np.arange(20_000), FULL, 3, vocab_size=20_001)


@pytest.mark.parametrize("warmup", WARMUPS)
def test_rows_count_the_targets_that_were_trained_on(warmup, windows):
    """An independent count: the tokens in the batches themselves, by where they stood in the
    text."""
    recipe = changed(RECIPE, *WARMUPS[warmup])
    progress, counted, seen_windows = Progress(), 0, 0
    lengths = []
    while progress.tokens < recipe.train.tokens:
        plan = plan_step(recipe, progress)
        batch = windows.batch(plan)
        assert batch.tokens.shape == batch.targets.shape == (plan.batch_size, plan.seq_len)
        assert torch.equal(batch.targets, batch.tokens + 1)
        counted += len(set(batch.targets.flatten().tolist()))
        # Every sequence comes from the windows that this step consumes, from their beginnings on.
        count = -(-plan.batch_size // plan.sequences_per_window)
        starts = windows.starts(progress.windows, count)
        pieces = (starts[:, None] + np.arange(plan.sequences_per_window) * plan.seq_len).reshape(
            -1
        )[: plan.batch_size]
        assert batch.tokens[:, 0].tolist() == pieces.tolist()
        progress = after_step(recipe, progress, plan, assumed_result(recipe, plan, None))
        seen_windows += count
        lengths.append(plan.seq_len)
        assert progress.tokens == counted
        assert (
            progress.tokens + progress.tokens_discarded
            == seen_windows * FULL
            == progress.windows * FULL
        )
    assert lengths[-1] == FULL
    if warmup not in ("batch", "switch"):
        assert lengths[0] == 8 or warmup == "root"
        assert all(before <= after for before, after in pairwise(lengths))


@pytest.mark.parametrize(
    "warmup", [name for name in WARMUPS if name != "reshape" and "tokens" not in name]
)
def test_rows_are_those_of_the_plan(warmup):
    recipe = changed(RECIPE, *WARMUPS[warmup])
    rows = run(fresh(recipe), recipe)
    steps = rows[1:]
    assert sum(row["batch_size"] * row["seq_len"] for row in steps) == rows[-1]["tokens"]
    assert rows[-1]["tokens"] >= recipe.train.tokens > rows[-2]["tokens"]
    assert {row["seq_len"] for row in steps} != {FULL} or {row["batch_size"] for row in steps} != {
        BATCH
    }
    # Validation is at full length whatever the step's: as it was before the first step, so at a
    # fresh state.
    plain = run(fresh(RECIPE), RECIPE, 0)
    assert rows[0]["val_loss"] == plain[0]["val_loss"]


def test_positions_that_no_sequence_has_reached_do_not_move():
    recipe = changed(RECIPE, *LONG)
    state = fresh(recipe)
    before = state.model.wpe.weight.detach().clone()
    val = RandomTokens(FULL).window(5)[None]
    list(train(state, recipe, RandomTokens(FULL), val, until=4))  # type: ignore[arg-type]
    after = state.model.wpe.weight.detach()
    assert not torch.equal(before[:8], after[:8])
    assert torch.equal(before[8:], after[8:])
