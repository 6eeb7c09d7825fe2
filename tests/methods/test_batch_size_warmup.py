"""The ramp of the batch size against Megatron-LM's."""

from __future__ import annotations

import pytest

from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from efftrain_cli.plan.plan import plan_equal_steps, plan_run
from tests.tiny import tiny_recipe


def megatron(consumed: int, start: int, increment: int, ramp: int, full: int) -> int:
    """`RampupBatchsizeNumMicroBatches` of Megatron-LM's microbatches.py, written out again."""
    increments = (full - start) // increment
    if consumed > ramp:
        return full
    return start + int(consumed / (ramp / increments)) * increment


@pytest.mark.parametrize(
    "start, increment, ramp, full", [(16, 16, 1_953_125, 256), (1, 3, 777, 64)]
)
def test_every_step_of_the_ramp_is_megatron_s(start, increment, ramp, full):
    warmup = BatchSizeWarmup(start=start, increment=increment, sequences=ramp)
    consumed = 0
    while consumed <= 1.1 * ramp:
        batch_size = warmup.batch_size_at(consumed, 0, full)
        assert batch_size == megatron(consumed, start, increment, ramp, full)
        consumed += batch_size
    assert batch_size == full


def test_the_edges_of_an_increase():
    # 15 increments of 10 sequences each
    warmup = BatchSizeWarmup(start=16, increment=16, sequences=150)
    sizes = [warmup.batch_size_at(consumed, 0, 256) for consumed in (0, 9, 10, 149, 150, 151)]
    assert sizes == [16, 16, 32, 240, 256, 256]


def test_the_batch_switches_at_the_first_step_after_so_many_tokens():
    """Steps of 2, 5 and 8 sequences of 16 tokens: 32, 80 and 128 tokens. The second batch begins
    after 5 steps (160 tokens, at least 150), the third 3 steps later (400 tokens)."""
    recipe = tiny_recipe(
        "train.tokens=800",
        "batch_size_warmup={start = 2, increment = 3, switch = [150, 400]}",
    )
    plans = list(plan_run(recipe))
    assert [plan.batch_size for plan, _ in plans] == [2] * 5 + [5] * 3 + [8] * 4
    assert plans[-1][1].tokens == 5 * 32 + 3 * 80 + 4 * 128
    groups = [(group.plan.batch_size, group.steps) for group in plan_equal_steps(recipe)]
    assert groups == [(2, 5), (5, 3), (8, 4)]
