"""Figures of the scaling law that the planner rests on."""

from __future__ import annotations

import math

import pytest

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.grow.planner import PAPER_OPTIMALITY
from efftrain_cli.grow.scaling_law import KAPLAN, cost, plan_schedule, relative_cost


def test_slope_at_the_cheapest_size_is_the_papers_threshold():
    assert KAPLAN.optimal_slope() == pytest.approx(-0.0519870, abs=5e-8)
    assert abs(PAPER_OPTIMALITY - KAPLAN.optimal_slope()) < 1e-4
    # and it is the slope that a cheapest model really has, d log L / d log (6 N B_crit(L) S),
    # whatever its size
    for size in (1e6, 1e9):
        loss = KAPLAN.optimal_loss(size)

        def compute(loss: float, size: float = size) -> float:
            return KAPLAN.critical_batch(loss) * KAPLAN.steps(size, loss)

        up, down = loss * 1.00001, loss * 0.99999
        slope = math.log(up / down) / math.log(compute(up) / compute(down))
        assert slope == pytest.approx(KAPLAN.optimal_slope(), rel=1e-4)
        assert KAPLAN.optimal_size(loss) == pytest.approx(size)


@pytest.mark.parametrize("factor, ratio", [(2, 1.483), (4, 2.198), (8, 3.259)])
def test_ratio_of_steps_where_marginal_costs_are_equal(factor, ratio):
    assert KAPLAN.same_loss_steps(factor) == pytest.approx(ratio, abs=5e-4)
    for size in (1e7, 1e9):
        loss = KAPLAN.switch_loss(size, factor)
        small, large = KAPLAN.steps(size, loss), KAPLAN.steps(factor * size, loss)
        assert small / large == pytest.approx(ratio, abs=5e-4)
        # moving the switch either way costs more
        end = KAPLAN.optimal_loss(factor * size)
        totals = [
            sum(stage.flops for stage in cost(KAPLAN, [(size, at), (factor * size, end)], 1e6))
            for at in (loss * 0.999, loss, loss * 1.001)
        ]
        assert totals[1] == min(totals)


@pytest.mark.parametrize("target", [{"target_size": 85e6}, {"target_loss": 2.69}])
@pytest.mark.parametrize("batch", ["fixed", "varying"])
def test_one_stage_has_nothing_to_search(target, batch, capfd):
    """LAPACK wrote four lines of errors when it was asked to."""
    (stage,) = plan_schedule(KAPLAN, 1, batch=batch, **target)
    assert stage.size == pytest.approx(KAPLAN.optimal_size(stage.loss))
    assert relative_cost(KAPLAN, [stage]) == pytest.approx(1.0)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "batch, stages, relative",
    [
        ("fixed", 1, 1.0),
        ("fixed", 2, 0.829),
        ("fixed", 3, 0.792),
        ("fixed", 4, 0.779),
        ("fixed", 6, 0.768),
        ("varying", 2, 0.745),
        ("varying", 3, 0.679),
        ("varying", 4, 0.650),
        ("varying", 6, 0.622),
    ],
)
def test_the_cheapest_schedules_to_the_loss_of_a_679M_model(batch, stages, relative):
    planned = plan_schedule(KAPLAN, stages, target_loss=2.6911, batch=batch)
    assert relative_cost(KAPLAN, planned) == pytest.approx(relative, abs=6e-4)
    assert planned[-1].loss == pytest.approx(2.6911)
    assert [s.size for s in planned] == sorted(s.size for s in planned)
    if (batch, stages) == ("fixed", 2):
        assert [round(s.size / 1e6) for s in planned] == [118, 959]


def test_a_schedule_to_a_size_ends_with_it():
    planned = plan_schedule(KAPLAN, 2, target_size=679_477_248)
    assert planned[-1].size == pytest.approx(679_477_248)
    assert planned[-1].loss == pytest.approx(2.6911, abs=1e-4)
    # the sizes are no longer free, so it cannot be cheaper than the free schedule
    assert 0.829 <= relative_cost(KAPLAN, planned) < 1


def test_targets_that_cannot_be():
    with pytest.raises(UsageError, match="--target-loss"):
        plan_schedule(KAPLAN, 2)
    with pytest.raises(UsageError, match="cannot be reached"):
        plan_schedule(KAPLAN, 2, target_loss=2.0, target_size=1e8)
