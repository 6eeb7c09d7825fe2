"""Build the state of a recipe before its first step."""

from __future__ import annotations

import torch
from torch import nn

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.model.block import Rope
from efftrain_cli.model.gpt import GPT
from efftrain_cli.optim.adamw import AdamW
from efftrain_cli.optim.lion import Lion
from efftrain_cli.optim.muon import Muon
from efftrain_cli.optim.optimizer import Optimizer, ParameterSet, check_cover
from efftrain_cli.plan.plan import model_config
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training import dist
from efftrain_cli.training.device import compute_dtype
from efftrain_cli.training.ring import Ring
from efftrain_cli.training.state import Division, TrainState

OPTIMIZER_CLASSES: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "muon": Muon,
    "lion": Lion,
}
"""The class of each optimizer in `optim/facts.py`."""


def build_model(recipe: Recipe, vocab_size: int, device: torch.device, stage: int) -> GPT:
    """Build the GPT of the recipe, or of its stage `stage`, on `device`; its weights are not the
    recipe's."""
    with device:
        model = GPT(model_config(recipe, vocab_size, stage=stage))
    # On CPUs layer norms would then compute in bf16 too.
    if device.type == "cuda":
        model.residual_dtype = torch.bfloat16
    return model


def build_state(
    recipe: Recipe,
    vocab_size: int,
    device: torch.device,
    stage: int = 0,
) -> TrainState:
    """Build the state before step 1, or this rank's part of it, in the size of stage `stage`."""
    place = device
    if is_divided(recipe):
        place = torch.device("meta")  # no device need have room for all
    model = build_model(recipe, vocab_size, place, stage)
    state = state_of(recipe, model, device)
    state.load_weights(model.initial_weights(recipe.seed))
    return state


def set_stage(state: TrainState, recipe: Recipe, stage: int) -> None:
    """Replace model and optimizer of `state` by fresh ones of a stage."""
    fresh = build_state(recipe, state.model.config.vocab_size, state.device, stage)
    state.model = fresh.model
    state.parameters = fresh.parameters
    state.optimizer = fresh.optimizer
    state.division = fresh.division


def state_of(recipe: Recipe, model: GPT, device: torch.device) -> TrainState:
    """Return the state of a model before step 1, with an optimizer that has never stepped."""
    # Methods exchange layers of the model, or ask its blocks for activations.
    if recipe.chunked_accumulation is not None:
        recipe.chunked_accumulation.attach(model, device)
    if recipe.standardization_loss is not None:
        recipe.standardization_loss.attach(model)
    model.with_squares = recipe.optim.z_loss > 0
    if device.type == "cuda":
        model.residual_dtype = torch.bfloat16

    division: Division | None = None
    parameters = dict(model.named_parameters())
    in_flight: Tensors = {}
    if is_divided(recipe):
        division = divide(recipe, model, device)
        parameters = division.parameters
        in_flight = division.in_flight
    return TrainState(
        model=model,
        parameters=parameters,
        optimizer=build_optimizer(recipe, model, parameters),
        nonfinite=torch.zeros((), device=device),
        device=device,
        dtype=compute_dtype(recipe, device),
        in_flight=in_flight,
        division=division,
    )


def is_divided(recipe: Recipe) -> bool:
    """Return whether the ranks divide the model."""
    divides = recipe.is_sharded or recipe.delayed_gradients is not None
    return divides and dist.world_size() > 1


def divide(recipe: Recipe, model: GPT, device: torch.device) -> Division:
    """Give this rank its part of a model on the meta device, not filled, on `device`."""
    if recipe.delayed_gradients is not None:
        division: Division = Ring(recipe, model, device)
    else:
        from efftrain_cli.training.sharding import Rows  # imports PyTorch's compiler

        division = Rows(recipe, model, device)
    if model.config.position_facts.rotates:
        rope = Rope(model.config).to(device)
        for block in model.h:
            block.attn.rope = rope  # type: ignore[union-attr]
    return division


def build_optimizer(
    recipe: Recipe,
    model: GPT,
    parameters: dict[str, nn.Parameter],
) -> Optimizer:
    """Build the recipe's optimizer over this rank's parameters of `model`."""
    updated = ParameterSet(
        named=parameters,
        kinds=model.parameter_kinds(),
        qkv_rows=model.config.qkv_rows,
    )
    optimizer = OPTIMIZER_CLASSES[recipe.optim.name](updated, recipe.optim)
    check_cover(optimizer, parameters)
    return optimizer
