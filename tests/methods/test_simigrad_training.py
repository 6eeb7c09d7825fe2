"""SimiGrad in training: the gradient it leaves alone, the plan it follows, rows, rules, and
resuming."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.foundation.step import Progress, StepResult
from efftrain_cli.methods.simigrad import SimiGrad, mean_dots, noise_scale
from efftrain_cli.plan.plan import after_growth, after_step, method_columns, plan_run, plan_step
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.recipe.rules import warnings_of
from efftrain_cli.recipe.sections import Optim
from tests.methods.similarities import HIGH, LOW, measured, recipe
from tests.resume_law import run
from tests.tiny import changed, fresh, gradient_of, random_batch

CPU = torch.device("cpu")
BATCH = {"target": 0.5, "min_batch_size": 2, "max_batch_size": 64}


@pytest.mark.parametrize("batch_size", [2, 3, 5, 7, 8, 10])
def test_gradient_is_the_same_with_simigrad_on_or_off(batch_size):
    plain, whole = gradient_of(recipe(None, batch_size=batch_size))
    halved, halves = gradient_of(recipe(SimiGrad(**BATCH), batch_size=batch_size))
    assert whole.simigrad_dots is None and halves.simigrad_dots is not None
    loss = pytest.approx(whole.scalars["loss"].item(), rel=1e-6)
    assert halves.scalars["loss"].item() == loss
    theirs = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    ours = torch.cat([parameter.grad.flatten() for parameter in halved.parameters()])
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("batch_size", [3, 7, 8])
def test_dots_are_those_of_the_even_and_the_odd_micro_batches(batch_size):
    whole = recipe(SimiGrad(**BATCH), batch_size=batch_size)
    plan = plan_step(whole, Progress())
    batch = random_batch(plan)
    model, result = gradient_of(whole)
    halves = []
    for half in (0, 1):
        tokens = torch.cat(batch.tokens.tensor_split(plan.accumulation_steps)[half::2])
        targets = torch.cat(batch.targets.tensor_split(plan.accumulation_steps)[half::2])
        model.zero_grad()
        (model.loss_sum(tokens, targets) / targets.numel()).backward()
        halves.append(
            torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()
        )
    a, b = halves
    expected = [float(a @ b), float(a @ a), float(b @ b)]
    # <A,B> cancels to a small difference.
    assert result.simigrad_dots == pytest.approx(expected, rel=1e-5, abs=1e-6 * expected[1])


def test_a_fixed_batch_trains_as_the_baseline_does():
    """min = max: up to the order in which the micro-batches are summed, the plans, the learning
    rate and the updates agree."""
    fixed = recipe(SimiGrad(target=0.5, min_batch_size=8, max_batch_size=8))
    baseline = recipe(None)
    assert [plan._replace(measure_similarity=False) for plan, _ in plan_run(fixed)] == [
        plan for plan, _ in plan_run(baseline)
    ]
    progress = Progress()
    for _ in range(6):
        plan = plan_step(fixed, progress)
        progress = after_step(fixed, progress, plan, gradient_of(fixed, progress)[1])
        assert plan.batch_size == progress.batch_size == 8


def test_plan_follows_the_batch_size_in_progress():
    growing = recipe(SimiGrad(**BATCH))
    assert plan_step(growing, Progress()).batch_size == 8
    plan = plan_step(growing, Progress(batch_size=18, step=5, schedule_step=5))
    assert plan.batch_size == 18
    assert plan.accumulation_steps == 10  # 18 sequences of 16 tokens need 9 micro-batches of 32
    baseline = plan_step(recipe(None, batch_size=18), Progress(step=5, schedule_step=5))
    assert plan.lr == pytest.approx(baseline.lr * 1.5)  # sqrt(18 / 8)
    progress, batches = Progress(), []
    for phi in (LOW, LOW, HIGH, math.nan, LOW):
        plan = plan_step(growing, progress)
        batches.append(plan.batch_size)
        progress = after_step(growing, progress, plan, measured(phi))
    assert [*batches, progress.batch_size] == [8, 9, 10, 9, 9, 10]
    assert progress.sequences == sum(batches)


def test_steps_between_measurements_do_not_measure():
    rare = recipe(SimiGrad(**BATCH, interval=3))
    for step, measures in enumerate([False, False, True, False, False, True], start=1):
        _, result = gradient_of(rare, Progress(step=step - 1))
        assert (result.simigrad_dots is not None) == measures


def test_a_plan_of_the_run_keeps_the_batch_and_its_window():
    started = Progress(batch_size=16)
    assert {plan.batch_size for plan, _ in plan_run(recipe(SimiGrad(**BATCH)), started)} == {16}


def test_columns_of_a_step():
    section = recipe(SimiGrad(**BATCH, interval=2))
    plan = plan_step(section, Progress(batch_size=16))
    columns = method_columns(section, plan, measured(0.25))
    assert columns == {
        "simigrad_similarity": 0.25,
        **dict(
            zip(
                ("simigrad_a_dot_b", "simigrad_a_square", "simigrad_b_square"),
                measured(0.25).simigrad_dots,
                strict=True,
            )
        ),
        "simigrad_noise_scale": pytest.approx(24),  # 16 / 2 * (1 / 0.25 - 1)
        "simigrad_batch_target": pytest.approx(48),  # 2 * 0.5 / (1 - 0.5) * 24
        "simigrad_lr_factor": pytest.approx(math.sqrt(2)),
    }
    columns = method_columns(section, plan, StepResult(tokens=1, flops=0.0))
    assert [
        columns[f"simigrad_{name}"] for name in ("similarity", "noise_scale", "batch_target")
    ] == [None] * 3
    json.dumps(method_columns(section, plan, measured(math.nan)), allow_nan=False)
    assert method_columns(section, plan, measured(math.nan))["simigrad_a_dot_b"] is None


def test_the_logged_products_average_without_bias_and_the_ratios_do_not():
    """Gradients of 16 sequences, noise scale 64 by construction: |G|^2 = 1, tr(Sigma) = 64 over 40
    dimensions."""
    draw = np.random.default_rng(22)
    mean = np.zeros(40)
    mean[0] = 1.0
    measurements = []
    for _ in range(4000):
        a, b = (mean + draw.normal(0, math.sqrt(64 / 40 / 8), 40) for _ in range(2))
        measurements.append((float(a @ b), float(a @ a), float(b @ b)))
    assert noise_scale(mean_dots(measurements), 8, 8) == pytest.approx(64, rel=0.15)
    ratios = [ratio for dots in measurements if (ratio := noise_scale(dots, 8, 8)) is not None]
    assert sum(ratios) / len(ratios) > 1.5 * 64


@pytest.mark.parametrize(
    "section, batch_size, rule",
    [
        ({"quantum": 4}, 10, "multiple of simigrad.quantum = 4"),
        ({"quantum": 4, "max_batch_size": 15}, 16, "within SimiGrad's bounds, 4 to 12"),
        ({"min_batch_size": 20}, 8, "within SimiGrad's bounds, 20 to 64"),
    ],
)
def test_the_recipes_batch_must_be_one_that_simigrad_can_hold(section, batch_size, rule):
    with pytest.raises(ValidationError, match=rule):
        recipe(SimiGrad(**(BATCH | section)), batch_size=batch_size)


def test_batch_size_warmup_and_simigrad_exclude_each_other():
    with pytest.raises(RecipeError, match="both decide the batch size"):
        changed(
            recipe(SimiGrad(**BATCH)),
            "batch_size_warmup={start = 2, increment = 2, sequences = 40}",
        )


def test_unwise_settings_are_named():
    def warned(changed: Recipe) -> str:
        return " ".join(warnings_of(changed))

    calm = recipe(SimiGrad(**BATCH))
    assert warned(calm) == ""
    assert "8.0 times" in warned(recipe(SimiGrad(**(BATCH | {"max_batch_size": 512}))))
    assert "8.0 times" in warned(recipe(SimiGrad(**BATCH, lr_scaling="linear")))
    assert "decay by tokens" in warned(replace(calm, optim=Optim(lr=1e-2, decay_steps=30)))
    assert "run each alone" in warned(changed(calm, "seq_len_warmup={steps = 5, start = 8}"))


def test_memory_is_planned_for_the_largest_micro_batch_that_may_come():
    assert summarize_plan(
        recipe(SimiGrad(**BATCH), micro_batch_tokens=160)
    ).largest_micro_batch == (10, 16)
    assert summarize_plan(
        recipe(SimiGrad(**BATCH), micro_batch_tokens=16_000)
    ).largest_micro_batch == (32, 16)


def test_rows_follow_the_changes_of_the_batch():
    section = SimiGrad(target=0.4, min_batch_size=4, max_batch_size=20, interval=2, window=2)
    adapting = recipe(section, tokens=8 * 16 * 14)
    rows = run(fresh(adapting), adapting)
    batches = [row["batch_size"] for row in rows[1:]]
    assert len(set(batches)) > 2
    measured = [row["simigrad_similarity"] is not None for row in rows[1:5]]
    assert measured == [False, True, False, True]
    for before, row in itertools.pairwise(rows[1:]):
        assert row["sequences"] == before["sequences"] + row["batch_size"]
        assert row["simigrad_lr_factor"] == math.sqrt(row["batch_size"] / 8)


def test_growth_clears_the_window_and_keeps_the_batch():
    grows = load_recipe(
        "small-staged-depth",
        ("simigrad={target=0.2, min_batch_size=8, max_batch_size=64, window=2}",),
    )
    grown = after_growth(grows, Progress(step=5, batch_size=18, simigrad_window=((0.1, 1.0, 1.0),)))
    assert (grown.batch_size, grown.simigrad_window) == (18, ())
