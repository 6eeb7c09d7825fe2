"""Growth of Llama-like models: exact in fp64, moments by autograd, and what cannot be."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.methods.growth_operators import grow, grow_depth, grow_size, grow_width
from efftrain_cli.methods.staged_growth import Operator, StagedGrowth, parse_operator
from efftrain_cli.model.gpt import GPT
from efftrain_cli.optim.muon import Muon
from efftrain_cli.recipe.recipe import load_recipe
from tests.methods.grown import (
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
    "tied": LLAMA,
    "untied": dataclasses.replace(LLAMA, tied=False, d_ff=40),
    "relu2": dataclasses.replace(LLAMA, mlp="relu2"),
    "relu2 untied": dataclasses.replace(LLAMA, mlp="relu2", tied=False),
    "qk norm": dataclasses.replace(LLAMA, qk_norm=True, tied=False, head_dim=8),
    "biases, learned": dataclasses.replace(LLAMA, bias=True, positions="learned", mlp="gelu"),
}
OPERATORS = ("width", "width:3", "pad:22", "pad:64", "d_ff:72", "n_kv_head:5", "depth:3")
by_shape = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)


@by_shape
@pytest.mark.parametrize("operator", OPERATORS)
def test_growth_keeps_loss_and_logits(operator, config):
    model, operators = small_model(config=config), [parse_operator(operator)]
    assert StagedGrowth().preserves_loss(operators)
    grown = grown_by(model, operators, StagedGrowth())
    assert grown.parameter_count > model.parameter_count
    assert_same_function(grown, model)


@pytest.mark.parametrize("order", list(itertools.permutations(["width", "pad:40", "depth"])))
def test_operators_compose_in_any_order(order):
    model = small_model(config=SHAPES["qk norm"])
    grown = grown_by(model, [parse_operator(o) for o in order], StagedGrowth())
    assert_same_function(grown, model)


@by_shape
@pytest.mark.parametrize("operator", ["width", "width:3", "pad:40"])
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


def test_what_is_new_learns_where_it_can():
    """Step 1 reaches the columns of the table, rows of o and down; the input columns follow when the table has."""
    model = small_model(config=LLAMA)
    tokens = tokens_of(LLAMA)
    grown = grow_size(state_of(model), Operator("pad", 24))
    assert grown.config.norm_eps == pytest.approx(1e-3 * 16 / 24)
    assert grown.config.head_size == 4 and grown.config.n_head == 4
    wide = model_of(grown)
    mean_loss(wide, tokens).backward()
    gradients = {name: p.grad for name, p in wide.named_parameters()}
    assert gradients["wte.weight"][:61, 16:].abs().max() > 0  # type: ignore[index]
    assert gradients["h.0.attn.c_proj.weight"][16:].abs().max() > 0  # type: ignore[index]
    assert not gradients["h.0.attn.c_attn.weight"][:, 16:].any()  # type: ignore[index]
    weight = wide.h[0].mlp.c_fc.weight
    spread = weight[:, :16].std().item()
    assert weight[:, 16:].std().item() == pytest.approx(spread, rel=0.1)
    new = grown.optimizer["exp_avg"]["h.0.mlp.c_fc.weight"]
    assert not new[:, 16:].any() and new[:, :16].any()


def test_zeroed_layers_learn_from_their_projections():
    deep = model_of(grow_depth(state_of(small_model(config=LLAMA)), 2))
    mean_loss(deep, tokens_of(LLAMA)).backward()
    for name, parameter in deep.named_parameters():
        if name.startswith("h.1."):
            assert parameter.grad is not None
            assert bool(parameter.grad.any()) == name.endswith("c_proj.weight"), name


def test_random_layers_are_initial_ones_and_copies_follow_the_stack():
    state = state_of(small_model(config=dataclasses.replace(LLAMA, n_layer=1)))
    for mode in ("random", "copies"):
        section = StagedGrowth(depth=mode)  # type: ignore[arg-type]
        assert not section.preserves_loss([Operator("depth", 4)])
        grown = grow(state, [Operator("depth", 4)], section, seed=7)
        fresh = GPT(grown.config)
        fresh.init_weights(7)
        for name, value in fresh.named_parameters():
            if name.startswith(("h.1.", "h.3.")):
                old = "h.0." + name.split(".", 2)[2]
                source = value.double() if mode == "random" else state.parameters[old]
                assert torch.equal(grown.parameters[name], source), name
                kept = 0 if mode == "random" else 7
                assert grown.optimizer["step"][name] == kept
        assert torch.equal(grown.parameters["wte.weight"], state.parameters["wte.weight"])


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


@pytest.mark.parametrize("config", [LLAMA, SHAPES["relu2"]])
def test_a_layer_that_could_never_learn_is_refused(config):
    with pytest.raises(ValueError, match="no gradient"):
        grow_depth(state_of(small_model(config=config)), 2, mode="identity")


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
        (staged("width", "n_embd = 64", "n_head = 2"), "the operators end at d_ff = 384"),
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
