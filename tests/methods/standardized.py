"""A small model without norms, and the loss on it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from efftrain_cli.methods.standardization_loss import StandardizationLoss
from efftrain_cli.model.gpt import GPT
from efftrain_cli.recipe.recipe import Recipe
from tests.resume_law import RandomTokens
from tests.tiny import tiny_recipe

CPU = torch.device("cpu")
LENGTH, BATCH = 16, 6
BARE = tiny_recipe(
    "model.norm=none",
    "model.init=unit",
    "optim={lr = 3e-3, warmup_steps = 2}",
    "train.tokens=576",
    "train.batch_size=6",
    "eval={every = 3, windows = 2}",
)


def with_loss(recipe: Recipe = BARE, **settings: object) -> Recipe:
    return replace(recipe, standardization_loss=StandardizationLoss(**{"weight": 0.3, **settings}))  # type: ignore[arg-type]


def batch(sequences: int = BATCH, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    ids = torch.stack([RandomTokens(length).window(i) for i in range(sequences)])
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


SITES = {
    "preact": ["attn.c_attn", "mlp.c_fc"],
    "ln_input": ["ln_1", "ln_2"],
    "all_linear": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
}


def same(have: dict[str, Tensor], model: GPT, want: dict[str, Tensor], other: GPT) -> None:
    """Losses, and the gradients of their sum, are equal to rounding."""
    for losses, of in ((have, model), (want, other)):
        of.zero_grad()
        (losses["loss"] + losses["standardization_loss"].sum()).backward()
    assert have.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(have[name], want[name], rtol=1e-5, atol=1e-5)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
