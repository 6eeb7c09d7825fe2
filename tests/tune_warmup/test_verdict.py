"""What makes a probe unstable."""

from __future__ import annotations

import math

import pytest

from efftrain_cli.run.stability import fluctuation


def test_fluctuation_is_perplexity_over_the_best_before():
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
