"""Costs to reach a loss, their blanks and bounds, and the ladder."""

from __future__ import annotations

import math

import numpy as np
import pytest

from efftrain_cli.compare.comparison import compare
from efftrain_cli.compare.curves import cost_to_reach, isotonic_fit, log_saving, smooth_end
from efftrain_cli.compare.measures import end_of_decay
from efftrain_cli.compare.show import bound_text
from efftrain_cli.run.reading import computed_values
from tests.compare.known_runs import row_of
from tests.compare.runs import make_arm, make_run

FALL = [6.0 - 0.2 * step for step in range(11)]
"""From 6 to 4 over 1,000 tokens."""


def test_a_rise_becomes_one_knot_at_its_mean():
    costs = np.array([0.0, 1.0, 2.0, 3.0])
    centres, losses = isotonic_fit(costs, np.array([5.0, 4.0, 4.2, 3.0]))
    assert list(centres) == [0.0, 1.5, 3.0] and list(losses) == pytest.approx([5.0, 4.1, 3.0])


def test_costs_are_read_between_evaluations():
    run = make_run("a", 0, FALL)
    assert cost_to_reach(run, "tokens", 5.0) == pytest.approx(500.0)
    assert cost_to_reach(run, "flops", 5.1) == pytest.approx(2700.0)
    assert math.isnan(cost_to_reach(run, "tokens", 3.9)), "never reached"


def test_the_end_is_a_line_through_the_last_fifth():
    """Of 15 evaluations the last three: 4.0, 4.4, 4.2 lie about a line that ends at 4.3."""
    run = make_run("a", 0, [6.0] * 12 + [4.0, 4.4, 4.2])
    assert smooth_end(run) == pytest.approx(4.3)
    assert smooth_end(make_run("a", 0, FALL)) == pytest.approx(4.0), "ten: the last loss"


def test_a_saving_is_the_ratio_of_costs_to_the_worse_end():
    """The arm comes to the baseline's 4.0 after 500 of its tokens, or the other way round."""
    slow = make_run("base", 0, FALL)
    fast = make_run("arm", 0, [6.0 - 0.4 * step for step in range(11)])
    assert log_saving(slow, fast, "tokens") == pytest.approx(math.log(2))
    assert log_saving(fast, slow, "tokens") == pytest.approx(-math.log(2))
    stuck = make_run("base", 0, [6.0] * 11)
    assert math.isnan(log_saving(stuck, fast, "tokens")), "both reach 6 at no cost"


def pairs(target=None, measure="tokens_to_match", **of_arm):
    runs = []
    for seed in range(3):
        runs.append(make_run("base", seed, FALL))
        fall = [6.0 - (0.25 + seed / 100) * step for step in range(11)]
        runs.append(make_run("arm", seed, fall, **of_arm))
    return row_of(compare(runs, baseline="base", target=target), measure, "arm")


def test_a_ratio_under_a_decay_is_shown_as_a_bound():
    """Ratios 1.25, 1.3 and 1.35."""
    row = pairs()
    logs = np.log([1.25, 1.3, 1.35])
    half = 4.302652729911275 * logs.std(ddof=1) / math.sqrt(3)
    assert row.estimate == pytest.approx(math.exp(logs.mean()))
    assert (row.low, row.high) == pytest.approx(np.exp([logs.mean() - half, logs.mean() + half]))
    assert bound_text(row) == f"at least {row.low:.3g}x" and row.verdict == ""
    assert math.isnan(row.p), "only claims are tested"
    reach = pairs(5.0, "tokens_to_target")
    assert (reach.title, reach.baseline) == ("tokens to 5", 500)
    assert (reach.low, reach.high) == pytest.approx((row.low, row.high))


@pytest.mark.parametrize(
    ("of_arm", "why"),
    [
        ({"optim.schedule": "linear"}, "learning rates decay in different ways"),
        ({"optim.schedule": "wsd"}, "the learning rate decays at the end alone"),
        ({"optim.decay_tokens": 500}, "learning rates decay in different ways"),
        ({"tokens": 1100.0}, "schedules of different lengths"),
        ({"eval.every": 7}, "evaluated at different steps"),
    ],
)
def test_costs_are_blank_where_schedules_differ(of_arm, why):
    row = pairs(**of_arm)
    assert math.isnan(row.estimate) and row.why == why and bound_text(row) == ""


def test_a_decay_that_is_written_out_is_the_default():
    """It ends with the budget of 1,000 tokens whether or not a recipe says so."""
    assert pairs(**{"optim.decay_tokens": 1000}).estimate == pytest.approx(pairs().estimate)
    run = make_run("arm", 0, FALL, **{"optim.decay_tokens": 12_345_678})
    assert end_of_decay(run) == "12345678 tokens", "all digits"
    optim = {"schedule": "wsd", "decay_share": 0.2}
    written = computed_values({"seed": 1, "optim": {**optim, "decay_shape": "linear"}})
    assert written == computed_values({"optim": optim})


@pytest.mark.parametrize(("evaluations", "why"), [(5, "fewer than 6 evaluations"), (6, "")])
def test_fewer_than_six_evaluations_show_no_cost(evaluations, why):
    base = make_arm("base", [4.0, 4.1])
    fall = np.linspace(6.0, 3.9, evaluations)
    runs = [*base, *(make_run("arm", seed, fall) for seed in range(2))]
    row = row_of(compare(runs, baseline="base"), "tokens_to_match", "arm")
    assert row.why == why
