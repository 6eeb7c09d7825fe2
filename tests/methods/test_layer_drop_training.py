"""Training with dropped blocks: costs, gradients, and blocks that did not run."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from efftrain_cli.foundation.step import Progress, StepPlan
from efftrain_cli.model.flops import flops_per_token
from efftrain_cli.plan.plan import plan_run, plan_step
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training.gradient import Gradient
from tests.tiny import fresh, gradient_of, random_batch, tiny_recipe


def recipe(section: str, *overrides: str) -> Recipe:
    """Return a recipe of four blocks with keys of [progressive_layer_drop] and overrides."""
    base = ["model.n_layer=4", "model.n_embd=32", "train.tokens=5120", "seed=11"]
    return tiny_recipe(*base, f"progressive_layer_drop={{{section}}}", *overrides)


def expected_gates(recipe: Recipe, plan: StepPlan, paired: bool = False) -> list[tuple[bool, ...]]:
    drop = recipe.progressive_layer_drop
    gates = []
    for micro_step in range(plan.accumulation_steps):
        gates.append(
            drop.gates(
                plan.keep, seed=recipe.seed, step=plan.step, micro_step=micro_step, paired=paired
            )
        )
    return gates


@pytest.mark.parametrize("recompute", [False, True])
def test_flops_are_those_of_head_and_active_blocks(recompute):
    """PyTorch's own counter sees the skipped blocks missing, and the step's figure counts the same
    blocks."""
    dropping = recipe(
        "theta = 0.5, steps = 0", f"train.activation_checkpointing={str(recompute).lower()}"
    )
    state = fresh(dropping)
    model = state.model
    compute = Gradient(dropping, state)

    def counted(blocks: int) -> int:
        """FLOPs of a micro-batch of 2 sequences through the first `blocks` blocks and the head."""
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        gates = [i < blocks for i in range(4)]
        with FlopCounterMode(display=False) as counter:
            x = model.run_blocks(model.embed(tokens), gates, torch.ones(4), recompute)
            model.head_loss_sum(x, tokens).backward()
        return counter.get_total_flops()

    head = counted(0)
    block = counted(1) - head
    for step in (1, 2, 3):
        plan = plan_step(dropping, Progress(step=step - 1))
        active = sum(map(sum, expected_gates(dropping, plan)))
        with FlopCounterMode(display=False) as counter:
            gradient = compute(random_batch(plan), plan)
        assert counter.get_total_flops() == 4 * head + active * block
        assert gradient.blocks_executed == active / 4 < 4
        per_token = flops_per_token(model.config, 16, active / 4)
        assert gradient.flops == pytest.approx(per_token.with_logits * 8 * 16)


def test_uneven_micro_batches_weigh_by_their_sequences():
    dropping = recipe("theta = 0.5, steps = 0", "train.batch_size=7")
    _, gradient = gradient_of(dropping)
    active = [sum(gates) for gates in expected_gates(dropping, plan_step(dropping, Progress()))]
    assert len(set(active)) > 1
    weighted = 2 * sum(active[:3]) + active[3]
    assert gradient.blocks_executed == pytest.approx(weighted / 7)


def test_a_block_that_no_micro_batch_ran_decays_and_follows_its_momentum():
    dropping = recipe("theta = 0.05, steps = 0, granularity = 'step'")
    state = fresh(dropping)
    compute = Gradient(dropping, state)
    name = "h.3.mlp.c_fc.weight"
    weight = state.model.get_parameter(name)
    skipped = 0
    for plan, _ in itertools.islice(plan_run(dropping), 6):
        compute(random_batch(plan), plan)
        before = weight.detach().clone()
        momentum = state.optimizer.tensors()[f"exp_avg.{name}"].clone()
        runs = expected_gates(dropping, plan)[0][-1]
        assert runs == weight.grad.any()
        state.optimizer.step(plan.lr, found_inf=torch.zeros(()))
        moments = state.optimizer.tensors()
        assert moments[f"step.{name}"].item() == plan.step
        if not runs:
            skipped += 1
            assert torch.allclose(moments[f"exp_avg.{name}"], 0.9 * momentum)
            assert not torch.equal(weight, before)
        state.model.zero_grad()
    assert skipped >= 3


def test_the_gradient_is_that_of_the_scaled_sub_networks():
    """The accumulated gradient of a step is the sum over its micro-batches, each through its own
    sub-network at scale 1/p, over the tokens of the whole step: micro-batches are never counted by
    how many blocks they ran."""
    dropping = recipe("theta = 0.5, steps = 0")
    progress = Progress(step=2)
    plan = plan_step(dropping, progress)
    batch = random_batch(plan)
    model, gradient = gradient_of(dropping, progress)
    assert gradient.tokens == 8 * 16
    ours = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for i, gates in enumerate(expected_gates(dropping, plan)):
        x = model.embed(batch.tokens[2 * i : 2 * i + 2])
        for block, gate, p in zip(model.h, gates, plan.keep, strict=True):
            if gate:
                h = x + block.attn(block.ln_1(x)) / p
                x = h + block.mlp(block.ln_2(h)) / p
        (model.head_loss_sum(x, batch.targets[2 * i : 2 * i + 2]) / (8 * 16)).backward()
    for have, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(have, parameter.grad, rtol=1e-5, atol=1e-7)


def test_simigrads_halves_run_the_same_blocks():
    simigrad = "simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 64}"
    dropping = recipe("theta = 0.3, steps = 0", simigrad)
    _, gradient = gradient_of(dropping)
    gates = expected_gates(dropping, plan_step(dropping, Progress()), paired=True)
    assert gates[0] == gates[1] != gates[2] == gates[3]
    assert gradient.blocks_executed == sum(map(sum, gates)) / 4


def test_recipes_for_comparison_cost_what_they_say():
    def cost(name: str, *overrides: str) -> float:
        return summarize_plan(load_recipe(name, overrides), vocab_size=1024).flops

    shallow = cost("small", "model.n_layer=3", "train.tokens=1_865_000")
    assert shallow == pytest.approx(cost("small-pld"), rel=0.005)
    assert cost("small-pld") < 0.75 * cost("small")
    for name in ("small", "gpt2-117m"):
        section = load_recipe(f"{name}-pld").progressive_layer_drop
        assert section.steps == summarize_plan(load_recipe(name)).steps
