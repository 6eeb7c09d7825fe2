"""SimiGrad in training: the gradient it leaves alone, the plan it follows, rows, rules, and
resuming."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from efftrain_cli.foundation.step import Progress, StepResult
from efftrain_cli.methods.simigrad import SimiGrad, mean_dots, noise_scale
from efftrain_cli.plan.plan import after_growth, after_step, method_columns, plan_run, plan_step
from efftrain_cli.recipe.recipe import load_recipe
from tests.methods.similarities import measured, recipe
from tests.tiny import gradient_of, random_batch

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


def test_growth_clears_the_window_and_keeps_the_batch():
    grows = load_recipe(
        "small-staged-depth",
        ("simigrad={target=0.2, min_batch_size=8, max_batch_size=64, window=2}",),
    )
    grown = after_growth(grows, Progress(step=5, batch_size=18, simigrad_window=((0.1, 1.0, 1.0),)))
    assert (grown.batch_size, grown.simigrad_window) == (18, ())
