"""What the methods say of a recipe before it runs, and what is left of their schedules in a short
one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from efftrain_cli.plan.plan import plan_run, shorten_schedules
from tests.tiny import changed, tiny_recipe

SIMIGRAD = "simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 128}"
FP8 = 'chunked_accumulation={fidelity = "hardware", operands = "fp8_e4m3"}'


@pytest.mark.parametrize(
    "overrides, warnings",
    [
        # 640 tokens are 5 steps of 128.
        (["progressive_layer_drop.steps=10"], []),
        (["progressive_layer_drop={steps = 1000, theta = 1.0}"], []),
        (
            ["progressive_layer_drop.steps=1000"],  # 0.5 exp(-0.1 x 4) + 0.5
            [
                "progressive_layer_drop.steps = 1000 sets the pace for a run of that many steps,"
                " and this run has 5: theta only comes down to 0.84, and fewer blocks are skipped"
                " than meant; set it to the steps of the run"
            ],
        ),
        (["ouroboros={modules = 3, warmup_steps = 4}"], []),
        (["ouroboros={modules = 1, warmup_steps = 5}"], []),
        (
            ["ouroboros={modules = 3, warmup_steps = 5}"],
            ["ouroboros.warmup_steps = 5 is the whole run of 5 steps: no gradient is ever delayed"],
        ),
        ([SIMIGRAD], []),  # sqrt(128 / 8) = 4
        (
            [SIMIGRAD, "simigrad.max_batch_size=137"],
            [
                "simigrad.lr_scaling = 'sqrt' can raise the learning rate to 4.1 times the"
                " schedule's, when the batch reaches max_batch_size = 137; lower that bound, or"
                " check that the rate is stable"
            ],
        ),
        (
            [SIMIGRAD, "optim.decay_steps=4", "seq_len_warmup.steps=2"],
            [
                "simigrad with seq_len_warmup: the similarity rises with the tokens in a sequence,"
                " so the batch will first grow and then shrink as sequences lengthen; run each"
                " alone before combining them",
                "optim.decay_steps decays by steps, and SimiGrad makes their number unknown; decay"
                " by tokens instead (decay_steps = false)",
            ],
        ),
        (["standardization_loss.weight=10"], []),
        (
            ["standardization_loss.weight=11"],
            [
                "standardization_loss.weight = 11 multiplies a mean of nats per channel, not the"
                " paper's sum over channels: beside a cross-entropy of a few nats 0.01 to 1 is"
                " usual"
            ],
        ),
        ([FP8, "train.dtype=bf16"], []),
        (
            ["chunked_accumulation={}", "train.dtype=bf16"],
            [
                'train.dtype = "bf16" acts outside the layers of chunked_accumulation only: those'
                " take their operands in fp32, add as they say, and round only their result to"
                " bf16"
            ],
        ),
        (
            # Two sequences of 16 tokens in a micro-batch.
            ["chunked_accumulation.grad_weight.chunk=32"],
            [
                "chunked_accumulation.grad_weight.chunk = 32 is no shorter than any sum of the"
                " blocks, the longest being 32: nothing is cut into chunks"
            ],
        ),
        (["chunked_accumulation.grad_weight.chunk=31"], []),
    ],
)
def test_what_is_probably_not_meant_is_warned_of(overrides, warnings):
    recipe = tiny_recipe(*overrides)
    found = [line for method in recipe.methods.values() for line in method.warnings(recipe)]
    assert sorted(found) == sorted(warnings)


@pytest.mark.parametrize(
    "overrides, assumptions",
    [
        (
            ["progressive_layer_drop.steps=5"],
            ["Layer dropping draws blocks at random; FLOPs are planned at their expectation."],
        ),
        (
            [SIMIGRAD],
            [
                "SimiGrad decides the batch size from gradients as they come; the plan assumes that"
                " it stays as it is, at first train.batch_size = 8."
            ],
        ),
        (["ouroboros.modules=1"], []),
        (
            ["ouroboros.modules=4"],
            [
                "Ouroboros: 4 modules on gradients of 3 to 0 steps ago, the last fresh. A module"
                " waits unchanged for its first one; the last ones in flight are dropped."
            ],
        ),
        (
            [FP8],
            [
                "Linear layers multiply in fp8 where the device can; on a CPU fast_accumulation has"
                " no effect."
            ],
        ),
        (
            ["chunked_accumulation={}"],
            [
                'Narrow accumulators are emulated (fidelity "blocked"), so steps take longer than'
                " fp32's; the papers' savings are those of special hardware."
            ],
        ),
        (
            [
                "model.n_layer=8",
                "stages=[{model = {n_layer = 1}, switch = {rule = 'steps', value = 1}},"
                " {operators = ['depth'], switch = {rule = 'loss', value = 3, latest = 320}},"
                " {operators = ['depth'], switch = {rule = 'slope', value = -0.05}},"
                " {operators = ['depth']}]",
            ],
            [
                "Stage 1 ends by the validation loss; the plan assumes 320 tokens, its latest.",
                "Stage 2 ends by the validation loss; the plan assumes the end of the budget.",
            ],
        ),
    ],
)
def test_a_plan_says_what_it_assumes(overrides, assumptions):
    recipe = tiny_recipe(*overrides)
    found = [line for method in recipe.methods.values() for line in method.assumptions(recipe)]
    assert found == assumptions


@pytest.mark.parametrize(
    "overrides, section, expected",
    [
        ("seq_len_warmup.steps=100", "seq_len_warmup", {"steps": 8}),
        ("seq_len_warmup.steps=3", "seq_len_warmup", {"steps": 3}),
        (
            "seq_len_warmup={pacing = 'discrete', lengths = [4, 8, 16, 16], until = [2, 9, 90]}",
            "seq_len_warmup",
            {"until": (2, 6, 7)},
        ),
        ("progressive_layer_drop.steps=9", "progressive_layer_drop", {"steps": 8}),
        ("progressive_layer_drop.steps=7", "progressive_layer_drop", {"steps": 7}),
        (
            "simigrad={target = 0.5, min_batch_size = 6, max_batch_size = 9, quantum = 2,"
            " interval = 2, window = 3}",
            "simigrad",
            {"min_batch_size": 4, "max_batch_size": 16, "quantum": 1, "interval": 2, "window": 2},
        ),
        (
            "simigrad={target = 0.5, min_batch_size = 6, max_batch_size = 9, interval = 7}",
            "simigrad",
            {"interval": 4, "window": 1},
        ),
        ("ouroboros={modules = 3, warmup_steps = 9}", "ouroboros", {"warmup_steps": 2}),
        ("ouroboros={modules = 3, warmup_steps = 1}", "ouroboros", {"warmup_steps": 1}),
    ],
)
def test_schedules_fit_into_eight_steps(overrides, section, expected: dict[str, Any]):
    """They change before and after step 4, of 8 sequences."""
    recipe = changed(tiny_recipe(), "train.tokens=12_800", overrides)
    shorter = shorten_schedules(recipe, 4, 8).get(section, recipe.methods[section])
    assert {key: getattr(shorter, key) for key in expected} == expected


def test_a_short_ramp_of_the_batch_ends_in_the_middle():
    ramp = "batch_size_warmup={start = 2, increment = 3, switch = [90, 500]}"
    recipe = tiny_recipe("train.tokens=768", ramp)
    shorter = replace(recipe, **shorten_schedules(recipe, 4, 8))
    assert [plan.batch_size for plan, _ in plan_run(shorter)] == [4] * 4 + [8] * 4


def test_stages_are_short_too():
    stages = (
        "stages=[{model = {n_layer = 1}, switch = {rule = 'tokens', value = 256}},"
        " {operators = ['depth'], switch = {rule = 'loss', value = 3}}, {operators = ['depth']}]"
    )
    recipe = tiny_recipe("model.n_layer=4", stages)
    first, second, last = shorten_schedules(recipe, 4, 8)["stages"]
    assert [(stage.switch.rule, stage.switch.value) for stage in (first, second)] == [
        ("steps", 4),
        ("steps", 5),
    ]
    assert last == recipe.stages[2]
