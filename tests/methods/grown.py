"""A small model, its state for growth, and the model of a state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from efftrain_cli.methods.growth_operators import GrowthState, grow
from efftrain_cli.methods.staged_growth import StagedGrowth
from efftrain_cli.methods.stages import Operator
from efftrain_cli.model.gpt import GPT, GPTConfig
from efftrain_cli.model.parameter_kinds import parameter_kind
from efftrain_cli.optim.adamw import AdamW
from tests.tiny import config_of, init_weights

CONFIG = config_of()


def small_model(dtype: torch.dtype = torch.float64, config: GPTConfig = CONFIG) -> GPT:
    """A GPT in which no parameter is 0 or 1, so that no operator can hide behind a trivial layer
    norm or bias."""
    model = GPT(config).to(dtype)
    init_weights(model, 3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            ).to(dtype)
    return model


def state_of(model: GPT) -> GrowthState:
    """The model with moments that are a function of the name: no two parameters, no two entries
    alike."""
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(5)

    def draw(p: torch.Tensor) -> torch.Tensor:
        return torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)

    return GrowthState(
        config=model.config,
        parameters=parameters,
        optimizer={
            "exp_avg": {name: draw(p) for name, p in parameters.items()},
            "exp_avg_sq": {name: draw(p).square() for name, p in parameters.items()},
            "step": {name: torch.tensor(7.0) for name in parameters},
        },
        gradient_powers=AdamW.gradient_powers,
    )


def model_of(state: GrowthState) -> GPT:
    dtype = next(iter(state.parameters.values())).dtype
    model = GPT(state.config).to(dtype)
    model.load_state_dict(dict(state.parameters), strict=True)
    return model


def tokens_of(config: GPTConfig, sequences: int = 4, seed: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (sequences, config.seq_len + 1), generator=generator)


def mean_loss(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten())


def assert_same_function(grown: GPT, model: GPT, tolerance: float = 1e-12) -> None:
    """Check that a grown model has the logits and the loss of the small one."""
    tokens = tokens_of(model.config)
    with torch.no_grad():
        assert (grown(tokens[:, :-1]) - model(tokens[:, :-1])).abs().max() <= tolerance
        assert abs(mean_loss(grown, tokens) - mean_loss(model, tokens)) <= tolerance


def grown_by(model: GPT, operators: Sequence[Operator], section: StagedGrowth) -> GPT:
    return model_of(grow(state_of(model), operators, section, seed=1))


def gradients_as_moments(model: GPT) -> GrowthState:
    """Return the model's state with its gradient on `tokens_of` in place of the moments."""
    state = state_of(model)
    mean_loss(model, tokens_of(model.config)).backward()
    small = {name: p.grad for name, p in model.named_parameters()}
    squares = {name: gradient.square() for name, gradient in small.items()}
    return replace(state, optimizer={"exp_avg": small, "exp_avg_sq": squares})


def width_asymmetry(
    parameters: Mapping[str, torch.Tensor], factor: int, config: GPTConfig
) -> float:
    """Measure how much the copies of a model widened k-fold differ: 0 while they are equal, of
    order 1 later.

    |p - p'| / |p| over all matrices and embeddings together, where p' is p with the copies
    cyclically exchanged. Vectors are left out: the gradient of the key bias is rounding only, and
    Adam makes full steps of it.
    """
    difference = total = 0.0
    for name, tensor in parameters.items():
        if tensor.dim() != 2:
            continue
        kind = parameter_kind(name)
        for part in tensor.split(config.qkv_rows) if kind.startswith("fused") else (tensor,):
            exchanged = part.roll(part.shape[1] // factor, 1)
            if kind.endswith("matrix"):
                exchanged = exchanged.roll(part.shape[0] // factor, 0)
            difference += float((part.double() - exchanged.double()).square().sum())
            total += float(part.double().square().sum())
    return math.sqrt(difference / max(total, 1e-300))
