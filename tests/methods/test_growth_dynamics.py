"""A model that has grown trains on as the small one did."""

from __future__ import annotations

import pytest
import torch

from efftrain_cli.methods.growth_operators import (
    GrowthState,
    grow_depth,
    grow_width,
    reset_moments,
    small_model_scales,
)
from efftrain_cli.model.gpt import GPT
from efftrain_cli.optim.adamw import AdamW
from efftrain_cli.optim.optimizer import ParameterSet
from efftrain_cli.recipe.sections import Optim
from tests.methods.grown import (
    CONFIG,
    mean_loss,
    model_of,
    small_model,
    state_of,
    tokens_of,
    width_asymmetry,
)


def adamw(model: GPT, state: GrowthState, weight_decay: float, factor: int | None = None) -> AdamW:
    """AdamW over `model`, loaded with the state's moments; with `factor`, every parameter at `small_model_scales`."""
    scales = (
        {name: small_model_scales(kind, factor) for name, kind in model.parameter_kinds().items()}
        if factor
        else {}
    )
    optimizer = AdamW(
        ParameterSet(
            named=dict(model.named_parameters()),
            kinds=model.parameter_kinds(),
            scales=scales,
        ),
        Optim(lr=1.0, betas=(0.9, 0.98), eps=1e-6, weight_decay=weight_decay),
    )
    for full_name, tensor in optimizer.tensors().items():
        key, name = full_name.split(".", 1)
        tensor.copy_(state.optimizer[key][name])
    return optimizer


def train_steps(model: GPT, optimizer: AdamW, steps: int, start: int) -> list[float]:
    losses = []
    for i in range(steps):
        model.zero_grad()
        loss = mean_loss(model, tokens_of(model.config, seed=1000 + start + i))
        loss.backward()
        optimizer.step(3e-3, found_inf=torch.zeros(()))
        losses.append(loss.item())
    return losses


def state_after(model: GPT, optimizer: AdamW) -> GrowthState:
    state: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, tensor in optimizer.tensors().items():
        key, name = full_name.split(".", 1)
        state.setdefault(key, {})[name] = tensor.clone()
    return GrowthState(
        config=model.config,
        parameters={name: p.detach().clone() for name, p in model.named_parameters()},
        optimizer=state,
        gradient_powers=optimizer.gradient_powers,
    )


def trained_small() -> tuple[GPT, AdamW, GrowthState]:
    model = small_model()
    optimizer = adamw(model, reset_moments(state_of(model)), 0.1)
    train_steps(model, optimizer, 10, 0)
    return model, optimizer, state_after(model, optimizer)


@pytest.mark.parametrize("factor", [2, 3])
def test_the_wide_model_follows_the_small_one_exactly(factor):
    """Filled moments, scaled learning rates, eps and weight decay: 60 steps, fp64, the same losses to 1e-12."""
    small, optimizer, state = trained_small()
    expected = train_steps(small, optimizer, 60, 10)
    grown = grow_width(state, factor, moments="ema", symmetry="none")
    wide = model_of(grown)
    losses = train_steps(wide, adamw(wide, grown, 0.1, factor), 60, 10)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-12
    assert len(set(expected)) == 60


def test_the_released_operators_state_at_the_same_lr_does_not_follow():
    """The negative control: same weights, the released moments, no scales."""
    small, optimizer, state = trained_small()
    expected = train_steps(small, optimizer, 10, 10)
    grown = grow_width(state, 2, moments="paper", symmetry="none")
    wide = model_of(grown)
    losses = train_steps(wide, adamw(wide, grown, 0.1), 10, 10)
    assert losses[0] == pytest.approx(expected[0], abs=1e-12)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) > 1e-3


@pytest.mark.parametrize("symmetry, parts", [("none", False), ("offdiag", True), ("noise", True)])
def test_asymmetry_tells_copies_from_parted_ways(symmetry, parts):
    _, _, state = trained_small()
    grown = grow_width(state, 2, symmetry=symmetry)
    wide = model_of(grown)
    optimizer = adamw(wide, grown, 0.1)
    train_steps(wide, optimizer, 20, 10)
    asymmetry = width_asymmetry(state_after(wide, optimizer).parameters, 2, wide.config)
    assert (asymmetry > 1e-3) == parts, asymmetry
    if not parts:
        assert asymmetry < 1e-10


def test_identity_units_stay_dead_with_zero_moments_and_wake_with_copied_ones():
    _, _, state = trained_small()
    width = CONFIG.n_embd
    for moments, dead in (("paper", True), ("ema", False)):
        grown = grow_depth(state, 2, mode="identity", moments=moments)
        deep = model_of(grown)
        train_steps(deep, adamw(deep, grown, 0.1), 20, 10)
        rest = deep.h[1].mlp.c_fc.weight[width:].detach()
        assert (rest.abs().max() == 0) == dead, moments
