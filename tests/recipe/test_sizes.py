"""Shape, batch, rate and budget by size, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.recipe.sizes import (
    parameters_for,
    scored_parameters,
    shape_within,
    sizes_for,
    written_sizes,
)

SMALL = load_recipe("small")


def lines_of(recipe: Recipe, parameters: int, tokens_per_parameter: float = 20) -> dict:
    return {
        line.key: line.value
        for line in written_sizes(recipe, 1024, parameters, tokens_per_parameter)
    }


# B = 327,680 (N / 108e6)^(2/3) and lr = 0.00235 (N / 108e6)^(-1/3); steps and warmup of 20 N and N
# tokens.
@pytest.mark.parametrize(
    ("parameters", "batch_tokens", "lr", "steps", "warmup_steps", "beta2"),
    [
        (100_000, 3_113, 0.024111, 642, 32, 0.99),
        (10_000_000, 67_066, 0.005194, 2_982, 149, 0.99),
        (100_000_000, 311_292, 0.002411, 6_425, 321, 0.99),
        (218_576_200, 524_287, 0.001858, 8_338, 417, 0.99),
        (218_576_500, 524_288, 0.001858, 8_338, 417, 0.95),
        (1_000_000_000, 1_444_888, 0.001119, 13_842, 692, 0.95),
    ],
)
def test_sizes_are_olmo_core_s(parameters, batch_tokens, lr, steps, warmup_steps, beta2):
    sizes = sizes_for(parameters)
    assert sizes.batch_tokens == batch_tokens
    assert sizes.lr == pytest.approx(lr, abs=6e-7)
    assert sizes.tokens == 20 * parameters
    assert round(sizes.tokens / batch_tokens) == steps
    assert round(sizes.warmup_tokens / batch_tokens) == warmup_steps
    assert sizes.beta2 == beta2


def test_the_warmup_is_at_most_a_tenth_of_the_budget():
    assert sizes_for(1_000_000, 2).warmup_tokens == 200_000


# A block has 12 d^2 + 13 d parameters, the last norm 2 d, the head 1024 d.
@pytest.mark.parametrize(
    ("parameters", "depth", "width", "count"),
    [
        (100_000, 2, 32, 2 * (12 * 32**2 + 13 * 32) + 2 * 32 + 1024 * 32),
        (999_999, 6, 96, 6 * (12 * 96**2 + 13 * 96) + 2 * 96 + 1024 * 96),
        (10_000_000, 5, 320, 5 * (12 * 320**2 + 13 * 320) + 2 * 320 + 1024 * 320),
    ],
)
def test_the_shape_is_the_largest_that_fits(parameters, depth, width, count):
    model = shape_within(SMALL.model, 1024, parameters)
    assert (model.n_layer, model.n_head, model.n_embd) == (depth, depth, width)
    assert scored_parameters(model, 1024) == count <= parameters
    above = shape_within(SMALL.model, 1024, count)
    assert (above.n_layer, above.n_embd) == (depth, width), "exactly as many fit too"
    assert shape_within(SMALL.model, 1024, 1_000_000).n_embd == 2 * 64, "heads of 64 from here on"


def test_a_text_is_read_four_times_at_most():
    """4.7 MB are 1.57M tokens of 3 bytes: 4 / 20 of that are 313,333 parameters."""
    assert parameters_for(SMALL, 1024, 4_700_000, 20) == 313_333
    own = 4 * (12 * 128**2 + 13 * 128) + 2 * 128 + 1024 * 128
    assert parameters_for(SMALL, 1024, 10**9, 20) == own
    smallest = 12 * 16**2 + 13 * 16 + 2 * 16 + 1024 * 16
    assert parameters_for(SMALL, 1024, 100, 20) == smallest


def test_lines_are_a_recipe_that_loads():
    """265,600 parameters: 5,970 tokens a step are 23 sequences of 256, 902 steps of them 20 N. The
    rate is that of small models; from 5M on the law's, 0.005999 at 6,493,120."""
    assert lines_of(SMALL, 10_000_000)["optim.lr"] == 0.005999
    lines = lines_of(SMALL, 313_333)
    assert lines == {
        "model.n_layer": 4,
        "model.n_head": 4,
        "model.n_embd": 64,
        "optim.lr": 0.004,
        "optim.min_lr": 0.0004,
        "optim.warmup_steps": 45,
        "optim.betas": [0.9, 0.99],
        "train.tokens": 5_312_000,
        "train.batch_size": 23,
        "eval.every": 45,
    }
    recipe = load_recipe("small", [f"{key}={value}" for key, value in lines.items()])
    assert recipe.full_steps == 903


def test_sizes_that_follow_from_the_width_are_taken_out():
    llama = load_recipe("small-llama", ["model.n_kv_head=2", "model.d_ff=100"])
    lines = lines_of(llama, 100_000)
    assert lines["model.n_kv_head"] is False and lines["model.d_ff"] is False
    assert "model.head_dim" not in lines


def test_a_small_budget_of_long_sequences_has_whole_numbers():
    """19,696 parameters of one block: 1,970 tokens are less than one sequence of 8,192."""
    lines = lines_of(load_recipe("small", ["model.seq_len=8192"]), 30_000, 0.1)
    assert lines["train.tokens"] == 1_970
    assert lines["train.batch_size"] == lines["optim.warmup_steps"] == lines["eval.every"] == 1
