"""What makes a probe unstable, and how sure a share of seeds is."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from efftrain_cli.run.stability import fluctuation
from efftrain_cli.tune_warmup.search import share_interval


def test_fluctuation_is_perplexity_over_the_best_before() -> None:
    log = math.log
    assert fluctuation(
        [(0, log(100)), (5, log(50)), (10, log(60)), (15, log(40)), (20, log(60))]
    ) == (
        pytest.approx(1.5),
        20,
    )
    assert fluctuation([(0, log(100)), (5, log(90))]) == (pytest.approx(0.9), 5)
    assert fluctuation([(0, 5.0)]) == (0.0, 0)
    assert fluctuation([(0, 5.0), (5, math.inf), (10, 1.0)]) == (math.inf, 5)
    assert fluctuation([(0, 5.0), (5, math.nan)]) == (math.inf, 5)
    assert fluctuation([(0, 1.0), (5, 5000.0)])[1] == 5


@pytest.mark.parametrize(("successes", "number"), [(0, 1), (1, 1), (2, 3), (3, 3), (5, 9), (0, 10)])
def test_the_interval_of_a_share_is_wilson_s(successes: int, number: int) -> None:
    wanted = stats.binomtest(successes, number).proportion_ci(method="wilson")
    assert share_interval(successes, number) == pytest.approx((wanted.low, wanted.high), abs=1e-6)
