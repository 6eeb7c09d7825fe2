"""The judge: estimates, tests and verdicts, by values computed by hand and by scipy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from efftrain_cli.compare.comparison import compare
from efftrain_cli.compare.inference import correct, outcome_of, paired, shares
from efftrain_cli.foundation.errors import UsageError
from tests.compare.known_runs import row_of
from tests.compare.runs import make_arm, make_run

BASE = [4.0, 4.1, 4.2]
LOWER = [3.9, 3.9, 3.9]
"""Differences -0.1, -0.2, -0.3: mean -0.2, standard deviation 0.1."""


def judged(base, arm, **options):
    comparison = compare([*base, *arm], baseline="base", **options)
    return row_of(comparison, arm="arm")


def test_three_pairs_by_hand():
    """F50: t = 0.2 / (0.1 / sqrt(3)) = 2 sqrt(3) with 2 degrees of freedom, where the two-sided p
    is 1 - t / sqrt(2 + t^2), and the quantile of 95 % 4.302653."""
    row = judged(make_arm("base", BASE), make_arm("arm", LOWER))
    t = 2 * math.sqrt(3)
    assert row.p == pytest.approx(1 - t / math.sqrt(2 + t**2), rel=1e-9)
    half = 4.302652729911275 * 0.1 / math.sqrt(3)
    assert row.estimate == pytest.approx(-0.2)
    assert (row.low, row.high) == pytest.approx((-0.2 - half, -0.2 + half))
    assert (row.n, row.verdict, row.unit) == (3, "undecided", "nats/token")
    assert (row.baseline, row.mean) == pytest.approx((4.1, 3.9))
    power = stats.nct.sf(4.302652729911275, 2, row.could_see / (0.1 / math.sqrt(3)))
    assert power == pytest.approx(0.8)


def test_unshared_seeds_are_left_out_and_named():
    runs = [*make_arm("base", [*BASE, 9.0]), *make_arm("arm", LOWER)]
    comparison = compare(runs, baseline="base")
    assert row_of(comparison, arm="arm").estimate == pytest.approx(-0.2)
    assert comparison.caveats == ["base-seed3 has no partner: left out"]


def test_two_pairs_by_hand():
    """Differences -0.1 and -0.3: t = 2 with 1 degree of freedom, where t is the tangent of an angle
    that is uniform."""
    row = judged(make_arm("base", [4.0, 4.1]), make_arm("arm", [3.9, 3.8]))
    assert row.p == pytest.approx(1 - 2 / math.pi * math.atan(2))


@pytest.mark.parametrize(
    ("failed", "p", "outcome"),
    [((5, 0), 2 / 252, "better"), ((0, 3), 1 / 6, "worse")],
)
def test_few_pairs_left_are_judged_by_fisher(failed, p, outcome):
    """All ten orders of five failures among ten are equally likely: 2 of 252 are as extreme."""
    base = make_arm("base", [4.0 + seed / 100 for seed in range(5)])
    arm = make_arm("arm", [3.9] * 5)
    for runs, number in zip((base, arm), failed, strict=True):
        for seed in range(number):
            runs[seed] = make_run(runs[seed].arm, seed, [6.0, 7.0], status="diverged")
    row = judged(base, arm)
    assert row.p == pytest.approx(p) and row.outcome == outcome
    assert row.verdict == (outcome if p < 0.05 else "undecided")
    assert math.isnan(row.estimate) and math.isnan(row.mean), "means of survivors are blank"


def test_the_side_that_failed_more_is_never_claimed():
    base = make_arm("base", [4.0, 4.01, 4.02, 4.03])
    arm = make_arm("arm", [3.5, 3.511, 3.52, 3.53])
    arm[0] = make_run("arm", 0, [6.0, 7.0], status="diverged")
    row = judged(base, arm)
    assert row.verdict == "undecided" and math.isnan(row.p)
    assert row.why.startswith("failed or stuck: 1 of 4, baseline 0 of 4: no claim")


def test_a_run_above_the_baseline_s_loss_at_a_fifth_is_stuck():
    """The baseline falls from 6 to 4 in a line: 5.6 at a fifth of its tokens."""
    base = make_arm("base", [4.0])
    base += [make_run("base", seed, [1.0, 2.0, 3.0], status="diverged") for seed in (1, 2)]
    arm = make_arm("arm", [5.59, 5.61, 5.8])
    runs = compare([*base, *arm], baseline="base").runs
    assert list(runs.status) == ["finished", *["diverged"] * 2, "finished", *["stuck"] * 2]


def test_what_cannot_be_judged_is_blank_and_says_why():
    """F49: a pair that is pending, one seed, and no spread; never a p of 1."""
    waiting = make_arm("arm", LOWER)
    waiting[2] = make_run("arm", 2, [6.0, 5.0], status="running")
    rows = [
        judged(make_arm("base", BASE), waiting),
        judged(make_arm("base", [4.0]), make_arm("arm", [3.9])),
        judged(make_arm("base", [4.0, 4.5]), make_arm("arm", [3.75, 4.25])),
    ]
    whys = ["waits for arm-seed2", "one seed supports no claim", "no spread between seeds"]
    assert [row.why for row in rows] == whys
    assert all(row.verdict == "" and math.isnan(row.p) for row in rows)


def test_holm_and_bonferroni_by_hand():
    p = [0.01, 0.04, 0.03]
    assert list(correct(p, can_step=True)) == pytest.approx([0.03, 0.06, 0.06])
    assert list(correct(p, can_step=False)) == pytest.approx([0.03, 0.12, 0.09])
    with_unknown = correct([0.01, math.nan, 0.03], can_step=True)
    assert list(with_unknown[[0, 2]]) == pytest.approx([0.03, 0.06]), "NaN counts as 1"
    assert math.isnan(with_unknown[1])
    assert list(correct([0.6, 0.7], can_step=True)) == [1, 1]


def test_a_look_spends_its_share_of_alpha():
    """The share grows with the square of the pairs; p is divided by it."""
    assert shares([3, 5, 8]) == pytest.approx([9 / 98, 25 / 98, 64 / 98])
    row = judged(make_arm("base", BASE), make_arm("arm", LOWER), share=0.25)
    assert row.p_look == pytest.approx(4 * row.p)
    assert judged(make_arm("base", BASE), make_arm("arm", LOWER), share=0.01).p_look == 1.0
    half = stats.t.isf(0.05 * 0.25 / 2, 2) * 0.1 / math.sqrt(3)
    assert row.high == pytest.approx(-0.2 + half)


def test_many_races_take_a_verdict_away():
    arms = make_arm("base", BASE), make_arm("arm", [3.9, 3.999, 4.1])
    once, last = judged(*arms), judged(*arms, races=10**6)
    assert once.verdict == "better" and last.verdict == "undecided"
    assert last.p == pytest.approx(once.p) and last.p_race == 1.0


@pytest.mark.parametrize(
    ("mean", "direction", "outcome"),
    [
        (0.2, "either", "better"),
        (-0.2, "either", "worse"),
        (0.001, "either", "equivalent"),
        (-0.03, "noninferior", "noninferior"),
    ],
)
def test_what_a_direction_claims_of_a_gain(mean, direction, outcome):
    """Gains above 0 are better; the margin is 0.05, the standard error 0.01."""
    spread = np.array([-0.01, 0.0, 0.01]) * math.sqrt(3)
    claimed, p = outcome_of(paired(mean + spread), direction, 0.05)
    assert claimed == outcome
    by_hand = {
        "better": 2 * stats.t.sf(mean / 0.01, 2),
        "worse": 2 * stats.t.sf(-mean / 0.01, 2),
        "equivalent": stats.t.sf((0.05 - abs(mean)) / 0.01, 2),
        "noninferior": stats.t.sf((0.05 + mean) / 0.01, 2),
    }
    assert p == pytest.approx(by_hand[outcome])


def test_closed_claims_count_and_stay_as_they_are():
    base = make_arm("base", BASE)
    closed = judged(base, make_arm("arm", LOWER))
    now = make_arm("arm", [3.0, 3.1, 3.25])
    other = make_arm("other", [3.9, 4.0, 4.11])
    comparison = compare([*base, *now, *other], baseline="base", closed=[closed])
    assert row_of(comparison, arm="arm") is closed
    row = row_of(comparison, arm="other")
    alone = stats.ttest_rel([3.9, 4.0, 4.11], BASE)
    assert row.p_corrected == pytest.approx(2 * alone.pvalue), "Holm over two claims"
    critical = stats.t.isf(0.05 / 2 / 2, 2)
    se = row.estimate / alone.statistic
    assert stats.nct.sf(critical, 2, row.could_see / se) == pytest.approx(0.8)


def test_losses_compare_at_equal_tokens_or_at_equal_flops():
    base = make_arm("base", BASE)
    more = judged(base, make_arm("arm", LOWER, flops=18.0))
    assert more.terms == "at equal tokens and 3x the FLOPs" and more.outcome
    fewer = judged(base, make_arm("arm", LOWER, tokens=800.0, flops=7.5))
    assert fewer.terms == "at equal FLOPs and 0.8x the tokens" and fewer.outcome
    other = judged(base, make_arm("arm", LOWER, tokens=2000.0))
    assert math.isnan(other.estimate) and other.verdict == ""
    assert "2,000 tokens, 1,000 of the baseline; --set train.tokens=1000" in other.why


def test_a_score_is_better_if_it_is_higher():
    row = judged(make_arm("base", BASE), make_arm("arm", [4.2, 4.3, 4.41]), maximize=True)
    assert row.verdict == "better" and row.estimate > 0 and row.title == "final score"


def test_losses_that_do_not_compare_are_refused():
    """Those of other windows, and of a copy under another seed, found by its first losses: it has
    another length, so that none of its evaluations equals the original's."""
    base = make_arm("base", BASE)
    arm = make_arm("arm", LOWER)
    other = [replace(run, conditions={"data.seq_len": 64}) for run in arm]
    with pytest.raises(UsageError, match="length of a validation window differs"):
        compare([*base, *other], baseline="base")
    shown = compare([*base, *other], baseline="base", allow=True)
    assert shown.verdicts == [] and shown.caveats[0].startswith("NOT COMPARABLE")
    longer = make_run("base", 3, [6.0, 5.5, 5.1, 4.9, 4.3])
    copy = replace(longer, opening=base[0].opening)
    with pytest.raises(UsageError, match="base-seed3 began with the losses of base-seed0"):
        compare([*base, copy, *arm], baseline="base")
    copies = [replace(copy, seed=seed) for seed in range(3, 9)]
    with pytest.raises(UsageError) as error:
        compare([*base, *copies, *arm], baseline="base")
    assert str(error.value).count("one is a copy") == 5, "the first"


def test_what_else_a_method_changed_is_one_sentence():
    facts = {"tokens": 1e3, "updates": 20, "warmup tokens": 40, "peak rate": 1e-3}
    base = [replace(run, facts=facts) for run in make_arm("base", BASE)]
    doubled = {title: 2 * value for title, value in facts.items()}
    arm = [replace(run, facts=doubled) for run in make_arm("arm", LOWER)]
    assert compare([*base, *arm], baseline="base").changes == [
        "arm trained on 2,000 instead of 1,000 tokens and made 40 instead of 20 updates"
        " and warmed up over 80 instead of 40 tokens"
        " and peaked at a rate of 0.002 instead of 0.001."
    ]


def test_settings_outside_the_method_are_said_first():
    slw = {"seq_len_warmup.start": 8}
    base = make_arm("base", BASE, **{"optim.lr": 2e-3, "model.n_layer": 2})
    same = make_arm("arm", LOWER, **slw, **{"optim.lr": 2e-3, "model.n_layer": 2})
    other = make_arm("arm", LOWER, **slw, **{"optim.lr": 4e-3, "model.n_layer": 3})
    third = make_arm("third", LOWER, **slw, **{"optim.lr": 2e-3, "model.n_layer": 4})
    for run in (*base, *same, *other, *third):
        del run.settings["label"]
    assert compare([*base, *same], baseline="base").differences == []
    assert compare([*base, *other], baseline="base").differences == [
        "They differ in more than the method: optim.lr 0.002 | 0.004, model.n_layer 2 | 3"
    ]
    assert compare([*base, *same, *third], baseline="base").differences == [
        "third differs from base in more than the method: model.n_layer 2 | 4"
    ]
    asked = make_arm("arm", LOWER, **{"optim.lr": 4e-3, "model.n_layer": 2})
    assert compare([*base, *asked], baseline="base").differences == []


def test_each_recipe_stands_at_its_best_setting():
    slow = make_arm("arm", [4.5, 4.5, 4.6], lr=1)
    fast = make_arm("arm", LOWER, lr=2)
    failing = make_arm("arm", [3.0, 3.0, 3.0], lr=3)
    failing[0] = make_run("arm", 0, [6.0, 7.0], status="diverged", lr=3)
    fast = [replace(run, name=f"arm-lr2-seed{run.seed}") for run in fast]
    runs = [*make_arm("base", BASE), *slow, *fast, *failing]
    comparison = compare(runs, baseline="base")
    assert row_of(comparison, arm="arm").estimate == pytest.approx(-0.2)
    assert comparison.caveats == ["arm: the best of 3 settings by these seeds: looks too good"]
    fast += [replace(run, name=f"arm-lr3-seed{run.seed}", settings={"lr": 3}) for run in slow]
    every = compare([*make_arm("base", BASE), *fast], baseline="base", every_setting=True)
    assert [arm.label for arm in every.arms] == ["base", "arm-lr2", "arm-lr3"]
    assert every.caveats == ["arm: best at the edge of its grid; add lr=1.33333"]


def test_recipes_are_compared_at_the_largest_budget_that_both_have():
    base = make_arm("base", BASE) + make_arm("base", [3.0, 3.1, 3.2], tokens=2000.0)
    arm = make_arm("arm", LOWER)
    assert judged(base, arm).baseline == pytest.approx(4.1)
    arm += make_arm("arm", [2.9, 2.9, 2.9], tokens=2000.0)
    assert judged(base, arm).baseline == pytest.approx(3.1)
