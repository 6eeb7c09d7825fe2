"""Chunk-based accumulation: its layers, its rules, and recipes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from efftrain_cli.foundation.errors import RecipeError, UsageError
from efftrain_cli.methods.chunked_accumulation import ChunkedAccumulation, check_fp8
from efftrain_cli.model.accumulator import Accumulator
from efftrain_cli.model.linear import NarrowLinear
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.recipe.rules import warnings_of
from tests.tiny import fresh, tiny_recipe

SMALL = tiny_recipe(
    "model.n_layer=3",
    "optim.warmup_steps=2",
    "train.tokens=384",
    "train.batch_size=4",
    "train.activation_checkpointing=false",
)


def small(section: ChunkedAccumulation | None = None, **keys: object) -> Recipe:
    """Return a small recipe with a section, or with keys of FP8 changed."""
    if keys:
        section = replace(FP8, **keys)
    return replace(SMALL, chunked_accumulation=section)


FP8 = ChunkedAccumulation(
    operands="fp8_e4m3",
    gradient_operands="fp8_e5m2",
    forward=Accumulator(bits=6, chunk=8),
    grad_input=Accumulator(bits=6, chunk=8),
    grad_weight=Accumulator(bits=6, chunk=8),
)


def test_inner_layers_leave_the_first_and_the_last_block_alone():
    model = fresh(small(layers="inner")).model
    narrow = {name for name, layer in model.named_modules() if isinstance(layer, NarrowLinear)}
    assert narrow == {
        f"h.1.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    plain = fresh(small()).model
    for (name, have), (other, want) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(have, want)


# --- recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"forward": {"bits": 0}}, ["bits", "at least 1"]),
        ({"forward": {"bits": 24}}, ["bits", "at most 23"]),
        ({"grad_weight": {"chunk": -1}}, ["chunk", "at least 0"]),
        ({"forward": {"fast_accumulation": True}}, ["fast_accumulation", "hardware"]),
        (
            {"fidelity": "hardware", "operands": "fp8_e4m3", "forward": {"bits": 9}},
            ["cannot choose bits, chunk and exponent_bits, given in forward"],
        ),
        ({"fidelity": "hardware"}, ["operands", "fp8_e4m3", "gradient_operands"]),
        ({"operands": "fp8"}, ["operands", "fp8_e4m3"]),
    ],
)
def test_impossible_settings_are_refused_with_their_key(settings, words):
    with pytest.raises(RecipeError) as refused:
        load_recipe("small", [f"chunked_accumulation={as_toml(settings)}"])
    for word in words:
        assert word in str(refused.value)


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(inner)}" for key, inner in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def test_rules_between_sections():
    hardware = 'chunked_accumulation={fidelity = "hardware", operands = "fp8_e4m3", forward = {}}'
    for overrides, key in (
        (["model.n_embd=100"], "n_embd = 100"),
        (["model.arch=llama", "model.d_ff=344"], "d_ff = 344"),
        (["model.head_dim=26"], "n_head = 4"),  # 4 heads: 104 columns of attention's projection
        (["model.head_dim=12", "model.n_kv_head=1"], "n_kv_head = 1"),  # 48 + 12 + 12 rows
    ):
        with pytest.raises(RecipeError, match=rf"model\.{key}(.|\n)*multiples of 16"):
            load_recipe("small", [hardware, *overrides])
    with pytest.raises(RecipeError, match="leaves none of 2 blocks"):
        load_recipe("small", ['chunked_accumulation={layers = "inner"}', "model.n_layer=2"])


def test_the_sums_are_those_of_the_models_own_shapes():
    """small-llama: 352 hidden units, 128 + 64 + 64 rows of q, k and v."""
    chunk = "{bits = 9, chunk = 352}"
    roles = f"chunked_accumulation={{forward = {chunk}, grad_input = {chunk}}}"
    for overrides, warned in (([], 2), (["model.d_ff=360"], 0), (["model.n_kv_head=4"], 1)):
        found = warnings_of(load_recipe("small-llama", [roles, *overrides]))
        assert sum("nothing is cut" in warning for warning in found) == warned


def test_a_gpu_without_fp8_is_refused():
    with pytest.raises(UsageError, match=r"no fp8 matrix units .*8\.0"):
        check_fp8("NVIDIA A100", (8, 0))
    for capability in ((8, 9), (9, 0), (10, 0)):
        check_fp8("a newer one", capability)
