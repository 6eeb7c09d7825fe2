"""Chunk-based accumulation: its layers, its rules, and recipes."""

from __future__ import annotations

import pytest

from efftrain_cli.foundation.errors import RecipeError, UsageError
from efftrain_cli.methods.chunked_accumulation import check_fp8
from efftrain_cli.model.linear import NarrowLinear
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.recipe.rules import warnings_of
from tests.methods.cases import check_messages
from tests.tiny import assert_equal, fresh, tiny_recipe

INNER = 'chunked_accumulation={layers = "inner", forward = {bits = 6, chunk = 8}}'


def test_inner_layers_leave_the_first_and_the_last_block_alone():
    state = fresh(tiny_recipe("model.n_layer=3", INNER))
    narrow = {name for name, layer in state.model.named_modules() if type(layer) is NarrowLinear}
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert narrow == {f"h.1.{name}" for name in layers}
    assert_equal(state.weights(), fresh(tiny_recipe("model.n_layer=3")).weights())


HARDWARE = 'chunked_accumulation={fidelity = "hardware", operands = "fp8_e4m3", forward = {}}'


@pytest.mark.parametrize(
    "overrides, key",
    [
        (["model.n_embd=100"], "n_embd = 100"),
        (["model.arch=llama", "model.d_ff=344"], "d_ff = 344"),
        (["model.head_dim=26"], "n_head = 4"),  # 4 heads: 104 columns of attention's projection
        (["model.head_dim=12", "model.n_kv_head=1"], "n_kv_head = 1"),  # 48 + 12 + 12 rows
    ],
)
def test_fp8_units_need_multiples_of_16(overrides, key):
    with pytest.raises(RecipeError, match=rf"model\.{key}(.|\n)*multiples of 16"):
        load_recipe("small", [HARDWARE, *overrides])


@pytest.mark.parametrize(
    "overrides, warned", [([], 2), (["model.d_ff=360"], 0), (["model.n_kv_head=4"], 1)]
)
def test_the_sums_are_those_of_the_models_own_shapes(overrides, warned):
    """small-llama: 352 hidden units, 128 + 64 + 64 rows of q, k and v."""
    chunk = "{bits = 9, chunk = 352}"
    roles = f"chunked_accumulation={{forward = {chunk}, grad_input = {chunk}}}"
    found = warnings_of(load_recipe("small-llama", [roles, *overrides]))
    assert sum("nothing is cut" in warning for warning in found) == warned


def test_a_gpu_without_fp8_is_refused():
    with pytest.raises(UsageError, match=r"no fp8 matrix units .*8\.0"):
        check_fp8("NVIDIA A100", (8, 0))
    for capability in ((8, 9), (9, 0)):
        check_fp8("a newer one", capability)


MESSAGES = """
chunked_accumulation={fidelity = "hardware", operands = "fp8_e4m3"}
train.dtype=bf16
    assumed: Linear layers multiply in fp8 where the device can; on a CPU fast_accumulation has no
    effect.

chunked_accumulation.grad_weight.chunk=31
    assumed: Narrow accumulators are emulated (fidelity "blocked"), so steps take longer than
    fp32's; the papers' savings are those of special hardware.

chunked_accumulation.grad_weight.chunk=32
train.dtype=bf16
    assumed: Narrow accumulators are emulated (fidelity "blocked"), so steps take longer than
    fp32's; the papers' savings are those of special hardware.
    warning: chunked_accumulation.grad_weight.chunk = 32 is no shorter than any sum of the blocks,
    the longest being 32: nothing is cut into chunks
    warning: train.dtype = "bf16" acts outside the layers of chunked_accumulation only: those take
    their operands in fp32, add as they say, and round only their result to bf16

chunked_accumulation.forward.fast_accumulation=true
    chunked_accumulation.fidelity: fidelity = "blocked" knows no fast_accumulation, given in
    forward: it is a switch of GPUs and needs fidelity = "hardware"; emulation takes bits and chunk

chunked_accumulation={fidelity = "hardware", operands = "fp8_e5m2", forward = {bits = 9}}
    chunked_accumulation.fidelity: fidelity = "hardware" cannot choose bits, chunk and
    exponent_bits, given in forward: a GPU adds as it is built; leave them out and say
    fast_accumulation = true or false; fidelity = "hardware" needs operands = "fp8_e4m3", not
    "fp8_e5m2": fp8 matrix units take it for activations and weights, and none multiplies e5m2 by
    e5m2

chunked_accumulation={fidelity = "hardware"}
    chunked_accumulation.fidelity: fidelity = "hardware" needs operands = "fp8_e4m3", not "fp32":
    fp8 matrix units take it for activations and weights, and none multiplies e5m2 by e5m2; fidelity
    = "hardware" needs gradient_operands "fp8_e5m2" or "fp8_e4m3", not "fp32"

chunked_accumulation.layers=inner
    chunked_accumulation.layers: leaves none of 2 blocks: the first and the last stay fp32; take
    "all", or a deeper model
"""


def test_messages_about_a_recipe():
    check_messages(MESSAGES)
