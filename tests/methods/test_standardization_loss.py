"""The standardization loss: its value and gradient against tables and by hand, and what training
with it keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.foundation.step import Progress
from efftrain_cli.methods.standardization_loss import StandardizationLoss
from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.standardization import standardization_loss
from efftrain_cli.plan.plan import full_plan, plan_step
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.recipe.rules import warnings_of
from efftrain_cli.training.evaluation import evaluate
from efftrain_cli.training.gradient import Gradient
from efftrain_cli.training.objective import Objective
from efftrain_cli.training.state import TrainState
from tests.methods.standardized import BARE, BATCH, LENGTH, SITES, batch, with_loss
from tests.resume_law import RandomTokens, run
from tests.tiny import changed, fresh, tensors_of

X = torch.tensor([[1, 2, -1], [3, 0, -1.5], [-1, 1, 0.5], [1, -1, 2]], dtype=torch.float64)


def test_four_samples_of_three_channels():
    """Worked by hand: mu = 1, .5, 0; v = 2, 1.25, 1.875."""
    by_channel = [standardization_loss(X[:, i : i + 1]).item() for i in range(3)]
    assert by_channel == pytest.approx([0.6534264097, 0.1384282243, 0.1231956703], abs=1e-9)
    x = X.clone().requires_grad_()
    loss = standardization_loss(x)
    assert loss.item() == pytest.approx(0.3050167681, abs=1e-9)
    (3 * loss).backward()
    assert x.grad is not None
    want = [
        [0.25, 0.2, -0.1166666667],
        [0.5, 0.1, -0.175],
        [0, 0.15, 0.0583333333],
        [0.25, 0.05, 0.2333333333],
    ]
    assert torch.allclose(x.grad, torch.tensor(want, dtype=torch.float64), atol=1e-9, rtol=0)
    assert torch.allclose(x.grad.sum(0), X.mean(0), atol=1e-12), (
        "each channel's gradient adds up to its mean"
    )


def test_the_gradient_is_the_derivative():
    x = torch.randn(
        2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    for eps in (0.0, 1e-2):
        assert torch.autograd.gradcheck(lambda x, eps=eps: standardization_loss(x, eps), (x,))  # type: ignore[arg-type]
    mean, variance = x.mean((0, 1)), x.var((0, 1), correction=0)
    plain = 0.5 * (mean**2 + variance - variance.log() - 1).mean()
    assert standardization_loss(x).item() == pytest.approx(plain.item(), abs=1e-14)
    eased = 0.5 * (mean**2 + variance - (variance + 0.5).log() - 1).mean()
    assert standardization_loss(x, eps=0.5).item() == pytest.approx(eased.item(), abs=1e-14)


def test_moments_are_fp32_where_activations_are_bf16():
    x = (
        (100 + torch.randn(4096, 2, generator=torch.Generator().manual_seed(1)))
        .bfloat16()
        .requires_grad_()
    )
    loss = standardization_loss(x)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(standardization_loss(x.double()).item(), rel=1e-5)
    loss.backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


def by_hand(model: GPT, tokens: Tensor, section: StandardizationLoss) -> dict[str, float]:
    """Each site's mean divergence, from hooks on the modules and torch's own moments."""
    found: dict[str, float] = {}

    def note(name: str, x: Tensor) -> None:
        x = x.detach().double()
        mean, variance = x.mean((0, 1)), x.var((0, 1), correction=0)
        found[name] = float(
            (0.5 * (mean**2 + variance - (variance + section.eps).log() - 1)).mean()
        )

    hooks = []
    for name, module in model.named_modules():
        if name == "ln_f" or (
            name.split(".", 2)[-1] in SITES["ln_input"] and name.startswith("h.")
        ):
            hooks.append(
                module.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
            )
        elif name.startswith("h.") and name.split(".", 2)[-1] in SITES["all_linear"]:
            hooks.append(
                module.register_forward_hook(lambda _, args, out, name=name: note(name, out))
            )
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("sites", SITES)
@pytest.mark.parametrize("norm", ["none", "layernorm"])
def test_the_objective_is_the_mean_over_sites_and_channels(sites, norm):
    recipe = changed(with_loss(sites=sites), f"model.norm={norm}")
    section = recipe.standardization_loss
    state = fresh(recipe)
    assert section is not None
    tokens, targets = batch()
    losses = Objective(recipe, state).compute(tokens, targets, None, None)
    model = state.model
    assert list(losses) == ["loss", "standardization_loss"]
    divergences = losses["standardization_loss"].detach() / targets.numel()
    names = [f"h.{i}.{name}" for i in range(2) for name in SITES[sites]] + ["ln_f"] * (
        sites == "ln_input"
    )
    expected = by_hand(model, tokens, section)
    assert section.sites_of(2) == names
    assert divergences.tolist() == pytest.approx(
        [expected[name] for name in names], rel=2e-5, abs=1e-6
    )
    width = {"attn.c_attn": 48, "mlp.c_fc": 64}
    channels = [width.get(name.split(".", 2)[-1], 16) for name in names]
    mean = sum(expected[name] * n for name, n in zip(names, channels, strict=True)) / sum(channels)
    assert float(divergences @ torch.tensor(section.site_weights(model.config))) == pytest.approx(
        mean, rel=2e-5
    )
    assert section.weight_sum(model.config) == pytest.approx(0.3 / sum(channels))


def step_of(recipe: Recipe, state: TrainState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(scalars, gradients) of a first step."""
    plan = plan_step(recipe, Progress(step=2))  # step 3 is evaluated
    result = Gradient(recipe, state)(RandomTokens(LENGTH).batch(plan), plan)
    parameters = state.parameters.items()
    gradients = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
    return result.scalars, gradients


def test_gradient_and_columns_are_means_over_micro_batches():
    """Micro-batches of 2, 2 and 2 sequences: the loss is the mean of their divergences, not the
    divergence of all six."""
    recipe = with_loss()
    state = fresh(recipe)
    model = state.model
    scalars, gradients = step_of(recipe, state)
    tokens, targets = batch()
    model.zero_grad()
    objective = Objective(recipe, state).compute
    total = torch.zeros(())
    shares = torch.tensor(recipe.standardization_loss.site_weights(model.config))  # type: ignore[union-attr]
    means = []
    for part in range(3):
        cut = slice(2 * part, 2 * part + 2)
        losses = objective(tokens[cut], targets[cut], None, None)
        means.append(losses["standardization_loss"] / targets[cut].numel())
        total = total + (losses["loss"] / targets.numel() + 0.3 * (means[-1] * shares).sum() / 3)
    total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-7), name
    mean = sum(means) / 3
    assert float(scalars["standardization_loss"]) == pytest.approx(
        float((mean * shares).sum()), rel=1e-6
    )
    assert float(scalars["loss"]) == pytest.approx(
        float(model.loss_sum(tokens, targets)) / targets.numel(), rel=1e-5
    )
    columns = [f"std_kl_h.{i}.{name}" for i in range(2) for name in SITES["preact"]]
    assert [name for name in scalars if name.startswith("std_kl_")] == columns
    assert [float(scalars[name]) for name in columns] == pytest.approx(mean.tolist(), rel=1e-6)
    whole = changed(recipe, f"train.micro_batch_tokens={LENGTH * BATCH}")
    assert (
        abs(
            float(step_of(whole, state)[0]["standardization_loss"])
            - float(scalars["standardization_loss"])
        )
        > 1e-3
    )


def rows_of(recipe: Recipe) -> tuple[list[dict], dict[str, Tensor]]:
    state = fresh(recipe)
    return run(state, recipe), tensors_of(state)


def test_weight_0_measures_it():
    measured, _ = rows_of(with_loss(weight=0))
    assert all(row["standardization_loss"] > 0 for row in measured[1:])  # type: ignore[operator]


def test_sites_are_rows_where_a_step_is_evaluated_and_evaluation_has_nothing_of_it():
    recipe = with_loss(weight=1.0)
    rows, _ = rows_of(recipe)
    assert [row["step"] for row in rows if "std_kl_h.0.mlp.c_fc" in row] == [3, 6]
    state, (tokens, targets) = fresh(recipe), batch(2)
    Gradient(recipe, state)
    windows = torch.cat([tokens, targets[:, -1:]], dim=1)
    plain = evaluate(fresh(BARE), BARE, windows)
    assert torch.equal(evaluate(state, BARE, windows), plain)


def test_a_site_is_the_mean_over_the_micro_batches_where_its_block_ran():
    """Three of 2 sequences: block 0 ran in the first and the second, block 1 never."""
    section = StandardizationLoss(weight=1.0, sites="ln_input")
    divergences = torch.tensor([0.2, 0.4, 0.0, 0.0, 0.6])
    plan = full_plan(BARE, 6, LENGTH, 2, micro_batches=3)._replace(evaluate=True)
    gates = [(True, False), (True, False), (False, False)]
    columns = section.loss_columns(divergences, torch.full((5,), 0.2), plan, gates, n_layer=2)
    assert {name: float(value) for name, value in columns.items()} == pytest.approx(
        {
            "standardization_loss": 0.24,
            "std_kl_h.0.ln_1": 0.3,
            "std_kl_h.0.ln_2": 0.6,
            "std_kl_ln_f": 0.6,
        }
    )


# --- the recipe ---


def test_bad_input_is_named_with_its_rule():
    for override, words in (
        ("standardization_loss.weight=-0.1", r"weight = -0.1.*must be at least 0"),
        (
            "standardization_loss.sites=preactivation",
            r"must be one of 'preact', 'ln_input' or 'all_linear'",
        ),
        ("standardization_loss.eps=0", "must be greater than 0"),
        ("standardization_loss.lambda=1", "did you mean standardization_loss.weight"),
        ("std_loss.weight=1", "did you mean standardization_loss"),
    ):
        with pytest.raises(RecipeError, match=f"(?s){words}") as caught:
            load_recipe("small-standardization", [override])
        assert len(caught.value.problems) == 1
    section = "standardization_loss={weight = 0.1, sites = 'all_linear'}"
    with pytest.raises(RecipeError, match="c_up is no site"):
        load_recipe("small", ["model.arch=llama", section])
    layernorm = ["model.norm=layernorm", "standardization_loss.sites=ln_input"]
    assert any(
        "ignores the scale" in warning
        for warning in warnings_of(load_recipe("small-standardization", layernorm))
    )


def test_the_recipe_says_the_papers_factor():
    recipe = load_recipe("small-standardization")
    assert recipe.standardization_loss is not None
    (line,) = recipe.standardization_loss.assumptions(recipe)
    assert (
        f"{recipe.standardization_loss.weight / (4 * 7 * 128):.3g}" in line
        and "micro_batch_tokens" in line
    )
    assert replace(recipe, standardization_loss=None) == load_recipe("small-no-norm")
