"""Every method trains a Llama-like model, and every step of it resumes exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from efftrain_cli.methods.chunked_accumulation import Accumulator, ChunkedAccumulation
from efftrain_cli.methods.ouroboros import Ouroboros
from efftrain_cli.methods.progressive_layer_drop import ProgressiveLayerDrop
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.methods.standardization_loss import StandardizationLoss
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sections import Eval, Model, Optim, Parallel, Train
from efftrain_cli.training.build import build_model
from tests.resume_law import assert_resumes_exactly_at_every_step

RECIPE = Recipe(
    model=Model(
        arch="llama",
        n_layer=3,
        n_head=4,
        n_kv_head=2,
        n_embd=32,
        seq_len=16,
        qk_norm=True,
        tied=False,
        softcap=20.0,
    ),
    optim=Optim(lr=1e-2, warmup_steps=2),
    train=Train(tokens=8 * 16 * 6, batch_size=8, micro_batch_tokens=32, dtype="fp32"),
    eval=Eval(every=3),
)
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "muon": {"optim": replace(RECIPE.optim, name="muon", muon_lr=0.02)},
    "bf16": {"train": replace(RECIPE.train, dtype="bf16")},
    "recompute": {"train": replace(RECIPE.train, activation_checkpointing=True)},
    "lanes": {"parallel": Parallel(lanes=2)},
    "lengths": {"seq_len_warmup": SeqLenWarmup(start=8, steps=4)},
    "batches": {"batch_size_warmup": BatchSizeWarmup(start=4, increment=2, sequences=30)},
    "drop": {"progressive_layer_drop": ProgressiveLayerDrop(theta=0.5, steps=4)},
    "simigrad": {"simigrad": SimiGrad(target=0.9, min_batch_size=4, max_batch_size=16, quantum=4)},
    "accumulation": {
        "chunked_accumulation": ChunkedAccumulation(
            forward=Accumulator(bits=9, chunk=16), head=True
        )
    },
    "ouroboros": {"ouroboros": Ouroboros(modules=3)},
    "replay": {"ouroboros": Ouroboros(modules=3, variant="replay")},
    "standardization": {"standardization_loss": StandardizationLoss(weight=0.1)},
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("tied", [True, False])
def test_each_method_trains_and_resumes(method: dict[str, Any], tied: bool) -> None:
    recipe = replace(RECIPE, model=replace(RECIPE.model, tied=tied), **method)
    rows = assert_resumes_exactly_at_every_step(recipe)
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    assert losses[-1] < losses[0]
    if not tied:
        before = build_model(recipe, 64, torch.device("cpu"))
        assert before.lm_head is not None


def test_a_scale_that_no_bias_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="without biases"):
        replace(RECIPE, standardization_loss=StandardizationLoss(weight=0.1, affine=True))
    with pytest.raises(ValueError, match="c_up is no site"):
        replace(RECIPE, standardization_loss=StandardizationLoss(weight=0.1, sites="all_linear"))
