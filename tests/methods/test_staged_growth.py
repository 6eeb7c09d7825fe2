"""The growth operators against the maths they stand on: same function, gradients g/k, the small model's own
dynamics."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from efftrain_cli.methods.growth_operators import (
    GrowthState,
    grow,
    grow_depth,
    grow_width,
    reset_moments,
    small_model_scales,
    width_asymmetry,
)
from efftrain_cli.methods.staged_growth import (
    Operator,
    StagedGrowth,
    default_schedule_ratio,
    log_log_slope,
    parse_operator,
    rewarmup_factor,
)
from efftrain_cli.model.gpt import GPT, GPTConfig
from efftrain_cli.optim.adamw import AdamW
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.recipe.rules import warnings_of

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=16, seq_len=32, vocab_size=61, padded_vocab_size=64)


def small_model(dtype: torch.dtype = torch.float64, config: GPTConfig = CONFIG) -> GPT:
    """A GPT in which no parameter is 0 or 1, so that no operator can hide behind a trivial layer norm or bias."""
    model = GPT(config).to(dtype)
    model.init_weights(3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def state_of(model: GPT) -> GrowthState:
    """The model with moments that are a function of the name: no two parameters, no two entries alike."""
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(5)

    def draw(p: torch.Tensor) -> torch.Tensor:
        return torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)

    return GrowthState(
        config=model.config,
        parameters=parameters,
        optimizer={
            "exp_avg": {name: draw(p) for name, p in parameters.items()},
            "exp_avg_sq": {name: draw(p).square() for name, p in parameters.items()},
            "step": {name: torch.tensor(7.0) for name in parameters},
        },
        gradient_powers=AdamW.gradient_powers,
    )


def model_of(state: GrowthState) -> GPT:
    dtype = next(iter(state.parameters.values())).dtype
    model = GPT(state.config).to(dtype)
    model.load_state_dict(dict(state.parameters), strict=True)
    return model


def tokens_of(config: GPTConfig, sequences: int = 4, seed: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (sequences, config.seq_len + 1), generator=generator)


def mean_loss(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten())


PRESERVING = [
    *itertools.product([("width", 2), ("width", 3)], ["none", "offdiag"], ["identity"]),
    *itertools.product([("depth", 2), ("depth", 3)], ["none"], ["identity", "zero_out_proj"]),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("moments", ["paper", "ema", "reset"])
@pytest.mark.parametrize(("operator", "symmetry", "depth"), PRESERVING)
def test_growth_keeps_loss_and_logits(operator, symmetry, depth, moments, dtype, tolerance):
    model = small_model(dtype)
    section = StagedGrowth(moments=moments, symmetry=symmetry, depth=depth)
    operators = [Operator(*operator)]
    assert section.preserves_loss(operators)
    grown = model_of(grow(state_of(model), operators, section, seed=1))
    tokens = tokens_of(CONFIG)
    with torch.no_grad():
        assert (grown(tokens[:, :-1]) - model(tokens[:, :-1])).abs().max() <= tolerance
        assert abs(mean_loss(grown, tokens) - mean_loss(model, tokens)) <= tolerance
    if operator[0] == "depth":  # inserted layers add exact zeros
        assert torch.equal(grown(tokens[:, :-1]), model(tokens[:, :-1]))


@pytest.mark.parametrize("order", list(itertools.permutations(["width:3", "depth:2", "width:2"]))[:4])
@pytest.mark.parametrize("depth", ["identity", "zero_out_proj"])
def test_operators_compose_in_any_order(order, depth):
    model = small_model()
    grown = model_of(grow(state_of(model), [parse_operator(o) for o in order], StagedGrowth(depth=depth), seed=1))
    assert (grown.config.n_layer, grown.config.n_head, grown.config.n_embd) == (4, 12, 96)
    tokens = tokens_of(CONFIG)
    with torch.no_grad():
        assert (grown(tokens[:, :-1]) - model(tokens[:, :-1])).abs().max() <= 1e-12


@pytest.mark.parametrize(
    ("operators", "section"),
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
    grown = model_of(grow(state_of(model), parsed, section, seed=1))
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
    state = grow(state_of(small_model()), [Operator("depth", 2), Operator("width", 2)], StagedGrowth(), seed=0)
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
                state.parameters if which == "parameters" else state.optimizer[which] for state in (small, grown)
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
                        rows += [torch.cat([b / divisor, zero], 1), torch.cat([zero, b / divisor], 1)]
                    expected = torch.cat(rows)
                assert torch.equal(after[name], expected), (which, name)
        assert all(step == 7 for step in grown.optimizer["step"].values())


@pytest.mark.parametrize("factor", [2, 3])
def test_gradients_after_widening_are_the_moments_ratio(factor):
    """Every block of every matrix, the zero ones included, gets g/k; the last layer norm gets g."""
    model = small_model()
    state = state_of(model)
    tokens = tokens_of(CONFIG)
    mean_loss(model, tokens).backward()
    small = {name: p.grad for name, p in model.named_parameters()}
    wide = model_of(grow_width(state, factor, symmetry="none"))
    mean_loss(wide, tokens).backward()
    moments = {"exp_avg": small, "exp_avg_sq": {n: g.square() for n, g in small.items()}}
    gradient_state = dataclasses.replace(state, optimizer=moments)
    grown = grow_width(gradient_state, factor, moments="ema", symmetry="none")
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
        new = name.replace(f"h.{layer}.", f"h.{2 * int(layer)}.", 1) if name.startswith("h.") else name
        assert torch.equal(gradients[new], p.grad), name
    # and the new layers are not dead
    assert all(
        any(gradients[f"h.{j}.{part}"].abs().max() > 0 for part in ("attn.c_proj.bias", "mlp.c_proj.bias"))
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
        expected = torch.zeros_like(before["exp_avg"][source]) if fresh else before["exp_avg"][source]
        assert torch.equal(grown["exp_avg"][name], expected), (mode, moments)
        assert grown["step"][name] == (0 if fresh else 7)
        assert torch.equal(grown["exp_avg_sq"]["h.2.ln_1.bias"], before["exp_avg_sq"]["h.1.ln_1.bias"])


def test_reset_forgets_every_moment_and_counter():
    grown = grow(
        state_of(small_model()), [Operator("width", 2), Operator("depth", 2)], StagedGrowth(moments="reset"), seed=0
    )
    assert len(grown.optimizer) == 3
    for tensors in grown.optimizer.values():
        assert tensors and all(not t.any() for t in tensors.values())


def test_weights_grow_without_an_optimizer_state():
    state = dataclasses.replace(state_of(small_model()), optimizer={})
    grown = grow(state, [Operator("depth", 2), Operator("width", 2)], StagedGrowth(), seed=0)
    assert grown.optimizer == {}


# --- dynamics ---


def adamw(model: GPT, state: GrowthState, weight_decay: float, factor: int | None = None) -> AdamW:
    """AdamW over `model`, loaded with the state's moments; with `factor`, every parameter at `small_model_scales`."""
    scales = (
        {name: small_model_scales(kind, factor) for name, kind in model.parameter_kinds().items()} if factor else None
    )
    optimizer = AdamW(
        dict(model.named_parameters()),
        model.parameter_kinds(),
        betas=(0.9, 0.98),
        eps=1e-6,
        weight_decay=weight_decay,
        scales=scales,
    )
    for full_name, tensor in optimizer.tensors().items():
        key, name = full_name.split(".", 1)
        tensor.copy_(state.optimizer[key][name])
    return optimizer


def train_steps(model: GPT, optimizer: AdamW, steps: int, start: int) -> list[float]:
    losses = []
    for i in range(steps):
        model.zero_grad()
        loss = mean_loss(model, tokens_of(model.config, seed=1000 + start + i))
        loss.backward()
        optimizer.step(3e-3, found_inf=torch.zeros(()))
        losses.append(loss.item())
    return losses


def state_after(model: GPT, optimizer: AdamW) -> GrowthState:
    state: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, tensor in optimizer.tensors().items():
        key, name = full_name.split(".", 1)
        state.setdefault(key, {})[name] = tensor.clone()
    return GrowthState(
        config=model.config,
        parameters={name: p.detach().clone() for name, p in model.named_parameters()},
        optimizer=state,
        gradient_powers=optimizer.gradient_powers,
    )


def trained_small() -> tuple[GPT, AdamW, GrowthState]:
    model = small_model()
    optimizer = adamw(model, reset_moments(state_of(model)), 0.1)
    train_steps(model, optimizer, 10, 0)
    return model, optimizer, state_after(model, optimizer)


@pytest.mark.parametrize("factor", [2, 3])
def test_the_wide_model_follows_the_small_one_exactly(factor):
    """Filled moments, scaled learning rates, eps and weight decay: 60 steps, fp64, the same losses to 1e-12."""
    small, optimizer, state = trained_small()
    expected = train_steps(small, optimizer, 60, 10)
    grown = grow_width(state, factor, moments="ema", symmetry="none")
    wide = model_of(grown)
    losses = train_steps(wide, adamw(wide, grown, 0.1, factor), 60, 10)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-12
    assert len(set(expected)) == 60


def test_the_released_operators_state_at_the_same_lr_does_not_follow():
    """The negative control: same weights, the released moments, no scales."""
    small, optimizer, state = trained_small()
    expected = train_steps(small, optimizer, 10, 10)
    grown = grow_width(state, 2, moments="paper", symmetry="none")
    wide = model_of(grown)
    losses = train_steps(wide, adamw(wide, grown, 0.1), 10, 10)
    assert losses[0] == pytest.approx(expected[0], abs=1e-12)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) > 1e-3


@pytest.mark.parametrize(("symmetry", "parts"), [("none", False), ("offdiag", True), ("noise", True)])
def test_asymmetry_tells_copies_from_parted_ways(symmetry, parts):
    _, _, state = trained_small()
    grown = grow_width(state, 2, symmetry=symmetry)
    wide = model_of(grown)
    optimizer = adamw(wide, grown, 0.1)
    train_steps(wide, optimizer, 20, 10)
    asymmetry = width_asymmetry(state_after(wide, optimizer).parameters, 2)
    assert (asymmetry > 1e-3) == parts, asymmetry
    if not parts:
        assert asymmetry < 1e-10


def test_identity_units_stay_dead_with_zero_moments_and_wake_with_copied_ones():
    _, _, state = trained_small()
    width = CONFIG.n_embd
    for moments, dead in (("paper", True), ("ema", False)):
        grown = grow_depth(state, 2, mode="identity", moments=moments)
        deep = model_of(grown)
        train_steps(deep, adamw(deep, grown, 0.1), 20, 10)
        rest = deep.h[1].mlp.c_fc.weight[width:].detach()
        assert (rest.abs().max() == 0) == dead, moments


# --- values and rules ---


def test_growth_is_a_function_of_the_seed():
    state = state_of(small_model())
    first, again, other = (grow_width(state, 2, seed=s).parameters["h.0.mlp.c_fc.weight"] for s in (1, 1, 2))
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


@pytest.mark.parametrize("text", ["width:1.5", "width:0", "depth:1", "depth:-2", "height", "", "width:x"])
def test_operators_that_cannot_be(text):
    with pytest.raises(ValueError, match=r"width|depth"):
        parse_operator(text)


def test_schedule_ratio_is_the_authors_constants():
    assert default_schedule_ratio([Operator("depth", 2)]) == pytest.approx(1 / 1.412)
    assert default_schedule_ratio([Operator("width", 2)]) == pytest.approx(1 / 1.776)
    assert default_schedule_ratio([Operator("width", 2), Operator("depth", 2)]) == pytest.approx(1 / 2.455)
    assert default_schedule_ratio([Operator("depth", 4)]) == pytest.approx(1 / 1.412**2)


def test_warm_restart_is_the_released_schedules():
    """Warmup 3000 of 250,000 steps, restart at 3319 over 150 steps: the released function's values, to 0.1 %."""
    warmup, total, restart, rewarm = 3000, 250_000, 3319, 150
    for step, expected in {3319: 0.0, 3394: 0.49905, 3468: 0.99145, 3469: 0.99810}.items():
        scheduled = (total - step) / (total - warmup)
        assert scheduled * rewarmup_factor(step - restart, rewarm) == pytest.approx(expected, rel=1e-3, abs=1e-12)
    assert rewarmup_factor(1, 0) == 1.0


def test_slope_is_the_exponent_of_a_power_law_at_any_spacing():
    x = [1.0, 2.0, 7.0, 7.5, 30.0, 31.0]
    assert log_log_slope(x, [3 * v**-0.0575 for v in x]) == pytest.approx(-0.0575, abs=1e-12)


def test_a_schedule_that_cannot_reach_min_lr_is_warned_of() -> None:
    """Grown at 1M of 2,449,408 tokens, the schedule stands at 0.708 M + 1,449,408 = 2,157,623 at the end."""
    assert warnings_of(load_recipe("small-staged-depth")) == []
    (warning,) = warnings_of(load_recipe("small-staged-depth", ["optim.decay_tokens=false"]))
    assert "stands at about 2,157,623 tokens" in warning and "set optim.decay_tokens = 2_157_623" in warning
    by_steps = ["optim.decay_tokens=false", 'stages.0.switch={ rule = "steps", value = 245 }']  # 1,003,520 tokens
    (warning,) = warnings_of(load_recipe("small-staged-depth", by_steps))
    assert "stands at about 2,156,596 tokens" in warning
    assert warnings_of(load_recipe("small-staged-depth", ["optim.decay_tokens=false", "optim.schedule=constant"])) == []
    by_loss = ["optim.decay_tokens=false", 'stages.0.switch={ rule = "loss", value = 3 }']
    assert warnings_of(load_recipe("small-staged-depth", by_loss)) == [], "not known before training"
