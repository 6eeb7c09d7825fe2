"""SimiGrad: the rule for the batch size, the similarity, and the noise scale."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from efftrain_cli.methods.simigrad import (
    Dots,
    SimiGrad,
    mean_dots,
    noise_scale,
    similarity,
)
from tests.methods.cases import check_messages

LOW, HIGH = 0.1, 0.9
# Batch sizes of the released code, its functions unmodified, under cosines below the target.
GROW = [128, 140, 154, 169, 185, 203, 223, 245, 269, 295, 324, 356, 391]


def adapting(**keys: Any) -> SimiGrad:
    return SimiGrad(**{"target": 0.5, "min_batch_size": 2, "max_batch_size": 1000, **keys})


def run(section: SimiGrad, batch_size: int, cosines: list[float]) -> list[int]:
    """Batch sizes after each step of a run whose measurements are `cosines`."""
    window: tuple[Dots, ...] = ()
    batches = [batch_size]
    for step, phi in enumerate(cosines, start=1):
        dots = (phi, 1.0, 1.0) if section.measures_at(step) else None
        batch_size, window = section.decide(batch_size, window, dots)
        json.dumps(window, allow_nan=False)
        batches.append(batch_size)
    return batches


def test_a_batch_grows_as_in_the_released_code():
    assert run(adapting(), 128, [LOW] * 12) == GROW


def test_bounds_are_rounded_to_the_quantum_and_never_exceeded():
    section = adapting(min_batch_size=50, max_batch_size=300, quantum=32)
    assert run(section, 256, [LOW] * 3) == [256, 288, 288, 288]
    assert run(section, 128, [HIGH] * 4) == [128, 96, 64, 64, 64]
    # To two sequences, and up again.
    assert run(adapting(), 5, [HIGH] * 4) == [5, 4, 3, 2, 2]
    assert run(adapting(), 2, [LOW] * 3) == [2, 3, 4, 5]


@pytest.mark.parametrize("quantum", [1, 7])
def test_it_moves_by_a_tenth_or_by_one_quantum(quantum):
    section = adapting(max_batch_size=100_000, quantum=quantum)
    for batch_size in range(section.lowest + quantum, 3000, quantum):
        grown = section.next_batch_size(batch_size, LOW)
        shrunk = section.next_batch_size(batch_size, HIGH)
        assert grown % quantum == shrunk % quantum == 0
        assert batch_size < grown <= max(1.1 * batch_size + 1e-9, batch_size + quantum)
        assert batch_size > shrunk >= min(0.9 * batch_size - 1e-9, batch_size - quantum)
    assert section.next_batch_size(98, 0.5) == section.next_batch_size(98, None) == 98


def test_it_leaves_out_measurements_that_are_not_finite_or_zero():
    section = adapting(window=2)
    assert section.decide(100, (), (math.nan, 1.0, 1.0)) == (100, ())
    assert section.decide(100, (), (0.0, 0.0, 1.0)) == (100, ())
    assert section.decide(100, (), (0.2, 1.0, 1.0)) == (100, ((0.2, 1.0, 1.0),))
    assert section.decide(100, ((0.2, 1.0, 1.0),), (0.9, 1.0, 1.0)) == (90, ())


def test_a_window_decides_on_the_mean_of_the_products_and_clears():
    section = adapting(interval=2, window=2)
    # Mean of the cosines 0.55, of the products 0.2: one large noisy gradient counts as large.
    batch_size, window = section.decide(100, (), (1.0, 1.0, 1.0))
    assert section.decide(batch_size, window, (10.0, 100.0, 100.0)) == (110, ())
    assert run(section, 100, [HIGH] * 8) == [100, 100, 100, 100, 90, 90, 90, 90, 81]


@pytest.mark.parametrize("target, window", [(0.5, 1), (1 / 3, 5)])
def test_the_loop_rests_where_the_noise_scale_says(target, window):
    """A gradient with noise scale 1000 has a similarity of 1 / (1 + 1000 / n) over halves of n;
    it is measured with an error of 0.02."""
    section = adapting(target=target, max_batch_size=10**6, window=window)
    error = np.random.default_rng(0).normal(0, 0.02, 1500)
    batch_size = 64
    batches = []
    measured: tuple[Dots, ...] = ()
    for step in range(1500):
        square = 1 + 1000 / (batch_size / 2)
        phi = min(1 / square + error[step], 0.99)
        dots = (phi * square, square, square)
        batch_size, measured = section.decide(batch_size, measured, dots)
        batches.append(batch_size)
    rest = 2 * target / (1 - target) * 1000
    assert np.mean(batches[700:]) == pytest.approx(rest, rel=0.12)
    assert 0.6 * rest < min(batches[700:]) and max(batches[700:]) < 1.5 * rest


def test_lr_factor_is_of_the_batch_relative_to_the_recipes():
    root = [adapting().lr_factor(batch, 128) for batch in (*GROW[:4], GROW[-1], 32)]
    assert root == pytest.approx([1, 1.045825, 1.096871, 1.149049, 1.747766, 0.5], abs=1e-6)
    assert adapting(lr_scaling="linear").lr_factor(384, 128) == 3
    assert adapting(lr_scaling="none").lr_factor(384, 128) == 1
    # 1 + 0.5 (sqrt 4 - 1) and 1 + 0.25 (3 - 1)
    assert adapting(lr_adjust_factor=0.5).lr_factor(512, 128) == 1.5
    linear = adapting(lr_scaling="linear", lr_adjust_factor=0.25)
    assert linear.lr_factor(384, 128) == 1.5


def test_phi_and_noise_scale_of_a_synthetic_model():
    """Gradients G + noise with tr(Sigma) / |G|^2 = 64, 2000 dimensions."""
    n_a, n_b = 32, 96
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


def test_the_noise_scale_of_equal_halves_by_hand():
    """n / 2 (|A|^2 + |B|^2 - 2 <A,B>) / <A,B> = 2 (9 + 7 - 4) / 2."""
    assert noise_scale((2.0, 9.0, 7.0), 4, 4) == pytest.approx(12)


# sqrt(128 / 8) = 4 times the learning rate is not yet worth a warning.
MESSAGES = """
simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 128}
    assumed: SimiGrad decides the batch size from gradients as they come; the plan assumes that it
    stays as it is, at first train.batch_size = 8.

simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 137}
optim.decay_steps=4
seq_len_warmup.steps=2
    assumed: SimiGrad decides the batch size from gradients as they come; the plan assumes that it
    stays as it is, at first train.batch_size = 8.
    warning: optim.decay_steps decays by steps, and SimiGrad makes their number unknown; decay by
    tokens instead (decay_steps = false)
    warning: simigrad.lr_scaling = 'sqrt' can raise the learning rate to 4.1 times the schedule's,
    when the batch reaches max_batch_size = 137; lower that bound, or check that the rate is stable
    warning: simigrad with seq_len_warmup: the similarity rises with the tokens in a sequence, so
    the batch will first grow and then shrink as sequences lengthen; run each alone before combining
    them

simigrad={target = 0.5, min_batch_size = 9, max_batch_size = 16}
    train.batch_size: must lie within SimiGrad's bounds, 9 to 16 sequences: SimiGrad starts from it

simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 7}
    train.batch_size: must lie within SimiGrad's bounds, 2 to 7 sequences: SimiGrad starts from it

simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 16, quantum = 3}
    train.batch_size: must be a multiple of simigrad.quantum = 3: SimiGrad starts from it

simigrad={target = 0.5, min_batch_size = 9, max_batch_size = 8}
    simigrad.min_batch_size: min_batch_size 9 is above max_batch_size 8; swap them, or set both to
    one value for a fixed batch

simigrad={target = 0.5, min_batch_size = 9, max_batch_size = 11, quantum = 4}
    simigrad.quantum: no multiple of quantum 4 lies between min_batch_size 9 and max_batch_size 11;
    choose a smaller quantum or wider bounds
"""


def test_messages_about_a_recipe():
    check_messages(MESSAGES)
