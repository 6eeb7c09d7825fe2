"""A state, its tensors and windows over made tokens: what every test needs that trains a model of a
few thousand weights."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efftrain_cli.data.corpus import ShardWriter, TokenShards
from efftrain_cli.data.windows import Windows
from efftrain_cli.foundation.step import Batch, Progress, StepPlan, StepResult
from efftrain_cli.model.gpt import GPT, GPTConfig
from efftrain_cli.plan.plan import plan_step
from efftrain_cli.recipe.draft import Draft, apply_override
from efftrain_cli.recipe.recipe import Recipe, check_draft, recipe_values
from efftrain_cli.training.build import build_state
from efftrain_cli.training.gradient import Gradient
from efftrain_cli.training.state import TrainState

VOCAB_SIZE = 64
CPU = torch.device("cpu")
FOUR_BLOCKS = [
    "model.n_layer=4",
    "model.n_head=2",
    "model.n_embd=16",
    "model.seq_len=16",
    "train.batch_size=4",
    "train.micro_batch_tokens=32",
    "train.tokens=640",
    "optim.lr=1e-2",
    "optim.warmup_steps=2",
    "eval.every=5",
]
"""Overrides of the recipe `small`: ten steps of two micro-batches, blocks enough for four
modules."""

TINY: dict[str, Any] = {
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 16, "seq_len": 16},
    "optim": {"lr": 1e-2},
    "train": {"tokens": 640, "batch_size": 8, "micro_batch_tokens": 32, "dtype": "fp32"},
    "eval": {"every": 100},
}
"""The values of `tiny_recipe`; all others are the defaults."""
METHODS = {
    "none": [],
    "muon": ["optim.name=muon", "optim.muon_lr=0.02"],
    "half-life": [
        "optim.beta2_tokens=500",
        "batch_size_warmup={start = 2, increment = 2, sequences = 14}",
    ],
    "bf16": ["train.dtype=bf16"],
    "z-loss": ["optim.z_loss=1e-3"],
    "recompute": ["train.activation_checkpointing=true"],
    "lengths": ["seq_len_warmup={start = 8, steps = 4}"],
    "batches": ["batch_size_warmup={start = 2, increment = 2, sequences = 14}"],
    "layer dropping": ["progressive_layer_drop={theta = 0.5, steps = 4}"],
    "simigrad": ["simigrad={target = 0.9, min_batch_size = 4, max_batch_size = 16, quantum = 4}"],
    "accumulation": ["chunked_accumulation.forward={bits = 9, chunk = 8}"],
    "ouroboros": ["ouroboros={modules = 3}"],
    "standardization": ["standardization_loss.weight=0.3"],
}
"""Overrides with which each method trains a recipe of 4 to 8 sequences of 16 tokens a step."""


def tiny_recipe(*overrides: str) -> Recipe:
    """Return a recipe of a few thousand weights, with overrides as `--set` takes them."""
    return _overridden(deepcopy(TINY), overrides)


def changed(recipe: Recipe, *overrides: str) -> Recipe:
    """Return a recipe with overrides as `--set` takes them."""
    return _overridden(recipe_values(recipe), overrides)


def _overridden(values: dict[str, Any], overrides: tuple[str, ...]) -> Recipe:
    draft = Draft("tiny", Path("tiny.toml"), values=values)
    for override in overrides:
        apply_override(draft, override)
    return check_draft(draft)


LLAMA_SHAPE: dict[str, Any] = {
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "positions": "rope",
    "bias": False,
}


def config_of(**shape: Any) -> GPTConfig:
    """Return a small GPT's shape with other values."""
    values = {"n_layer": 2, "n_head": 2, "n_embd": 16, "seq_len": 32, "vocab_size": 61, **shape}
    padded = -(-values["vocab_size"] // 64) * 64
    return GPTConfig(**{"padded_vocab_size": padded, **values})


def fresh(recipe: Recipe, vocab_size: int = VOCAB_SIZE) -> TrainState:
    """A run's state before its first step."""
    return build_state(recipe, vocab_size, CPU)


def init_weights(model: GPT, seed: int) -> None:
    """Give a model the weights that a run of this seed begins with."""
    with torch.no_grad():
        for name, drawn_ in model.initial_weights(seed):
            model.get_parameter(name).copy_(drawn_)


def random_batch(plan: StepPlan, vocab_size: int = VOCAB_SIZE) -> Batch:
    """Tokens that are a function of the step."""
    generator = torch.Generator().manual_seed(plan.step)
    ids = torch.randint(vocab_size, (plan.batch_size, plan.seq_len + 1), generator=generator)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def tensors_of(state: TrainState) -> dict[str, Tensor]:
    """Copies of weights, moments and a method's tensors."""
    return {
        name: tensor.clone()
        for name, tensor in (state.weights() | state.optimizer.tensors()).items()
    }


def drawn(vocab_size: int, *shape: int, seed: int) -> Tensor:
    """Return tokens that are a function of the seed."""
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def assert_equal(
    have: Mapping[str, Tensor], want: Mapping[str, Tensor], when: object = None
) -> None:
    """Check that tensors of the same names are equal to the last bit."""
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(have[name], tensor), (name, when)


def gradient_of(
    recipe: Recipe, progress: Progress = Progress(), batch: Batch | None = None
) -> tuple[GPT, StepResult]:
    """Return a fresh model with a step's gradient in it, and what the step returned."""
    plan = plan_step(recipe, progress)
    state = fresh(recipe)
    return state.model, Gradient(recipe, state)(batch or random_batch(plan), plan)


def windows_of(
    folder: Path, ids: np.ndarray, seq_len: int, seed: int, vocab_size: int = VOCAB_SIZE
) -> Windows:
    """Windows over one document of these tokens; the last id of the vocabulary ends it."""
    writer = ShardWriter(folder / "train.bin", vocab_size)
    writer.add(np.append(ids, vocab_size - 1))
    writer.close()
    return Windows(TokenShards(writer.path, writer.split, vocab_size), seq_len, seed)
