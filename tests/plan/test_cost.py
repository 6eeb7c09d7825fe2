"""Bytes of a model's state, of checkpoints and of memory, computed by hand for each optimizer."""

from __future__ import annotations

import pytest

from efftrain_cli.plan.cost import checkpoint_bytes, disk_bytes, state_bytes, training_bytes
from efftrain_cli.plan.plan import model_config
from efftrain_cli.recipe.recipe import load_recipe
from tests.tiny import fresh

SHAPE = ["model.n_layer=1", "model.n_head=1", "model.n_embd=4", "model.seq_len=2"]
PARAMETERS = 64 * 4 + 2 * 4 + (12 * 16 + 9 * 4 + 4 * 4) + 2 * 4
"""Tables of 64 tokens and 2 positions, a block (matrices 12 C^2, biases 9 C, two norms), the last
norm: 516."""
MOMENTS = {
    "adamw": 2 * PARAMETERS,
    "lion": PARAMETERS,
    "muon": 12 * 16 + 2 * (PARAMETERS - 12 * 16),
}
"""Numbers of the state: Muon keeps one of each entry of the block's matrices, AdamW's two of all
else."""


@pytest.mark.parametrize("name", MOMENTS)
def test_bytes_count_the_moments_that_the_optimizer_has(name):
    muon = ["optim.muon_lr=0.02"] if name == "muon" else []
    recipe = load_recipe("small", [*SHAPE, "data.tokenizer=bpe:64", f"optim.name={name}", *muon])
    config = model_config(recipe, 64)
    moments = fresh(recipe).optimizer.tensors()
    assert sum(tensor.numel() for tensor in moments.values() if tensor.dim()) == MOMENTS[name]

    assert state_bytes(recipe, config) == 4 * (2 * PARAMETERS + MOMENTS[name])
    assert checkpoint_bytes(recipe, config) == 4 * (PARAMETERS + MOMENTS[name])
    # Without a sequence there are no activations; bf16 adds a copy of the weights. TF32 is kept as
    # fp32.
    for wide in ("fp32", "tf32"):
        assert training_bytes(recipe, config, 0, 2, dtype=wide) == state_bytes(recipe, config)
    bf16 = training_bytes(recipe, config, 0, 2, dtype="bf16")
    assert bf16 == state_bytes(recipe, config) + 2 * PARAMETERS
    other = load_recipe("small", [*SHAPE, "data.tokenizer=bpe:64"])
    saved = disk_bytes(other) - disk_bytes(recipe)
    assert saved == recipe.checkpoint.keep * 4 * (MOMENTS["adamw"] - MOMENTS[name])
