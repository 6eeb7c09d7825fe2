"""A model that has grown trains on as the small one did."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from efftrain_cli.methods.growth_operators import GrowthState, grow_depth, grow_width
from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.parameter_kinds import ParameterKind
from efftrain_cli.optim.adamw import AdamW
from efftrain_cli.optim.optimizer import decays
from tests.methods.grown import (
    CONFIG,
    mean_loss,
    model_of,
    small_model,
    tokens_of,
    width_asymmetry,
)


class Scale(NamedTuple):
    """Factors on one parameter's settings."""

    lr: float = 1.0
    eps: float = 1.0
    weight_decay: float = 1.0


def small_model_scale(kind: ParameterKind, k: int) -> Scale:
    """Return the scale with which a parameter of a model widened k-fold takes the small model's own
    steps.

    All k blocks of a row step alike, so a matrix needs lr / k, and so does the last layer norm,
    which is 1/k of its size at the same gradient. Gradients are g/k, so eps is too, but for the
    last layer norm. Weight decay is k times as large where the learning rate is 1/k.
    """
    if kind == "last_norm":
        return Scale(lr=1 / k, weight_decay=k)
    if kind.endswith("matrix"):
        return Scale(lr=1 / k, eps=1 / k, weight_decay=k)
    return Scale(eps=1 / k)


def adamw(model: GPT, state: GrowthState | None = None, factor: int = 1) -> torch.optim.AdamW:
    """AdamW over `model` with the state's moments, or none; every parameter at
    `small_model_scale`."""
    groups = []
    for name, parameter in model.named_parameters():
        kind = model.parameter_kinds()[name]
        scale = small_model_scale(kind, factor)
        groups.append(
            {
                "params": [parameter],
                "lr": 3e-3 * scale.lr,
                "eps": 1e-6 * scale.eps,
                "weight_decay": 0.1 * scale.weight_decay * decays(kind),
            }
        )
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    if state is not None:
        for name, parameter in model.named_parameters():
            moments = {key: tensors[name].clone() for key, tensors in state.optimizer.items()}
            optimizer.state[parameter] = moments
    return optimizer


def train_steps(model: GPT, optimizer: torch.optim.AdamW, steps: int, start: int) -> list[float]:
    losses = []
    for i in range(steps):
        model.zero_grad()
        loss = mean_loss(model, tokens_of(model.config, seed=1000 + start + i))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained_small() -> tuple[GPT, torch.optim.AdamW, GrowthState]:
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
def test_the_wide_model_follows_the_small_one_exactly(factor):
    """Filled moments, scaled learning rates, eps and weight decay: 60 steps, fp64, the same losses
    to 1e-12."""
    small, optimizer, state = trained_small()
    expected = train_steps(small, optimizer, 60, 10)
    grown = grow_width(state, factor, moments="ema", symmetry="none")
    wide = model_of(grown)
    losses = train_steps(wide, adamw(wide, grown, factor), 60, 10)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-12
    assert len(set(expected)) == 60


@pytest.mark.parametrize("symmetry, parts", [("none", False), ("offdiag", True)])
def test_asymmetry_tells_copies_from_parted_ways(symmetry, parts):
    _, _, state = trained_small()
    grown = grow_width(state, 2, symmetry=symmetry)
    wide = model_of(grown)
    train_steps(wide, adamw(wide, grown), 20, 10)
    asymmetry = width_asymmetry(wide.state_dict(), 2, wide.config)
    assert (asymmetry > 1e-3) == parts, asymmetry
    if not parts:
        assert asymmetry < 1e-10


def test_identity_units_stay_dead_with_zero_moments_and_wake_with_copied_ones():
    _, _, state = trained_small()
    width = CONFIG.n_embd
    for moments, dead in (("paper", True), ("ema", False)):
        grown = grow_depth(state, 2, mode="identity", moments=moments)
        deep = model_of(grown)
        train_steps(deep, adamw(deep, grown), 20, 10)
        rest = deep.h[1].mlp.c_fc.weight[width:].detach()
        assert (rest.abs().max() == 0) == dead, moments
