"""The growth operators against the maths they stand on: same function, gradients g/k, the small model's own
dynamics."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from efftrain_cli.methods.growth_operators import grow, grow_depth, grow_width
from efftrain_cli.methods.staged_growth import (
    Operator,
    Stage,
    StagedGrowth,
    Switch,
    default_schedule_ratio,
    log_log_slope,
    parse_operator,
    rewarmup_factor,
    stage_problems,
)
from efftrain_cli.model.gpt import GPT
from efftrain_cli.recipe.sections import Model
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

PRESERVING = [
    *itertools.product([("width", 2), ("width", 3)], ["none", "offdiag"], ["identity"]),
    *itertools.product([("depth", 2), ("depth", 3)], ["none"], ["identity", "zero_out_proj"]),
]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("moments", ["paper", "ema", "reset"])
@pytest.mark.parametrize("operator, symmetry, depth", PRESERVING)
def test_growth_keeps_loss_and_logits(operator, symmetry, depth, moments, dtype, tolerance):
    model = small_model(dtype)
    section = StagedGrowth(moments=moments, symmetry=symmetry, depth=depth)
    operators = [Operator(*operator)]
    assert section.preserves_loss(operators)
    grown = grown_by(model, operators, section)
    assert_same_function(grown, model, tolerance)
    if operator[0] == "depth":  # inserted layers add exact zeros
        tokens = tokens_of(CONFIG)
        assert torch.equal(grown(tokens[:, :-1]), model(tokens[:, :-1]))


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["width:3", "depth:2", "width:2"]))[:4]
)
@pytest.mark.parametrize("depth", ["identity", "zero_out_proj"])
def test_operators_compose_in_any_order(order, depth):
    model = small_model()
    grown = grown_by(model, [parse_operator(o) for o in order], StagedGrowth(depth=depth))
    assert (grown.config.n_layer, grown.config.n_head, grown.config.n_embd) == (4, 12, 96)
    assert_same_function(grown, model)


@pytest.mark.parametrize(
    "operators, section",
    [
        (["width"], StagedGrowth(symmetry="noise")),
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


def test_grown_names_are_the_large_models_own_in_its_order():
    state = grow(
        state_of(small_model()),
        [Operator("depth", 2), Operator("width", 2)],
        StagedGrowth(),
        seed=0,
    )
    expected = [name for name, _ in GPT(state.config).named_parameters()]
    assert len(state.optimizer) == 3
    for tensors in (state.parameters, *state.optimizer.values()):
        assert list(tensors) == expected


# --- moments ---


def blocks(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The parts of a tensor that the width operator treats alike: q, k and v of the fused projection, else the
    whole."""
    return list(tensor.chunk(3)) if ".c_attn." in name else [tensor]


def test_paper_moments_are_the_released_operators_bit_for_bit():
    """Written out from the paper's table: copies m/2 and v/4, zero blocks 0, the last layer norm's as they were."""
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


@pytest.mark.parametrize("factor", [2, 3])
def test_gradients_after_widening_are_the_moments_ratio(factor):
    """Every block of every matrix, the zero ones included, gets g/k; the last layer norm gets g."""
    state = gradients_as_moments(small_model())
    grown = grow_width(state, factor, moments="ema", symmetry="none")
    wide = model_of(grown)
    mean_loss(wide, tokens_of(CONFIG)).backward()
    for name, p in wide.named_parameters():
        assert (p.grad - grown.optimizer["exp_avg"][name]).abs().max() < 1e-14, name
        assert (p.grad.square() - grown.optimizer["exp_avg_sq"][name]).abs().max() < 1e-14, name


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
    grown = grow(
        state_of(small_model()),
        [Operator("width", 2), Operator("depth", 2)],
        StagedGrowth(moments="reset"),
        seed=0,
    )
    assert len(grown.optimizer) == 3
    for tensors in grown.optimizer.values():
        assert tensors and all(not t.any() for t in tensors.values())


def test_weights_grow_without_an_optimizer_state():
    state = dataclasses.replace(state_of(small_model()), optimizer={})
    grown = grow(state, [Operator("depth", 2), Operator("width", 2)], StagedGrowth(), seed=0)
    assert grown.optimizer == {}


# --- values and rules ---


def test_growth_is_a_function_of_the_seed():
    state = state_of(small_model())
    first, again, other = (
        grow_width(state, 2, seed=s).parameters["h.0.mlp.c_fc.weight"] for s in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_padding_rows_of_the_vocabulary_stay_zero_under_noise():
    state = state_of(small_model())
    state.parameters["wte.weight"][CONFIG.vocab_size :] = 0
    grown = grow_width(state, 2, symmetry="noise").parameters["wte.weight"]
    assert not grown[CONFIG.vocab_size :].any() and grown[: CONFIG.vocab_size].all()


def test_unknown_parameters_are_refused():
    state = state_of(small_model())
    state.parameters["h.0.attn.rotary"] = torch.zeros(3)
    for grow_it in (grow_width, grow_depth):
        with pytest.raises(ValueError, match=r"h\.0\.attn\.rotary"):
            grow_it(state, 2)


@pytest.mark.parametrize(
    "text", ["width:1.5", "width:0", "depth:1", "depth:-2", "height", "", "width:x"]
)
def test_operators_that_cannot_be(text):
    with pytest.raises(ValueError, match=r"width|depth"):
        parse_operator(text)


def test_schedule_ratio_is_the_authors_constants():
    assert default_schedule_ratio([Operator("depth", 2)]) == pytest.approx(1 / 1.412)
    assert default_schedule_ratio([Operator("width", 2)]) == pytest.approx(1 / 1.776)
    assert default_schedule_ratio([Operator("width", 2), Operator("depth", 2)]) == pytest.approx(
        1 / 2.455
    )
    assert default_schedule_ratio([Operator("depth", 4)]) == pytest.approx(1 / 1.412**2)


def test_warm_restart_is_the_released_schedules():
    """Warmup 3000 of 250,000 steps, restart at 3319 over 150 steps: the released function's values, to 0.1 %."""
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


def test_stages_that_outgrow_every_limit_are_a_mistake_of_the_recipe():
    stages = [Stage(switch=Switch(rule="steps", value=5)), Stage(operators=("width:1000",))]
    model = Model(n_layer=2, n_head=2, n_embd=16, seq_len=32)
    (rule,) = stage_problems(model, stages)
    assert (
        rule == "the stages grow model.n_head to 2000: input should be less than or equal to 1024"
    )
