"""The bounds of the methods' values."""

from __future__ import annotations

import pytest

from efftrain_cli.foundation.errors import RecipeError
from tests.tiny import tiny_recipe

BEYOND = """
must be at least 1
    batch_size_warmup.start=0
    batch_size_warmup.increment=0
    batch_size_warmup.sequences=0
    seq_len_warmup.start=0
    seq_len_warmup.steps=0
    seq_len_warmup.multiple=0
    seq_len_warmup.degree=0
    simigrad.quantum=0
    simigrad.interval=0
    simigrad.window=0
    ouroboros.modules=0
    chunked_accumulation.forward.bits=0
    stages.0.switch.times=0

must be greater than 0
    progressive_layer_drop.theta=0
    simigrad.lr_adjust_factor=0
    standardization_loss.eps=0
    stages.0.model.norm_eps=0
    stages.1.lr=0
    stages.1.schedule_ratio=0

must be at most 1
    progressive_layer_drop.theta=1.1
    simigrad.lr_adjust_factor=1.1
    stages.1.schedule_ratio=1.1

must be at least 0
    progressive_layer_drop.steps=-1
    standardization_loss.weight=-1
    ouroboros.warmup_steps=-1
    chunked_accumulation.forward.chunk=-1
    stages.1.rewarmup_steps=-1

must be greater than -1
    simigrad.target=-1

must be less than 1
    simigrad.target=1

must be at least 2
    simigrad.min_batch_size=1
    simigrad.max_batch_size=1
    chunked_accumulation.forward.exponent_bits=1

item 1 must be at least 0
    ouroboros.split=[-1]

must be at most 23
    chunked_accumulation.grad_input.bits=24

must be at most 8
    chunked_accumulation.grad_input.exponent_bits=9

must be at least 5
    stages.0.switch.window=4
"""


def test_values_beyond_their_bounds():
    stages = "stages=[{switch = {rule = 'slope', value = -1}}, {operators = ['depth']}]"
    for group in BEYOND.strip().split("\n\n"):
        rule, *overrides = map(str.strip, group.splitlines())
        for override in overrides:
            with pytest.raises(RecipeError) as refused:
                tiny_recipe(stages, override)
            found = [(problem.source, problem.rule) for problem in refused.value.problems]
            assert (f"--set {override}", rule) in found, override
