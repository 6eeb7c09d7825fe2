"""SimiGrad: the released code's batch sizes, the mended rule, the similarity, and what a step with two halves
computes."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.methods.simigrad import (
    Dots,
    SimiGrad,
    half_dots,
    mean_dots,
    noise_scale,
    reference_batch_size,
    similarity,
)
from efftrain_cli.model.gpt import GPT
from efftrain_cli.plan.plan import accumulation_steps, after_growth, after_step, method_columns, plan_run, plan_step
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.plan.step import Batch, Progress, StepPlan, StepResult
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.recipe.rules import warnings_of
from efftrain_cli.recipe.sections import Model, Optim, Train
from efftrain_cli.training.gradient import build_forward_backward, build_model
from tests.resume_law import assert_resumes_exactly_at_every_step, assert_tokens_are_those_of_the_data

LOW, HIGH = 0.1, 0.9


def reference(
    cosines: list[float | None], batch_size: int, world_size: int = 1, micro: int = 1, upper: int | None = None, max_micro: int | None = None
) -> tuple[list[int], list[int], list[int]]:  # fmt: skip
    """Batch, accumulation steps and micro-batch after each decision of the released code, target 0.5."""
    batches, steps, micros = [batch_size], [batch_size // world_size // micro], [micro]
    for phi in cosines:
        batch_size, accumulation, micro = reference_batch_size(
            batch_size,
            phi,
            target=0.5,
            upper=upper,
            world_size=world_size,
            micro_batch_size=micro,
            max_micro_batch_size=max_micro,
        )
        batches.append(batch_size)
        steps.append(accumulation)
        micros.append(micro)
    return batches, steps, micros


# Recorded from the released code, functions cut out unmodified: cosines -> batch sizes, target 0.5.
GROW = [128, 140, 154, 169, 185, 203, 223, 245, 269, 295, 324, 356, 391]
SHRINK = [128, 115, 103, 92, 82, 73, 65, 58, 52, 46, 41, 36, 32]
ALTERNATE = [128, 140, 126, 138, 124, 136, 122, 134, 120, 132, 118, 129, 116]


def test_reference_trajectories_with_a_quantum_of_one() -> None:
    assert reference([LOW] * 12, 128)[0] == GROW
    assert reference([HIGH] * 12, 128)[0] == SHRINK
    assert reference([LOW, HIGH] * 6, 128)[0] == ALTERNATE
    assert reference([0.5, None], 128)[0] == [128] * 3
    from_one = reference([LOW] * 26, 1)[0]
    assert from_one[:20] == list(range(1, 21))
    assert from_one[19:] == [20, 22, 24, 26, 28, 30, 33, 36]
    assert reference([HIGH] * 6, 5)[0] == [5, 4, 3, 2, 1, 1, 1]


def test_reference_trajectories_with_a_quantum() -> None:
    batches, steps, _ = reference([LOW] * 12, 128, world_size=4, micro=8)
    assert batches == [128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448, 480, 512]
    assert steps == list(range(4, 17))
    batches, steps, _ = reference([HIGH] * 6, 128, world_size=4, micro=8)
    assert (batches, steps) == ([128, 96, 64, 32, 32, 32, 32], [4, 3, 2, 1, 1, 1, 1])


def test_reference_trajectories_with_a_growing_micro_batch() -> None:
    batches, steps, micros = reference([LOW] * 12, 128, world_size=4, micro=32, max_micro=512)
    assert batches == [128, 140, 152, 164, 180, 196, 212, 232, 252, 276, 300, 328, 360]
    assert micros == [32, 35, 38, 41, 45, 49, 53, 58, 63, 69, 75, 82, 90]
    assert set(steps) == {1}
    stuck = reference([LOW] * 3 + [HIGH] * 5, 128, world_size=4, micro=32, max_micro=512)[0]
    assert stuck == [128, 140, 152, 164, 164, 164, 164, 164, 164]
    jumps = reference([LOW, HIGH, LOW, HIGH, LOW, LOW, HIGH], 2048, world_size=4, micro=512, max_micro=512)[0]
    assert jumps == [2048, 4096, 2048, 4096, 2048, 4096, 6144, 4096]


@pytest.mark.parametrize(("phi", "after"), [(0.5, 320), (None, 320), (math.nan, 320), (LOW, 300), (HIGH, 288)])
def test_reference_keeps_no_bound_where_it_decides_nothing(phi: float | None, after: int) -> None:
    """The released code leaves 320 at 320 where phi is the target or not finite, although the upper bound is 300."""
    section = SimiGrad(target=0.5, min_batch_size=2, max_batch_size=300, mode="reference")
    if phi is not None and math.isnan(phi):
        assert section.decide(1, 320, (), (phi, 1.0, 1.0))[0] == after
    else:
        assert section.next_batch_size(320, phi) == after


def test_reference_leaves_a_batch_of_one_below_the_lower_bound_that_should_shrink() -> None:
    assert reference_batch_size(1, HIGH, target=0.5, lower=8)[0] == 1
    assert reference_batch_size(1, LOW, target=0.5, lower=8)[0] == 8


def test_reference_passes_over_an_upper_bound_as_released() -> None:
    assert reference([LOW] * 4, 256, world_size=4, micro=8, upper=300)[0] == [256, 288, 320, 288, 320]


def run(section: SimiGrad, batch_size: int, cosines: list[float]) -> list[int]:
    """Batch sizes after each step of a run whose measurements are `cosines`."""
    window: tuple[Dots, ...] = ()
    batches = [batch_size]
    for step, phi in enumerate(cosines, start=1):
        # The released code hands fp32 cosines to its rule.
        dots = (float(np.float32(phi)), 1.0, 1.0) if section.measures_at(step) else None
        batch_size, window = section.decide(step, batch_size, window, dots)
        json.dumps(window, allow_nan=False)
        batches.append(batch_size)
    return batches


def test_reference_mode_of_the_section_follows_both_releases() -> None:
    wide = {"target": 0.5, "min_batch_size": 2, "max_batch_size": 4096, "mode": "reference"}
    assert run(SimiGrad(**wide), 128, [LOW] * 12) == GROW
    assert run(SimiGrad(**wide), 128, [HIGH] * 12) == SHRINK
    assert run(SimiGrad(**wide, quantum=32), 128, [LOW] * 4) == [128, 160, 192, 224, 256]
    assert run(SimiGrad(**(wide | {"max_batch_size": 300}), quantum=32), 256, [LOW] * 4) == [256, 288, 320, 288, 320]
    cosines = [0.1, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9, math.nan, 0.1, 0.9]
    assert run(SimiGrad(**wide), 128, cosines) == [128, 140, 126, 113, 124, 111, 99, 89, 89, 97, 87]
    smoothed = run(SimiGrad(**wide, window=20), 128, cosines)
    assert smoothed == [128, 140, 154, 138, 151, 135, 121, 108, 108, 97, 87]


def test_reference_interval_acts_on_the_value_read_at_its_beginning() -> None:
    section = SimiGrad(target=0.5, min_batch_size=2, max_batch_size=4096, mode="reference", interval=3)
    assert [step for step in range(1, 10) if section.measures_at(step)] == [1, 4, 7]
    batches = run(section, 100, [LOW, HIGH, HIGH, HIGH, LOW, LOW, LOW, HIGH, HIGH])
    assert batches == [100, 100, 100, 110, 110, 110, 99, 99, 99, 108]


def test_default_bounds_are_rounded_to_the_quantum_and_never_exceeded() -> None:
    section = SimiGrad(target=0.5, min_batch_size=50, max_batch_size=300, quantum=32)
    assert (section.lowest, section.highest) == (64, 288)
    up = run(section, 256, [LOW] * 6)
    down = run(section, 128, [HIGH] * 6)
    assert up == [256, 288, 288, 288, 288, 288, 288]
    assert down == [128, 96, 64, 64, 64, 64, 64]


def test_default_shrinks_to_two_sequences_and_grows_again() -> None:
    section = SimiGrad(target=0.5, min_batch_size=2, max_batch_size=1000)
    down = run(section, 40, [HIGH] * 30)
    assert down[-1] == 2
    assert sorted(down, reverse=True) == down
    assert run(section, 2, [LOW] * 3) == [2, 3, 4, 5]


@pytest.mark.parametrize("quantum", [1, 2, 7, 32])
def test_default_moves_by_a_tenth_or_by_one_quantum(quantum: int) -> None:
    section = SimiGrad(target=0.5, min_batch_size=2, max_batch_size=100_000, quantum=quantum)
    for batch_size in range(section.lowest + quantum, 3000, quantum):
        grown, shrunk = section.next_batch_size(batch_size, LOW), section.next_batch_size(batch_size, HIGH)
        assert grown % quantum == shrunk % quantum == 0
        assert batch_size < grown <= max(1.1 * batch_size + 1e-9, batch_size + quantum)
        assert batch_size > shrunk >= min(0.9 * batch_size - 1e-9, batch_size - quantum)
        assert section.next_batch_size(batch_size, 0.5) == section.next_batch_size(batch_size, None) == batch_size


def test_default_leaves_out_measurements_that_are_not_finite_or_zero() -> None:
    section = SimiGrad(target=0.5, min_batch_size=2, max_batch_size=1000, window=2)
    batch_size, window = section.decide(1, 100, (), (math.nan, 1.0, 1.0))
    assert (batch_size, window) == (100, ())
    batch_size, window = section.decide(2, 100, window, (0.0, 0.0, 1.0))
    assert (batch_size, window) == (100, ())
    batch_size, window = section.decide(3, 100, window, (0.2, 1.0, 1.0))
    assert (batch_size, window) == (100, ((0.2, 1.0, 1.0),))
    assert section.decide(4, 100, window, (0.9, 1.0, 1.0)) == (90, ())


def test_default_window_decides_on_the_mean_of_the_products_and_clears() -> None:
    section = SimiGrad(target=0.5, min_batch_size=2, max_batch_size=1000, interval=2, window=2)
    assert [step for step in range(1, 9) if section.measures_at(step)] == [2, 4, 6, 8]
    # Mean of the cosines 0.55, of the products 0.2: one large noisy gradient counts as large.
    batch_size, window = section.decide(2, 100, (), (1.0, 1.0, 1.0))
    batch_size, window = section.decide(4, batch_size, window, (10.0, 100.0, 100.0))
    assert (batch_size, window) == (110, ())
    assert run(section, 100, [HIGH] * 8) == [100, 100, 100, 100, 90, 90, 90, 90, 81]


def closed_loop(section: SimiGrad, noise: float, steps: int, batch_size: int, seed: int = 0) -> list[int]:
    """Batch sizes when phi is what a gradient with noise scale `noise` would show, plus measurement noise."""
    generator = np.random.default_rng(seed)
    window: tuple[Dots, ...] = ()
    batches = []
    for step in range(1, steps + 1):
        n = batch_size / 2
        phi = float(np.clip(generator.normal(1 / (1 + noise / n), 0.02), -0.99, 0.99))
        square = 1 + noise / n
        dots = (phi * square, square, square) if section.measures_at(step) else None
        batch_size, window = section.decide(step, batch_size, window, dots)
        batches.append(batch_size)
    return batches


@pytest.mark.parametrize(("target", "window"), [(0.5, 1), (0.5, 5), (0.8, 1), (0.8, 5), (1 / 3, 5)])
def test_the_loop_rests_where_the_noise_scale_says(target: float, window: int) -> None:
    section = SimiGrad(target=target, min_batch_size=2, max_batch_size=10**6, window=window)
    rest = 2 * target / (1 - target) * 1000
    batches = closed_loop(section, noise=1000.0, steps=1500, batch_size=64)[700:]
    assert np.mean(batches) == pytest.approx(rest, rel=0.12)
    assert min(batches) > 0.6 * rest
    assert max(batches) < 1.5 * rest


def test_smoothing_as_released_drives_the_loop_into_a_cycle() -> None:
    """Why the default clears its window: a sliding mean acted on at every step swings the batch several-fold."""
    wide = {"target": 0.5, "min_batch_size": 2, "max_batch_size": 10**6}
    released = closed_loop(SimiGrad(**wide, window=20, mode="reference"), noise=1000.0, steps=1500, batch_size=2000)[
        700:
    ]
    mended = closed_loop(SimiGrad(**wide, window=20), noise=1000.0, steps=1500, batch_size=2000)[700:]
    assert max(released) / min(released) > 4
    assert max(mended) / min(mended) < 1.6


def test_lr_factor_is_of_the_batch_relative_to_the_recipes() -> None:
    section = SimiGrad(target=0.5, min_batch_size=2, max_batch_size=1000)
    assert [section.lr_factor(batch, 128) for batch in GROW[:4]] == pytest.approx(
        [1, 1.045825, 1.096871, 1.149049], abs=1e-6
    )
    assert section.lr_factor(GROW[-1], 128) == pytest.approx(1.747766, abs=1e-6)
    assert section.lr_factor(32, 128) == 0.5
    assert SimiGrad(target=0.5, min_batch_size=2, max_batch_size=9, lr_scaling="linear").lr_factor(384, 128) == 3
    assert SimiGrad(target=0.5, min_batch_size=2, max_batch_size=9, lr_scaling="none").lr_factor(384, 128) == 1
    # 1 + 0.5 (sqrt 4 - 1) and 1 + 0.25 (3 - 1)
    assert SimiGrad(target=0.5, min_batch_size=2, max_batch_size=9, lr_adjust_factor=0.5).lr_factor(512, 128) == 1.5
    linear = SimiGrad(target=0.5, min_batch_size=2, max_batch_size=9, lr_scaling="linear", lr_adjust_factor=0.25)
    assert linear.lr_factor(384, 128) == 1.5
    assert [round(6e-4 * section.lr_factor(batch, 128), 4) for batch in (65_536, 79_872, 262_144)] == [
        0.0136,
        0.0150,
        0.0272,
    ]


def test_accumulation_is_even() -> None:
    one_by_one = recipe(SimiGrad(target=0.5, min_batch_size=2, max_batch_size=9), micro_batch_tokens=16)
    assert [accumulation_steps(one_by_one, sequences, 16) for sequences in (1, 2, 3, 4, 5)] == [2, 2, 4, 4, 6]
    assert [accumulation_steps(one_by_one, 7, 16, ranks) for ranks in (1, 2, 3, 4)] == [8, 8, 12, 8]


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ({"target": 1.0, "min_batch_size": 2, "max_batch_size": 8}, "target"),
        ({"target": 0.5, "min_batch_size": 1, "max_batch_size": 8}, "min_batch_size"),
        ({"target": 0.5, "min_batch_size": 9, "max_batch_size": 8}, "above max_batch_size 8"),
        ({"target": 0.5, "min_batch_size": 9, "max_batch_size": 15, "quantum": 8}, "no multiple of quantum 8"),
        ({"target": 0.5, "min_batch_size": 2, "max_batch_size": 8, "interval": 0}, "interval"),
        ({"target": 0.5, "min_batch_size": 2, "max_batch_size": 8, "smooth_factor": 0.5}, "smooth_factor"),
    ],
)
def test_a_section_that_breaks_its_rules_is_refused(section: dict[str, float], names: str) -> None:
    with pytest.raises(ValidationError, match=names):
        SimiGrad(**section)


def test_similarity_is_undefined_without_two_finite_gradients() -> None:
    assert similarity((1.0, 4.0, 1.0)) == 0.5
    for dots in [(0.0, 0.0, 1.0), (0.0, 0.0, 0.0), (math.nan, 1.0, 1.0), (1.0, math.inf, 1.0)]:
        assert similarity(dots) is None
    # Gradients as small as 1e-30 still have a direction; PyTorch's cosine_similarity would give 1e-5 at 3e-11.
    assert similarity((1e-60, 1e-60, 1e-60)) == pytest.approx(1.0)


def test_noise_scale_inverts_the_relation_of_phi_and_batch_size() -> None:
    # B* / B_s for targets, rounded as printed.
    for target, ratio in [(0.01, 0.0202), (0.1, 0.2222), (0.3, 0.857), (0.5, 2), (0.6, 3), (0.75, 6), (0.8, 8), (0.9, 18), (0.95, 38)]:  # fmt: skip
        assert 2 * target / (1 - target) == pytest.approx(ratio, abs=5e-4)
        assert noise_scale((target, 1.0, 1.0), 100, 100) == pytest.approx(200 / (2 * target / (1 - target)))
    assert noise_scale((-0.1, 1.0, 1.0), 4, 4) is None
    assert noise_scale((math.nan, 1.0, 1.0), 4, 4) is None


@pytest.mark.parametrize(("n_a", "n_b"), [(4, 4), (16, 16), (64, 64), (256, 256), (32, 96), (32, 64)])
def test_phi_and_noise_scale_of_a_synthetic_model(n_a: int, n_b: int) -> None:
    """Gradients G + noise with tr(Sigma) / |G|^2 = 64, 2000 dimensions."""
    generator = np.random.default_rng(1)
    mean = generator.normal(size=2000)
    mean /= np.linalg.norm(mean)
    sigma = math.sqrt(64 / 2000)
    measured: list[Dots] = []
    for _ in range(400):
        a = mean + sigma / math.sqrt(n_a) * generator.normal(size=2000)
        b = mean + sigma / math.sqrt(n_b) * generator.normal(size=2000)
        measured.append((float(a @ b), float(a @ a), float(b @ b)))
    dots = mean_dots(measured)
    predicted = 1 / math.sqrt((1 + 64 / n_a) * (1 + 64 / n_b))
    assert similarity(dots) == pytest.approx(predicted, rel=0.05)
    assert noise_scale(dots, n_a, n_b) == pytest.approx(64, rel=0.06)
    if n_a == n_b:
        a_dot_b, a_square, b_square = dots
        closed_form = n_a / 2 * (a_square + b_square - 2 * a_dot_b) / a_dot_b
        assert noise_scale(dots, n_a, n_b) == pytest.approx(closed_form, rel=1e-12)


@pytest.mark.parametrize(("n_a", "n_b"), [(4, 4), (5, 4)])
def test_half_dots_are_those_of_the_mean_gradients(n_a: int, n_b: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(300, 700), (700,), (1,), (3, 5)]
    common = [torch.randn(shape, generator=generator) for shape in shapes]
    # Sums of the two halves' losses over one constant: the shares of the mean gradients.
    a = [n_a / (n_a + n_b) * (c + torch.randn(c.shape, generator=generator)) for c in common]
    b = [n_b / (n_a + n_b) * (c + torch.randn(c.shape, generator=generator)) for c in common]
    flat_a = torch.cat([t.flatten() for t in a]).double() * (n_a + n_b) / n_a
    flat_b = torch.cat([t.flatten() for t in b]).double() * (n_a + n_b) / n_b
    dots = half_dots(a, b, n_a, n_b).tolist()
    assert dots == pytest.approx([float(flat_a @ flat_b), float(flat_a @ flat_a), float(flat_b @ flat_b)], rel=1e-5)
    cosine = torch.nn.functional.cosine_similarity(flat_a, flat_b, dim=0).item()
    assert similarity(tuple(dots)) == pytest.approx(cosine, rel=1e-5)


def test_batch_sizes_of_all_short_measurement_histories_stay_legal() -> None:
    section = SimiGrad(target=0.5, min_batch_size=6, max_batch_size=21, quantum=4)
    for cosines in itertools.product((LOW, 0.5, HIGH, math.nan), repeat=5):
        batches = run(section, 12, list(cosines))
        assert all(8 <= batch <= 20 and batch % 4 == 0 for batch in batches)


CPU = torch.device("cpu")
BATCH = {"target": 0.5, "min_batch_size": 2, "max_batch_size": 64}


def recipe(simigrad: SimiGrad | None, **train: int) -> Recipe:
    return Recipe(
        model=Model(n_layer=2, n_head=2, n_embd=32, seq_len=16),
        optim=Optim(lr=1e-2, warmup_steps=2),
        train=Train(**({"tokens": 8 * 16 * 40, "batch_size": 8, "micro_batch_tokens": 32, "dtype": "fp32"} | train)),
        seed=11,
        simigrad=simigrad,
    )


def random_batch(plan: StepPlan) -> Batch:
    generator = torch.Generator().manual_seed(plan.step)
    ids = torch.randint(64, (plan.batch_size, plan.seq_len + 1), generator=generator)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def step_gradient(recipe: Recipe, progress: Progress = Progress()) -> tuple[GPT, Dots | None, float]:
    """The model with a step's gradient in it, the step's dots and loss."""
    plan = plan_step(recipe, progress)
    model = build_model(recipe, 64, CPU)
    gradient = build_forward_backward(recipe, model, CPU)(random_batch(plan), plan)
    return model, gradient.simigrad_dots, gradient.scalars["loss"].item()


@pytest.mark.parametrize("batch_size", [2, 3, 5, 7, 8, 10])
def test_gradient_is_the_same_with_simigrad_on_or_off(batch_size: int) -> None:
    plain, none, plain_loss = step_gradient(recipe(None, batch_size=batch_size))
    halved, dots, halved_loss = step_gradient(recipe(SimiGrad(**BATCH), batch_size=batch_size))
    assert none is None
    assert dots is not None
    assert halved_loss == pytest.approx(plain_loss, rel=1e-6)
    theirs = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    ours = torch.cat([parameter.grad.flatten() for parameter in halved.parameters()])
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("batch_size", [3, 7, 8])
def test_dots_are_those_of_the_even_and_the_odd_micro_batches(batch_size: int) -> None:
    whole = recipe(SimiGrad(**BATCH), batch_size=batch_size)
    plan = plan_step(whole, Progress())
    batch = random_batch(plan)
    _, dots, _ = step_gradient(whole)
    model = build_model(whole, 64, CPU)
    halves = []
    for half in (0, 1):
        tokens = torch.cat(batch.tokens.tensor_split(plan.accumulation_steps)[half::2])
        targets = torch.cat(batch.targets.tensor_split(plan.accumulation_steps)[half::2])
        model.zero_grad()
        (model.loss_sum(tokens, targets) / targets.numel()).backward()
        halves.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double())
    a, b = halves
    expected = [float(a @ b), float(a @ a), float(b @ b)]
    assert dots == pytest.approx(expected, rel=1e-5, abs=1e-6 * expected[1])  # <A,B> cancels to a small difference


def test_a_fixed_batch_trains_as_the_baseline_does() -> None:
    """min = max: up to the order in which the micro-batches are summed, the plans, the learning rate and the updates
    agree."""
    fixed = recipe(SimiGrad(target=0.5, min_batch_size=8, max_batch_size=8))
    baseline = recipe(None)
    assert [plan._replace(measure_similarity=False) for plan, _ in plan_run(fixed)] == [
        plan for plan, _ in plan_run(baseline)
    ]
    progress = Progress()
    for _ in range(6):
        _, dots, _ = step_gradient(fixed, progress)
        plan = plan_step(fixed, progress)
        progress = after_step(fixed, progress, plan, StepResult(tokens=128, flops=0.0, simigrad_dots=dots))
        assert plan.batch_size == progress.batch_size == 8


def measured(phi: float) -> StepResult:
    return StepResult(tokens=1, flops=0.0, simigrad_dots=(phi, 1.0, 1.0))


def test_plan_follows_the_batch_size_in_progress() -> None:
    growing = recipe(SimiGrad(**BATCH))
    assert plan_step(growing, Progress()).batch_size == 8
    plan = plan_step(growing, Progress(batch_size=18, step=5, schedule_step=5))
    assert plan.batch_size == 18
    assert plan.accumulation_steps == 10  # 18 sequences of 16 tokens need 9 micro-batches of 32
    baseline = plan_step(recipe(None, batch_size=18), Progress(step=5, schedule_step=5))
    assert plan.lr == pytest.approx(baseline.lr * 1.5)  # sqrt(18 / 8)
    progress, batches = Progress(), []
    for phi in (LOW, LOW, HIGH, math.nan, LOW):
        plan = plan_step(growing, progress)
        batches.append(plan.batch_size)
        progress = after_step(growing, progress, plan, measured(phi))
    assert [*batches, progress.batch_size] == [8, 9, 10, 9, 9, 10]
    assert progress.sequences == sum(batches)


def test_steps_between_measurements_do_not_measure() -> None:
    rare = recipe(SimiGrad(**BATCH, interval=3))
    for step, measures in enumerate([False, False, True, False, False, True], start=1):
        _, dots, _ = step_gradient(rare, Progress(step=step - 1))
        assert (dots is not None) == measures


def test_a_plan_of_the_run_keeps_the_batch_and_its_window() -> None:
    for mode in ("default", "reference"):
        section = SimiGrad(**BATCH, mode=mode)
        started = Progress(batch_size=16, simigrad_window=((0.1, 1.0, 1.0),) if mode == "reference" else ())
        assert {plan.batch_size for plan, _ in plan_run(recipe(section), started)} == {16}


def test_columns_of_a_step() -> None:
    section = recipe(SimiGrad(**BATCH, interval=2))
    plan = plan_step(section, Progress(batch_size=16))
    columns = method_columns(section, plan, measured(0.25))
    assert columns == {
        "simigrad_similarity": 0.25,
        **dict(
            zip(
                ("simigrad_a_dot_b", "simigrad_a_square", "simigrad_b_square"),
                measured(0.25).simigrad_dots,
                strict=True,
            )
        ),
        "simigrad_noise_scale": pytest.approx(24),  # 16 / 2 * (1 / 0.25 - 1)
        "simigrad_batch_target": pytest.approx(48),  # 2 * 0.5 / (1 - 0.5) * 24
        "simigrad_lr_factor": pytest.approx(math.sqrt(2)),
    }
    columns = method_columns(section, plan, StepResult(tokens=1, flops=0.0))
    assert [columns[f"simigrad_{name}"] for name in ("similarity", "noise_scale", "batch_target")] == [None] * 3
    json.dumps(method_columns(section, plan, measured(math.nan)), allow_nan=False)
    assert method_columns(section, plan, measured(math.nan))["simigrad_a_dot_b"] is None


def test_the_logged_products_average_without_bias_and_the_ratios_do_not() -> None:
    """Gradients of 16 sequences, noise scale 64 by construction: |G|^2 = 1, tr(Sigma) = 64 over 40 dimensions."""
    draw = np.random.default_rng(22)
    mean = np.zeros(40)
    mean[0] = 1.0
    measurements = []
    for _ in range(4000):
        a, b = (mean + draw.normal(0, math.sqrt(64 / 40 / 8), 40) for _ in range(2))
        measurements.append((float(a @ b), float(a @ a), float(b @ b)))
    assert noise_scale(mean_dots(measurements), 8, 8) == pytest.approx(64, rel=0.15)
    ratios = [ratio for dots in measurements if (ratio := noise_scale(dots, 8, 8)) is not None]
    assert sum(ratios) / len(ratios) > 1.5 * 64


@pytest.mark.parametrize(
    ("section", "batch_size", "rule"),
    [
        ({"quantum": 4}, 10, "multiple of simigrad.quantum = 4"),
        ({"quantum": 4, "max_batch_size": 15}, 16, "within SimiGrad's bounds, 4 to 12"),
        ({"min_batch_size": 20}, 8, "within SimiGrad's bounds, 20 to 64"),
    ],
)
def test_the_recipes_batch_must_be_one_that_simigrad_can_hold(
    section: dict[str, int], batch_size: int, rule: str
) -> None:
    with pytest.raises(ValidationError, match=rule):
        recipe(SimiGrad(**(BATCH | section)), batch_size=batch_size)


def test_batch_size_warmup_and_simigrad_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="both decide the batch size"):
        replace(recipe(SimiGrad(**BATCH)), batch_size_warmup=BatchSizeWarmup(start=2, increment=2, sequences=40))


def test_unwise_settings_are_named() -> None:
    def warned(changed: Recipe) -> str:
        return " ".join(warnings_of(changed))

    calm = recipe(SimiGrad(**BATCH))
    assert warned(calm) == ""
    assert "8.0 times" in warned(recipe(SimiGrad(**(BATCH | {"max_batch_size": 512}))))
    assert "8.0 times" in warned(recipe(SimiGrad(**BATCH, lr_scaling="linear")))
    assert "makes the batch swing" in warned(recipe(SimiGrad(**BATCH, mode="reference", window=20)))
    assert "decay by tokens" in warned(replace(calm, optim=Optim(lr=1e-2, decay_steps=30)))
    assert "run each alone" in warned(replace(calm, seq_len_warmup=SeqLenWarmup(steps=5, start=8)))


def test_memory_is_planned_for_the_largest_micro_batch_that_may_come() -> None:
    assert summarize_plan(recipe(SimiGrad(**BATCH), micro_batch_tokens=160)).largest_micro_batch == (10, 16)
    assert summarize_plan(recipe(SimiGrad(**BATCH), micro_batch_tokens=16_000)).largest_micro_batch == (32, 16)


@pytest.mark.parametrize("mode", ["default", "reference"])
def test_resume_is_exact_in_the_middle_of_changes_of_the_batch(mode: str) -> None:
    section = SimiGrad(target=0.4, min_batch_size=4, max_batch_size=20, interval=2, window=2, mode=mode)
    adapting = recipe(section, tokens=8 * 16 * 14)
    rows = assert_resumes_exactly_at_every_step(adapting)
    assert_tokens_are_those_of_the_data(rows, adapting)
    batches = [row["batch_size"] for row in rows[1:]]
    assert len(set(batches)) > 2
    assert [row["simigrad_similarity"] is not None for row in rows[1:5]] == (
        [False, True, False, True] if mode == "default" else [True, False, True, False]
    )
    for before, row in itertools.pairwise(rows[1:]):
        assert row["sequences"] == before["sequences"] + row["batch_size"]
        assert row["simigrad_lr_factor"] == math.sqrt(row["batch_size"] / 8)


def test_growth_clears_the_window_and_keeps_the_batch() -> None:
    grows = load_recipe("small-staged-depth", ("simigrad={target=0.2, min_batch_size=8, max_batch_size=64, window=2}",))
    grown = after_growth(grows, Progress(step=5, batch_size=18, simigrad_window=((0.1, 1.0, 1.0),)))
    assert (grown.batch_size, grown.simigrad_window) == (18, ())


def test_the_reference_mode_stays_within_the_bounds_that_it_states() -> None:
    """Every batch that the released rule reaches, from every start, and both bounds are reached."""
    for lower, upper, quantum in [(2, 30, 4), (10, 30, 4), (10, 32, 8), (3, 17, 1), (6, 22, 5)]:
        section = SimiGrad(target=0.5, min_batch_size=lower, max_batch_size=upper, quantum=quantum, mode="reference")
        lowest, highest = section.batch_bounds(0)
        reached, fresh = set(), set(range(section.lowest, section.highest + 1, quantum))
        while fresh:
            reached |= fresh
            fresh = {section.next_batch_size(batch, phi) for batch in fresh for phi in (0.1, 0.9)} - reached
        assert lowest <= min(reached) and max(reached) == highest, (lower, upper, quantum, sorted(reached))
