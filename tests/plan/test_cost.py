"""Bytes of a model's state, of checkpoints and of memory, computed by hand for each optimizer."""

from __future__ import annotations

import pytest

from efftrain_cli.plan.cost import checkpoint_bytes, disk_bytes, state_bytes, training_bytes
from efftrain_cli.plan.plan import full_plan, model_config
from efftrain_cli.recipe.recipe import load_recipe
from tests.tiny import fresh, tiny_recipe

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


GPT_2 = ["model.n_embd=8", "model.n_layer=3", "data.tokenizer=bpe:64"]
LLAMA = [*GPT_2, "model.arch=llama", "model.d_ff=10", "model.n_kv_head=1"]


@pytest.mark.parametrize(
    ("words", "compiled", "fp32", "bf16"),
    [
        # 16 C in each of 3 blocks, fp32 log-sum-exps of 2 heads, logits and their gradient; layer
        # norms' inputs in fp32.
        (GPT_2, False, 3 * (4 * 128 + 8) + 512, 3 * (2 * 128 + 8 + 32) + 256),
        # All of one block, and the inputs of all.
        (
            [*GPT_2, "train.activation_checkpointing=true"],
            True,
            3 * 32 + 4 * 128 + 8 + 512,
            3 * 16 + 2 * 128 + 8 + 256,
        ),
        # Stream, norms 4 C; q, k, v 8 + 4 + 4; attention 8; gated MLP 4 x 10; rotated q and k 12;
        # keys and values once more 8: 116. RMS norms keep 2 C in fp32.
        (LLAMA, False, 3 * (4 * 116 + 8 + 64) + 512, 3 * (2 * 116 + 8 + 64) + 256),
    ],
)
def test_bytes_per_token_are_the_sum_of_what_a_block_keeps(words, compiled, fp32, bf16):
    recipe = tiny_recipe(*words)
    config = model_config(recipe, 64)
    for dtype, per_token in (("fp32", fp32), ("bf16", bf16)):
        none, some = (
            training_bytes(recipe, config, sequences, 5, dtype=dtype, compiled=compiled)
            for sequences in (0, 7)
        )
        assert some - none == 35 * per_token


def test_a_probe_s_step_has_all_blocks_at_full_scale():
    """Layer dropping multiplies each branch, also by one."""
    dropped = tiny_recipe("progressive_layer_drop={theta = 0.5, steps = 40}")
    plan = full_plan(dropped, 6, 16, 2)
    assert plan.keep == plan.branch_scales == (1.0, 1.0)
