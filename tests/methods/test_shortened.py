"""What is left of the methods' schedules in a short run."""

from __future__ import annotations

from dataclasses import replace

from efftrain_cli.plan.plan import plan_run, shorten_schedules
from tests.tiny import tiny_recipe

SHORT = """
seq_len_warmup.steps=100 -> steps 8
seq_len_warmup.steps=3 -> steps 3
seq_len_warmup={pacing="discrete", lengths=[4, 8, 16, 16], until=[2, 9, 90]} -> until (2, 6, 7)
progressive_layer_drop.steps=9 -> steps 8
progressive_layer_drop.steps=7 -> steps 7
simigrad={target=0.5, min_batch_size = 6, max_batch_size = 9, quantum = 2} -> quantum 1
simigrad={target = 0.5, min_batch_size = 6, max_batch_size = 9} -> min_batch_size 4
simigrad={target = 0.5, min_batch_size = 6, max_batch_size = 9} -> max_batch_size 16
simigrad={target=0.5, min_batch_size = 6, max_batch_size = 9, interval = 7} -> interval 4
simigrad={target=0.5, min_batch_size = 6, max_batch_size = 9, interval=2, window=5} -> window 2
simigrad={target=0.5, min_batch_size = 6, max_batch_size = 9, window = 3} -> window 3
ouroboros={modules = 3, warmup_steps = 9} -> warmup_steps 2
ouroboros={modules = 3, warmup_steps = 1} -> warmup_steps 1
"""


def test_schedules_fit_into_eight_steps():
    """They change before and after step 4, of 8 sequences."""
    for line in SHORT.strip().splitlines():
        override, _, expected = line.partition(" -> ")
        recipe = tiny_recipe("train.tokens=12_800", override)
        shorter = replace(recipe, **shorten_schedules(recipe, 4, 8))
        (method,) = shorter.methods.values()
        key, _, value = expected.partition(" ")
        assert str(getattr(method, key)) == value, line


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
