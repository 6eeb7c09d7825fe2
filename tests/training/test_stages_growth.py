"""Training through the stages of a recipe, and what growth keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.rules import warnings_of
from efftrain_cli.training.build import build_model
from efftrain_cli.training.record import read_records
from efftrain_cli.training.stages import GrowthRecord, growth_message, train_stages
from efftrain_cli.training.state import TrainState
from tests.resume_law import RandomTokens
from tests.tiny import CPU, VOCAB_SIZE, changed, fresh, tiny_recipe

RECIPE = tiny_recipe(
    "model.n_embd=32",
    "optim={lr = 3e-3, warmup_steps = 3}",
    "train.tokens=1536",
    "train.batch_size=4",
    "stages=[{model={n_layer=1, n_head=1, n_embd=16}, switch={rule='steps', value=8}, lr=4e-3},"
    " {operators=['depth'], switch={rule='tokens', value=1024}, rewarmup_steps=4},"
    " {operators=['width'], rewarmup_steps=4}]",
)
"""Eight steps of 64 tokens in each of three stages."""


def run(
    state: TrainState, recipe: Recipe, until: int | None = None
) -> tuple[list[dict], list[GrowthRecord]]:
    """Train `state` on; return rows and growths."""
    data = RandomTokens(recipe.model.seq_len)
    rows = []
    growths = []
    for record in train_stages(state, recipe, data, data.validation(8), until):  # type: ignore[arg-type]
        if isinstance(record, GrowthRecord):
            growths.append(record)
        else:
            rows += read_records(state, recipe, [record])
    return rows, growths


def test_a_staged_recipe_trains_through_all_its_stages():
    state = fresh(RECIPE)
    rows, growths = run(state, RECIPE)
    assert [row["stage"] for row in rows] == [0] * 9 + [1] * 8 + [2] * 8
    assert [row["step"] for row in rows] == list(range(25))
    found = [(growth.step, growth.stage, growth.operators) for growth in growths]
    assert found == [(8, 1, ("depth",)), (16, 2, ("width",))]
    for growth in growths:
        assert growth.preserves_loss
        assert growth.val_loss_after == pytest.approx(growth.val_loss_before, abs=1e-5)
        assert "warning" not in growth_message(growth)
    for change, more in (
        ({"val_loss_after": 3.0009}, ""),
        ({"val_loss_after": 3.0011}, "\n  warning: the loss should have stayed the same"),
        (
            {"val_loss_after": 9, "preserves_loss": False},
            "\n  (these variants do not keep the loss)",
        ),
    ):
        growth = replace(growths[0], val_loss_before=3.0, parameters_before=1500, **change)
        after = f"{growth.parameters_after:,} parameters, val loss 3.0000 -> "
        assert growth_message(growth) == (
            f"grown at step 8 (depth): 1,500 -> {after}{growth.val_loss_after:.4f};"
            f" the schedule continues from step 6{more}"
        )
    assert growths[0].parameters_after == growths[1].parameters_before
    last = build_model(RECIPE, VOCAB_SIZE, CPU, 2)
    assert growths[1].parameters_after == sum(p.numel() for p in last.parameters())
    assert state.model.config == last.config
    # The last step of each stage is evaluated.
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [0, 8, 16, 24]
    # Nothing that was spent is rewritten by growth.
    assert sum(row["flops"] for row in rows[1:]) == pytest.approx(state.progress.flops)
    assert state.progress.tokens == 24 * 64 and state.progress.windows == 24 * 4


@pytest.mark.parametrize("symmetry, warned", [("none", 1), ("offdiag", 0)])
def test_equal_copies_are_warned_of_before_the_run(symmetry, warned):
    recipe = changed(RECIPE, f"staged_growth.symmetry={symmetry}")
    warnings = [line for line in warnings_of(recipe) if "staged_growth.symmetry" in line]
    assert len(warnings) == warned


def test_a_run_that_ends_with_its_stage_does_not_grow():
    state = fresh(RECIPE)
    _, growths = run(state, RECIPE, until=8)
    assert growths == [] and state.progress.stage == 0
    _, growths = run(state, RECIPE, until=9)
    assert [growth.step for growth in growths] == [8]
    _, undisturbed = run(fresh(RECIPE), RECIPE, until=9)
    assert growths[0].val_loss_before == undisturbed[0].val_loss_before
