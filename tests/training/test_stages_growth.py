"""Training through the stages of a recipe: what growth keeps, and that a run can be stopped and
resumed anywhere in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from efftrain_cli.data.windows import Windows
from efftrain_cli.methods.staged_growth import StagedGrowth
from efftrain_cli.methods.stages import Stage, StageModel, Switch
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.rules import warnings_of
from efftrain_cli.recipe.sections import Eval, Model, Optim, Train
from efftrain_cli.training.build import build_model
from efftrain_cli.training.record import read_records
from efftrain_cli.training.stages import (
    GrowthRecord,
    growth_message,
    train_stages,
)
from efftrain_cli.training.state import TrainState
from tests.tiny import fresh, windows_of

VOCAB = 60
CPU = torch.device("cpu")
RECIPE = Recipe(
    model=Model(n_layer=2, n_head=2, n_embd=32, seq_len=16),
    optim=Optim(lr=3e-3, warmup_steps=3),
    train=Train(tokens=16 * 4 * 24, batch_size=4, dtype="fp32"),
    eval=Eval(every=100, windows=8),
    staged_growth=StagedGrowth(),
    stages=(
        Stage(
            model=StageModel(n_layer=1, n_head=1, n_embd=16),
            switch=Switch(rule="steps", value=8),
            lr=4e-3,
        ),
        Stage(
            operators=("depth",), switch=Switch(rule="tokens", value=16 * 4 * 16), rewarmup_steps=4
        ),
        Stage(operators=("width",), rewarmup_steps=4),
    ),
)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Windows:
    folder = tmp_path_factory.mktemp("shards")
    ids = np.random.Generator(np.random.Philox(7)).integers(0, VOCAB - 1, 8_000).astype(np.uint32)
    ids[1::2] = (ids[::2] * 7 + 3) % (VOCAB - 1)  # something to learn
    return windows_of(folder, ids, RECIPE.model.seq_len, RECIPE.seed, VOCAB)


def run(
    state: TrainState, windows: Windows, recipe: Recipe, until: int | None = None
) -> tuple[list[dict], list[GrowthRecord]]:
    """(rows, growths) of training `state` on."""
    rows, growths = [], []
    for record in train_stages(
        state, recipe, windows, windows.validation(recipe.eval.windows), until
    ):
        if isinstance(record, GrowthRecord):
            growths.append(record)
            continue
        rows += read_records(state, recipe, [record])
    return rows, growths


def test_a_staged_recipe_trains_through_all_its_stages(windows):
    state = fresh(RECIPE, VOCAB)
    rows, growths = run(state, windows, RECIPE)
    assert [row["stage"] for row in rows] == [0] * 9 + [1] * 8 + [2] * 8
    assert [row["step"] for row in rows] == list(range(25))
    assert [(g.step, g.stage, g.operators) for g in growths] == [
        (8, 1, ("depth",)),
        (16, 2, ("width",)),
    ]
    for growth in growths:
        assert growth.preserves_loss
        assert growth.val_loss_after == pytest.approx(growth.val_loss_before, abs=1e-5)
        assert "warning" not in growth_message(growth)
    assert growths[0].parameters_after == growths[1].parameters_before
    last = build_model(RECIPE, VOCAB, CPU, 2)
    assert growths[1].parameters_after == sum(p.numel() for p in last.parameters())
    assert state.model.config == last.config
    # the last step of each stage is evaluated, and the larger model's first loss is that of its own
    # step
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [0, 8, 16, 24]
    # conservation: nothing that was spent is rewritten by growth
    assert sum(row["flops"] for row in rows[1:]) == pytest.approx(state.progress.flops)
    assert state.progress.tokens == 24 * 64 and state.progress.windows == 24 * 4


@pytest.mark.parametrize("symmetry, warned", [("none", True), ("offdiag", False)])
def test_equal_copies_are_warned_of_before_the_run(windows, symmetry, warned):
    stages = (
        Stage(model=StageModel(n_head=1, n_embd=16), switch=Switch(rule="steps", value=2)),
        Stage(operators=("width",), rewarmup_steps=2),
    )
    recipe = replace(RECIPE, stages=stages, staged_growth=StagedGrowth(symmetry=symmetry))
    _, growths = run(fresh(recipe, VOCAB), windows, recipe)
    assert growths[0].preserves_loss
    warnings = [line for line in warnings_of(recipe) if "staged_growth.symmetry" in line]
    assert len(warnings) == warned


def test_a_run_that_ends_with_its_stage_does_not_grow(windows):
    state = fresh(RECIPE, VOCAB)
    _, growths = run(state, windows, RECIPE, until=8)
    assert growths == [] and state.progress.stage == 0
    _, growths = run(state, windows, RECIPE, until=9)
    assert [g.step for g in growths] == [8]
    _, undisturbed = run(fresh(RECIPE, VOCAB), windows, RECIPE, until=9)
    assert growths[0].val_loss_before == undisturbed[0].val_loss_before
