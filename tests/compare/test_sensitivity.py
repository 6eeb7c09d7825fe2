"""Learning-rate sensitivity: Wortsman's mean excess, failed runs, edges."""

from __future__ import annotations

import pytest

from efftrain_cli.compare.sensitivity import Curve, band, edge_warning, sensitivity


def curve(
    losses: list[list[float | None]], rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3), **more: int
) -> Curve:
    seeds = len(losses[0])
    return Curve("r", rates, tuple(map(tuple, losses)), (7.0,) * seeds, tuple(range(seeds)), **more)


def test_it_is_the_mean_excess_over_the_best_on_an_even_grid():
    assert sensitivity((1e-4, 1e-3, 1e-2), (3.3, 3.0, 3.6), 7.0) == pytest.approx(
        (0.3 + 0.0 + 0.6) / 3
    )
    assert sensitivity((1e-3, 2e-3), (3.0, 3.0), 7.0) == 0


def test_a_failed_run_and_a_loss_above_the_start_count_as_the_start():
    want = (0.3 + 0.0 + 4.0) / 3
    for failed in (None, float("inf"), float("nan"), 9.5, 7.0):
        assert sensitivity((1e-4, 1e-3, 1e-2), (3.3, 3.0, failed), 7.0) == pytest.approx(want)


def test_an_uneven_grid_is_weighed_by_its_stretches():
    # log2 gaps 1, 1, 2: stretches 1, 1, 1.5, 2
    got = sensitivity((1e-3, 2e-3, 4e-3, 16e-3), (3.0, 3.1, 3.2, 4.0), 7.0)
    assert got == pytest.approx((1 * 0 + 1 * 0.1 + 1.5 * 0.2 + 2 * 1.0) / 5.5)
    with pytest.raises(ValueError, match="rising"):
        sensitivity((2e-3, 1e-3), (3.0, 3.1), 7.0)


def test_a_curve_s_best_is_one_with_which_every_seed_finished():
    found = curve([[3.4, 3.5], [3.2, 3.3], [3.0, None]])
    assert found.means == (pytest.approx(3.45), pytest.approx(3.25), None)
    assert found.best == 1 and edge_warning(found) is None
    assert band(found, 2) == (3.0, 3.0)
    assert found.sensitivities == (
        pytest.approx((0.4 + 0.2) / 3),
        pytest.approx((0.2 + 0 + 3.7) / 3),
    )
    assert curve([[3.4, 3.5], [3.2, 3.3], [3.0, None]], pending=1).sensitivities == ()


def test_an_optimum_at_the_edge_is_said():
    assert "0.004, is the highest tried; a higher" in edge_warning(curve([[3.4], [3.3], [3.2]]))
    assert "0.001, is the lowest tried; a lower" in edge_warning(curve([[3.1], [3.3], [3.4]]))
    assert "no learning rate at which every seed finished" in edge_warning(
        curve([[None], [None], [None]])
    )
