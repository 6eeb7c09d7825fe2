"""Build the model, optimizer and state of a recipe before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from efftrain_cli.model.gpt import GPT
from efftrain_cli.optim.adamw import AdamW
from efftrain_cli.optim.lion import Lion
from efftrain_cli.optim.muon import Muon
from efftrain_cli.optim.optimizer import Optimizer, ParameterSet, check_cover
from efftrain_cli.plan.plan import model_config
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.state import TrainState

OPTIMIZER_CLASSES: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "muon": Muon,
    "lion": Lion,
}
"""The class of each optimizer in `optim/facts.py`."""


def compute_dtype(recipe: Recipe, device: torch.device) -> str:
    """Return "bf16", "tf32" or "fp32" for the recipe's train.dtype on this device.

    "auto" is bf16 if the device has units for bf16 matrix products.
    """
    dtype = recipe.train.dtype
    on_cuda = device.type == "cuda"
    if dtype == "tf32":
        # From Ampere on; other devices multiply in fp32.
        if on_cuda and torch.cuda.get_device_capability(device) >= (8, 0):
            return "tf32"
        return "fp32"
    if dtype != "auto":
        return dtype

    if on_cuda:
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        # Without these instructions bf16 on a CPU is emulated and slower than fp32.
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if has_bf16:
        return "bf16"
    return "fp32"


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[None]:
    """Return the autocast context for bf16, or one without effect for fp32 and tf32."""
    if dtype != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def build_model(recipe: Recipe, vocab_size: int, device: torch.device, stage: int = 0) -> GPT:
    """Build the GPT of the recipe, or of its stage `stage`, on `device`, initialized from the
    recipe's seed."""
    model = GPT(model_config(recipe, vocab_size, stage=stage))
    model.init_weights(recipe.seed)
    # On CPUs layer norms would then compute in bf16 too.
    if device.type == "cuda":
        model.residual_dtype = torch.bfloat16
    model = model.to(device)
    if recipe.chunked_accumulation is not None:
        recipe.chunked_accumulation.attach(model, device)
    return model


def build_optimizer(
    recipe: Recipe,
    model: GPT,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> Optimizer:
    """Build the recipe's optimizer over the model of any stage.

    Args:
        parameters: this rank's part of each parameter by its name; None: the whole parameters.
    """
    if parameters is None:
        parameters = dict(model.named_parameters())
    updated = ParameterSet(
        named=parameters,
        kinds=model.parameter_kinds(),
        qkv_rows=model.config.qkv_rows,
    )
    optimizer = OPTIMIZER_CLASSES[recipe.optim.name](updated, recipe.optim)
    check_cover(optimizer, parameters)
    return optimizer


def build_state(
    recipe: Recipe,
    vocab_size: int,
    device: torch.device,
    stage: int = 0,
) -> TrainState:
    """Build the state before step 1, in the size of stage `stage` if the recipe has stages."""
    model = build_model(recipe, vocab_size, device, stage)
    return TrainState(
        model,
        build_optimizer(recipe, model),
        nonfinite=torch.zeros((), device=device),
    )
