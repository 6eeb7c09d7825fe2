"""A model that has grown trains on as the small one did."""

from __future__ import annotations

import pytest
import torch

from efftrain_cli.methods.growth_operators import GrowthState, grow_depth, grow_width
from efftrain_cli.model.config import ParameterKind, parameter_kind
from efftrain_cli.model.gpt import GPT
from efftrain_cli.optim.adamw import AdamW
from efftrain_cli.optim.optimizer import decays
from tests.methods.grown import CONFIG, mean_loss, model_of, small_model, tokens_of


def small_models_scales(kind: ParameterKind, k: int) -> tuple[float, float]:
    """Return factors on learning rate and eps with which a parameter of a model widened k-fold
    takes the small model's own steps.

    All k blocks of a row step alike, so a matrix needs lr / k, and so does the last layer norm,
    which is 1/k of its size at the same gradient. Gradients are g/k, so eps is too, but for the
    last layer norm. Weight decay is k times as large where the learning rate is 1/k.
    """
    if kind == "last_norm":
        return 1 / k, 1.0
    if kind.endswith("matrix"):
        return 1 / k, 1 / k
    return 1.0, 1 / k


def adamw(model: GPT, state: GrowthState | None = None, factor: int = 1) -> torch.optim.AdamW:
    """AdamW over `model` with the state's moments, or none."""
    groups = []
    for name, parameter in model.named_parameters():
        kind = parameter_kind(name)
        lr, eps = small_models_scales(kind, factor)
        decay = 0.1 / lr * decays(kind)
        groups.append(
            {"params": [parameter], "lr": 3e-3 * lr, "eps": 1e-6 * eps, "weight_decay": decay}
        )
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    if state is not None:
        for name, parameter in model.named_parameters():
            moments = {key: tensors[name].clone() for key, tensors in state.optimizer.items()}
            optimizer.state[parameter] = moments
    return optimizer


def train_steps(model: GPT, optimizer: torch.optim.AdamW, steps: int, start: int) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        model.zero_grad()
        loss = mean_loss(model, tokens_of(model.config, seed=1000 + step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def trained_small() -> tuple[GPT, torch.optim.AdamW, GrowthState]:
    """A model after ten steps."""
    model = small_model()
    optimizer = adamw(model)
    train_steps(model, optimizer, 10, 0)
    named = dict(model.named_parameters())
    moments = {}
    for key in ("exp_avg", "exp_avg_sq", "step"):
        moments[key] = {name: optimizer.state[p][key].clone() for name, p in named.items()}
    state = GrowthState(
        config=model.config,
        parameters={name: p.detach().clone() for name, p in named.items()},
        optimizer=moments,
        gradient_powers=AdamW.gradient_powers,
    )
    return model, optimizer, state


@pytest.mark.parametrize("factor", [2, 3])
def test_the_wide_model_follows_the_small_one_exactly(trained_small, factor):
    """Filled moments, scaled learning rates, eps and weight decay: 60 steps, fp64, the same losses
    to 1e-12."""
    small, optimizer, state = trained_small
    expected = train_steps(small, optimizer, 60, 10)
    grown = grow_width(state, factor, moments="ema", symmetry="none")
    wide = model_of(grown)
    losses = train_steps(wide, adamw(wide, grown, factor), 60, 10)
    assert losses == pytest.approx(expected, abs=1e-12, rel=0)
    assert len(set(expected)) == 60


@pytest.mark.parametrize("symmetry, parts", [("none", False), ("offdiag", True)])
def test_copies_part_ways_only_if_something_makes_them_differ(trained_small, symmetry, parts):
    grown = grow_width(trained_small[2], 2, symmetry=symmetry)
    wide = model_of(grown)
    train_steps(wide, adamw(wide, grown), 20, 10)
    first, second = wide.h[0].attn.c_proj.bias.detach().chunk(2)
    difference = float((first - second).norm() / first.norm())
    assert difference > 1e-3 if parts else difference < 1e-10


@pytest.mark.parametrize("moments, dead", [("paper", True), ("ema", False)])
def test_identity_units_stay_dead_with_zero_moments_only(trained_small, moments, dead):
    grown = grow_depth(trained_small[2], 2, mode="identity", moments=moments)
    deep = model_of(grown)
    train_steps(deep, adamw(deep, grown), 20, 10)
    rest = deep.h[1].mlp.c_fc.weight[CONFIG.n_embd :]
    assert (not rest.any()) == dead
