"""The inference against simulation, textbook values and scipy's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from efftrain_cli.compare import inference, planning
from efftrain_cli.compare.engine import Verdict, correct
from efftrain_cli.compare.inference import (
    Direction,
    Estimate,
    ExactTest,
    difference_of_means,
    paired_t,
    rank_sum,
    ratio_of_means,
    welch_t,
)
from efftrain_cli.compare.measures import FINAL_LOSS, cost_question
from efftrain_cli.compare.verdicts import sentence
from tests.compare.known_runs import decide


def test_t_interval_covers_the_truth_in_94_to_96_percent_of_10000_normal_draws():
    """F50."""
    random = np.random.default_rng(3)
    truth = 0.03
    covered = 0
    for sample in random.normal(truth, 0.1, (10_000, 3)):
        estimate = paired_t(sample)
        covered += estimate.low <= truth <= estimate.high
    assert 9400 <= covered <= 9600


def test_t_tests_agree_with_scipy():
    a = [3.1, 3.3, 3.2, 3.6]
    b = [3.0, 3.1, 3.15, 3.2]
    expected = stats.ttest_rel(b, a)
    estimate = paired_t(np.subtract(b, a))
    low, high = expected.confidence_interval()
    assert (estimate.p, estimate.low, estimate.high) == pytest.approx((expected.pvalue, low, high))
    expected = stats.ttest_ind(b, a, equal_var=False)
    estimate = welch_t(a, b)
    low, high = expected.confidence_interval()
    assert (estimate.p, estimate.low, estimate.high) == pytest.approx((expected.pvalue, low, high))


def test_equal_differences_make_no_claim():
    """Copies of one run under several names have no spread; that is not evidence."""
    assert paired_t([0.1, 0.1, 0.1]).p is None
    assert paired_t([0.0, 0.0]).why == inference.NO_SPREAD
    assert welch_t([1.0, 1.0], [2.0, 2.0]).p is None


def test_holm_worked_example():
    """Holm (1979): ordered p-values times m, m - 1, ..., made monotone."""
    assert inference.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert inference.holm([0.6, 0.7]) == [1.0, 1.0]
    assert inference.holm([]) == []


@pytest.mark.parametrize(("effect", "n"), [(1.0, 10), (0.5, 34), (0.8, 15), (2.0, 5)])
def test_seeds_needed_matches_published_tables_of_the_paired_t_test(effect, n):
    """Two-sided 5 %, power 80 %: 34 pairs for d = 0.5, 15 for 0.8, 10 for 1 (Cohen, 1988;
    G*Power)."""
    assert planning.seeds_needed(effect, 1.0) == n


def test_seeds_needed_unpaired_matches_cohen():
    """64 per group for d = 0.5, 26 for d = 0.8 (Cohen, 1992, table 2)."""
    assert planning.seeds_needed(0.5, 1.0, paired=False) == 64
    assert planning.seeds_needed(0.8, 1.0, paired=False) == 26


def test_seeds_needed_has_no_answer_without_spread_or_difference():
    assert planning.seeds_needed(0.1, 0.0) is None
    assert planning.seeds_needed(0.0, 1.0) is None
    assert planning.seeds_needed(1e-6, 1.0) is None
    assert planning.seeds_needed(100.0, 1.0) == 2
    # At 5 % / 30 t of one degree of freedom is 382: 200 standard deviations are 283 standard errors
    # of two seeds.
    assert planning.seeds_needed(200.0, 1.0, alpha=0.05 / 30) == 3


def test_plans_assure_the_80th_percentile_of_the_spread():
    """The 20th percentile of chi-squared on 4 degrees of freedom is 1.6488 (tables)."""
    assert planning.assured_sd(0.01, 4) == pytest.approx(0.01 * (4 / 1.6488) ** 0.5, rel=1e-4)


def test_the_interval_of_a_spread_is_chi_squared_s():
    """On 2 degrees of freedom the quantiles of 2.5 and 97.5 % are 0.050636 and 7.3778 (tables)."""
    found = planning.sd_interval(2.0, 3)
    assert found == pytest.approx((2 * (2 / 7.3778) ** 0.5, 2 * (2 / 0.050636) ** 0.5), rel=1e-4)


@pytest.mark.parametrize("alpha", [0.05, 0.05 / 30])
def test_what_two_scattered_ratios_could_show_has_no_end(alpha):
    """Ratios of 1 and 20 have a standard error of 1.5. With one degree of freedom t is 12.7 at 5 %
    and 381 at a thirtieth of it; at power 0.8 more than 16 standard errors are e^24, and e^571 is
    no number."""
    estimate = ratio_of_means({0: 1.0, 1: 20.0}, {0: 1.0, 1: 1.0})
    assert inference.detectable(estimate, alpha) == np.inf
    (found,) = decide([estimate])
    assert found.min_detectable_range == (np.inf, np.inf)


def test_effects_are_found_where_the_noncentral_t_is_no_number():
    """20 seeds at 5 % / 30: critical t of 19 degrees is 3.6595, so with power 0.8 a difference of
    about 3.6595 + 0.85 standard errors shows; SciPy's noncentral t has no value from 41 on."""
    estimate = Estimate(0.0, se=1.0, df=19)
    assert inference.detectable(estimate, 0.05 / 30) == pytest.approx(3.6595 + 0.8416, rel=0.03)


def test_mcnemar_matches_the_binomial_test():
    assert inference.mcnemar(5, 15) == pytest.approx(stats.binomtest(5, 20).pvalue)
    assert inference.mcnemar(0, 0) == 1.0
    assert inference.mcnemar(4, 4) == 1.0


def shows(estimate: Estimate, direction: Direction, margin: float | None = 0.02) -> bool:
    """Whether the claim is made at 5 %; `margin` counts for those that have one."""
    return inference.claim_p(estimate, direction, margin) < inference.ALPHA


def outcome(result: Estimate | ExactTest) -> str:
    return decide([result])[0].outcome


def by_seed(values: list[float], first: int = 0) -> dict[int, float]:
    return dict(enumerate(values, first))


def test_one_seed_makes_no_claim():
    for estimate in (
        paired_t([-0.5]),
        welch_t([1.0], [0.5]),
        welch_t([1.0, 1.1], [0.5]),
        ratio_of_means({0: 2.0}, {0: 1.0}),
        difference_of_means({0: 1.0, 1: 1.1}, {0: 0.5}),
    ):
        assert estimate.why == inference.ONE_SEED
        assert estimate.p is estimate.low is estimate.high is None
        assert decide([estimate])[0].outcome == "undecided"


def test_ratio_is_a_geometric_mean_and_needs_positive_values():
    estimate = ratio_of_means({0: 200.0, 1: 800.0}, {0: 100.0, 1: 100.0})
    assert estimate.mean == pytest.approx(4.0)
    assert estimate.low < 4 < estimate.high
    with pytest.raises(ValueError):
        ratio_of_means({0: 0.0, 1: 1.0}, {0: 1.0, 1: 1.0})


def test_unpaired_ratio_is_baseline_over_method():
    """The baseline needs twice as much: 2.0, never 0.5; by Welch's t on the logarithms."""
    baseline, method = [200.0, 220.0, 190.0], [100.0, 104.0, 99.0, 101.0]
    estimate = ratio_of_means(by_seed(baseline), by_seed(method, 10))
    assert estimate.mean == pytest.approx(np.exp(np.log(baseline).mean() - np.log(method).mean()))
    expected = stats.ttest_ind(np.log(baseline), np.log(method), equal_var=False)
    low, high = np.exp(expected.confidence_interval())
    assert (estimate.p, estimate.low, estimate.high) == pytest.approx((expected.pvalue, low, high))
    assert decide([estimate])[0].outcome == "better"


def test_pairs_are_of_one_seed_not_of_one_place():
    """Every seed's difference is 0.1 but for rounding's sake, while the order of the two dicts
    differs."""
    baseline = {0: 3.0, 1: 3.5, 2: 4.0}
    method = {2: 4.11, 0: 3.10, 1: 3.59}
    estimate = difference_of_means(baseline, method)
    assert estimate.mean == pytest.approx(0.1) and estimate.sd == pytest.approx(0.01)
    assert estimate.method == "paired t" and estimate.n == 3


def test_seeds_0_1_2_against_1_2_3_use_all_six_runs():
    """The mean is that of all runs, so that it agrees with the means shown; two pairs are too few
    to pair."""
    baseline, method = by_seed([3.0, 3.2, 3.1]), by_seed([3.1, 3.0, 2.9], 1)
    estimate = difference_of_means(baseline, method)
    assert estimate.mean == pytest.approx(-0.1)
    expected = stats.ttest_ind([3.1, 3.0, 2.9], [3.0, 3.2, 3.1], equal_var=False)
    assert estimate.p == pytest.approx(expected.pvalue)
    assert "2 shared seeds are too few" in estimate.method


def test_partly_paired_t_is_narrower_than_welch_where_seeds_matter():
    """Derrick et al. (2017), worked by hand: r = 1 on four shared seeds of five and five."""
    baseline = by_seed([1.0, 2.0, 3.0, 4.0, 5.0])
    method = by_seed([2.5, 3.5, 4.5, 5.5, 6.5], 1)
    estimate = difference_of_means(baseline, method)
    assert estimate.mean == pytest.approx(1.5)
    # s^2 = 2.5 in both; 2.5/5 + 2.5/5 - 2 * 1 * sqrt(0.5 * 0.5) * 4 / 5 = 0.2; df = 3 + (8 - 3) /
    # 10 * 2 = 4
    assert (estimate.se, estimate.df) == pytest.approx((np.sqrt(0.2), 4.0))
    assert estimate.se < welch_t(list(baseline.values()), list(method.values())).se


def test_all_pairs_of_two_unpaired_sides():
    """Where the score is a plain difference, the estimate and its standard error are Welch's."""
    a, b = np.array([1.0, 1.4, 0.9]), np.array([2.0, 2.2, 2.1, 2.6])
    estimate, welch = inference.all_pairs(b[:, None] - a[None, :]), welch_t(a, b)
    assert (estimate.mean, estimate.se, estimate.df, estimate.p) == pytest.approx(
        (welch.mean, welch.se, welch.df, welch.p)
    )


SPREAD = np.array([-1, 1, -1, 1]) * 0.01 * np.sqrt(3) / 2
"""Four pairs of sd 0.01: standard error 0.005; critical t(3) is 3.182 two-sided and 2.353
one-sided."""


def losses(gain: float) -> Estimate:
    return paired_t(SPREAD - gain)


def ratios(gain: float) -> Estimate:
    return inference.exponentiated(paired_t(SPREAD + gain))


@pytest.mark.parametrize("estimate", [losses, ratios])
@pytest.mark.parametrize(
    ("gain", "margin", "outcome"),
    [
        (0.017, None, "better"),
        (-0.017, None, "worse"),
        (0.015, None, "undecided"),
        # Equivalent if |gain| + 2.353 * 0.005 is below 0.02 of losses, log 1.02 = 0.0198 of ratios:
        # up to 0.0080.
        (0.0079, 0.02, "equivalent"),
        (-0.0079, 0.02, "equivalent"),
        (0.0085, 0.02, "undecided"),
        (0.0079, None, "undecided"),
    ],
)
def test_three_outcomes_by_hand(estimate, gain, margin, outcome):
    assert estimate(0.0).se == pytest.approx(0.005)
    assert decide([estimate(gain)], margin)[0].outcome == outcome


@pytest.mark.parametrize("estimate", [losses, ratios])
@pytest.mark.parametrize(
    ("gain", "direction", "margin", "shown"),
    [
        # No worse than the margin looks at one side only.
        (-0.0079, "noninferior", 0.02, True),
        (-0.0085, "noninferior", 0.02, False),
        (0.05, "noninferior", 0.02, True),
        (0.05, "equivalent", 0.02, False),
        # One-sided, beyond 0.01177.
        (0.0120, "better", None, True),
        (-0.0120, "better", None, False),
    ],
)
def test_claims_of_a_direction_by_hand(estimate, gain, direction, margin, shown):
    assert shows(estimate(gain), direction, margin) == shown


def test_a_margin_of_a_ratio_is_a_share():
    """0.5 is 1.5 times the cost, log 1.5 = 0.405, and not half of the ratio, log 2 = 0.693."""
    assert shows(ratios(-0.39), "noninferior", 0.5)
    assert not shows(ratios(-0.42), "noninferior", 0.5)
    seen = decide([losses(0.0)])[0].min_detectable_effect
    assert decide([ratios(0.0)])[0].min_detectable_effect == pytest.approx(np.expm1(seen))


def test_a_margin_is_a_positive_number():
    with pytest.raises(ValueError, match="margin"):
        inference.claim_p(losses(0.0), "equivalent", None)
    with pytest.raises(ValueError, match="positive"):
        decide([losses(0.0)], margin=0.0)


@pytest.mark.parametrize(
    ("question", "estimate", "shown", "sizes"),
    [
        # sqrt(4 / 11.143) and sqrt(4 / 0.48442) times 0.16822: 0.10079 and 0.48340.
        (FINAL_LOSS, losses, "+0.0000 [-0.1242, +0.1242] nats/token", "0.17 nats/token 0.1 0.48"),
        (cost_question("tokens", None), ratios, "1.000x [0.883, 1.132]", "1.18x 1.11x 1.62x"),
    ],
)
def test_the_sentence_names_what_could_be_shown(question, estimate, shown, sizes):
    """Five pairs of sd 0.1: t(4) is 2.7764, so 0.1242 on either side; with power 0.8 they show
    1.6822 sd (tables)."""
    pairs = paired_t(np.array([-1, 1, -1, 1, 0]) * 0.1)
    if estimate is ratios:
        pairs = inference.exponentiated(pairs)
    made = Verdict(question, "arm", (0, 1, 2, 3, 4), pairs, p=1.0)
    size, least, most = sizes.rsplit(" ", 2)
    assert (
        sentence(correct([made])[0], "arm", "base")
        == f"arm against base is undecided in {question.title}: {shown}, p = 1, 5 pairs; such a"
        f" study shows a difference of {size} in 80 % of cases ({least} to {most} by the"
        " spread's own interval)."
    )


def test_holm_counts_only_what_was_tested():
    clear, faint = paired_t([0.1, 0.11, 0.12]), paired_t([0.01, 0.03, 0.04])
    decisions = decide([clear, paired_t([0.1]), faint])
    assert [d.p_holm for d in decisions] == [
        pytest.approx(2 * clear.p),
        None,
        pytest.approx(faint.p),
    ]


@pytest.mark.parametrize(
    ("tokens", "flops", "other", "corrected"),
    [
        # The smallest of a member's p takes Holm's factor; the member's other cost takes the same.
        (0.01, 0.02, 0.04, [0.02, 0.04, 0.04]),
        # A p of exactly 0 says nothing about the member's other cost: twice its own p, for two
        # members.
        (0.0, 0.03, 0.04, [0.0, 0.06, 0.04]),
        (0.0, 0.6, 0.04, [0.0, 1.0, 0.04]),
        (0.0, 0.0, 0.0, [0.0, 0.0, 0.0]),
    ],
)
def test_a_p_of_0_does_not_pass_to_the_arm_s_other_costs(tokens, flops, other, corrected):
    asked = [cost_question("tokens", None), cost_question("flops", None)]
    made = [
        Verdict(question, "arm", (0, 1), Estimate(1.1, log=True), p=p, outcome="better")
        for question, p in zip(asked, (tokens, flops), strict=True)
    ]
    made.append(replace(made[0], arm="other", p=other))
    found = correct(made)
    assert [each.p_holm for each in found] == pytest.approx(corrected)
    assert [each.outcome for each in found] == [
        "better" if p < 0.05 else "undecided" for p in corrected
    ]


@pytest.mark.parametrize(("n", "effect"), [(3, 0.082), (5, 0.043), (8, 0.029), (10, 0.025)])
def test_what_a_study_could_have_seen(n, effect):
    """Smallest effect at power 0.8 and sd 0.025; the same as asking how many seeds that effect
    needs."""
    sample = np.random.default_rng(n).normal(0, 1, n)
    sample = (sample - sample.mean()) / sample.std(ddof=1) * 0.025
    seen = inference.detectable(paired_t(sample))
    assert seen == pytest.approx(effect, abs=0.0011)
    assert planning.seeds_needed(seen * 1.0001, 0.025) == n


def test_rank_sum_without_ties_is_the_exact_mann_whitney_test():
    random = np.random.default_rng(0)
    for n, m in ((3, 3), (5, 5), (4, 7), (10, 10)):
        a, b = random.normal(0, 1, n), random.normal(0.8, 1, m)
        found = rank_sum(a, b)
        assert found.p == pytest.approx(stats.mannwhitneyu(a, b, method="exact").pvalue)
        assert found.wins == pytest.approx(stats.mannwhitneyu(a, b).statistic / (n * m))


def test_rank_sum_with_ties_counts_every_split():
    a, b = [1.0, 2.0, 2.0, np.inf], [2.0, np.inf, np.inf, np.inf]
    ranks = stats.rankdata([*a, *b])
    expected = stats.permutation_test(
        (ranks[:4], ranks[4:]),
        lambda x, y: abs(np.sum(x) - np.sum(y)),
        n_resamples=np.inf,
        alternative="greater",
    )
    assert rank_sum(a, b).p == pytest.approx(expected.pvalue)


def test_many_runs_are_ranked_by_the_normal_approximation_and_say_so():
    """The count of splits costs n^4 and overflowed beyond 1,030 runs; at the border both agree to 5
    %."""
    random = np.random.default_rng(1)
    a, b = random.normal(0, 1, 600), random.normal(0.1, 1, 600).round(1)
    found = rank_sum(a, b)
    assert found.p == pytest.approx(stats.mannwhitneyu(a, b, method="asymptotic").pvalue)
    assert found.method == "rank sum, normal approximation"
    counted, failing = rank_sum(a[:50], a[50:100] + 0.5), [*a[:50], *[np.inf] * 5]
    assert counted.method == "exact rank sum"
    assert counted.p == pytest.approx(stats.mannwhitneyu(a[:50], a[50:100] + 0.5).pvalue, rel=0.05)
    ranks = np.where(np.isinf(failing), 9.0, failing)
    expected = stats.mannwhitneyu(ranks, a[100:200], method="asymptotic").pvalue
    assert rank_sum(failing, a[100:200]).p == pytest.approx(expected)
    few = rank_sum(a[:9], a[9:600])  # a small arm is counted, however large the other is
    assert few.method == "exact rank sum"
    assert few.p == pytest.approx(stats.mannwhitneyu(a[:9], a[9:600], method="exact").pvalue)


def test_a_failed_run_is_the_worst_rank():
    """All five baselines diverged, no method did: 2 of the 252 splits are as far apart."""
    found = rank_sum([np.inf] * 5, [3.0, 3.1, 3.2, 3.3, 9.9])
    assert (outcome(found), found.wins) == ("better", 1.0)
    assert found.p == pytest.approx(2 / 252) == found.smallest_p
    assert (
        outcome(rank_sum([3.0, 3.1, 3.2], [np.inf] * 3)) == "undecided"
    )  # three seeds: p is 0.1 at best
    assert rank_sum([3.0, 3.1, 3.2], [np.inf] * 3).smallest_p == pytest.approx(0.1)


def test_a_bound_beats_only_what_it_must():
    """More than 10 is above 10 and 9, not known against 12 or another bound, and better than a
    failure."""
    assert rank_sum([9.0], [10.0], method_beyond=[True]).wins == 0.0
    assert rank_sum([10.0], [10.0], method_beyond=[True]).wins == 0.0
    assert rank_sum([12.0], [10.0], method_beyond=[True]).wins == 0.5
    assert rank_sum([12.0], [10.0], baseline_beyond=[True], method_beyond=[True]).wins == 0.5
    assert rank_sum([np.inf], [10.0], method_beyond=[True]).wins == 1.0
    five = rank_sum([10.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0], baseline_beyond=[True] * 5)
    assert outcome(five) == "better"


def test_failures_by_fisher_and_from_six_pairs_by_mcnemar():
    yes, no = {seed: True for seed in range(5)}, {seed: False for seed in range(5)}
    found = inference.failure_test(yes, no)
    assert found.method == "Fisher's exact test" and outcome(found) == "better"
    assert found.p == pytest.approx(2 / 252) == found.smallest_p
    assert (
        outcome(inference.failure_test(no, yes)) == "worse"
        and inference.failure_test(no, no).p == 1.0
    )
    six = {seed: True for seed in range(6)}
    found = inference.failure_test(six, {seed: seed == 0 for seed in range(6)})
    assert found.method == "McNemar's exact test" and outcome(found) == "undecided"
    assert found.p == pytest.approx(stats.binomtest(0, 5).pvalue)
    assert inference.failure_test(six, {seed: False for seed in range(6)}).p == pytest.approx(
        2 / 64
    )
    assert (
        inference.failure_test(six, {seed: False for seed in range(9, 15)}).method
        == "Fisher's exact test"
    )


@pytest.mark.slow
@pytest.mark.parametrize("paired", [0, 2, 5, 8])
def test_partly_paired_t_holds_its_level(paired):
    """8 + 8 runs of which some share a seed, seeds' correlation 0 and 0.8: at most 6 % false
    verdicts."""
    random = np.random.default_rng(paired)
    for correlation in (0.0, 0.8):
        found = 0
        for _ in range(2000):
            seeds = random.normal(0, np.sqrt(correlation), 16)
            own = random.normal(0, np.sqrt(1 - correlation), 16)
            baseline = {i: seeds[i] + own[i] for i in range(8)}
            method = {8 - paired + i: seeds[8 - paired + i] + own[8 + i] for i in range(8)}
            estimate = difference_of_means(baseline, method)
            assert estimate.mean == pytest.approx(
                np.mean(list(method.values())) - np.mean(list(baseline.values()))
            )
            found += estimate.p < inference.ALPHA
        assert found / 2000 <= 0.065


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_margin_holds_its_level(n):
    """Two methods exactly the margin apart are called equivalent, or no worse, in at most 5 % of
    studies (+ noise)."""
    random = np.random.default_rng(n)
    equivalent = noninferior = 0
    for sample in random.normal(0.02, 0.015, (3000, n)):
        estimate = paired_t(sample)
        equivalent += shows(estimate, "equivalent")
        noninferior += shows(estimate, "noninferior")
    assert equivalent / 3000 <= 0.06 and 0.04 <= noninferior / 3000 <= 0.06


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, 10])
def test_switching_to_ranks_where_runs_failed_holds_the_level(n):
    """The rule: the t test where all finished, the exact rank sum where any run failed; both sides
    fail equally often."""
    random = np.random.default_rng(n)
    for share in (0.05, 0.3):
        found = 0
        for _ in range(1500):
            seeds = random.normal(0, 0.02, n)
            a, b = seeds + random.normal(0, 0.02, n), seeds + random.normal(0, 0.02, n)
            a[random.random(n) < share], b[random.random(n) < share] = np.inf, np.inf
            if np.isinf([*a, *b]).any():
                found += outcome(rank_sum(a, b)) != "undecided"
            else:
                found += paired_t(b - a).p < inference.ALPHA
        assert found / 1500 <= 0.07
