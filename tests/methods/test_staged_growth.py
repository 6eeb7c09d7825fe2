"""The growth operators against the maths they stand on: same function, gradients g/k, moments."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from efftrain_cli.methods.growth_operators import grow, grow_depth, grow_width
from efftrain_cli.methods.staged_growth import StagedGrowth
from efftrain_cli.methods.stages import (
    default_schedule_ratio,
    log_log_slope,
    parse_operator,
    rewarmup_factor,
)
from efftrain_cli.model.gpt import GPT, GPTConfig
from tests.methods.grown import (
    CONFIG,
    largest_change,
    mean_loss,
    model_of,
    small_model,
    state_of,
    tokens_of,
)
from tests.resume_law import run
from tests.tiny import LLAMA_SHAPE, config_of, fresh, tiny_recipe

LLAMA = config_of(n_head=4, n_kv_head=2, seq_len=24, norm_eps=1e-3, **LLAMA_SHAPE)
SHAPES = {
    "gpt2": CONFIG,
    "llama": LLAMA,
    "llama, untied": dataclasses.replace(LLAMA, tied=False, d_ff=40, mlp="relu2"),
    "qk norm": dataclasses.replace(LLAMA, qk_norm=True, tied=False, head_dim=8),
    "no norms": dataclasses.replace(CONFIG, norm="none", init="unit"),
}
OPERATORS = ("depth:3", "d_ff:72", "n_kv_head:5", "width", "width:3", "pad:40", "pad:64")


def by_shape_and(*operators: str) -> pytest.MarkDecorator:
    """Parametrize a test by shape and operator, without those that a recipe refuses."""
    refused = {"layernorm": ("pad",), "none": ("pad", "width"), "rmsnorm": ()}
    pairs = []
    for name, config in SHAPES.items():
        for operator in operators:
            if not operator.startswith(refused[config.norm]):
                pairs.append(pytest.param(config, operator, id=f"{name}-{operator}"))
    return pytest.mark.parametrize("config, operator", pairs)


def staged(operator: str, first: str) -> str:
    switch = '{ rule = "steps", value = 3 }'
    stage = f"{{ model = {{ {first} }}, switch = {switch} }}"
    return f'stages=[{stage}, {{ operators = ["{operator}"] }}]'


def grown_by(model: GPT, operators: list[str], section: StagedGrowth) -> GPT:
    parsed = [parse_operator(operator) for operator in operators]
    return model_of(grow(state_of(model), parsed, section, seed=1))


@by_shape_and(*OPERATORS)
def test_growth_keeps_the_logits(config: GPTConfig, operator):
    """F47."""
    model = small_model(config=config)
    grown = grown_by(model, [operator], StagedGrowth())
    assert grown.parameter_count > model.parameter_count
    assert largest_change(grown, model) <= 1e-12


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_variants_keep_the_logits_or_say_that_they_do_not(dtype, tolerance):
    model = small_model(dtype)
    for operator, settings, most in (
        ("width:3", {"symmetry": "none"}, tolerance),
        ("depth:3", {"depth": "identity"}, 0.0),
        ("depth:3", {"depth": "zero_out_proj"}, 0.0),
        ("depth", {"depth": "copy_interleave"}, None),
        ("depth", {"depth": "copy_append"}, None),
    ):
        section = StagedGrowth(**settings)
        change = largest_change(grown_by(model, [operator], section), model)
        assert section.preserves_loss([parse_operator(operator)]) == (most is not None)
        if most is None:
            assert change > 1e-3
        else:
            assert change <= most


@pytest.mark.parametrize(
    "shape, order, depth",
    [
        ("qk norm", ("width", "pad:40", "depth"), "zero_out_proj"),
        ("qk norm", ("depth", "pad:20", "width"), "zero_out_proj"),
        ("gpt2", ("width:3", "depth", "width"), "identity"),
    ],
)
def test_operators_compose_in_any_order(shape, order, depth):
    model = small_model(config=SHAPES[shape])
    grown = grown_by(model, list(order), StagedGrowth(depth=depth))
    assert largest_change(grown, model) <= 1e-12


def test_copied_layers_stand_where_their_names_say():
    state = state_of(small_model())
    names = [f"h.{j}.attn.c_attn.weight" for j in range(4)]
    for mode, sources in (("copy_interleave", (0, 0, 1, 1)), ("copy_append", (0, 1, 0, 1))):
        grown = grow_depth(state, 2, mode=mode).parameters
        assert [name for name in grown if name.endswith("c_attn.weight")] == names
        for name, source in zip(names, sources, strict=True):
            assert torch.equal(grown[name], state.parameters[names[source]])


def test_the_blocks_that_cancel_are_half_as_large_as_the_matrix():
    """Beside the diagonal stands A alone; each row of blocks is W."""
    state = state_of(small_model())
    wide = grow_width(state, 3, moments="ema", symmetry="offdiag", seed=1).parameters
    name = "h.0.mlp.c_fc.weight"
    matrix = state.parameters[name]
    blocks = [row.chunk(3, dim=1) for row in wide[name].chunk(3)]
    beside = torch.stack([blocks[i][j] for i in range(3) for j in range(3) if i != j])
    assert float(beside.std() / matrix.std()) == pytest.approx(0.5, rel=0.05)
    for row in blocks:
        torch.testing.assert_close(sum(row), matrix)


# --- moments ---


@pytest.mark.parametrize("which, divisor", [("parameters", 1), ("exp_avg", 2), ("exp_avg_sq", 4)])
def test_paper_moments_are_the_released_operators_bit_for_bit(which, divisor):
    """Written out from the paper's table: copies m/2 and v/4, zero blocks 0, the last layer norm's
    as they were."""
    small = state_of(small_model())
    grown = grow_width(small, 2, moments="paper", symmetry="none")
    before = small.optimizer.get(which, small.parameters)
    after = grown.optimizer.get(which, grown.parameters)
    for name, p in before.items():
        parts = p.chunk(3) if ".c_attn." in name else [p]
        if name.startswith("ln_f"):
            expected = torch.cat([p, p]) / (2 if which == "parameters" else 1)
        elif name.startswith("w"):
            expected = torch.cat([p, p], dim=1) / divisor
        elif p.dim() == 1:
            expected = torch.cat([torch.cat([part, part]) for part in parts]) / divisor
        else:
            expected = torch.cat([torch.block_diag(part, part) for part in parts]) / divisor
        assert torch.equal(after[name], expected), name
    assert all(step == 7 for step in grown.optimizer["step"].values())


@by_shape_and("width", "width:3", "pad:40")
def test_moments_are_those_of_the_gradients(config: GPTConfig, operator):
    """Where the old entries stand, the grown model's own gradient is the mapped one."""
    model = small_model(config=config)
    mean_loss(model, tokens_of(config)).backward()
    small = {name: p.grad for name, p in model.named_parameters()}
    squares = {name: gradient.square() for name, gradient in small.items()}
    moments = {"exp_avg": small, "exp_avg_sq": squares}
    state = dataclasses.replace(state_of(model), optimizer=moments)
    grown = grow(state, [parse_operator(operator)], StagedGrowth(symmetry="none"), seed=1)
    wide = model_of(grown)
    mean_loss(wide, tokens_of(config)).backward()
    for name, p in wide.named_parameters():
        first = grown.optimizer["exp_avg"][name]
        second = grown.optimizer["exp_avg_sq"][name]
        mapped = torch.ones_like(first, dtype=torch.bool)
        if operator.startswith("pad"):
            mapped = first != 0
        assert mapped.any() and p.grad is not None
        assert (p.grad - first)[mapped].abs().max() < 1e-14, name
        assert (p.grad.square() - second)[mapped].abs().max() < 1e-14, name


@pytest.mark.parametrize("mode", ["identity", "zero_out_proj"])
def test_inserted_layers_leave_the_old_gradients_alone_and_are_not_dead(mode):
    model = small_model()
    deep = model_of(grow_depth(state_of(model), 2, mode=mode))
    gradients: list[dict[str, Tensor]] = []
    for each in (model, deep):
        mean_loss(each, tokens_of(CONFIG)).backward()
        gradients.append({name: p.grad for name, p in each.named_parameters()})
    old, new = gradients
    for name, gradient in old.items():
        at = name.replace("h.1.", "h.2.")
        assert torch.equal(new[at], gradient), name
    for layer in (1, 3):
        assert new[f"h.{layer}.attn.c_proj.bias"].any()


@pytest.mark.parametrize(
    "mode, moments, starts_at_zero",
    [
        ("zero_out_proj", "ema", True),
        ("identity", "paper", True),
        ("identity", "ema", False),
        ("copy_interleave", "paper", False),
    ],
)
def test_moments_of_inserted_and_copied_layers(mode, moments, starts_at_zero):
    state = state_of(small_model())
    old = state.optimizer
    new = grow_depth(state, 2, mode=mode, moments=moments).optimizer
    part = "mlp.c_fc.weight"
    assert torch.equal(new["exp_avg_sq"][f"h.2.{part}"], old["exp_avg_sq"][f"h.1.{part}"])
    factor = 0 if starts_at_zero else 1
    for key in ("exp_avg", "step"):
        assert torch.equal(new[key][f"h.1.{part}"], factor * old[key][f"h.0.{part}"])


# --- training on ---


def trained_on(first: str, operator: str, **section: str) -> GPT:
    """The model after 3 small steps and 17 grown ones."""
    settings = [f"staged_growth.{key}={value}" for key, value in section.items()]
    recipe = tiny_recipe("train.tokens=2560", staged(operator, first), *settings)
    state = fresh(recipe)
    run(state, recipe)
    return state.model


@pytest.mark.parametrize("symmetry, parts", [("none", False), ("offdiag", True)])
def test_copies_part_ways_only_if_something_makes_them_differ(symmetry, parts):
    wide = trained_on("n_head = 1, n_embd = 8", "width", symmetry=symmetry)
    first, second = wide.h[0].attn.c_proj.bias.detach().chunk(2)
    difference = float((first - second).norm() / first.norm())
    assert difference > 1e-2 if parts else difference < 1e-6


@pytest.mark.parametrize("moments, dead", [("paper", True), ("ema", False)])
def test_identity_units_stay_dead_with_zero_moments_only(moments, dead):
    deep = trained_on("n_layer = 1", "depth", depth="identity", moments=moments)
    assert (not deep.h[1].mlp.c_fc.weight[16:].any()) == dead


# --- values and rules ---


def test_schedule_ratio_is_the_authors_constants():
    for operators, steps in (
        (["depth"], 1.412),
        (["width"], 1.776),
        (["width", "depth"], 2.455),
        (["depth:4"], 1.412**2),
    ):
        ratio = default_schedule_ratio(map(parse_operator, operators))
        assert ratio == pytest.approx(1 / steps)


def test_warm_restart_is_the_released_schedules():
    """Warmup 3000 of 250,000 steps, restart at 3319 over 150 steps: the released function's values,
    to 0.1 %."""
    for step, expected in {3319: 0.0, 3394: 0.49905, 3468: 0.99145, 3469: 0.99810}.items():
        scheduled = (250_000 - step) / (250_000 - 3000)
        restarted = scheduled * rewarmup_factor(step - 3319, 150)
        assert restarted == pytest.approx(expected, rel=1e-3, abs=1e-12)
    assert rewarmup_factor(1, 0) == 1.0


def test_slope_is_the_exponent_of_a_power_law_at_any_spacing():
    x = [1.0, 2.0, 7.0, 7.5, 30.0, 31.0]
    assert log_log_slope(x, [3 * v**-0.0575 for v in x]) == pytest.approx(-0.0575, abs=1e-12)
