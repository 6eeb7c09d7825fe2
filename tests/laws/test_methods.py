"""Every method trains every kind of model, and every step of it resumes exactly."""

from __future__ import annotations

import math

import pytest

from efftrain_cli.model.flops import parameter_count
from efftrain_cli.plan.plan import model_config
from tests.resume_law import (
    assert_resumes_exactly_at_every_step,
    assert_tokens_are_those_of_the_data,
)
from tests.tiny import METHODS, VOCAB_SIZE, fresh, tiny_recipe

LLAMA = [
    "model={arch = 'llama', n_layer = 3, n_head = 4, n_kv_head = 2, n_embd = 32, seq_len = 16}",
    "model.qk_norm=true",
    "model.softcap=20.0",
    "optim.warmup_steps=2",
    "train.tokens=768",
    "eval.every=3",
]
NARROW = "{bits = 6, chunk = 8}"
BASES = {
    "llama": [*LLAMA, "model.tied=true"],
    "llama, untied": [*LLAMA, "model.tied=false"],
    "standardized": [
        "model.norm=none",
        "model.init=unit",
        "train.tokens=768",
        "eval.every=3",
        "standardization_loss={weight = 0.3}",
    ],
    "narrow sums": [
        "train.batch_size=4",
        "train.tokens=384",
        "chunked_accumulation={operands = 'fp8_e4m3', gradient_operands = 'fp8_e5m2', head = true}",
        f"chunked_accumulation.forward={NARROW}",
        f"chunked_accumulation.grad_input={NARROW}",
        f"chunked_accumulation.grad_weight={NARROW}",
    ],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", BASES)
def test_each_method_trains_and_resumes(base, method):
    if (base, method) == ("standardized", "replay"):
        pytest.skip("the two exclude each other")
    recipe = tiny_recipe(*BASES[base], *METHODS[method])
    rows = assert_resumes_exactly_at_every_step(recipe)
    losses = [row["loss"] for row in rows[1:]]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] or not base.startswith("llama")
    assert_tokens_are_those_of_the_data(rows, recipe)
    if recipe.standardization_loss is not None:
        assert all(math.isfinite(row["standardization_loss"]) for row in rows[1:])

    model = fresh(recipe).model
    assert (model.lm_head is None) == recipe.model.tied
    assert model.parameter_count == parameter_count(model_config(recipe, VOCAB_SIZE))
