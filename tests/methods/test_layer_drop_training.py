"""Training with dropped blocks: the baseline, costs, gradients, columns, and resuming."""

from __future__ import annotations

import itertools

import pytest
import torch

from efftrain_cli.foundation.step import Progress, StepPlan
from efftrain_cli.model.flops import block_parameters, flops_per_token
from efftrain_cli.model.gpt import GPT
from efftrain_cli.optim.optimizer import Optimizer
from efftrain_cli.plan.plan import (
    plan_run,
    plan_step,
)
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training.gradient import Gradient
from tests.tiny import fresh, gradient_of, random_batch, tiny_recipe

BASE = ["model.n_layer=4", "model.n_embd=32", "train.tokens=5120", "seed=11"]
SIMIGRAD = "simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 64}"


def recipe(section: str, *overrides: str) -> Recipe:
    """Return the baseline with keys of [progressive_layer_drop], and overrides."""
    return tiny_recipe(*BASE, f"progressive_layer_drop={{{section}}}", *overrides)


def train(recipe: Recipe, steps: int) -> tuple[GPT, Optimizer]:
    """A bare loop: the trainer's steps without data, clipping and records."""
    state = fresh(recipe)
    forward_backward = Gradient(recipe, state)
    for plan, _ in itertools.islice(plan_run(recipe), steps):
        forward_backward(random_batch(plan), plan)
        state.optimizer.step(plan.lr, found_inf=torch.zeros(()))
        state.model.zero_grad()
    return state.model, state.optimizer


def expected_gates(recipe: Recipe, plan: StepPlan, paired: bool = False) -> list[tuple[bool, ...]]:
    assert recipe.progressive_layer_drop is not None
    return [
        recipe.progressive_layer_drop.gates(
            plan.keep, seed=recipe.seed, step=plan.step, micro_step=i, paired=paired
        )
        for i in range(plan.accumulation_steps)
    ]


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_flops_are_those_of_head_and_active_blocks(activation_checkpointing):
    """PyTorch's own counter sees the skipped blocks missing, and the step's figure counts the same
    blocks."""
    from torch.utils.flop_counter import FlopCounterMode

    recompute = f"train.activation_checkpointing={str(activation_checkpointing).lower()}"
    dropping = recipe("theta = 0.5, steps = 0", recompute)
    state = fresh(dropping)
    model = state.model
    forward_backward = Gradient(dropping, state)

    def counted(blocks: int) -> int:
        """FLOPs of a micro-batch of 2 sequences through the first `blocks` blocks and the head."""
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        gates = [True] * blocks + [False] * (4 - blocks)
        with FlopCounterMode(display=False) as counter:
            model.loss_sum(
                tokens, tokens, gates, torch.ones(4), activation_checkpointing
            ).backward()
        model.zero_grad()
        return counter.get_total_flops()

    head, block = counted(0), counted(1) - counted(0)
    config = model.config
    assert counted(4) == head + 4 * block
    for step in (1, 2, 3):
        plan = plan_step(dropping, Progress(step=step - 1))
        active = [sum(gates) for gates in expected_gates(dropping, plan)]
        with FlopCounterMode(display=False) as counter:
            gradient = forward_backward(random_batch(plan), plan)
        model.zero_grad()
        assert counter.get_total_flops() == 4 * head + sum(active) * block
        assert gradient.blocks_executed == sum(active) / 4 < 4
        tokens = plan.batch_size * plan.seq_len
        per_token = flops_per_token(config, 16, sum(active) / 4)
        assert gradient.flops == pytest.approx(per_token.with_logits * tokens)
        saved = flops_per_token(config, 16, 4).with_logits * tokens - gradient.flops
        assert saved == pytest.approx(
            (16 - sum(active)) / 4 * tokens * (6 * block_parameters(config) + 12 * 32 * 16)
        )


def test_uneven_micro_batches_weigh_by_their_sequences():
    dropping = recipe("theta = 0.5, steps = 0", "train.batch_size=7")
    plan = plan_step(dropping, Progress())
    _, gradient = gradient_of(dropping)
    active = [sum(gates) for gates in expected_gates(dropping, plan)]
    assert gradient.blocks_executed == pytest.approx(
        (2 * active[0] + 2 * active[1] + 2 * active[2] + active[3]) / 7
    )
    assert len(set(active)) > 1


def test_a_block_that_no_micro_batch_ran_decays_and_follows_its_momentum():
    dropping = recipe("theta = 0.05, steps = 0, granularity = 'step'")
    begun = fresh(dropping)
    model, optimizer = begun.model, begun.optimizer
    forward_backward = Gradient(dropping, begun)
    skipped = 0
    for plan, _ in itertools.islice(plan_run(dropping), 6):
        forward_backward(random_batch(plan), plan)
        last_ran = expected_gates(dropping, plan)[0][-1]
        name = "h.3.mlp.c_fc.weight"
        weight, state = model.get_parameter(name), optimizer.tensors()
        assert weight.grad is not None
        before, momentum = weight.detach().clone(), state[f"exp_avg.{name}"].clone()
        if not last_ran:
            assert not weight.grad.any()
            skipped += 1
        optimizer.step(plan.lr, found_inf=torch.zeros(()))
        if not last_ran:
            assert torch.allclose(state[f"exp_avg.{name}"], 0.9 * momentum)
            assert not torch.equal(weight, before)
        assert state[f"step.{name}"].item() == plan.step
        model.zero_grad()
    assert skipped >= 3


def test_the_mean_gradient_over_all_gates_is_that_of_the_scaled_networks():
    """The accumulated gradient of a step is the sum over its micro-batches, each through its own
    sub-network at scale 1/p, over the tokens of the whole step: micro-batches are never counted by
    how many blocks they ran."""
    dropping = recipe("theta = 0.5, steps = 0")
    plan = plan_step(dropping, Progress(step=2))
    batch = random_batch(plan)
    model, gradient = gradient_of(dropping, Progress(step=2))
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    scales = torch.tensor([1 / p for p in plan.keep])
    for i, gates in enumerate(expected_gates(dropping, plan)):
        x = model.embed(batch.tokens[2 * i : 2 * i + 2])
        for block, gate, scale in zip(model.h, gates, scales, strict=True):
            if gate:
                h = x + block.attn(block.ln_1(x)) * scale
                x = h + block.mlp(block.ln_2(h)) * scale
        (model.head_loss_sum(x, batch.targets[2 * i : 2 * i + 2]) / (8 * 16)).backward()
    for mine, parameter in zip(ours, model.parameters(), strict=True):
        theirs = torch.zeros_like(mine) if parameter.grad is None else parameter.grad
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    assert gradient.tokens == 8 * 16


def test_simigrads_halves_run_the_same_blocks():
    dropping = recipe("theta = 0.3, steps = 0", SIMIGRAD)
    plan = plan_step(dropping, Progress())
    _, gradient = gradient_of(dropping)
    gates = expected_gates(dropping, plan, paired=True)
    assert gates[0] == gates[1] != gates[2] == gates[3]
    assert gradient.blocks_executed == sum(map(sum, gates)) / 4


def test_recipes_for_comparison_cost_what_they_say():
    def cost(name: str, *overrides: str) -> float:
        return summarize_plan(load_recipe(name, overrides), vocab_size=1024).flops

    shallow = ("model.n_layer=3", "train.tokens=1_865_000")
    assert cost("small", *shallow) == pytest.approx(cost("small-pld"), rel=0.005)
    assert cost("small-pld") < 0.75 * cost("small")
    for name in ("small", "gpt2-117m"):
        section = load_recipe(f"{name}-pld").progressive_layer_drop
        assert section is not None
        assert section.steps == summarize_plan(load_recipe(name)).steps
