"""Progressive layer dropping: the published schedules, the gates, and what a step with skipped
blocks computes and costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from efftrain_cli.methods.progressive_layer_drop import ProgressiveLayerDrop
from tests.methods.cases import check_messages

# By updates t, as the released schedule class gives it for theta = 0.7 and 1,000 steps.
THETA = {0: 1, 1: 0.97145123, 5: 0.88195920, 10: 0.81036383, 20: 0.74060058, 50: 0.70202138}


def test_theta_follows_the_released_schedule():
    drop = ProgressiveLayerDrop(theta=0.7, steps=1000)
    for t, expected in THETA.items():
        assert drop.theta_at(t + 1) == pytest.approx(expected, abs=5.1e-9)


EQUATION_12 = (
    0.958333, 0.916667, 0.875, 0.833333, 0.791667, 0.75, 0.708333, 0.666667, 0.625, 0.583333,
    0.541667, 0.5,
)  # fmt: skip
SCALES_12 = (
    1.043478, 1.090909, 1.142857, 1.2, 1.263158, 1.333333, 1.411765, 1.5, 1.6, 1.714286, 1.846154,
    2,
)  # fmt: skip


def test_keep_probabilities_and_scales_at_theta_a_half():
    equation = ProgressiveLayerDrop(theta=0.5, steps=0)
    code = ProgressiveLayerDrop(theta=0.5, steps=0, keep="code")
    assert equation.keep_probabilities(1, 12) == pytest.approx(EQUATION_12, abs=1e-6)
    assert code.keep_probabilities(1, 12) == pytest.approx((1, *EQUATION_12[:-1]), abs=1e-6)
    for drop in (equation, code):
        assert drop.branch_scales(1, 12) == pytest.approx(SCALES_12, abs=1e-6)


@pytest.mark.parametrize(
    "n_layer, keep, skipped",
    [
        (6, "equation", 0.2886),
        (12, "equation", 0.2680),
        (12, "code", 0.2268),
    ],
)
def test_share_of_block_compute_skipped_over_a_run(n_layer, keep, skipped):
    drop = ProgressiveLayerDrop(theta=0.5, steps=1000, keep=keep)
    kept = sum(sum(drop.keep_probabilities(step, n_layer)) for step in range(1, 1001))
    assert 1 - kept / (1000 * n_layer) == pytest.approx(skipped, abs=1e-4)
    assert drop.blocks_over(1, 1000, n_layer) == pytest.approx(kept)


def test_gates_are_these_bits():
    drop = ProgressiveLayerDrop(theta=0.5, steps=0)
    keep = drop.keep_probabilities(1, 12)
    draws = [drop.gates(keep, seed=1337, step=1, micro_step=i) for i in range(3)]
    draws.append(drop.gates(keep, seed=1337, step=2, micro_step=0))
    bits = ["".join("01"[gate] for gate in gates) for gates in draws]
    assert bits == ["101111100100", "111111011110", "111111101010", "101011111011"]


def test_granularity_and_pairs_decide_which_micro_batches_share_gates():
    by_micro_step = ProgressiveLayerDrop(theta=0.5, steps=0)
    keep = by_micro_step.keep_probabilities(1, 12)

    def gates(drop: ProgressiveLayerDrop, paired: bool) -> list[tuple[bool, ...]]:
        return [drop.gates(keep, seed=1, step=5, micro_step=i, paired=paired) for i in range(4)]

    alone = gates(by_micro_step, paired=False)
    assert len(set(alone)) == 4
    assert gates(by_micro_step, paired=True) == [alone[0], alone[0], alone[1], alone[1]]
    by_step = replace(by_micro_step, granularity="step")
    assert gates(by_step, paired=False) == [alone[0]] * 4


# theta is 0.5 exp(-0.1 x 4) + 0.5 in the last of 5 steps.
MESSAGES = """
progressive_layer_drop.steps=10
    assumed: Layer dropping draws blocks at random; FLOPs are planned at their expectation.

progressive_layer_drop={steps = 1000, theta = 1.0}
    assumed: Layer dropping draws blocks at random; FLOPs are planned at their expectation.

progressive_layer_drop.steps=1000
    assumed: Layer dropping draws blocks at random; FLOPs are planned at their expectation.
    warning: progressive_layer_drop.steps = 1000 sets the pace for a run of that many steps, and
    this run has 5: theta only comes down to 0.84, and fewer blocks are skipped than meant; set it
    to the steps of the run
"""


def test_messages_about_a_recipe():
    check_messages(MESSAGES)
