"""What the methods say of a recipe before it runs, the values that they refuse, and what is left of
their schedules in a short run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.plan.plan import plan_run, shorten_schedules
from tests.tiny import tiny_recipe

# 640 tokens are 5 steps of 8 sequences of 16, two in a micro-batch. theta: 0.5 exp(-0.1 x 4) + 0.5.
# The learning rate: sqrt(128 / 8) = 4, and more.
SAID = """
progressive_layer_drop.steps=10
    assumed: Layer dropping draws blocks at random; FLOPs are planned at their expectation.

progressive_layer_drop={steps = 1000, theta = 1.0}
    assumed: Layer dropping draws blocks at random; FLOPs are planned at their expectation.

progressive_layer_drop.steps=1000
    assumed: Layer dropping draws blocks at random; FLOPs are planned at their expectation.
    warning: progressive_layer_drop.steps = 1000 sets the pace for a run of that many steps, and
    this run has 5: theta only comes down to 0.84, and fewer blocks are skipped than meant; set it
    to the steps of the run

ouroboros={modules = 1, warmup_steps = 5}

ouroboros={modules = 4, warmup_steps = 4}
    assumed: Ouroboros: 4 modules on gradients of 3 to 0 steps ago, the last fresh. A module waits
    unchanged for its first one; the last ones in flight are dropped.

ouroboros={modules = 3, warmup_steps = 5}
    assumed: Ouroboros: 3 modules on gradients of 2 to 0 steps ago, the last fresh. A module waits
    unchanged for its first one; the last ones in flight are dropped.
    warning: ouroboros.warmup_steps = 5 is the whole run of 5 steps: no gradient is ever delayed

simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 128}
    assumed: SimiGrad decides the batch size from gradients as they come; the plan assumes that it
    stays as it is, at first train.batch_size = 8.

simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 137}
optim.decay_steps=4
seq_len_warmup.steps=2
    assumed: SimiGrad decides the batch size from gradients as they come; the plan assumes that it
    stays as it is, at first train.batch_size = 8.
    warning: optim.decay_steps decays by steps, and SimiGrad makes their number unknown; decay by
    tokens instead (decay_steps = false)
    warning: simigrad.lr_scaling = 'sqrt' can raise the learning rate to 4.1 times the schedule's,
    when the batch reaches max_batch_size = 137; lower that bound, or check that the rate is stable
    warning: simigrad with seq_len_warmup: the similarity rises with the tokens in a sequence, so
    the batch will first grow and then shrink as sequences lengthen; run each alone before combining
    them

standardization_loss.weight=10
    assumed: The standardization loss at 4 sites is averaged with weight 10; the paper's lambda, a
    factor of the sum, is 0.0446. Moments are of each micro-batch of train.micro_batch_tokens, a
    setting of this method.

standardization_loss={weight = 11, sites = "ln_input"}
    assumed: The standardization loss at 5 sites is averaged with weight 11; the paper's lambda, a
    factor of the sum, is 0.138. Moments are of each micro-batch of train.micro_batch_tokens, a
    setting of this method.
    warning: standardization_loss.sites = "ln_input" with model.norm = "layernorm": the forward pass
    ignores the scale that is asked for, as each norm divides it out; the term only changes what the
    residual stream looks like
    warning: standardization_loss.weight = 11 multiplies a mean of nats per channel, not the paper's
    sum over channels: beside a cross-entropy of a few nats 0.01 to 1 is usual

chunked_accumulation={fidelity = "hardware", operands = "fp8_e4m3"}
train.dtype=bf16
    assumed: Linear layers multiply in fp8 where the device can; on a CPU fast_accumulation has no
    effect.

chunked_accumulation.grad_weight.chunk=31
    assumed: Narrow accumulators are emulated (fidelity "blocked"), so steps take longer than
    fp32's; the papers' savings are those of special hardware.

chunked_accumulation.grad_weight.chunk=32
train.dtype=bf16
    assumed: Narrow accumulators are emulated (fidelity "blocked"), so steps take longer than
    fp32's; the papers' savings are those of special hardware.
    warning: chunked_accumulation.grad_weight.chunk = 32 is no shorter than any sum of the blocks,
    the longest being 32: nothing is cut into chunks
    warning: train.dtype = "bf16" acts outside the layers of chunked_accumulation only: those take
    their operands in fp32, add as they say, and round only their result to bf16

model.n_layer=8
stages=[{model={n_layer=1}, switch={rule='steps', value=1}}, {}, {}, {operators=['depth']}]
stages.1.operators=['depth']
stages.1.switch={rule = 'loss', value = 3, latest = 320}
stages.2.operators=['depth']
stages.2.switch={rule = 'slope', value = -0.05}
    assumed: Stage 1 ends by the validation loss; the plan assumes 320 tokens, its latest.
    assumed: Stage 2 ends by the validation loss; the plan assumes the end of the budget.
"""


def test_assumptions_and_warnings():
    for case in SAID.strip().split("\n\n"):
        lines = case.splitlines()
        recipe = tiny_recipe(*(line for line in lines if not line.startswith(" ")))
        found = []
        for method in recipe.methods.values():
            found += [f"assumed: {line}" for line in method.assumptions(recipe)]
        for method in recipe.methods.values():
            found += [f"warning: {line}" for line in method.warnings(recipe)]
        expected = " ".join(line.strip() for line in lines if line.startswith(" "))
        assert " ".join(found) == expected, lines[0]


BEYOND = """
batch_size_warmup.start=0: must be at least 1
batch_size_warmup.increment=0: must be at least 1
batch_size_warmup.sequences=0: must be at least 1
seq_len_warmup.start=0: must be at least 1
seq_len_warmup.steps=0: must be at least 1
seq_len_warmup.multiple=0: must be at least 1
seq_len_warmup.degree=0: must be at least 1
progressive_layer_drop.theta=0: must be greater than 0
progressive_layer_drop.theta=1.1: must be at most 1
progressive_layer_drop.steps=-1: must be at least 0
simigrad.target=-1: must be greater than -1
simigrad.target=1: must be less than 1
simigrad.min_batch_size=1: must be at least 2
simigrad.max_batch_size=1: must be at least 2
simigrad.quantum=0: must be at least 1
simigrad.interval=0: must be at least 1
simigrad.window=0: must be at least 1
simigrad.lr_adjust_factor=0: must be greater than 0
simigrad.lr_adjust_factor=1.1: must be at most 1
standardization_loss.weight=-1: must be at least 0
standardization_loss.eps=0: must be greater than 0
ouroboros.modules=0: must be at least 1
ouroboros.warmup_steps=-1: must be at least 0
ouroboros.split=[-1]: item 1 must be at least 0
chunked_accumulation.forward.bits=0: must be at least 1
chunked_accumulation.forward.chunk=-1: must be at least 0
chunked_accumulation.forward.exponent_bits=1: must be at least 2
chunked_accumulation.grad_input.bits=24: must be at most 23
chunked_accumulation.grad_input.exponent_bits=9: must be at most 8
stages.0.switch.window=4: must be at least 5
stages.0.switch.times=0: must be at least 1
stages.0.model.norm_eps=0: must be greater than 0
stages.1.lr=0: must be greater than 0
stages.1.rewarmup_steps=-1: must be at least 0
stages.1.schedule_ratio=0: must be greater than 0
stages.1.schedule_ratio=1.1: must be at most 1
"""


def test_values_beyond_their_bounds():
    stages = "stages=[{switch = {rule = 'slope', value = -1}}, {operators = ['depth']}]"
    for line in BEYOND.strip().splitlines():
        override, rule = line.split(": ")
        with pytest.raises(RecipeError) as refused:
            tiny_recipe(stages, override)
        assert (f"--set {override}", rule) in [(p.source, p.rule) for p in refused.value.problems]


@pytest.mark.parametrize(
    "override, expected",
    [
        ("seq_len_warmup.steps=100", {"steps": 8}),
        ("seq_len_warmup.steps=3", {"steps": 3}),
        (
            "seq_len_warmup={pacing = 'discrete', lengths = [4, 8, 16, 16], until = [2, 9, 90]}",
            {"until": (2, 6, 7)},
        ),
        ("progressive_layer_drop.steps=9", {"steps": 8}),
        ("progressive_layer_drop.steps=7", {"steps": 7}),
        (
            "simigrad={target = 0.5, min_batch_size = 6, max_batch_size = 9, quantum = 2,"
            " interval = 2, window = 3}",
            {"min_batch_size": 4, "max_batch_size": 16, "quantum": 1, "interval": 2, "window": 2},
        ),
        (
            "simigrad={target = 0.5, min_batch_size = 6, max_batch_size = 9, interval = 7}",
            {"interval": 4, "window": 1},
        ),
        ("ouroboros={modules = 3, warmup_steps = 9}", {"warmup_steps": 2}),
        ("ouroboros={modules = 3, warmup_steps = 1}", {"warmup_steps": 1}),
    ],
)
def test_schedules_fit_into_eight_steps(override, expected: dict[str, Any]):
    """They change before and after step 4, of 8 sequences."""
    recipe = tiny_recipe("train.tokens=12_800", override)
    shorter = replace(recipe, **shorten_schedules(recipe, 4, 8))
    (method,) = shorter.methods.values()
    assert {key: getattr(method, key) for key in expected} == expected


def test_a_short_ramp_of_the_batch_ends_in_the_middle():
    ramp = "batch_size_warmup={start = 2, increment = 3, switch = [90, 500]}"
    recipe = tiny_recipe("train.tokens=768", ramp)
    shorter = replace(recipe, **shorten_schedules(recipe, 4, 8))
    assert [plan.batch_size for plan, _ in plan_run(shorter)] == [4] * 4 + [8] * 4


def test_stages_of_a_short_run_end_in_the_middle():
    stages = (
        "stages=[{model = {n_layer = 1}, switch = {rule = 'tokens', value = 256}},"
        " {operators = ['depth'], switch = {rule = 'loss', value = 3}}, {operators = ['depth']}]"
    )
    recipe = tiny_recipe("model.n_layer=4", stages)
    *ended, last = shorten_schedules(recipe, 4, 8)["stages"]
    assert [(stage.switch.rule, stage.switch.value) for stage in ended] == [
        ("steps", 4),
        ("steps", 5),
    ]
    assert last == recipe.stages[2]
