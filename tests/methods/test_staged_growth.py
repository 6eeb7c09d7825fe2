"""The growth operators against the maths they stand on: same function, gradients g/k, the small
model's own dynamics."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.methods.growth_operators import grow, grow_depth, grow_size, grow_width
from efftrain_cli.methods.staged_growth import StagedGrowth
from efftrain_cli.methods.stages import (
    Operator,
    default_schedule_ratio,
    log_log_slope,
    parse_operator,
    rewarmup_factor,
)
from efftrain_cli.optim.muon import Muon
from efftrain_cli.recipe.recipe import load_recipe
from tests.methods.grown import (
    CONFIG,
    assert_same_function,
    gradients_as_moments,
    grown_by,
    mean_loss,
    model_of,
    small_model,
    state_of,
    tokens_of,
)
from tests.tiny import LLAMA_SHAPE, config_of

LLAMA = config_of(n_head=4, n_kv_head=2, seq_len=24, norm_eps=1e-3, **LLAMA_SHAPE)
SHAPES = {
    "gpt2": CONFIG,
    "tied": LLAMA,
    "untied": dataclasses.replace(LLAMA, tied=False, d_ff=40),
    "relu2": dataclasses.replace(LLAMA, mlp="relu2"),
    "relu2 untied": dataclasses.replace(LLAMA, mlp="relu2", tied=False),
    "qk norm": dataclasses.replace(LLAMA, qk_norm=True, tied=False, head_dim=8),
    "no norms": dataclasses.replace(CONFIG, norm="none", init="unit"),
    "biases, learned": dataclasses.replace(LLAMA, bias=True, positions="learned", mlp="gelu"),
}
OPERATORS = ("width", "width:3", "pad:22", "pad:64", "d_ff:72", "n_kv_head:5", "depth:3")


def by_shape_and(*operators: str) -> pytest.MarkDecorator:
    """Parametrize a test by shape and operator, without those that a recipe refuses for the
    shape."""
    pairs = []
    for (name, config), operator in itertools.product(SHAPES.items(), operators):
        refused: tuple[str, ...] = ()
        if config.norm == "layernorm":
            refused = ("pad",)
        elif config.norm == "none":
            refused = ("pad", "width")
        if not operator.startswith(refused):
            pairs.append(pytest.param(config, operator, id=f"{name}-{operator}"))
    return pytest.mark.parametrize("config, operator", pairs)


@by_shape_and(*OPERATORS)
def test_growth_keeps_loss_and_logits(config, operator):
    model, operators = small_model(config=config), [parse_operator(operator)]
    assert StagedGrowth().preserves_loss(operators)
    grown = grown_by(model, operators, StagedGrowth())
    assert grown.parameter_count > model.parameter_count
    assert_same_function(grown, model)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "operator, section",
    [
        ("width:3", StagedGrowth(symmetry="none")),
        ("depth:3", StagedGrowth(depth="identity")),
        ("depth:3", StagedGrowth(depth="zero_out_proj")),
    ],
)
def test_variants_keep_loss_and_logits(operator, section, dtype, tolerance):
    model = small_model(dtype)
    operators = [parse_operator(operator)]
    assert section.preserves_loss(operators)
    grown = grown_by(model, operators, section)
    assert_same_function(grown, model, tolerance)
    if operator == "depth:3":  # inserted layers add exact zeros
        tokens = tokens_of(CONFIG)
        assert torch.equal(grown(tokens[:, :-1]), model(tokens[:, :-1]))


@pytest.mark.parametrize(
    "shape, order, depth",
    [
        *(
            ("qk norm", o, "zero_out_proj")
            for o in itertools.permutations(["width", "pad:40", "depth"])
        ),
        ("gpt2", ("width:3", "depth", "width"), "identity"),
    ],
)
def test_operators_compose_in_any_order(shape, order, depth):
    model = small_model(config=SHAPES[shape])
    grown = grown_by(model, [parse_operator(o) for o in order], StagedGrowth(depth=depth))
    assert_same_function(grown, model)


@pytest.mark.parametrize(
    "operators, section",
    [
        (["depth"], StagedGrowth(depth="copy_interleave")),
        (["depth"], StagedGrowth(depth="copy_append")),
    ],
)
def test_variants_that_change_the_loss_say_so(operators, section):
    model = small_model()
    parsed = [parse_operator(o) for o in operators]
    assert not section.preserves_loss(parsed)
    grown = grown_by(model, parsed, section)
    tokens = tokens_of(CONFIG)
    assert abs(mean_loss(grown, tokens) - mean_loss(model, tokens)) > 1e-6


def test_copied_layers_stand_where_their_names_say():
    state = state_of(small_model())
    weight = "attn.c_attn.weight"
    interleaved = grow_depth(state, 2, mode="copy_interleave").parameters
    appended = grow_depth(state, 2, mode="copy_append").parameters
    assert [n for n in interleaved if n.endswith(weight)] == [f"h.{j}.{weight}" for j in range(4)]
    for j in range(4):
        assert torch.equal(interleaved[f"h.{j}.{weight}"], state.parameters[f"h.{j // 2}.{weight}"])
        assert torch.equal(appended[f"h.{j}.{weight}"], state.parameters[f"h.{j % 2}.{weight}"])


# --- moments ---


def blocks(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The parts of a tensor that the width operator treats alike: q, k and v of the fused
    projection, else the whole."""
    return list(tensor.chunk(3)) if ".c_attn." in name else [tensor]


def test_paper_moments_are_the_released_operators_bit_for_bit():
    """Written out from the paper's table: copies m/2 and v/4, zero blocks 0, the last layer norm's
    as they were."""
    for dtype in (torch.float32, torch.float64):
        small = state_of(small_model(dtype))
        grown = grow_width(small, 2, moments="paper", symmetry="none")
        for which, divisor in (("parameters", 1), ("exp_avg", 2), ("exp_avg_sq", 4)):
            before, after = (
                state.parameters if which == "parameters" else state.optimizer[which]
                for state in (small, grown)
            )
            for name, p in before.items():
                if name.startswith("ln_f"):
                    expected = torch.cat([p, p]) / (2 if which == "parameters" else 1)
                elif name in ("wte.weight", "wpe.weight"):
                    expected = torch.cat([p, p], dim=1) / divisor
                elif p.dim() == 1:
                    expected = torch.cat([torch.cat([b, b]) for b in blocks(name, p)]) / divisor
                else:
                    rows = []
                    for b in blocks(name, p):
                        zero = torch.zeros_like(b)
                        rows += [
                            torch.cat([b / divisor, zero], 1),
                            torch.cat([zero, b / divisor], 1),
                        ]
                    expected = torch.cat(rows)
                assert torch.equal(after[name], expected), (which, name)
        assert all(step == 7 for step in grown.optimizer["step"].values())


@by_shape_and("width", "width:3", "pad:40")
def test_moments_are_those_of_the_gradients(config, operator):
    """Where the old entries stand, the grown model's own gradient is the mapped one."""
    state = gradients_as_moments(small_model(config=config))
    grown = grow(state, [parse_operator(operator)], StagedGrowth(symmetry="none"), seed=1)
    wide = model_of(grown)
    mean_loss(wide, tokens_of(config)).backward()
    for name, p in wide.named_parameters():
        first, second = (grown.optimizer[key][name] for key in ("exp_avg", "exp_avg_sq"))
        there = first != 0
        assert there.any()
        assert p.grad is not None
        assert (p.grad - first)[there].abs().max() < 1e-14, name
        assert (p.grad.square() - second)[there].abs().max() < 1e-14, name
        if operator.startswith("width"):
            assert (p.grad - first).abs().max() < 1e-14, name


@pytest.mark.parametrize("mode", ["identity", "zero_out_proj"])
def test_inserted_layers_leave_the_old_gradients_alone(mode):
    model = small_model()
    tokens = tokens_of(CONFIG)
    mean_loss(model, tokens).backward()
    deep = model_of(grow_depth(state_of(model), 2, mode=mode))
    mean_loss(deep, tokens).backward()
    gradients = {name: p.grad for name, p in deep.named_parameters()}
    for name, p in model.named_parameters():
        layer = name.split(".")[1]
        new = (
            name.replace(f"h.{layer}.", f"h.{2 * int(layer)}.", 1)
            if name.startswith("h.")
            else name
        )
        assert torch.equal(gradients[new], p.grad), name
    # and the new layers are not dead
    assert all(
        any(
            gradients[f"h.{j}.{part}"].abs().max() > 0
            for part in ("attn.c_proj.bias", "mlp.c_proj.bias")
        )
        for j in (1, 3)
    )


def test_moments_of_inserted_and_copied_layers():
    state = state_of(small_model())
    name, source = "h.1.mlp.c_fc.weight", "h.0.mlp.c_fc.weight"
    for mode, moments, fresh in [
        ("zero_out_proj", "ema", True),
        ("zero_out_proj", "paper", True),
        ("identity", "paper", True),
        ("identity", "ema", False),
        ("copy_interleave", "paper", False),
    ]:
        grown = grow_depth(state, 2, mode=mode, moments=moments).optimizer
        before = state.optimizer
        expected = (
            torch.zeros_like(before["exp_avg"][source]) if fresh else before["exp_avg"][source]
        )
        assert torch.equal(grown["exp_avg"][name], expected), (mode, moments)
        assert grown["step"][name] == (0 if fresh else 7)
        assert torch.equal(
            grown["exp_avg_sq"]["h.2.ln_1.bias"], before["exp_avg_sq"]["h.1.ln_1.bias"]
        )


def test_reset_forgets_every_moment_and_counter():
    """The optimizer begins anew, with zeros."""
    section = StagedGrowth(moments="reset")
    operators = [Operator("width", 2), Operator("depth", 2)]
    assert grow(state_of(small_model()), operators, section, seed=0).optimizer == {}


def test_muons_momentum_grows():
    state = state_of(small_model(config=LLAMA))
    momentum = {n: t for n, t in state.optimizer["exp_avg"].items() if n.endswith("c_up.weight")}
    state = dataclasses.replace(
        state, optimizer={"momentum_buffer": momentum}, gradient_powers=Muon.gradient_powers
    )
    name = "h.0.mlp.c_up.weight"
    old = momentum[name]
    copies = grow_width(state, 2).optimizer["momentum_buffer"][name]
    assert torch.equal(copies, torch.cat([torch.cat([old, old], 1)] * 2) / 2)
    padded = grow_size(state, Operator("d_ff", 80)).optimizer["momentum_buffer"][name]
    assert torch.equal(padded[: len(old)], old) and not padded[len(old) :].any()


# --- values and rules ---


def test_schedule_ratio_is_the_authors_constants():
    assert default_schedule_ratio([Operator("depth", 2)]) == pytest.approx(1 / 1.412)
    assert default_schedule_ratio([Operator("width", 2)]) == pytest.approx(1 / 1.776)
    assert default_schedule_ratio([Operator("width", 2), Operator("depth", 2)]) == pytest.approx(
        1 / 2.455
    )
    assert default_schedule_ratio([Operator("depth", 4)]) == pytest.approx(1 / 1.412**2)


def test_warm_restart_is_the_released_schedules():
    """Warmup 3000 of 250,000 steps, restart at 3319 over 150 steps: the released function's values,
    to 0.1 %."""
    warmup, total, restart, rewarm = 3000, 250_000, 3319, 150
    for step, expected in {3319: 0.0, 3394: 0.49905, 3468: 0.99145, 3469: 0.99810}.items():
        scheduled = (total - step) / (total - warmup)
        assert scheduled * rewarmup_factor(step - restart, rewarm) == pytest.approx(
            expected, rel=1e-3, abs=1e-12
        )
    assert rewarmup_factor(1, 0) == 1.0


def test_slope_is_the_exponent_of_a_power_law_at_any_spacing():
    x = [1.0, 2.0, 7.0, 7.5, 30.0, 31.0]
    assert log_log_slope(x, [3 * v**-0.0575 for v in x]) == pytest.approx(-0.0575, abs=1e-12)


def staged(operator: str, *first: str) -> list[str]:
    sets = ", ".join(first)
    return [
        f'stages=[{{ model = {{ {sets} }}, switch = {{ rule = "steps", value = 2 }} }}, '
        f'{{ operators = ["{operator}"] }}]'
    ]


SIZES = ("n_layer", "n_head", "n_embd", "n_kv_head", "head_dim", "d_ff", "norm_eps")


@pytest.mark.parametrize(
    "overrides, rule",
    [
        (
            ["model.norm=layernorm", *staged("pad:128", "n_embd = 64")],
            'needs model.norm = "rmsnorm"',
        ),
        (
            ["staged_growth.depth=identity", *staged("depth", "n_layer = 2")],
            'must not be "identity" with model.mlp = "swiglu"',
        ),
        (
            ["model.norm=none", "staged_growth.depth=identity", *staged("depth", "n_layer = 2")],
            'must not be "identity" with model.norm = "none"',
        ),
        (staged("width", "n_embd = 64", "n_head = 2"), "the operators end at d_ff = 384"),
        (
            ["model.init=unit", *staged("pad:128", "n_embd = 64")],
            "operator pad does not keep the loss",
        ),
        (staged("d_ff:352", "d_ff = 500"), "growth makes no model smaller"),
        *((staged("depth", f"{key} = 0"), rf"stages\.0\.model\.{key} = 0") for key in SIZES),
    ],
)
def test_stages_that_cannot_be_are_refused(overrides, rule):
    with pytest.raises(RecipeError, match=rule):
        load_recipe("small", ["model.arch=llama", *overrides])


def test_stages_of_sizes_end_at_the_model():
    """The last stage's width, units and eps are [model]'s; stage 0 says its own."""
    recipe = load_recipe(
        "small",
        [
            "model.arch=llama",
            "model.norm_eps=1e-5",
            "model.head_dim=32",
            *staged(
                'pad:128", "d_ff:352", "n_kv_head:4',
                "n_embd = 80",
                "n_head = 2",
                "d_ff = 224",
                "n_kv_head = 2",
                "norm_eps = 1.6e-5",
            ),
        ],
    )
    first, last = recipe.model_at(0), recipe.model_at(1)
    assert (first.n_embd, first.head_size, first.ff_size, first.kv_heads) == (80, 32, 224, 2)
    assert (last.n_embd, last.n_head, last.ff_size, last.kv_heads) == (128, 4, 352, 4)
    assert last.norm_eps == pytest.approx(1e-5)
