"""The growth planner: planted switch points in made curves, and the authors' six real curves."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.grow.planner import (
    PAPER_OPTIMALITY,
    Curve,
    equal_marginal_cost,
    fitted_projection,
    fitted_switch,
    make_curve,
    marginal_projection,
    project,
    read_curve,
    released_projection,
    released_switch,
    saving_interval,
    target_step,
)
from efftrain_cli.grow.scaling_law import KAPLAN

# --- made curves ---


def law_curve(size: float, steps: np.ndarray, noise: float = 0.0, seed: int = 0) -> Curve:
    generator = np.random.Generator(np.random.Philox(seed))
    losses = {s: KAPLAN.loss(size, s) * math.exp(noise * generator.standard_normal()) for s in steps.tolist()}
    return make_curve(f"{size:.0f}", losses, 6 * size, 6 * size)


def test_equal_marginal_cost_finds_the_laws_own_switch():
    steps = np.arange(50, 40_000, 50.0)
    small, large = law_curve(1e8, steps), law_curve(2e8, steps)
    step = equal_marginal_cost(small, large)
    assert step == pytest.approx(KAPLAN.steps(1e8, KAPLAN.switch_loss(1e8, 2)), rel=0.02)
    assert target_step(small, large, step) == pytest.approx(step / KAPLAN.same_loss_steps(2), rel=0.01)


def test_fitted_switch_regresses_on_steps_not_on_rows():
    """A power law has one slope everywhere, also across gaps."""
    steps = np.array([100.0, 150, 200, 1000, 1050, 1100, 5000, 5050, 5100, 9000, 9050])
    curve = make_curve("gaps", {s: 20 * s**-0.06 for s in steps.tolist()}, 1.0, 1.0)
    assert fitted_switch(curve, -0.0601) is not None
    assert fitted_switch(curve, -0.0599) is None


def test_one_outlier_sets_off_the_released_rule_and_not_the_fitted_one():
    steps = np.arange(50, 10_000, 50.0)
    losses = {s: 20 * s**-0.1 * (1 + 10 * math.exp(-s / 100)) for s in steps.tolist()}
    losses[5000.0] *= 1.03
    curve = make_curve("outlier", losses, 1.0, 1.0)
    assert released_switch(curve, -0.0575) == 4850.0  # the next mean of 5 is the first that holds it
    assert fitted_switch(curve, -0.0575) is None


def test_saving_interval_holds_the_saving_without_noise():
    steps = np.arange(50, 15_000, 50.0)
    step, final = 6000.0, 12_000.0
    truth = (KAPLAN.steps(2e8, KAPLAN.loss(1e8, step)) * 2 - step) / (final * 2)
    hits = 0
    for seed in range(10):
        small, large = law_curve(1e8, steps, 0.003, 2 * seed), law_curve(2e8, steps, 0.003, 2 * seed + 1)
        at = target_step(small, large, step)
        low, high = saving_interval(small, large, project("", small, large, step, at, final), draws=100)
        assert low < high < low + 0.1
        hits += low <= truth <= high
    assert hits >= 8


@pytest.mark.parametrize("count", [0, 1, 4])
def test_fewer_than_five_points_are_refused(count, tmp_path):
    path = tmp_path / "short.csv"
    path.write_text("step,val_loss\n" + "".join(f"{50 * i + 50},{5 - 0.1 * i}\n" for i in range(count)))
    with pytest.raises(UsageError, match=f"{count} validation losses are too few"):
        read_curve(path, 1.0, 1.0)


def test_five_points_are_enough(tmp_path):
    path = tmp_path / "five.csv"
    path.write_text("step,val_loss\n" + "".join(f"{50 * 2**i},{5 * 2 ** (-0.05 * i)}\n" for i in range(5)))
    curve = read_curve(path, 1.0, 1.0)
    assert fitted_switch(curve, -0.06) is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "columns step and val_loss"),
        ("step,val_loss\n1,x\n", "not two numbers"),
        ("step,val_loss\n" + "".join(f"{i},-1\n" for i in range(1, 9)), "positive"),
    ],
)
def test_bad_curves(text, message, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_curve(path, 1.0, 1.0)


def test_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_curve(tmp_path / "none.csv", 1.0, 1.0)


# --- the authors' curves ---

SHAPES = {
    "base": (12, 768),
    "large": (24, 1536),
    "base_half_depth": (6, 768),
    "large_half_depth": (12, 1536),
    "base_half_width": (12, 384),
    "large_half_width": (24, 768),
}
THRESHOLDS = {"depth": -0.0575, "width": -0.0475}


@pytest.fixture
def curves(shared_data: Path) -> dict[str, Curve]:
    found = {}
    for name, (layers, width) in SHAPES.items():
        blocks = 12 * layers * width**2
        found[name] = read_curve(shared_data / "staged_curves" / f"{name}.csv", blocks + 50257 * width, blocks)
    return found


def test_the_released_rule_on_the_authors_curves(curves):
    """Four of the six published points follow from the rule. In the other two curves one evaluation far off the line sets it
    off too soon, at step 2999 of base_half_depth and at step 1499 of base_half_width; without that evaluation the rule gives
    the published 2949 and 3799."""
    points = {
        name: released_switch(curve, THRESHOLDS.get(name.rpartition("_")[2], PAPER_OPTIMALITY))
        for name, curve in curves.items()
    }
    assert points == {
        "base": 5099,
        "large": 7749,
        "large_half_depth": 6799,
        "large_half_width": 6299,
        "base_half_depth": 2849,
        "base_half_width": 1349,
    }
    for name, outlier, published in (("base_half_depth", 2999, 2949), ("base_half_width", 1499, 3799)):
        curve = curves[name]
        keep = curve.steps != outlier
        cleaned = make_curve(
            name, dict(zip(curve.steps[keep].tolist(), curve.losses[keep].tolist(), strict=True)), 1.0, 1.0
        )
        assert released_switch(cleaned, THRESHOLDS[name.rpartition("_")[2]]) == published


@pytest.mark.parametrize(
    ("kind", "size", "saving", "with_logits"),
    [("depth", "large", 0.148, 0.104), ("width", "large", 0.255, 0.234)],
)
def test_the_released_savings_and_what_logits_leave_of_them(curves, kind, size, saving, with_logits):
    projection = released_projection(curves[f"{size}_half_{kind}"], curves[size], THRESHOLDS[kind])
    assert projection.saving == pytest.approx(saving, abs=6e-4)
    assert projection.saving_with_logits == pytest.approx(with_logits, abs=6e-4)
    assert projection.target_steps == {"depth": 4549, "width": 3549}[kind]


def test_the_fitted_rule_on_the_authors_curves(curves):
    """Switches later, saves half of it: the published savings owe much to noise."""
    expected = {
        ("depth", "base"): (5949, 1.68, 0.072),
        ("depth", "large"): (9699, 1.66, 0.067),
        ("width", "base"): (6199, 2.34, 0.137),
    }
    for (kind, size), (step, ratio, saving) in expected.items():
        projection = fitted_projection(curves[f"{size}_half_{kind}"], curves[size], THRESHOLDS[kind])
        assert projection.small_steps == step
        assert projection.ratio == pytest.approx(ratio, abs=0.015)
        assert projection.saving == pytest.approx(saving, abs=0.002)
        assert projection.saving_with_logits < projection.saving
    assert fitted_projection(curves["large_half_width"], curves["large"], THRESHOLDS["width"]) is None
    assert fitted_switch(curves["base"], PAPER_OPTIMALITY) == 7999
    assert fitted_switch(curves["large"], PAPER_OPTIMALITY) == 14899


def test_equal_marginal_cost_beats_the_thresholds_on_the_authors_curves(curves):
    for kind, size in (("depth", "base"), ("depth", "large"), ("width", "base"), ("width", "large")):
        small, target = curves[f"{size}_half_{kind}"], curves[size]
        best = marginal_projection(small, target)
        by_slope = fitted_projection(small, target, THRESHOLDS[kind])
        assert best is not None, (kind, size)
        if by_slope is not None:
            assert best.saving >= by_slope.saving - 0.005
