"""Ouroboros on one device: the scalar chain's published arithmetic, what a delay may and may not
change, and exact resuming."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from efftrain_cli.foundation.errors import UnsoundError, UsageError
from efftrain_cli.foundation.signals import never
from efftrain_cli.methods.ouroboros import Ouroboros, balanced_split, head_in_blocks
from efftrain_cli.plan.plan import after_step, plan_step
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training import checkpoint, dist
from efftrain_cli.training.delay import DelayedGradient, add_up, clip_by_device, pop, put
from efftrain_cli.training.gradient import Gradient
from efftrain_cli.training.resuming import dropped_in_flight
from efftrain_cli.training.session import check_ranks
from tests.methods.cases import check_messages
from tests.resume_law import RandomTokens, run
from tests.tiny import FOUR_BLOCKS, METHODS, config_of, fresh, tensors_of, tiny_recipe

PLAIN = load_recipe("small", FOUR_BLOCKS)


def recipe_of(modules: int, *overrides: str, **keys: object) -> Recipe:
    plain = load_recipe("small", [*FOUR_BLOCKS, *overrides])
    return replace(plain, ouroboros=Ouroboros(modules=modules, **keys))  # type: ignore[arg-type]


# --- the scalar chain: h1 = v x, h2 = w h1, y' = v h2, L = (y' - y)^2 / 2; v tied, K = 3, SGD of 0.

X = [1, -0.5, 2, 1.5, -1, 0.5, 1, -2]
Y = [0.5, 0.25, -1, 0.5, 0.75, -0.25, 1, 0.5]
TABLES = {  # mean -> {step: (v, w) before it}; 8: after the last
    False: {
        1: (0.7742720000, 1.2),
        2: (0.7459476617, 1.1828480000),
        3: (0.3114544744, 1.1645723816),
        4: (0.3011141551, 0.9067899483),
        5: (-0.1303745301, 0.9115996135),
        7: (-0.1434932385, 0.9038348579),
        8: (-0.1280267072, 0.9050501720),
    },
    True: {
        1: (0.7871360000, 1.2),
        2: (0.7724539493, 1.1828480000),
        3: (0.5392453490, 1.1635867156),
        4: (0.5242088799, 0.8757964725),
        5: (0.2811235629, 0.8754679736),
        7: (0.2673296762, 0.8471204339),
        8: (0.2515136192, 0.8543914389),
    },
}


def chain(mean: bool) -> list[tuple[float, float]]:
    """(v, w) before every step and after the last."""
    v, w = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.8, 1.2))
    names = {"v": v, "w": w}
    in_flight: dict[str, Tensor] = {}
    rows = [(v.item(), w.item())]
    for step, (x, y) in enumerate(zip(X, Y, strict=True), 1):
        lookup = v.detach().requires_grad_()
        ((v * (w * (lookup * x)) - y) ** 2 / 2).backward()
        put(in_flight, step, 1, {"v": lookup.grad})
        put(in_flight, step, 2, {"w": w.grad})
        due = [{"v": v.grad}, pop(in_flight, step - 1, 2), pop(in_flight, step - 2, 1)]
        add_up(names, due, ["v"] if mean else [])
        with torch.no_grad():
            for parameter in names.values():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        rows.append((v.item(), w.item()))
    return rows


@pytest.mark.parametrize("mean", TABLES)
def test_the_scalar_chain(mean):
    rows = chain(mean)
    for step, values in TABLES[mean].items():
        assert rows[step] == pytest.approx(values, abs=1e-9)


# --- a GPT ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_module_waits_for_its_first_gradient(optimizer):
    """Weight decay and moments wait too."""
    recipe = recipe_of(4, *METHODS.get(optimizer, []), split=(1, 1, 1, 1))
    state = fresh(recipe)
    before = tensors_of(state)
    for steps in (1, 2, 3, 4):
        run(state, recipe, steps)
        after = tensors_of(state)
        moved = {name for name in after if not torch.equal(before[name], after[name])}
        for block in range(4):
            assert any(f"h.{block}." in name for name in moved) == (steps > 3 - block)
        assert "wte.weight" in moved
        assert ("wpe.weight" in moved) == (steps > 3)


def test_at_a_rate_of_zero_late_gradients_are_the_true_ones_of_their_batch():
    still = ["optim={lr = 1e-30, min_lr = 0, weight_decay = 0, grad_clip = 0}"]
    recipe = recipe_of(3, *still, split=(2, 1, 1))
    state, data = fresh(recipe), RandomTokens(recipe.model.seq_len)
    plain = Gradient(PLAIN, state)
    gradient = DelayedGradient(recipe, state, never)
    staleness = {
        "h.0.mlp.c_fc.weight": 2,
        "h.2.attn.c_attn.bias": 1,
        "h.3.ln_1.weight": 0,
        "wpe.weight": 2,
        "ln_f.weight": 0,
    }
    true: list[dict[str, Tensor]] = []
    for step in range(5):
        plan = plan_step(recipe, state.progress)
        batch = data.batch(plan)
        plain(batch, plan)
        true.append({name: p.grad for name, p in state.parameters.items()})
        state.model.zero_grad(set_to_none=True)
        result = gradient(batch, plan)
        for name, late in staleness.items():
            have = state.parameters[name].grad
            if step < late:
                assert have is None
            else:
                torch.testing.assert_close(have, true[step - late][name], rtol=1e-5, atol=1e-8)
        state.model.zero_grad(set_to_none=True)
        state.progress = after_step(recipe, state.progress, plan, result)


def test_a_gradient_in_flight_that_is_not_finite_is_not_saved():
    recipe = recipe_of(3)
    state = fresh(recipe)
    run(state, recipe, 3)
    name, tensor = next(iter(state.in_flight.items()))
    tensor.view(-1)[0] = math.inf
    with pytest.raises(UnsoundError, match=name):
        checkpoint.save(None, state, recipe)


def test_clipping_by_device():
    """Norms of 5, 13 and 12: modules 1 and 3, on one device, have a norm of 13 together."""
    parameters = {}
    for name, gradient in {"a": [3.0, 4.0], "b": [5.0, 12.0], "c": [12.0], "d": None}.items():
        parameters[name] = torch.zeros(len(gradient or [0]))
        if gradient is not None:
            parameters[name].grad = torch.tensor(gradient)
    clip_by_device(Ouroboros(modules=3), [["a"], ["b"], ["c", "d"]], parameters, 6.5)
    for name, expected in {"a": [1.5, 2.0], "b": [2.5, 6.0], "c": [6.0]}.items():
        assert parameters[name].grad.tolist() == pytest.approx(expected, rel=1e-5)
    assert parameters["d"].grad is None


# --- the section ----------------------------------------------------------------------------------

GPT2 = config_of(n_layer=12, n_head=12, n_embd=768, seq_len=1024, vocab_size=50257)


def test_the_split_evens_out_flops_with_the_head():
    assert head_in_blocks(GPT2) == pytest.approx(4.5, abs=0.1)
    assert balanced_split(4, GPT2) == (0, 6, 5, 1)  # 5.5, 6, 5 blocks' worth on the three devices
    assert balanced_split(3, GPT2) == (2, 8, 2)
    assert balanced_split(14, GPT2) == (0, *[1] * 12, 0)
    assert balanced_split(2, GPT2) == (6, 6)


@pytest.mark.parametrize(
    "more, devices, words",
    [
        ([], 4, "makes a ring of 3 devices, not 4"),
        (["eval.positions=true"], 3, "need a whole model"),
    ],
)
def test_rings_that_cannot_be_are_refused(monkeypatch, more, devices, words):
    recipe = recipe_of(4, *more)
    monkeypatch.setattr(dist, "world_size", lambda: devices)
    with pytest.raises(UsageError, match=words):
        check_ranks(recipe, summarize_plan(recipe, until=1))


def test_gradients_in_flight_of_another_layout_are_dropped_with_a_reason():
    before = recipe_of(3, split=(2, 1, 1))
    assert dropped_in_flight(before, recipe_of(3, split=(2, 1, 1), clip="module")) == ""
    assert dropped_in_flight(PLAIN, before) == ""
    assert dropped_in_flight(before, PLAIN).endswith("training goes on without delay")
    other = dropped_in_flight(before, recipe_of(3, split=(1, 1, 2)))
    assert other.startswith("[ouroboros] has changed") and "in 2 steps every module" in other


@pytest.mark.parametrize("arch", ["model.arch=gpt2", "model.arch=llama"])
def test_planned_bytes_in_flight_are_those_of_the_gradients_that_wait(arch):
    recipe = tiny_recipe(*METHODS["ouroboros"], arch)
    state = fresh(recipe)
    run(state, recipe, 4)
    held = sum(tensor.nbytes for tensor in state.in_flight.values())
    assert recipe.ouroboros.in_flight_bytes(state.model.config) == held


MESSAGES = """
ouroboros={modules = 1, warmup_steps = 5}

ouroboros.modules=2
    assumed: Ouroboros: 2 modules on gradients of 1 to 0 steps ago, the last fresh. A module waits
    unchanged for its first one; the last ones in flight are dropped.

ouroboros={modules = 4, warmup_steps = 4}
    assumed: Ouroboros: 4 modules on gradients of 3 to 0 steps ago, the last fresh, after 4 steps of
    ordinary training. A module waits unchanged for its first one; the last ones in flight are
    dropped.

ouroboros={modules = 3, warmup_steps = 5}
    assumed: Ouroboros: 3 modules on gradients of 2 to 0 steps ago, the last fresh, after 5 steps of
    ordinary training. A module waits unchanged for its first one; the last ones in flight are
    dropped.
    warning: ouroboros.warmup_steps = 5 is the whole run of 5 steps: no gradient is ever delayed

ouroboros.modules=5
    ouroboros.modules: must be at most model.n_layer + 2 = 4: embedding and head can stand alone,
    the modules between need a block

ouroboros={modules = 3, split = [1, 1, 1]}
    ouroboros.split: must add up to model.n_layer = 2 blocks, not 3

ouroboros={modules = 3, split = [2, 2]}
    ouroboros.split: split [2, 2] names 2 modules, and modules = 3

ouroboros={modules = 3, split = [1, 0, 1]}
    ouroboros.split: split [1, 0, 1]: only the first and the last module can do without a block, as
    they have embedding and head
"""


def test_messages_about_a_recipe():
    check_messages(MESSAGES)
