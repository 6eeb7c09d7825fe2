"""Every value of every `Literal` trains as planned, resumes, grows, exports and is shared, or is
refused."""

from __future__ import annotations

import json
import math
from functools import cache

import pytest
import torch

from efftrain_cli.foundation.errors import RecipeError, UsageError
from efftrain_cli.model.flops import parameter_count
from efftrain_cli.model.hf import to_hf
from efftrain_cli.plan.plan import model_config, plan_run
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from efftrain_cli.training.build import set_stage
from efftrain_cli.training.stages import GrowthRecord, train_stages
from tests.launch import run_ranks
from tests.laws.every_value import OF_MODEL, OF_TRAINING, STAGES, VALUES, overrides_of
from tests.laws.ranks_run import RANKS_RUN
from tests.resume_law import RandomTokens, assert_resumes_exactly, run
from tests.tiny import VOCAB_SIZE, fresh

STAGED = [value for value in VALUES if value.startswith("staged_growth.")]


def test_the_values_come_from_the_annotations():
    assert {"model.norm=rmsnorm", "optim.name=adamw", "ouroboros.clip=module"} <= set(VALUES)
    assert len(VALUES) > 60


@pytest.mark.parametrize(
    "value", [value for value in VALUES if value != "train.compile=on" and value not in STAGED]
)
def test_it_trains_as_planned_and_resumes(value):
    recipe = load_recipe("small", overrides_of(value))
    rows = assert_resumes_exactly(recipe, after=[1])
    state = fresh(recipe)
    assert parameter_count(model_config(recipe, VOCAB_SIZE)) == state.model.parameter_count
    summary = summarize_plan(recipe, vocab_size=VOCAB_SIZE)
    if "steps" not in recipe.varies:
        assert summary.steps == rows[-1]["step"]
        rates = [plan.lr for plan, _ in plan_run(recipe)]
        assert [row["lr"] for row in rows[1:]] == rates and min(rates) > 0
    assert all(math.isfinite(row["loss"]) for row in rows[1:])


def test_a_recipe_of_it_is_written_and_read_back(tmp_path):
    for value in VALUES:
        recipe = load_recipe("small", overrides_of(value))
        (tmp_path / "copy.toml").write_text(dump_recipe(recipe))
        assert load_recipe(str(tmp_path / "copy.toml")) == recipe


@cache
def plain_losses() -> list[float]:
    """Return the losses of the recipe without a setting."""
    recipe = load_recipe("small", overrides_of("model.arch=gpt2"))
    return [row["loss"] for row in run(fresh(recipe), recipe)[1:]]


@pytest.mark.parametrize(
    "settings",
    [
        ["model.n_kv_head=1"],
        ["model.head_dim=6"],
        ["model.d_ff=20"],
        ["model.norm_eps=1e-3"],
        ["model.positions=rope", "model.rope_theta=100.0"],
        ["model.qk_norm=true"],
        ["model.bias=false"],
        ["model.tied=false"],
        ["model.softcap=5.0"],
        ["optim.z_loss=0.01"],
        ["eval.internals=2"],
    ],
    ids=lambda settings: settings[-1],
)
def test_a_number_or_switch_changes_the_run_and_resumes(settings):
    recipe = load_recipe("small", [*overrides_of("model.arch=gpt2"), *settings])
    rows = assert_resumes_exactly(recipe, after=[1])
    model = fresh(recipe).model
    assert parameter_count(model_config(recipe, VOCAB_SIZE)) == model.parameter_count
    equal = [row["loss"] for row in rows[1:]] == plain_losses()
    # What is looked at changes nothing; z-loss is reported apart and changes the second step.
    assert equal == (settings == ["eval.internals=2"])


@pytest.mark.parametrize("value", [*OF_TRAINING, *STAGED])
def test_growth_keeps_the_loss_or_is_refused(value):
    try:
        recipe = load_recipe("small", [*overrides_of(value), STAGES])
    except RecipeError as error:
        assert "stages" in str(error) or "staged_growth" in str(error)
        return
    state, data = fresh(recipe), RandomTokens(recipe.model.seq_len)
    set_stage(state, recipe, 0)
    records = list(train_stages(state, recipe, data, data.validation()))  # type: ignore[arg-type]
    (growth,) = [record for record in records if isinstance(record, GrowthRecord)]
    assert growth.val_loss_before is not None and growth.val_loss_after is not None
    jump = abs(growth.val_loss_after - growth.val_loss_before)
    assert jump <= 2e-6 or not growth.preserves_loss


@pytest.mark.parametrize("value", OF_MODEL)
def test_export_gives_equal_logits_or_is_refused(value):
    pytest.importorskip("transformers")
    ours = fresh(load_recipe("small", overrides_of(value))).model
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # biases and gains that an export may not forget
        for parameter in ours.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    try:
        theirs = to_hf(ours, 1)
    except UsageError as error:
        assert "model." in str(error)
        return
    tokens = torch.randint(VOCAB_SIZE, (2, 16), generator=generator)
    with torch.no_grad():
        difference = (ours(tokens) - theirs(tokens).logits).abs().max()
    assert difference <= 1e-5


@pytest.mark.slow
def test_two_ranks_and_shares_train_as_one_process(tmp_path, zygote):
    found = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.json"
        run_ranks(zygote, tmp_path, ranks, "every_value", str(out), script=RANKS_RUN)
        found.append(json.loads(out.read_text()))
    alone, shared = found
    assert shared.keys() == set(OF_TRAINING)
    for value, rows in shared.items():
        loose = 1e-3 if value == "optim.name=muon" else 1e-4
        expected = alone[value]["replicate"]
        assert len(expected) == 3
        for strategy in ("replicate", "shard"):
            refused = rows[strategy] == "refused"
            assert refused or rows[strategy] == pytest.approx(expected, rel=loose), value
            assert not (refused and strategy == "replicate")
