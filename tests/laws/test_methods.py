"""Every method, on every kind of model: it resumes exactly, and neither neutral settings nor
observers move a bit."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
from torch import Tensor

from efftrain_cli.model.flops import parameter_count
from efftrain_cli.plan.plan import model_config
from tests.fake_runs import without_times
from tests.resume_law import (
    assert_resumes_exactly,
    assert_tokens_are_those_of_the_data,
    run,
)
from tests.tiny import METHODS, VOCAB_SIZE, assert_equal, fresh, tensors_of, tiny_recipe

SIX_STEPS = ["train.tokens=768", "train.micro_batch_tokens=64", "eval.every=3"]
LLAMA = [
    *SIX_STEPS,
    "model={arch = 'llama', n_layer = 3, n_head = 4, n_kv_head = 2, n_embd = 32, seq_len = 16}",
    "model.qk_norm=true",
    "model.softcap=20.0",
    "optim.warmup_steps=2",
]
NARROW = "{bits = 6, chunk = 8}"
BASES = {
    "llama": [*LLAMA, "model.tied=true"],
    "llama, untied": [*LLAMA, "model.tied=false"],
    "standardized": [
        *SIX_STEPS,
        "model.norm=none",
        "model.init=unit",
        "standardization_loss={weight = 0.3}",
    ],
    "narrow sums": [
        "train.batch_size=4",
        "train.tokens=384",
        "chunked_accumulation={operands = 'fp8_e4m3', gradient_operands = 'fp8_e5m2'}",
        f"chunked_accumulation.forward={NARROW}",
        f"chunked_accumulation.grad_input={NARROW}",
        f"chunked_accumulation.grad_weight={NARROW}",
    ],
}


ASK_WHETHER_TIED = ("none", "muon", "ouroboros")
"""The methods for which a head of its own is another case; for the others one base is enough."""
PAIRS = [
    (base, method)
    for base, method in itertools.product(BASES, METHODS)
    if base != "llama, untied" or method in ASK_WHETHER_TIED
]


@pytest.mark.parametrize("base, method", PAIRS)
def test_each_method_trains_and_resumes(base, method):
    """F3."""
    recipe = tiny_recipe(*BASES[base], *METHODS[method])
    rows = assert_resumes_exactly(recipe)
    losses = [row["loss"] for row in rows[1:]]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] or not base.startswith("llama")
    assert_tokens_are_those_of_the_data(rows, recipe)
    if recipe.standardization_loss is not None:
        assert all(math.isfinite(row["standardization_loss"]) for row in rows[1:])

    model = fresh(recipe).model
    assert (model.lm_head is None) == recipe.model.tied
    assert model.parameter_count == parameter_count(model_config(recipe, VOCAB_SIZE))


LONGER = ["model.n_layer=4", "train.batch_size=4"]  # ten steps
GROWING = [
    *LONGER,
    (
        "stages=[{model = {n_layer = 2, n_head = 1, n_embd = 8}, switch = {rule = 'steps', value ="
        " 3}}, {operators = ['depth'], switch = {rule = 'steps', value = 6}, rewarmup_steps = 2},"
        " {operators = ['width'], rewarmup_steps = 2}]"
    ),
]
QUEUED = [*LONGER, "seq_len_warmup={start = 8, steps = 6, multiple = 1}"]
ADAPTING = (
    "simigrad={target = 0.4, min_batch_size = 4, max_batch_size = 20, interval = 2, window = 2}"
)
VARIANTS = {
    "simigrad, interval": ["train.tokens=1792", ADAPTING],
    "simigrad, dropping": [*METHODS["simigrad"], *METHODS["layer dropping"]],
    "ouroboros, mean": [
        *LONGER,
        "ouroboros={modules = 3, warmup_steps = 2}",
        "ouroboros.embedding_gradient=mean",
    ],
    "ouroboros, by module": [*LONGER, "ouroboros={modules = 6, clip = 'module'}"],
    "two modules": [*LONGER, "ouroboros={modules = 2, clip = 'module'}"],
    "ouroboros, lengths": [*QUEUED, "ouroboros.modules=3"],
    "lion, ouroboros": ["optim.name=lion", *METHODS["ouroboros"]],
    "std, inputs": [
        "model.norm=none",
        "model.init=unit",
        "standardization_loss={weight = 0.3, sites = 'ln_input'}",
    ],
    "std, linear": ["standardization_loss={weight = 0.3, sites = 'all_linear'}"],
    "internals": [*LONGER, "eval.internals=3"],
    "internals, ouroboros": [*LONGER, *METHODS["ouroboros"], "eval.internals=3"],
    "growth": [*GROWING, "staged_growth.moments=ema"],
    "growth, paper": [*GROWING, "staged_growth.moments=paper"],
    "growth, reset": [*GROWING, "staged_growth.moments=reset"],
    "growth, slope": [
        *GROWING,
        (
            "stages=[{model = {n_layer = 2}, switch = {rule = 'slope', value = -1e-9, window = 5,"
            " times = 2, latest = 448}}, {operators = ['depth']}]"
        ),
        "eval.every=1",
    ],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_of_a_method_resumes(variant):
    rows = assert_resumes_exactly(tiny_recipe(*VARIANTS[variant]))
    assert all(math.isfinite(row["loss"]) for row in rows[1:])


NEUTRAL = {
    "full length": ["seq_len_warmup={start = 16, steps = 5}"],
    "one step of length": ["seq_len_warmup={start = 8, steps = 1}"],
    "one step of tokens": ["seq_len_warmup={start = 8, steps = 1, batch = 'tokens'}"],
    "one length": ["seq_len_warmup={pacing = 'discrete', lengths = [16]}"],
    "full batch": ["batch_size_warmup={start = 8, increment = 1, sequences = 10}"],
    "full batch, no switch": ["batch_size_warmup={start = 8, increment = 1, switch = []}"],
    "theta 1": ["progressive_layer_drop={theta = 1.0, steps = 10}"],
    "theta 1, code": ["progressive_layer_drop={theta = 1.0, steps = 10, keep = 'code'}"],
    "wide sums": ["chunked_accumulation={}"],
    "weight 0": ["standardization_loss.weight=0"],
    "one module": ["ouroboros.modules=1"],
    "no delay": ["ouroboros={modules = 3, warmup_steps = 5}"],
}


@cache
def trained(*overrides: str) -> tuple[list[dict], dict[str, Tensor]]:
    """Return the rows of a whole run, and its weights and moments."""
    recipe = tiny_recipe(*overrides)
    state = fresh(recipe)
    return run(state, recipe), tensors_of(state)


def assert_trains_alike(plain: list[str], more: list[str]) -> None:
    """Check that weights, moments and all columns are the same, bit for bit, with more
    overrides."""
    rows, tensors = trained(*plain)
    more_rows, more_tensors = trained(*plain, *more)
    assert_equal(more_tensors, tensors)
    for want, have in zip(rows, more_rows, strict=True):
        assert without_times(want).items() <= without_times(have).items()


@pytest.mark.parametrize("neutral", NEUTRAL)
def test_a_neutral_setting_moves_no_bit(neutral):
    assert_trains_alike([], NEUTRAL[neutral])


@pytest.mark.parametrize("method", METHODS)
def test_observers_move_no_bit(method):
    assert_trains_alike(METHODS[method], ["eval.internals=2", "eval.positions=true"])


@pytest.mark.parametrize("method", [*METHODS, *(name for name in VARIANTS if "std" in name)])
def test_recomputed_activations_move_no_bit(method):
    assert_trains_alike((METHODS | VARIANTS)[method], METHODS["recompute"])
