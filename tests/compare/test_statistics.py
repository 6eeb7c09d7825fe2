"""The statistics against simulation, textbook values and scipy's own."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from efftrain_cli.compare import statistics


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_t_interval_covers_the_truth_in_94_to_96_percent_of_10000_normal_draws(n: int) -> None:
    """F50."""
    random = np.random.default_rng(n)
    truth = 0.03
    covered = 0
    for sample in random.normal(truth, 0.1, (10_000, n)):
        estimate = statistics.paired_t(sample)
        covered += estimate.low <= truth <= estimate.high
    assert 9400 <= covered <= 9600


def test_ratio_interval_below_20_pairs_covers_the_true_ratio_in_94_to_96_percent() -> None:
    random = np.random.default_rng(7)
    covered = 0
    for logs in random.normal(np.log(1.5), 0.2, (10_000, 3)):
        estimate = statistics.ratio_of_logs(logs)
        covered += estimate.low <= 1.5 <= estimate.high
    assert 9400 <= covered <= 9600


def test_welch_interval_covers_with_unequal_variances() -> None:
    random = np.random.default_rng(3)
    covered = 0
    for a, b in zip(random.normal(0, 1, (5000, 5)), random.normal(0.5, 2, (5000, 6)), strict=True):
        estimate = statistics.welch_t(a, b)
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.935 <= covered / 5000 <= 0.965


def test_t_tests_agree_with_scipy() -> None:
    a = [3.1, 3.3, 3.2, 3.6]
    b = [3.0, 3.1, 3.15, 3.2]
    expected = stats.ttest_rel(b, a)
    estimate = statistics.paired_t(np.subtract(b, a))
    low, high = expected.confidence_interval()
    assert (estimate.p, estimate.low, estimate.high) == pytest.approx((expected.pvalue, low, high))
    expected = stats.ttest_ind(b, a, equal_var=False)
    estimate = statistics.welch_t(a, b)
    low, high = expected.confidence_interval()
    assert (estimate.p, estimate.low, estimate.high) == pytest.approx((expected.pvalue, low, high))


def test_one_seed_makes_no_claim() -> None:
    for estimate in (statistics.paired_t([-0.5]), statistics.welch_t([1.0], [0.5]), statistics.ratio([2.0], [1.0])):
        assert estimate.reason == "one seed: no claim"
        assert estimate.p is estimate.low is estimate.high is None


def test_equal_differences_make_no_claim() -> None:
    """Copies of one run under several names have no spread; that is no evidence."""
    assert statistics.paired_t([0.1, 0.1, 0.1]).p is None
    assert statistics.paired_t([0.0, 0.0]).reason == "no spread between seeds: no claim"
    assert statistics.welch_t([1.0, 1.0], [2.0, 2.0]).p is None


def test_holm_worked_example() -> None:
    """Holm (1979): ordered p-values times m, m - 1, ..., made monotone."""
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.6, 0.7]) == [1.0, 1.0]
    assert statistics.holm([]) == []


def test_holm_keeps_the_family_wise_error() -> None:
    random = np.random.default_rng(0)
    false_claims = 0
    for _ in range(2000):
        p = [statistics.paired_t(sample).p for sample in random.normal(0, 1, (5, 4))]
        false_claims += min(statistics.holm(p)) < statistics.ALPHA
    assert false_claims / 2000 < 0.06


@pytest.mark.parametrize(("effect", "n"), [(1.0, 10), (0.5, 34), (0.8, 15), (2.0, 5)])
def test_seeds_needed_matches_published_tables_of_the_paired_t_test(effect: float, n: int) -> None:
    """Two-sided 5 %, power 80 %: 34 pairs for d = 0.5, 15 for 0.8, 10 for 1 (Cohen, 1988; G*Power)."""
    assert statistics.seeds_needed(effect, 1.0) == n


def test_seeds_needed_unpaired_matches_cohen() -> None:
    """64 per group for d = 0.5, 26 for d = 0.8 (Cohen, 1992, table 2)."""
    assert statistics.seeds_needed(0.5, 1.0, paired=False) == 64
    assert statistics.seeds_needed(0.8, 1.0, paired=False) == 26


def test_seeds_needed_reaches_its_power_in_simulation() -> None:
    n = statistics.seeds_needed(0.02, 0.015)
    assert n is not None
    random = np.random.default_rng(1)
    found = sum(statistics.paired_t(s).p < statistics.ALPHA for s in random.normal(0.02, 0.015, (4000, n)))
    assert found / 4000 >= 0.78
    fewer = sum(statistics.paired_t(s).p < statistics.ALPHA for s in random.normal(0.02, 0.015, (4000, n - 1)))
    assert fewer / 4000 < 0.82


def test_seeds_needed_has_no_answer_without_spread_or_difference() -> None:
    assert statistics.seeds_needed(0.1, 0.0) is None
    assert statistics.seeds_needed(0.0, 1.0) is None
    assert statistics.seeds_needed(1e-6, 1.0) is None
    assert statistics.seeds_needed(100.0, 1.0) == 2


def test_bootstrap_is_seeded_and_states_a_true_coverage() -> None:
    values = np.random.default_rng(5).normal(0.1, 0.2, 20)
    assert statistics.bootstrap(values, seed=3) == statistics.bootstrap(values, seed=3)
    assert statistics.bootstrap(values, seed=3) != statistics.bootstrap(values, seed=4)
    stated = statistics.bootstrap_coverage(20, draws=1000)
    random = np.random.default_rng(99)
    covered = 0
    for _ in range(1000):
        estimate = statistics.bootstrap(random.normal(0, 1, 20), seed=int(random.integers(1 << 30)), resamples=1000)
        covered += estimate.low <= 0 <= estimate.high
    assert abs(stated - covered / 1000) < 0.03
    assert stated < 0.95


def test_bootstrap_of_few_seeds_covers_too_little_which_is_why_it_is_not_used() -> None:
    assert statistics.bootstrap_coverage(3, draws=500) < 0.85
    assert "bootstrap" not in statistics.ratio_of_logs([0.1, 0.2, 0.15]).method


def test_ratio_is_a_geometric_mean_and_needs_positive_values() -> None:
    estimate = statistics.ratio([200.0, 800.0], [100.0, 100.0])
    assert estimate.mean == pytest.approx(4.0)
    assert estimate.low < 4 < estimate.high
    with pytest.raises(ValueError, match="positive"):
        statistics.ratio([0.0, 1.0], [1.0, 1.0])


def test_sd_interval_covers() -> None:
    random = np.random.default_rng(2)
    covered = 0
    for sample in random.normal(0, 2.0, (4000, 4)):
        low, high = statistics.sd_interval(float(sample.std(ddof=1)), 4)
        covered += low <= 2.0 <= high
    assert 0.935 <= covered / 4000 <= 0.965


def test_mcnemar_matches_the_binomial_test() -> None:
    assert statistics.mcnemar(5, 15) == pytest.approx(stats.binomtest(5, 20).pvalue)
    assert statistics.mcnemar(0, 0) == 1.0
    assert statistics.mcnemar(4, 4) == 1.0
