"""The standardization loss in growth, in curves and in compiled graphs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from efftrain_cli.compare.arms import Arm
from efftrain_cli.compare.figures import plots_of
from efftrain_cli.compare.picture import inline_svg
from efftrain_cli.methods.staged_growth import Stage, StageModel, Switch
from efftrain_cli.run.reading import load_run
from efftrain_cli.training import compiling
from efftrain_cli.training.compiling import compiled_graphs
from efftrain_cli.training.objective import Objective
from efftrain_cli.training.record import StepRecord, read_records
from efftrain_cli.training.stages import GrowthRecord, set_stage, train_stages
from tests.fake_runs import rows_of as rows_of_run
from tests.fake_runs import write_run
from tests.methods.standardized import LENGTH, SITES, batch, same, with_loss
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


def test_a_runs_sites_are_drawn_over_training(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path))
    rows = rows_of_run(40, 0)
    sites = [f"h.{i}.{name}" for i in range(2) for name in SITES["preact"]]
    for row in rows[1:]:
        row["standardization_loss"] = 2.0
        if row["val_loss"] is not None:
            row |= {
                f"std_kl_{site}": 1.0 / (row["step"] + number) for number, site in enumerate(sites)
            }
    path = write_run(
        tmp_path,
        "small-std",
        0,
        steps=40,
        rows=rows,
        more="\n[standardization_loss]\nweight = 0.1\n",
    )
    plots = {plot.name: plot for plot in plots_of([Arm("A", (load_run(path),))], [])}
    assert {"std-kl-A", "standardization-loss"} <= plots.keys()
    plot = plots["std-kl-A"]
    assert len(plot.curves.groupby(["group", "line"])) == len(sites)
    assert "40K" in inline_svg(plot)


@pytest.mark.parametrize(
    "settings, recompute",
    [
        pytest.param({}, False, id="preact"),
        pytest.param({"sites": "ln_input"}, False, id="ln_input", marks=pytest.mark.slow),
        pytest.param({"sites": "all_linear"}, True, id="recomputed", marks=pytest.mark.slow),
    ],
)
def test_compiled_as_a_whole_it_is_one_graph_without_breaks(settings, recompute, monkeypatch):
    recipe = with_loss(**settings)
    recipe = changed(recipe, f"train.activation_checkpointing={str(recompute).lower()}")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tokens, targets = batch(2)
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    eager = fresh(recipe)
    state = fresh(recipe)
    compiled = Objective(changed(recipe, "train.compile=on"), state).compute
    for _ in range(2):
        same(
            compiled(tokens, targets, None, None),
            state.model,
            Objective(recipe, eager).compute(tokens, targets, None, None),
            eager.model,
        )
    assert compiled_graphs() == 1
    assert not torch._dynamo.utils.counters["graph_break"]


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
