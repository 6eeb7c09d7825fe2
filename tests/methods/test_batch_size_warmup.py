"""The ramp of the batch size against Megatron-LM's."""

from __future__ import annotations

import pytest

from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from efftrain_cli.plan.plan import plan_equal_steps, plan_run
from tests.methods.cases import check_messages
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


MESSAGES = """
batch_size_warmup={start = 9, increment = 3, sequences = 40}
    batch_size_warmup.start: 9 sequences is above the final batch, train.batch_size = 8; start below
    it

batch_size_warmup={start = 2, increment = 4, sequences = 40}
    batch_size_warmup.increment: 4 does not divide the 6 sequences between start = 2 and
    train.batch_size = 8, so the ramp would not end at it

batch_size_warmup={start = 2, increment = 3, sequences = 41}
    batch_size_warmup.sequences: 41 is beyond the budget: the ramp alone trains 656 tokens,
    train.tokens is 640; lower it to at most 40, or raise train.tokens

batch_size_warmup={start = 2, increment = 3, sequences = 641}
seq_len_warmup.steps=3
    batch_size_warmup.sequences: 641 is beyond the budget: the ramp alone trains 641 tokens,
    train.tokens is 640; lower it to at most 640, or raise train.tokens

batch_size_warmup={start = 2, increment = 3}
    batch_size_warmup.sequences: or switch is needed, and not both: the length of the ramp in
    sequences, or the tokens after which the batch grows

batch_size_warmup={start = 2, increment = 3, sequences = 40, switch = [100, 200]}
    batch_size_warmup.sequences: or switch is needed, and not both: the length of the ramp in
    sequences, or the tokens after which the batch grows

batch_size_warmup={start = 2, increment = 3, switch = [100]}
    batch_size_warmup.switch: has 1 entries, and from start = 2 it takes 2 of increment = 3 to
    train.batch_size = 8

batch_size_warmup={start = 2, increment = 3, switch = [100, 100]}
    batch_size_warmup.switch: rises from above 0 to below train.tokens = 640

batch_size_warmup={start = 2, increment = 3, switch = [100, 640]}
    batch_size_warmup.switch: rises from above 0 to below train.tokens = 640

batch_size_warmup={start = 2, increment = 3, sequences = 40}
"""


def test_messages_about_a_recipe():
    check_messages(MESSAGES)
