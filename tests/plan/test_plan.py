"""What each step shall be, and the schedule's printed forms."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from efftrain_cli.foundation.step import Progress, StepResult
from efftrain_cli.plan.describe import is_stuck, result_line
from efftrain_cli.plan.plan import (
    after_step,
    plan_equal_steps,
    plan_run,
    plan_step,
)
from efftrain_cli.plan.preview import csv_lines, summarize_plan
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.recipe.rules import warnings_of
from tests.tiny import changed, tiny_recipe

RECIPE = tiny_recipe(
    "model.n_embd=32",
    "model.seq_len=64",
    "optim={lr = 1e-3, min_lr = 1e-4, warmup_steps = 10}",
    "train.tokens=51_200",
    "train.micro_batch_tokens=200",
    "eval.every=30",
)


def test_last_step_is_evaluated_and_every_thirtieth():
    assert [plan.step for plan, _ in plan_run(RECIPE) if plan.evaluate] == [30, 60, 90, 100]


def test_learning_rate_warms_up_by_steps_and_ends_at_the_minimum():
    rates = [plan.lr for plan, _ in plan_run(RECIPE)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[9] == pytest.approx(1e-3)
    assert max(rates) == rates[9]
    assert rates[-1] == pytest.approx(1e-4)
    # Half-way through the decay a cosine stands at the mean of its ends; step 55 includes its own
    # tokens.
    assert rates[54] == pytest.approx((1e-3 + 1e-4) / 2)


# Of x = 0.1, 0.25, 0.5, 0.75 and 0.9 of the decay, worked out by hand.
SHAPES = {
    "linear": [0.9, 0.75, 0.5, 0.25, 0.1],
    "1-sqrt": [0.6838, 0.5, 0.2929, 0.1340, 0.0513],
    "cosine": [0.9755, 0.8536, 0.5, 0.1464, 0.0245],
    "square": [0.99, 0.9375, 0.75, 0.4375, 0.19],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_wsd_decays_in_the_shape_of_the_recipe(shape):
    """The last half of 1,000 tokens, from 1e-3 to 1e-4."""
    wsd = replace(RECIPE.optim, schedule="wsd", decay_share=0.5, warmup_steps=0, decay_shape=shape)
    rates = [wsd.lr_at(1, tokens, 0, 1000) for tokens in (550, 625, 750, 875, 950)]
    assert rates == pytest.approx([1e-4 + 9e-4 * share for share in SHAPES[shape]], abs=1e-7)
    assert [wsd.lr_at(1, tokens, 0, 1000) for tokens in (500, 1000)] == [1e-3, 1e-4]


def test_the_inverse_square_root_depends_on_no_budget():
    """512 tokens a step, 10 steps of warmup: at 40 steps sqrt(10 / 40) of the way from 1e-4 to 1e-3
    is left."""
    recipe = changed(RECIPE, "optim.schedule=inverse_sqrt", "optim.decay_tokens=20_000")
    rates = [plan.lr for plan, _ in plan_run(recipe)]
    assert [rates[step - 1] for step in (5, 10, 40, 90)] == pytest.approx(
        [5e-4, 1e-3, 5.5e-4, 4e-4]
    )
    longer = changed(recipe, f"train.tokens={2 * recipe.train.tokens}")
    assert [plan.lr for plan, _ in plan_run(longer)][:100] == rates
    assert any("inverse_sqrt" in line and "no effect" in line for line in warnings_of(recipe))
    # Growth may set the tokens back behind the end of the warmup.
    assert recipe.optim.lr_at(11, 4_000, 5_120, 51_200) == 1e-3
    # A run without a warmup that is resumed with one has counted no tokens of it: then by steps.
    assert recipe.optim.lr_at(40, 20_480, 0, 51_200) == pytest.approx(5.5e-4)


def test_wsd_decays_by_steps_or_to_its_own_end_where_the_recipe_says():
    wsd = replace(RECIPE.optim, schedule="wsd", decay_share=0.5, warmup_steps=0)
    by_steps = replace(wsd, decay_steps=40)
    assert [by_steps.lr_at(step, 0, 0, 1) for step in (20, 30, 40, 41)] == pytest.approx(
        [1e-3, 5.5e-4, 1e-4, 1e-4]
    )
    # A share that would begin in the warmup begins after it: the linear schedule.
    whole = replace(RECIPE.optim, schedule="wsd", decay_share=1.0)
    linear = replace(RECIPE.optim, schedule="linear")
    assert [whole.lr_at(step, 10 * step, 100, 1000) for step in range(1, 101)] == [
        linear.lr_at(step, 10 * step, 100, 1000) for step in range(1, 101)
    ]


def test_summary_counts_what_the_plan_yields():
    summary = summarize_plan(RECIPE, vocab_size=500)
    assert (summary.steps, summary.tokens) == (100, 51200)
    assert summary.largest_micro_batch == (3, 64)
    assert summarize_plan(RECIPE, until=7).steps == 7


@pytest.mark.parametrize(
    "changes",
    [
        ["seq_len_warmup={start = 8, steps = 40, mode = 'reshape'}"],
        # Lengths that come back: the first and the last phase are equal.
        ["seq_len_warmup={pacing = 'discrete', lengths = [64, 8, 64], until = [20, 50]}"],
        ["simigrad={target = 0.9, min_batch_size = 4, max_batch_size = 16, quantum = 4}"],
        [
            "seq_len_warmup={start = 8, steps = 30}",
            "batch_size_warmup={start = 2, increment = 2, sequences = 100}",
            "progressive_layer_drop={theta = 0.5, steps = 100, keep = 'code'}",
        ],
        [
            "stages=[{model={n_layer=1}, switch={rule='steps', value=30}}, {operators=['depth'],"
            " rewarmup_steps=5}]",
        ],
    ],
)
@pytest.mark.parametrize(("done", "until"), [(0, None), (7, 33)])
def test_equal_steps_together_are_the_steps_one_by_one(changes, done, until):
    """The sizes of all steps, and the progress at the end of each group."""
    recipe = changed(RECIPE, *changes)
    first = list(itertools.islice(plan_run(recipe, vocab_size=500), done))
    start = first[-1][1] if first else Progress()
    steps = []
    for plan, after in plan_run(recipe, start, 500):
        if until is None or plan.step <= until:
            steps.append((plan, after))
    groups = list(plan_equal_steps(recipe, start, 500, until))
    sizes = []
    for group in groups:
        plan = group.plan
        sizes += group.steps * [(plan.batch_size, plan.seq_len, plan.accumulation_steps)]
        _, after = steps[len(sizes) - 1]
        assert group.after.flops == pytest.approx(after.flops, rel=1e-12)
        assert group.after._replace(flops=0.0) == after._replace(flops=0.0)
    assert sizes == [(plan.batch_size, plan.seq_len, plan.accumulation_steps) for plan, _ in steps]
    assert len(groups) < len(steps) / 1.5 or "seq_len_warmup" in str(changes)


def test_a_plan_as_csv():
    """Three steps of two micro-batches of 2 x 8 tokens; the last is evaluated, and every second."""
    recipe = tiny_recipe(
        *("model.seq_len=8", "train.batch_size=4", "train.micro_batch_tokens=16"),
        *("train.tokens=96", "eval.every=2"),
        *("optim.lr=0.5", "optim.warmup_steps=2", "optim.schedule=constant"),
    )
    header, *rows = csv_lines(recipe)
    assert header.split(",")[-3:] == ["windows", "tokens_discarded", "evaluate"]
    assert rows == ["1,32,0.25,4,8,2,4,0,0", "2,64,0.5,4,8,2,8,0,1", "3,96,0.5,4,8,2,12,0,1"]
    assert list(csv_lines(recipe, until=1)) == [header, rows[0]]


def test_a_plan_is_fast():
    """The promise is 100,000 steps per second (docs/performance.md has the figure); a busy machine
    gets half of it."""
    recipe = load_recipe("gpt2-117m", [f"train.tokens={512 * 1024 * 20_000}"])
    start = time.process_time()
    count = sum(1 for _ in csv_lines(recipe))
    assert count > 50_000 * (time.process_time() - start)


def test_a_step_changes_only_what_it_is_about():
    """Every other field is carried over, each in its place."""
    before = Progress(
        step=5, segment=2, stage=0, stage_step=3, stage_curve=((1, 2.0),), windows=40, sequences=41,
        tokens=2560, tokens_discarded=7, flops=11.0, train_seconds=13.0, batch_size=0,
        schedule_step=6, schedule_tokens=2570, lr_warmup_tokens=100, best_loss=17.0,
        evaluation_due=True, simigrad_window=((1.0, 2.0, 3.0),),
    )  # fmt: skip
    assert all(value not in (None, False, ()) for value in before[4:11] + before[12:])
    plan = plan_step(RECIPE, before)
    after = after_step(RECIPE, before, plan, StepResult(tokens=100, flops=0.5))
    assert after == before._replace(
        step=6,
        windows=40 + plan.batch_size,
        sequences=41 + plan.batch_size,
        tokens=2660,
        tokens_discarded=7 + plan.batch_size * RECIPE.model.seq_len - 100,
        flops=11.5,
        schedule_step=7,
        schedule_tokens=2670,
        lr_warmup_tokens=100 if RECIPE.optim.warmup_steps < 7 else 2670,
    )


def test_a_result_says_what_was_spent_or_that_the_run_is_stuck():
    """Stuck is within one percent of the loss of token frequencies alone."""
    spent = Progress(tokens=600_064, flops=3.8e12, train_seconds=44.0)
    line = result_line(spent, 4.0981, 5.937)
    assert line == "result  val loss 4.0981 nats/token; 600K tokens, 3.8 TFLOPs, 44 s"
    line = result_line(spent, 5.931, 5.937)
    assert line == "result  val loss 5.9310 nats/token: stuck; token frequencies alone give 5.937"
    assert [is_stuck(loss, 100.0) for loss in (98.9, 99.1, 100.9, 101.1)] == [0, 1, 1, 0]
