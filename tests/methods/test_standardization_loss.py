"""The standardization loss: its value and gradient against tables and by hand, and what training
with it keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from efftrain_cli.foundation.step import Progress
from efftrain_cli.methods.standardization_loss import StandardizationLoss
from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.losses import standardization_loss
from efftrain_cli.plan.plan import full_plan, plan_step
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training import compiling
from efftrain_cli.training.compiling import compiled_graphs
from efftrain_cli.training.gradient import Gradient
from efftrain_cli.training.objective import Objective
from tests.methods.cases import check_messages
from tests.resume_law import run
from tests.tiny import changed, drawn, fresh, random_batch, tiny_recipe

LENGTH = 16
BARE = tiny_recipe(
    "model.norm=none",
    "model.init=unit",
    "optim={lr = 3e-3, warmup_steps = 2}",
    "train.tokens=576",
    "train.batch_size=6",
    "eval={every = 3, windows = 2}",
)


def with_loss(*overrides: str, **settings: object) -> Recipe:
    section = StandardizationLoss(**{"weight": 0.3, **settings})  # type: ignore[arg-type]
    return replace(changed(BARE, *overrides), standardization_loss=section)


def batch(sequences: int) -> tuple[Tensor, Tensor]:
    ids = drawn(64, sequences, LENGTH + 1, seed=0)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def test_four_samples_of_three_channels():
    """Worked by hand: mu = 1, .5, 0; v = 2, 1.25, 1.875."""
    samples = [[1, 2, -1], [3, 0, -1.5], [-1, 1, 0.5], [1, -1, 2]]
    x = torch.tensor(samples, dtype=torch.float64, requires_grad=True)
    by_channel = [standardization_loss(x[:, i : i + 1]).item() for i in range(3)]
    assert by_channel == pytest.approx([0.6534264097, 0.1384282243, 0.1231956703], abs=1e-9)
    loss = standardization_loss(x)
    assert loss.item() == pytest.approx(0.3050167681, abs=1e-9)
    (3 * loss).backward()
    want = [
        [0.25, 0.2, -0.1166666667],
        [0.5, 0.1, -0.175],
        [0, 0.15, 0.0583333333],
        [0.25, 0.05, 0.2333333333],
    ]
    torch.testing.assert_close(x.grad, torch.tensor(want, dtype=torch.float64), atol=1e-9, rtol=0)


def test_value_and_gradient_with_eps():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 4, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: standardization_loss(x, 0.5), (x,))
    assert standardization_loss(x, 0.5).item() == pytest.approx(divergence(x, 0.5), abs=1e-14)


def test_moments_are_fp32_where_activations_are_bf16():
    noise = torch.randn(4096, 2, generator=torch.Generator().manual_seed(1))
    x = (100 + noise).bfloat16()
    loss = standardization_loss(x)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(divergence(x[None], 0), rel=1e-5)


def divergence(x: Tensor, eps: float) -> float:
    """The mean over channels by torch's own moments."""
    x = x.detach().double()
    mean = x.mean((0, 1))
    variance = x.var((0, 1), correction=0)
    return 0.5 * float((mean**2 + variance - (variance + eps).log() - 1).mean())


def by_hand(model: GPT, tokens: Tensor, sites: list[str], eps: float) -> list[float]:
    """Each site's divergence, from hooks: what a norm takes in, what a linear layer puts out."""
    found: dict[str, float] = {}

    def note(name: str, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        found[name] = divergence(args[0] if ".ln_" in f".{name}" else out, eps)

    for name in sites:
        model.get_submodule(name).register_forward_hook(partial(note, name))
    with torch.no_grad():
        model(tokens)
    return [found[name] for name in sites]


IN_BLOCK = {
    "preact": {"attn.c_attn": 48, "mlp.c_fc": 64},
    "ln_input": {"ln_1": 16, "ln_2": 16},
    "all_linear": {"attn.c_attn": 48, "attn.c_proj": 16, "mlp.c_fc": 64, "mlp.c_proj": 16},
}
"""Channels of each activation."""


@pytest.mark.parametrize("sites", IN_BLOCK)
@pytest.mark.parametrize("norm", ["none", "layernorm"])
def test_the_objective_is_the_mean_over_sites_and_channels(sites, norm):
    recipe = with_loss(f"model.norm={norm}", sites=sites)
    section = recipe.standardization_loss
    state = fresh(recipe)
    tokens, targets = batch(6)
    losses = Objective(recipe, state).compute(tokens, targets, None, None)
    divergences = losses["standardization_loss"].detach() / targets.numel()

    channels = {f"h.{i}.{name}": n for i in (0, 1) for name, n in IN_BLOCK[sites].items()}
    if sites == "ln_input":
        channels["ln_f"] = 16
    assert section.sites_of(2) == list(channels)
    expected = by_hand(state.model, tokens, list(channels), section.eps)
    assert divergences.tolist() == pytest.approx(expected, rel=2e-5, abs=1e-6)
    total = sum(channels.values())
    shares = [n / total for n in channels.values()]
    assert section.site_weights(state.model.config) == pytest.approx(shares)
    assert section.weight_sum(state.model.config) == pytest.approx(0.3 / total)


def test_gradient_and_columns_are_means_over_micro_batches():
    """Micro-batches of 2, 2 and 2 sequences: the loss is the mean of their divergences, not the
    divergence of all six."""
    recipe = with_loss()
    state = fresh(recipe)
    plan = plan_step(recipe, Progress(step=2))  # step 3 is evaluated
    data = random_batch(plan)
    scalars = Gradient(recipe, state)(data, plan).scalars
    gradients = {name: p.grad.clone() for name, p in state.parameters.items()}

    state.model.zero_grad()
    shares = torch.tensor(recipe.standardization_loss.site_weights(state.model.config))
    parts = zip(data.tokens.split(2), data.targets.split(2), strict=True)
    total = torch.zeros(())
    means = []
    for tokens, targets in parts:
        losses = Objective(recipe, state).compute(tokens, targets, None, None)
        means.append(losses["standardization_loss"] / targets.numel())
        total = total + losses["loss"] / data.targets.numel() + 0.1 * (means[-1] * shares).sum()
    total.backward()
    for name, parameter in state.parameters.items():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-7), name
    mean = sum(means).detach() / 3
    column = float(scalars["standardization_loss"])
    assert column == pytest.approx(float((mean * shares).sum()), rel=1e-6)
    columns = [f"std_kl_h.{i}.{name}" for i in range(2) for name in IN_BLOCK["preact"]]
    assert [name for name in scalars if name.startswith("std_kl_")] == columns
    assert [float(scalars[name]) for name in columns] == pytest.approx(mean.tolist(), rel=1e-6)

    whole = changed(recipe, f"train.micro_batch_tokens={6 * LENGTH}")
    plan = plan_step(whole, Progress(step=2))
    uncut = Gradient(whole, state)(data, plan).scalars["standardization_loss"]
    assert abs(float(uncut) - column) > 1e-3


def test_weight_0_measures_it_and_sites_are_rows_where_a_step_is_evaluated():
    recipe = with_loss(weight=0)
    rows = run(fresh(recipe), recipe)[1:]
    assert all(row["standardization_loss"] > 0 for row in rows)
    assert [row["step"] for row in rows if "std_kl_h.0.mlp.c_fc" in row] == [3, 6]


def test_a_site_is_the_mean_over_the_micro_batches_where_its_block_ran():
    """Three micro-batches of 2 sequences: block 0 ran in the first two, block 1 in none."""
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


def test_it_goes_on_in_a_grown_model():
    stages = (
        "stages=[{model = {n_layer = 1}, switch = {rule = 'steps', value = 3}},"
        " {operators = ['depth'], rewarmup_steps = 1}]"
    )
    recipe = with_loss(stages, sites="all_linear")
    last = run(fresh(recipe), recipe)[-1]
    assert math.isfinite(last["standardization_loss"]) and "std_kl_h.1.mlp.c_proj" in last


@pytest.mark.slow
def test_compiled_by_blocks_all_blocks_share_a_graph(monkeypatch):
    recipe = with_loss(sites="ln_input")
    torch._dynamo.reset()
    before = compiled_graphs()
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiling, "WHOLE_MODEL_BLOCKS", 1)
    found = []
    for each in (recipe, changed(recipe, "train.compile=on")):
        state = fresh(each)
        losses = Objective(each, state).compute(*batch(2), None, None)
        (losses["loss"] + losses["standardization_loss"].sum()).backward()
        gradients = {name: p.grad for name, p in state.parameters.items()}
        found.append(({name: loss.detach() for name, loss in losses.items()}, gradients))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert compiled_graphs() - before == 2  # a block's and the head's


# --- the recipe ---


def test_the_two_recipes_differ_by_the_loss_alone():
    recipe = load_recipe("small-standardization")
    assert replace(recipe, standardization_loss=None) == load_recipe("small-no-norm")


MESSAGES = """
standardization_loss.weight=10
    assumed: The standardization loss at 4 sites is averaged with weight 10; the paper's lambda, a
    factor of the sum, is 0.0446. Moments are of each micro-batch of train.micro_batch_tokens, a
    setting of this method.

standardization_loss={weight = 11, sites = "ln_input"}
    assumed: The standardization loss at 5 sites is averaged with weight 11; the paper's lambda, a
    factor of the sum, is 0.138. Moments are of each micro-batch of train.micro_batch_tokens, a
    setting of this method.
    warning: standardization_loss.sites = "ln_input" with model.norm = "layernorm": the forward pass
    ignores the scale that is asked for, as each norm divides it out; the term only changes what the
    residual stream looks like
    warning: standardization_loss.weight = 11 multiplies a mean of nats per channel, not the paper's
    sum over channels: beside a cross-entropy of a few nats 0.01 to 1 is usual

standardization_loss={weight = 1, sites = "all_linear"}
model.mlp=swiglu
    standardization_loss.sites: must be "preact" or "ln_input" with mlp = "swiglu": c_up is no site
"""


def test_messages_about_a_recipe():
    check_messages(MESSAGES)
