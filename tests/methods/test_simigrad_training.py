"""SimiGrad in training: the gradient it leaves alone, the plan it follows, and rows."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from efftrain_cli.foundation.step import Progress, StepResult
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.model.gpt import GPT
from efftrain_cli.plan.plan import after_growth, plan_run, plan_step
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from tests.tiny import gradient_of, random_batch, tiny_recipe

ADAPTING = SimiGrad(target=0.5, min_batch_size=2, max_batch_size=64)


def recipe(simigrad: SimiGrad | None, batch_size: int = 8) -> Recipe:
    plain = tiny_recipe("model.n_embd=32", "train.tokens=5120", f"train.batch_size={batch_size}")
    return replace(plain, simigrad=simigrad)


def flat_gradient(model: GPT) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()


@pytest.mark.parametrize("batch_size", [2, 3, 7, 8])
def test_gradient_and_dots_are_those_of_the_even_and_the_odd_micro_batches(batch_size):
    whole = recipe(ADAPTING, batch_size)
    plan = plan_step(whole, Progress())
    batch = random_batch(plan)
    model, result = gradient_of(whole)
    gradient = flat_gradient(model)
    plain, expected = gradient_of(recipe(None, batch_size))
    assert expected.simigrad_dots is None
    assert result.scalars["loss"].item() == pytest.approx(expected.scalars["loss"].item())
    assert (gradient - flat_gradient(plain)).norm() <= 1e-6 * gradient.norm()

    halves = []
    for half in (0, 1):
        tokens = torch.cat(batch.tokens.tensor_split(plan.accumulation_steps)[half::2])
        targets = torch.cat(batch.targets.tensor_split(plan.accumulation_steps)[half::2])
        model.zero_grad()
        (model.loss_sum(tokens, targets) / targets.numel()).backward()
        halves.append(flat_gradient(model))
    a, b = halves
    dots = [float(a @ b), float(a @ a), float(b @ b)]
    # <A,B> cancels to a small difference.
    assert result.simigrad_dots == pytest.approx(dots, rel=1e-5, abs=1e-6 * dots[1])


def test_a_fixed_batch_is_planned_as_the_baseline_is():
    fixed = recipe(SimiGrad(target=0.5, min_batch_size=8, max_batch_size=8))
    plans = [plan._replace(measure_similarity=False) for plan, _ in plan_run(fixed)]
    assert plans == [plan for plan, _ in plan_run(recipe(None))]


def test_columns_of_a_step():
    section = recipe(replace(ADAPTING, interval=2))
    plan = plan_step(section, Progress(batch_size=16))

    def columns(dots: tuple[float, float, float] | None) -> dict[str, float | None]:
        result = StepResult(tokens=1, flops=0, simigrad_dots=dots)
        found = section.methods["simigrad"].columns(section, plan, result)
        json.dumps(found, allow_nan=False)
        return {name.removeprefix("simigrad_"): value for name, value in found.items()}

    assert columns((0.25, 1.0, 1.0)) == {
        "similarity": 0.25,
        "a_dot_b": 0.25,
        "a_square": 1.0,
        "b_square": 1.0,
        "noise_scale": pytest.approx(24),  # 16 / 2 * (1 / 0.25 - 1)
        "batch_target": pytest.approx(48),  # 2 * 0.5 / (1 - 0.5) * 24
        "lr_factor": pytest.approx(math.sqrt(2)),
    }
    for dots in (None, (math.nan, 1.0, 1.0)):
        unknown = columns(dots)
        assert unknown["similarity"] is unknown["noise_scale"] is unknown["batch_target"] is None
    assert unknown["a_dot_b"] is None


def test_growth_clears_the_window_and_keeps_the_batch():
    section = "simigrad={target=0.2, min_batch_size=8, max_batch_size=64, window=2}"
    grows = load_recipe("small-staged-depth", [section])
    grown = after_growth(grows, Progress(step=5, batch_size=18, simigrad_window=((0.1, 1.0, 1.0),)))
    assert (grown.batch_size, grown.simigrad_window) == (18, ())
