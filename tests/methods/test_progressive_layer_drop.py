"""Progressive layer dropping: the published schedules, the gates, and what a step with skipped blocks computes and
costs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from efftrain_cli.methods.progressive_layer_drop import ProgressiveLayerDrop, draw_gates
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.model.flops import block_parameters, flops_per_token
from efftrain_cli.model.gpt import GPT, Block, GPTConfig
from efftrain_cli.optim.optimizer import Optimizer
from efftrain_cli.plan.plan import assumed_result, method_columns, plan_run, plan_step
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.plan.step import Batch, Progress, StepPlan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.recipe.rules import warnings_of
from efftrain_cli.recipe.sections import Model, Optim, Train
from efftrain_cli.training.gradient import build_forward_backward, build_model
from tests.resume_law import assert_resumes_exactly_at_every_step, assert_tokens_are_those_of_the_data
from tests.tiny import fresh


def bits(gates: tuple[bool, ...]) -> str:
    return "".join("01"[gate] for gate in gates)


# theta(t) by updates t, as the released schedule class gives it.
THETA = {
    (0.5, 100_000): {
        0: 1, 1: 0.9995002499, 10: 0.9950249169, 100: 0.9524187090, 500: 0.8032653299, 1000: 0.6839397206,
        2000: 0.5676676416, 3000: 0.5248935342, 5000: 0.5033689735, 10_000: 0.5000227000,
    },
    (0.5, 1000): {1: 0.95241871, 5: 0.80326533, 10: 0.68393972, 20: 0.56766764, 50: 0.50336897, 100: 0.50002270},
    (0.7, 1000): {1: 0.97145123, 5: 0.88195920, 10: 0.81036383, 20: 0.74060058, 50: 0.70202138, 100: 0.70001362},
    (0.9, 1000): {1: 0.99048374, 5: 0.96065307, 10: 0.93678794, 20: 0.91353353, 50: 0.90067379, 100: 0.90000454},
}  # fmt: skip


@pytest.mark.parametrize(("theta", "steps"), THETA)
def test_theta_follows_the_released_schedule(theta: float, steps: int) -> None:
    drop = ProgressiveLayerDrop(theta=theta, steps=steps)
    for t, expected in THETA[theta, steps].items():
        assert drop.theta_at(t + 1) == pytest.approx(expected, abs=5.1e-9)


def test_the_first_step_drops_nothing_unless_theta_is_constant() -> None:
    assert ProgressiveLayerDrop(steps=100).theta_at(1) == 1.0
    constant = ProgressiveLayerDrop(theta=0.7, steps=0)
    assert [constant.theta_at(step) for step in (1, 2, 1000)] == [0.7, 0.7, 0.7]


def test_theta_1_keeps_every_block_at_scale_1_exactly() -> None:
    for keep in ("equation", "code"):
        drop = ProgressiveLayerDrop(theta=1.0, steps=50, keep=keep)
        for step in (1, 7, 1000):
            assert drop.keep_probabilities(step, 12) == (1.0,) * 12
            assert drop.branch_scales(step, 12) == (1.0,) * 12


EQUATION_12 = (0.958333, 0.916667, 0.875, 0.833333, 0.791667, 0.75, 0.708333, 0.666667, 0.625, 0.583333, 0.541667, 0.5)
CODE_SCALES_12 = (1.043478, 1.090909, 1.142857, 1.2, 1.263158, 1.333333, 1.411765, 1.5, 1.6, 1.714286, 1.846154, 2)


def test_keep_probabilities_and_scales_at_theta_a_half() -> None:
    equation = ProgressiveLayerDrop(theta=0.5, steps=0)
    code = ProgressiveLayerDrop(theta=0.5, steps=0, keep="code")
    assert equation.keep_probabilities(1, 12) == pytest.approx(EQUATION_12, abs=1e-6)
    assert equation.keep_probabilities(1, 4) == pytest.approx((0.875, 0.75, 0.625, 0.5))
    assert equation.keep_probabilities(1, 6) == pytest.approx(
        (0.916667, 0.833333, 0.75, 0.666667, 0.583333, 0.5), abs=1e-6
    )
    assert code.keep_probabilities(1, 12) == pytest.approx((1, *EQUATION_12[:-1]), abs=1e-6)
    assert code.keep_probabilities(1, 4) == pytest.approx((1, 0.875, 0.75, 0.625))
    assert code.branch_scales(1, 12) == pytest.approx(CODE_SCALES_12, abs=1e-6)


def test_the_equation_is_unbiased_and_the_code_is_not() -> None:
    for n_layer in (4, 12):
        equation = ProgressiveLayerDrop(theta=0.5, steps=0)
        pairs = zip(equation.keep_probabilities(1, n_layer), equation.branch_scales(1, n_layer), strict=True)
        assert [p * scale for p, scale in pairs] == pytest.approx([1.0] * n_layer)
    code = ProgressiveLayerDrop(theta=0.5, steps=0, keep="code")
    pairs = zip(code.keep_probabilities(1, 4), code.branch_scales(1, 4), strict=True)
    assert [p * scale for p, scale in pairs] == pytest.approx([1.142857, 1.166667, 1.2, 1.25], abs=1e-6)


@pytest.mark.parametrize(
    ("keep", "n_layer", "theta", "expected"),
    [
        ("equation", 12, 0.5, 8.75), ("equation", 12, 0.7, 10.05), ("equation", 12, 0.9, 11.35),
        ("code", 12, 0.5, 9.25), ("code", 12, 0.7, 10.35), ("code", 12, 0.9, 11.45),
        ("equation", 4, 0.5, 2.75), ("code", 4, 0.5, 3.25), ("equation", 6, 0.5, 4.25), ("code", 6, 0.5, 4.75),
    ],
)  # fmt: skip
def test_expected_number_of_blocks(keep: str, n_layer: int, theta: float, expected: float) -> None:
    drop = ProgressiveLayerDrop(theta=theta, steps=0, keep=keep)
    p = drop.keep_probabilities(1, n_layer)
    assert sum(p) == pytest.approx(expected)
    draws = 4000
    active = sum(sum(drop.gates(p, seed=7, step=step, micro_step=0)) for step in range(1, draws + 1)) / draws
    assert abs(active - expected) < 3 * math.sqrt(sum(q * (1 - q) for q in p) / draws)


@pytest.mark.parametrize(
    ("n_layer", "keep", "skipped"),
    [(6, "equation", 0.2886), (12, "equation", 0.2680), (24, "equation", 0.2577), (6, "code", 0.2061), (12, "code", 0.2268), (24, "code", 0.2371)],
)  # fmt: skip
def test_share_of_block_compute_skipped_over_a_run(n_layer: int, keep: str, skipped: float) -> None:
    drop = ProgressiveLayerDrop(theta=0.5, steps=1000, keep=keep)
    kept = sum(sum(drop.keep_probabilities(step, n_layer)) for step in range(1, 1001))
    assert 1 - kept / (1000 * n_layer) == pytest.approx(skipped, abs=1e-4)


def test_gates_are_these_bits() -> None:
    keep = ProgressiveLayerDrop(theta=0.5, steps=0).keep_probabilities(1, 12)
    assert [bits(draw_gates(keep, seed=1337, updates=0, draw=draw)) for draw in range(3)] == [
        "101111100100",
        "111111011110",
        "111111101010",
    ]
    assert bits(draw_gates(keep, seed=1337, updates=1, draw=0)) == "101011111011"


def test_each_block_is_kept_as_often_as_its_probability_says() -> None:
    keep = ProgressiveLayerDrop(theta=0.5, steps=0).keep_probabilities(1, 12)
    drawn = [draw_gates(keep, seed=1337, updates=step, draw=0) for step in range(4000)]
    # Recorded for seed 1337 over 4000 steps.
    assert [round(sum(block) / 4000, 3) for block in zip(*drawn, strict=True)] == pytest.approx(
        [0.958, 0.916, 0.876, 0.839, 0.786, 0.760, 0.709, 0.668, 0.625, 0.582, 0.538, 0.498], abs=0.0011
    )


def test_gates_depend_on_their_arguments_alone() -> None:
    import numpy as np

    drop = ProgressiveLayerDrop(theta=0.5, steps=0)
    keep = drop.keep_probabilities(1, 12)
    forwards = [drop.gates(keep, seed=3, step=step, micro_step=0) for step in range(1, 20)]
    np.random.default_rng(3).random(100)
    backwards = [drop.gates(keep, seed=3, step=step, micro_step=0) for step in reversed(range(1, 20))]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) > 10
    assert forwards != [drop.gates(keep, seed=4, step=step, micro_step=0) for step in range(1, 20)]


def test_granularity_and_pairs_decide_which_micro_batches_share_gates() -> None:
    by_micro_step = ProgressiveLayerDrop(theta=0.5, steps=0)
    by_step = ProgressiveLayerDrop(theta=0.5, steps=0, granularity="step")
    keep = by_micro_step.keep_probabilities(1, 12)
    alone = [by_micro_step.gates(keep, seed=1, step=5, micro_step=i) for i in range(6)]
    paired = [by_micro_step.gates(keep, seed=1, step=5, micro_step=i, paired=True) for i in range(6)]
    assert len(set(alone)) == 6
    assert paired == [alone[0], alone[0], alone[1], alone[1], alone[2], alone[2]]
    assert {by_step.gates(keep, seed=1, step=5, micro_step=i) for i in range(6)} == {alone[0]}


def test_the_mean_over_all_gates_of_scaled_branches_is_the_dense_sum() -> None:
    n_layer = 5
    drop = ProgressiveLayerDrop(theta=0.6, steps=0)
    keep, scales = drop.keep_probabilities(1, n_layer), drop.branch_scales(1, n_layer)
    branches = [0.3, -1.2, 2.5, 0.7, -0.4]
    mean = 0.0
    for gates in itertools.product((False, True), repeat=n_layer):
        probability = math.prod(p if gate else 1 - p for gate, p in zip(gates, keep, strict=True))
        mean += probability * sum(
            branch * scale for branch, scale, gate in zip(branches, scales, gates, strict=True) if gate
        )
    assert mean == pytest.approx(sum(branches))


@pytest.mark.parametrize(
    "section", [{"theta": 0.0, "steps": 10}, {"theta": 1.1, "steps": 10}, {"steps": -1}, {"steps": 10, "gamma": 0.001}, {"theta": 0.5}]
)  # fmt: skip
def test_a_section_that_breaks_its_rules_is_refused(section: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ProgressiveLayerDrop(**section)


def test_a_scaled_branch_is_the_papers_equation() -> None:
    """Sub-layers x -> 3 x + 8 and x -> 100 x + 2, x = 1, p = 1/2: h = 1 + 11 / p = 23, y = h + 2302 / p = 4627."""

    class Attention(torch.nn.Module):
        def forward(self, x: Tensor, cache: None, see: object) -> Tensor:
            return 3 * x + 8

    class FeedForward(torch.nn.Module):
        def forward(self, x: Tensor, see: object) -> Tensor:
            return 100 * x + 2

    block = Block(GPTConfig(n_layer=1, n_head=1, n_embd=1, seq_len=1, vocab_size=1, padded_vocab_size=1))
    block.ln_1, block.ln_2 = torch.nn.Identity(), torch.nn.Identity()
    block.attn, block.mlp = Attention(), FeedForward()
    assert block(torch.ones(1, 1, 1), torch.tensor(2.0)).item() == 4627


CPU = torch.device("cpu")


def recipe(layer_drop: ProgressiveLayerDrop | None, n_layer: int = 4, **train: int | str | bool) -> Recipe:
    return Recipe(
        model=Model(n_layer=n_layer, n_head=2, n_embd=32, seq_len=16),
        optim=Optim(lr=1e-2),
        train=Train(**({"tokens": 8 * 16 * 40, "batch_size": 8, "micro_batch_tokens": 32, "dtype": "fp32"} | train)),
        seed=11,
        progressive_layer_drop=layer_drop,
    )


def random_batch(plan: StepPlan, vocab_size: int = 64) -> Batch:
    generator = torch.Generator().manual_seed(plan.step)
    ids = torch.randint(vocab_size, (plan.batch_size, plan.seq_len + 1), generator=generator)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def train(recipe: Recipe, steps: int) -> tuple[GPT, Optimizer]:
    """A bare loop: the trainer's steps without data, clipping and records."""
    state = fresh(recipe)
    forward_backward = build_forward_backward(recipe, state.model, CPU)
    for plan, _ in itertools.islice(plan_run(recipe), steps):
        forward_backward(random_batch(plan), plan)
        state.optimizer.step(plan.lr, found_inf=torch.zeros(()))
        state.model.zero_grad()
    return state.model, state.optimizer


@pytest.mark.parametrize("keep", ["equation", "code"])
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_theta_1_equals_the_baseline_bit_for_bit(keep: str, activation_checkpointing: bool) -> None:
    neutral = ProgressiveLayerDrop(theta=1.0, steps=10, keep=keep)
    baseline, _ = train(recipe(None), 4)
    dropped, _ = train(recipe(neutral, activation_checkpointing=activation_checkpointing), 4)
    for ours, theirs in zip(dropped.parameters(), baseline.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_plan_holds_the_steps_keep_probabilities() -> None:
    layer_drop = ProgressiveLayerDrop(theta=0.5, steps=40)
    plans = [plan for plan, _ in plan_run(recipe(layer_drop))]
    assert plans[0].keep == (1.0,) * 4
    assert [plan.keep for plan in plans] == [layer_drop.keep_probabilities(step, 4) for step in range(1, 41)]
    assert plan_step(recipe(None), Progress(step=30)).keep == (1.0,) * 4


def expected_gates(recipe: Recipe, plan: StepPlan, paired: bool = False) -> list[tuple[bool, ...]]:
    assert recipe.progressive_layer_drop is not None
    return [
        recipe.progressive_layer_drop.gates(plan.keep, seed=recipe.seed, step=plan.step, micro_step=i, paired=paired)
        for i in range(plan.accumulation_steps)
    ]


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_flops_are_those_of_head_and_active_blocks(activation_checkpointing: bool) -> None:
    """PyTorch's own counter sees the skipped blocks missing, and the step's figure counts the same blocks."""
    from torch.utils.flop_counter import FlopCounterMode

    dropping = recipe(ProgressiveLayerDrop(theta=0.5, steps=0), activation_checkpointing=activation_checkpointing)
    model = build_model(dropping, 64, CPU)
    forward_backward = build_forward_backward(dropping, model, CPU)

    def counted(blocks: int) -> int:
        """FLOPs of a micro-batch of 2 sequences through the first `blocks` blocks and the head."""
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        gates = [True] * blocks + [False] * (4 - blocks)
        with FlopCounterMode(display=False) as counter:
            model.loss_sum(tokens, tokens, gates, torch.ones(4), activation_checkpointing).backward()
        model.zero_grad()
        return counter.get_total_flops()

    head, block = counted(0), counted(1) - counted(0)
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
        per_token = flops_per_token(32, 16, 64, sum(active) / 4)
        assert gradient.flops == pytest.approx(per_token.with_logits * tokens)
        saved = flops_per_token(32, 16, 64, 4).with_logits * tokens - gradient.flops
        assert saved == pytest.approx((16 - sum(active)) / 4 * tokens * (6 * block_parameters(32) + 12 * 32 * 16))


def test_executed_flops_average_to_the_plans_expectation() -> None:
    """Within 2 %, over the gates of a run: what `--plan` promises is what training will execute."""
    dropping = recipe(ProgressiveLayerDrop(theta=0.5, steps=300), n_layer=6, tokens=8 * 16 * 300)
    expected = executed = 0.0
    for plan, _ in plan_run(dropping):
        expected += assumed_result(dropping, plan, 64).flops
        for gates in expected_gates(dropping, plan):
            executed += flops_per_token(32, 16, 64, sum(gates)).with_logits * plan.batch_size * plan.seq_len / 4
    dense = flops_per_token(32, 16, 64, 6).with_logits * 8 * 16 * 300
    assert executed == pytest.approx(expected, rel=0.02)
    assert executed < 0.8 * dense


def test_uneven_micro_batches_weigh_by_their_sequences() -> None:
    dropping = recipe(ProgressiveLayerDrop(theta=0.5, steps=0), batch_size=7)
    plan = plan_step(dropping, Progress())
    model = build_model(dropping, 64, CPU)
    gradient = build_forward_backward(dropping, model, CPU)(random_batch(plan), plan)
    active = [sum(gates) for gates in expected_gates(dropping, plan)]
    assert gradient.blocks_executed == pytest.approx((2 * active[0] + 2 * active[1] + 2 * active[2] + active[3]) / 7)
    assert len(set(active)) > 1


def test_a_block_that_no_micro_batch_ran_decays_and_follows_its_momentum() -> None:
    dropping = recipe(ProgressiveLayerDrop(theta=0.05, steps=0, granularity="step"))
    begun = fresh(dropping)
    model, optimizer = begun.model, begun.optimizer
    forward_backward = build_forward_backward(dropping, model, CPU)
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


def test_recomputed_activations_use_the_same_gates() -> None:
    dropping = recipe(ProgressiveLayerDrop(theta=0.5, steps=0))
    stored, _ = train(dropping, 3)
    recomputed, _ = train(replace(dropping, train=replace(dropping.train, activation_checkpointing=True)), 3)
    for ours, theirs in zip(recomputed.parameters(), stored.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_mean_gradient_over_all_gates_is_that_of_the_scaled_networks() -> None:
    """The accumulated gradient of a step is the sum over its micro-batches, each through its own sub-network at scale
    1/p, over the tokens of the whole step: micro-batches are never counted by how many blocks they ran."""
    dropping = recipe(ProgressiveLayerDrop(theta=0.5, steps=0))
    plan = plan_step(dropping, Progress(step=2))
    batch = random_batch(plan)
    model = build_model(dropping, 64, CPU)
    gradient = build_forward_backward(dropping, model, CPU)(batch, plan)
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


def test_columns_of_a_step() -> None:
    dropping = recipe(ProgressiveLayerDrop(theta=0.5, steps=1000))
    plan = plan_step(dropping, Progress(step=10))
    columns = method_columns(dropping, plan, assumed_result(dropping, plan, 64))
    assert columns == {"pld_theta": pytest.approx(0.68393972), "pld_blocks": pytest.approx(sum(plan.keep))}
    assert method_columns(recipe(None), plan, assumed_result(dropping, plan, 64)) == {}


def test_simigrads_halves_run_the_same_blocks() -> None:
    dropping = replace(
        recipe(ProgressiveLayerDrop(theta=0.3, steps=0)), simigrad=SimiGrad(target=0.5, min_batch_size=2, max_batch_size=64)
    )  # fmt: skip
    plan = plan_step(dropping, Progress())
    model = build_model(dropping, 64, CPU)
    gradient = build_forward_backward(dropping, model, CPU)(random_batch(plan), plan)
    gates = expected_gates(dropping, plan, paired=True)
    assert gates[0] == gates[1] != gates[2] == gates[3]
    assert gradient.blocks_executed == sum(map(sum, gates)) / 4


def test_paired_gates_keep_drop_noise_out_of_the_similarity() -> None:
    """Both halves hold the same sequences, so without layer dropping their cosine is 1; paired gates leave it at 1."""
    halves = SimiGrad(target=0.5, min_batch_size=2, max_batch_size=64)
    dropping = replace(recipe(ProgressiveLayerDrop(theta=0.3, steps=0)), simigrad=halves)
    plan = plan_step(dropping, Progress())
    ids = random_batch(plan).tokens
    for i in (0, 2):  # micro-batches of two sequences; 0 and 1 are a pair, and 2 and 3
        ids[2 * i + 2 : 2 * i + 4] = ids[2 * i : 2 * i + 2]
    batch = Batch(ids, ids.roll(-1, dims=1))
    model = build_model(dropping, 64, CPU)
    a_dot_b, a_square, b_square = build_forward_backward(dropping, model, CPU)(batch, plan).simigrad_dots
    assert a_dot_b / math.sqrt(a_square * b_square) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_compiled_blocks_keep_the_number_of_graphs_small() -> None:
    """One graph for all blocks and gate patterns, and one without gradient for the evaluation."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    dropping = recipe(ProgressiveLayerDrop(theta=0.5, steps=20), n_layer=6)
    model = build_model(dropping, 64, CPU)
    for block in model.h:
        block.compile(backend=counter)
    forward_backward = build_forward_backward(dropping, model, CPU)
    patterns = set()
    for plan, _ in itertools.islice(plan_run(dropping), 20):
        patterns |= set(expected_gates(dropping, plan))
        forward_backward(random_batch(plan), plan)
        model.zero_grad()
        with torch.no_grad():
            model.loss_sum(*(torch.zeros(2, 16, dtype=torch.int64),) * 2)
    torch.compiler.reset()
    assert len(patterns) > 20
    assert counter.frame_count == 2


def test_verify_resume_sees_blocks_dropped_before_and_after_the_stop() -> None:
    slow = recipe(ProgressiveLayerDrop(theta=0.5, steps=100_000))
    (cut,) = slow.methods["progressive_layer_drop"].shortened(slow, 4, 4).values()
    assert cut == ProgressiveLayerDrop(theta=0.5, steps=8)


def test_unwise_settings_are_named() -> None:
    assert warnings_of(recipe(ProgressiveLayerDrop(steps=40))) == []
    assert warnings_of(recipe(ProgressiveLayerDrop(theta=0.7, steps=0))) == []
    (pace,) = warnings_of(recipe(ProgressiveLayerDrop(steps=100_000)))
    assert "theta only comes down to 0.98" in pace
    assert "set it to the steps of the run" in pace
    (biased,) = warnings_of(recipe(ProgressiveLayerDrop(steps=40, keep="code")))
    assert "for comparison only" in biased


def test_resume_is_exact_in_the_middle_of_the_ramp() -> None:
    dropping = recipe(ProgressiveLayerDrop(theta=0.4, steps=400), tokens=8 * 16 * 12)
    rows = assert_resumes_exactly_at_every_step(dropping)[1:]
    assert [row["pld_theta"] for row in rows] == [
        dropping.progressive_layer_drop.theta_at(step) for step in range(1, 13)
    ]
    assert 0.45 < rows[6]["pld_theta"] < 0.6  # so the ramp was not over
    assert len({row["pld_blocks"] for row in rows}) > 3


def test_tokens_are_counted_from_targets_whatever_blocks_ran() -> None:
    dropping = recipe(ProgressiveLayerDrop(theta=0.4, steps=0), tokens=8 * 16 * 4)
    assert_tokens_are_those_of_the_data(assert_resumes_exactly_at_every_step(dropping), dropping)


def test_resume_is_exact_with_simigrad() -> None:
    both = replace(
        recipe(ProgressiveLayerDrop(theta=0.4, steps=400), tokens=8 * 16 * 8),
        simigrad=SimiGrad(target=0.9, min_batch_size=2, max_batch_size=64),
    )
    rows = assert_resumes_exactly_at_every_step(both)[1:]
    assert [row["batch_size"] for row in rows[:4]] == [8, 9, 10, 11]


def test_recipes_for_comparison_cost_what_they_say() -> None:
    def cost(name: str) -> float:
        return summarize_plan(load_recipe(name), vocab_size=1024).flops

    assert cost("small-shallow") == pytest.approx(cost("small-pld"), rel=0.005)
    assert cost("small-pld") < 0.75 * cost("small")
    for name in ("small", "gpt2-117m"):
        section = load_recipe(f"{name}-pld").progressive_layer_drop
        assert section is not None
        assert section.steps == summarize_plan(load_recipe(name)).steps
