"""Sequence length warmup against the reference's scheduler, and its token accounting against the
authors' runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.plan.plan import plan_run
from efftrain_cli.recipe.optim import Optim
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sections import Model, Train
from tests.methods.cases import check_messages

BUDGET = 157_286_400_000


def deepspeed(step: int, start: int, steps: int, degree: int) -> int:
    """DeepSpeed's `curriculum_scheduler.py`, fixed_root and fixed_linear, to 1024 in multiples of
    8, written out again."""
    length = math.floor((float(step) / steps) ** (1.0 / degree) * (1024 - start) + start)
    return min(length - length % 8, 1024)


def test_linear_pacing_is_the_reference_at_every_step():
    warmup = SeqLenWarmup(start=8, steps=15000)
    lengths = [warmup.seq_len_at(step, 1024) for step in range(1, 15001)]
    assert lengths == [deepspeed(step, 8, 15000, 1) for step in range(1, 15001)]
    table = {
        1: 8, 118: 8, 119: 16, 236: 16, 237: 24, 1500: 104, 3000: 208, 7500: 512,
        14882: 1016, 14999: 1016, 15000: 1024, 15001: 1024, 20000: 1024,
    }  # fmt: skip
    assert {step: warmup.seq_len_at(step, 1024) for step in table} == table
    assert warmup.tokens_through(15000, 1024, batch_size=3) == 3 * sum(lengths) == 3 * 7_680_512
    assert [length for _, length in warmup.phases(1024)] == list(range(8, 1025, 8))


@pytest.mark.parametrize(
    "degree, steps, table",
    [
        (2, 10000, {1: 72, 10: 88, 100: 160, 1000: 360, 5000: 736, 9999: 1016, 10000: 1024}),
        (3, 8000, {999: 536, 1000: 544}),
    ],
)
def test_root_pacing_is_the_reference_at_every_step(degree, steps, table):
    warmup = SeqLenWarmup(start=64, steps=steps, pacing="root", degree=degree)
    assert {step: warmup.seq_len_at(step, 1024) for step in table} == table
    for step in range(1, steps + 1):
        assert warmup.seq_len_at(step, 1024) == deepspeed(step, 64, steps, degree)


def test_two_stage():
    warmup = SeqLenWarmup(pacing="discrete", lengths=(128, 1024), until=(15000,))
    lengths = [warmup.seq_len_at(step, 1024) for step in (1, 15000, 15001, 99999)]
    assert lengths == [128, 128, 1024, 1024]
    assert list(warmup.phases(1024)) == [(1, 128), (15001, 1024)]
    assert warmup.tokens_through(15002, 1024, batch_size=2) == 2 * (15000 * 128 + 2 * 1024)


def test_without_the_reference_s_defects():
    # A start below the multiple gave empty sequences, one that is not a multiple gave lengths below
    # it.
    assert SeqLenWarmup(start=4, steps=100_000).seq_len_at(1, 1024) == 8
    assert SeqLenWarmup(start=12, steps=100).seq_len_at(1, 1024) == 16
    # A full length that is not a multiple was reached one step late.
    odd = SeqLenWarmup(start=8, steps=100)
    assert [odd.seq_len_at(step, 1023) for step in (99, 100, 101)] == [1008, 1023, 1023]
    # A start at such a length was rounded down.
    assert SeqLenWarmup(start=1023, steps=100).seq_len_at(1, 1023) == 1023
    # Lengths that came down stayed up.
    down = SeqLenWarmup(pacing="discrete", lengths=(8, 64, 16), until=(5, 10))
    assert [down.seq_len_at(step, 64) for step in (5, 6, 10, 11)] == [8, 64, 64, 16]


def test_floating_point_as_in_the_reference():
    # Exact arithmetic would give 248; who reproduces a run of the reference's wants its value.
    assert SeqLenWarmup(start=8, steps=165516).seq_len_at(95490, 424) == 240


def test_sequences_of_a_window_and_of_a_step():
    """What is cut off is dropped, or trained on in the same window, or in the same step."""
    truncate = SeqLenWarmup(steps=10)
    reshape = replace(truncate, mode="reshape")
    tokens = replace(truncate, batch="tokens", mode="reshape")
    assert SeqLenWarmup(steps=10, batch="tokens") == tokens
    lengths = (8, 24, 520, 1024)
    assert [truncate.sequences_per_window_at(length, 1024) for length in lengths] == [1] * 4
    assert [reshape.sequences_per_window_at(length, 1024) for length in lengths] == [128, 42, 1, 1]
    assert [reshape.batch_size_at(length, 1024, 4) for length in lengths] == [4] * 4
    assert [tokens.batch_size_at(length, 1024, 4) for length in lengths] == [512, 170, 7, 4]


def recipe_of(warmup: SeqLenWarmup, full: int, batch_size: int, budget: int) -> Recipe:
    return Recipe(
        model=Model(n_layer=1, n_head=1, n_embd=8, seq_len=full),
        optim=Optim(lr=6e-4, min_lr=1e-5, warmup_steps=3000),
        train=Train(tokens=budget, batch_size=batch_size),
        seq_len_warmup=warmup,
    )


RATES = {
    1: 2.0e-7,
    1500: 3.0e-4,
    3000: 6.0e-4,
    10000: 5.980637e-4,
    37500: 3.554895e-4,
    58000: 1.062021e-5,
    58769: 1e-5,
}
"""Learning rate of the first of the authors' runs by step: it warms up by steps and decays by
tokens."""


# The final steps of the authors' published checkpoints.
@pytest.mark.parametrize(
    "start, steps, full, batch_size, budget, last, tokens",
    [
        (
            64, 45000, 1024, 4096, BUDGET, 58_769,
            {3000: "1.131", 37500: "70.66", 45000: "99.54", 50000: "120.5"},
        ),
        pytest.param(
            64, 15000, 1024, 4096, BUDGET, 44_589, {15000: "33.18"}, marks=pytest.mark.slow
        ),
        pytest.param(
            64, 270000, 1024, 512, BUDGET, 427_617, {270000: "74.65", 360000: "121.8"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            8, 60000, 1024, 512, BUDGET, 330_000, {60000: "15.73", 200000: "89.13"},
            marks=pytest.mark.slow,
        ),
        pytest.param(8, 40000, 1024, 512, BUDGET, 320_000, {}, marks=pytest.mark.slow),
        (8, 20000, 1024, 4096, BUDGET, 47_500, {20000: "41.95", 27000: "71.3"}),
        (64, 3000, 2048, 2048, 30_000_000_000, 8_612, {3000: "6.47"}),
    ],
)  # fmt: skip
def test_final_steps_of_the_authors_runs(start, steps, full, batch_size, budget, last, tokens):
    warmup = SeqLenWarmup(start=start, steps=steps)
    found = {}
    rates = {}
    for plan, progress in plan_run(recipe_of(warmup, full, batch_size, budget)):
        if plan.step in tokens:
            found[plan.step] = progress.tokens
        if plan.step in RATES:
            rates[plan.step] = plan.lr
    assert plan.step == last
    assert progress.tokens >= budget > progress.tokens - batch_size * full
    assert progress.tokens + progress.tokens_discarded == last * batch_size * full
    for step, billions in tokens.items():
        decimals = len(billions.partition(".")[2])
        assert round(found[step] / 1e9, decimals) == float(billions)
        assert warmup.tokens_through(step, full, batch_size) == found[step]
    assert last != 58_769 or rates == pytest.approx(RATES, rel=2e-7)


def problems_of(warmup: SeqLenWarmup, budget: int) -> dict[str, str]:
    """The problems at length 64 with steps of 4 sequences; the recipe's own warmup has none."""
    return dict(warmup.problems(recipe_of(SeqLenWarmup(start=1, steps=1), 64, 4, budget)))


def test_a_warmup_beyond_the_budget_names_the_longest_that_fits():
    warmup = SeqLenWarmup(start=8, steps=1000)
    longest = warmup.longest_within(50_000, 64, 4)
    assert f"at most {longest}" in problems_of(warmup, 50_000)["seq_len_warmup.steps"]
    assert not problems_of(replace(warmup, steps=longest), 50_000)
    assert problems_of(replace(warmup, steps=longest + 1), 50_000)


MESSAGES = """
seq_len_warmup={}
    seq_len_warmup.steps: steps is missing: the optimizer step at which the full length is reached

seq_len_warmup={steps = 9, until = [5]}
    seq_len_warmup.until: until = [5] needs pacing = "discrete", but pacing is "linear"

seq_len_warmup={pacing = "discrete"}
    seq_len_warmup.pacing: pacing = "discrete" needs lengths, such as [128, 1024], and until, such
    as [15000]

seq_len_warmup={pacing = "discrete", lengths = [8, 16]}
    seq_len_warmup.lengths: lengths has 2 phases and until 0 ends; until names the last step of each
    phase but the final one, so it needs 1

seq_len_warmup={pacing = "discrete", lengths = [8, 16], until = [2], steps = 9}
    seq_len_warmup.steps: steps = 9 has no effect with pacing = "discrete"; until says when to
    lengthen

seq_len_warmup={pacing = "discrete", lengths = [0, 8, 16], until = [0, 0]}
    seq_len_warmup.lengths: lengths = [0, 8, 16]: a length is at least 1 token; until = [0, 0]:
    steps are 1 or more and rise from phase to phase

seq_len_warmup={steps = 3, batch = "tokens", mode = "truncate"}
    seq_len_warmup.batch: batch = "tokens" fills a step with further sequences of the same windows,
    and mode = "truncate" drops them; set mode = "reshape", or batch = "sequences"

seq_len_warmup={steps = 3, start = 17}
    seq_len_warmup.start: 17 tokens is above the full length, model.seq_len = 16; start below it

seq_len_warmup={pacing = "discrete", lengths = [17, 16], until = [1]}
    seq_len_warmup.lengths: [17, 16]: the last must be model.seq_len = 16, which validation uses,
    and none may be above it

seq_len_warmup={pacing = "discrete", lengths = [8, 8], until = [1]}
    seq_len_warmup.lengths: [8, 8]: the last must be model.seq_len = 16, which validation uses, and
    none may be above it

seq_len_warmup={pacing = "discrete", lengths = [8, 16], until = [11]}
    seq_len_warmup.until: [11] is beyond the budget: the warmup alone trains 704 tokens,
    train.tokens is 640; end the warmup earlier, or raise train.tokens

seq_len_warmup={pacing = "discrete", lengths = [1, 16], until = [1]}

seq_len_warmup={steps = 3, start = 16}
"""


def test_messages_about_a_recipe():
    check_messages(MESSAGES)
