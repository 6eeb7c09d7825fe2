"""A state, its tensors and windows over made tokens: what every test needs that trains a model of a few thousand
weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from efftrain_cli.data.corpus import ShardWriter
from efftrain_cli.data.windows import Windows
from efftrain_cli.foundation.step import Batch, StepPlan
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.build import build_model, build_optimizer
from efftrain_cli.training.state import TrainState, model_tensors

VOCAB_SIZE = 64
CPU = torch.device("cpu")
FOUR_BLOCKS = [
    *("model.n_layer=4", "model.n_head=2", "model.n_embd=16", "model.seq_len=16"),
    *(
        *[
            "train.batch_size=4",
            "train.micro_batch_tokens=32",
            "train.tokens=640",
            "optim.lr=1e-2",
            "optim.warmup_steps=2",
        ],
        *["eval.every=5"],
    ),
]
"""Overrides of the recipe `small`: ten steps of two micro-batches, blocks enough for four modules."""


def fresh(recipe: Recipe, vocab_size: int = VOCAB_SIZE) -> TrainState:
    """A run's state before its first step."""
    model = build_model(recipe, vocab_size, CPU)
    return TrainState(model=model, optimizer=build_optimizer(recipe, model))


def random_batch(plan: StepPlan, vocab_size: int = VOCAB_SIZE) -> Batch:
    """Tokens that are a function of the step."""
    generator = torch.Generator().manual_seed(plan.step)
    ids = torch.randint(vocab_size, (plan.batch_size, plan.seq_len + 1), generator=generator)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def tensors_of(state: TrainState) -> dict[str, Tensor]:
    """Copies of weights, moments and a method's tensors."""
    return {
        name: tensor.clone()
        for name, tensor in (model_tensors(state) | state.optimizer.tensors()).items()
    }


def windows_of(
    folder: Path, ids: np.ndarray, seq_len: int, seed: int, vocab_size: int = VOCAB_SIZE
) -> Windows:
    """Windows over one document of these tokens; the last id of the vocabulary ends it."""
    writer = ShardWriter(folder, "train", vocab_size=vocab_size, eot_id=vocab_size - 1)
    writer.add(ids.astype(np.uint32), "made")
    writer.close()
    return Windows(writer.opened(), seq_len, seed)
