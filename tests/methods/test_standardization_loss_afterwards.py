"""The standardization loss in growth, in curves and in compiled graphs."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from efftrain_cli.methods.stages import Stage, StageModel, Switch
from efftrain_cli.training import compiling
from efftrain_cli.training.compiling import compiled_graphs
from efftrain_cli.training.objective import Objective
from efftrain_cli.training.record import StepRecord, read_records
from efftrain_cli.training.stages import GrowthRecord, set_stage, train_stages
from tests.methods.standardized import LENGTH, batch, same, with_loss
from tests.resume_law import RandomTokens
from tests.tiny import changed, fresh


def test_growth_in_depth_keeps_the_loss_and_training_goes_on():
    stages = (
        Stage(model=StageModel(n_layer=1), switch=Switch(rule="steps", value=3)),
        Stage(operators=("depth",), rewarmup_steps=1),
    )
    recipe = replace(with_loss(sites="all_linear"), stages=stages)
    state, data = fresh(recipe), RandomTokens(LENGTH)
    set_stage(state, recipe, 0)
    records = list(train_stages(state, recipe, data, data.validation()))  # type: ignore[arg-type]
    (growth,) = [record for record in records if isinstance(record, GrowthRecord)]
    assert growth.val_loss_after == growth.val_loss_before and growth.preserves_loss
    rows = read_records(
        state, recipe, [record for record in records if isinstance(record, StepRecord)]
    )
    assert math.isfinite(rows[-1]["standardization_loss"]) and "std_kl_h.1.mlp.c_proj" in rows[-1]  # type: ignore[arg-type]


def test_compiled_by_blocks_all_blocks_share_a_graph(monkeypatch):
    recipe = with_loss(sites="ln_input")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tokens, targets = batch(2)
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiling, "WHOLE_MODEL_BLOCKS", 1)
    eager = fresh(recipe)
    state = fresh(recipe)
    have = Objective(changed(recipe, "train.compile=on"), state).compute(
        tokens, targets, None, None
    )
    want = Objective(recipe, eager).compute(tokens, targets, None, None)
    same(have, state.model, want, eager.model)
    assert compiled_graphs() == 2  # a block's and the head's
    assert not torch._dynamo.utils.counters["graph_break"]
