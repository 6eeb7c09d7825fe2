"""A small model, its state for growth, and the model of a state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from efftrain_cli.methods.growth_operators import GrowthState
from efftrain_cli.model.gpt import GPT, GPTConfig
from efftrain_cli.optim.adamw import AdamW
from tests.tiny import config_of, drawn
from tests.trained_run import random_gpt

CONFIG = config_of()


def small_model(dtype: torch.dtype = torch.float64, config: GPTConfig = CONFIG) -> GPT:
    """A GPT in which no parameter is 0 or 1, so that no operator can hide behind a trivial layer
    norm or bias."""
    return random_gpt(config, spread=0.2, seed=3).to(dtype)


def state_of(model: GPT) -> GrowthState:
    """The model with moments of which no two are alike."""
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(5)
    moments = {}
    for name, p in parameters.items():
        moments[name] = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
    return GrowthState(
        config=model.config,
        parameters=parameters,
        optimizer={
            "exp_avg": moments,
            "exp_avg_sq": {name: 2 * moment.square() for name, moment in moments.items()},
            "step": {name: torch.tensor(7.0) for name in parameters},
        },
        gradient_powers=AdamW.gradient_powers,
    )


def model_of(state: GrowthState) -> GPT:
    model = GPT(state.config).to(state.parameters["wte.weight"].dtype)
    model.load_state_dict(dict(state.parameters), strict=True)
    return model


def tokens_of(config: GPTConfig, seed: int = 6) -> Tensor:
    return drawn(config.vocab_size, 4, config.seq_len + 1, seed=seed)


def mean_loss(model: GPT, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten())


@torch.no_grad()
def largest_change(grown: GPT, model: GPT) -> float:
    """Return the largest difference between the logits of a grown model and the small one."""
    tokens = tokens_of(model.config)[:, :-1]
    return float((grown(tokens) - model(tokens)).abs().max())
