"""What a comparison says, against runs whose numbers are known; and that it can be recomputed from
metrics.jsonl."""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from efftrain_cli.compare import inference
from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.engine import _unless_too_sparse, count_members
from efftrain_cli.compare.frames import as_json
from efftrain_cli.compare.inference import Estimate
from efftrain_cli.compare.measures import (
    NOT_REACHED,
    Costs,
    Ended,
    cost_to_reach,
    crossing_error,
    has_unequal_steps,
    loss_at,
    match,
    read_end,
    smooth_end,
)
from efftrain_cli.compare.planning import seeds_needed
from efftrain_cli.compare.reading import read_numbers
from efftrain_cli.compare.tables import answers, plan_table
from efftrain_cli.compare.verdicts import verdict_sentences
from tests.compare.known_runs import PLD, SLW, curve, mean, of, values, verdict_of, write_pair
from tests.fake_runs import rows_of, write_rows, write_run


@pytest.mark.parametrize(
    ("losses", "target", "bound", "read"),
    [
        # Convex: the segment before reaches 3 at 1.25, the one behind at 1: the curve lies between
        # 1.25 and 1.5.
        ([8.0, 4.0, 2.0, 1.0], 3.0, 1.25, 1.5),
        # It bends both ways: drawn on, they reach 4 beyond either end; the farther end counts.
        ([8.0, 7.0, 3.0, 2.0], 4.0, 1.0, 1.75),
        # Concave: the segment before reaches 6 at 3, cut off at 2; the one behind at 1.875.
        ([8.0, 7.5, 5.5, 1.5], 6.0, 1.875, 1.75),
        ([8.0, 4.0], 8.5, 1.0, 1.0),
    ],
)
def test_how_far_a_crossing_may_lie_by_hand(losses, target, bound, read):
    curve = Ended(3.0, losses[-1], np.arange(len(losses), dtype=float), np.array(losses))
    assert crossing_error(curve, target) == pytest.approx(math.log(bound / read))


@pytest.mark.parametrize("case", ["failed before an evaluation", "unbounded in both directions"])
def test_sparse_evaluations_never_end_a_comparison(root, case):
    """Where a crossing lies is open by any factor; the verdict says so."""
    for seed in range(5):
        sides = [[6.0, 5.5, 5.2, 5.0 + seed / 100], [6.0, 4.0, 3.9, 3.8 + seed / 100]]
        if seed % 2 and case == "unbounded in both directions":
            sides.reverse()
        if seed == 0 and case == "failed before an evaluation":
            diverged = [row | {"val_loss": None, "nonfinite": True} for row in rows_of(5, seed)[1:]]
            write_run(root, "small", seed, rows=diverged, budget=30 * 1024)
        else:
            curve(root, sides[0], "small", seed)
        curve(root, sides[1], "small-slw", seed, more=SLW)
    assert (
        verdict_of("tokens_to_match").text
        == "not judged: evaluations every 10 steps leave it open altogether; eval.every = 1"
        " would do"
    )


def test_the_interval_of_evaluations_that_would_do_by_hand():
    """Open by e^0.4, a crossing is off by four times a quarter of the interval; half the steps
    leave a fourth of it."""
    run = SimpleNamespace(evaluated={"step": np.array([0, 50, 100])})
    groups = [SimpleNamespace(runs=[run])] * 2
    wide = Estimate(1.2, low=1.0, high=math.exp(0.4), log=True)
    assert (
        _unless_too_sparse(wide, 0.4, groups).why.text
        == "not judged: evaluations every 50 steps leave it open by 1.49x, more than a quarter of"
        " its interval; eval.every = 25 would do"
    )
    assert _unless_too_sparse(wide, 0.1, groups) is wide


def test_interpolation_by_hand(root):
    """Evaluations at 0, 10240, 20480, 30720 tokens: 6, 5, 4, 4.5."""
    run = read_numbers(curve(root, [6.0, 5.0, 4.0, 4.5]))
    assert loss_at(run, "tokens", 5120) == 5.5
    assert loss_at(run, "seconds", 1.25) == pytest.approx(4.25)
    assert loss_at(run, "tokens", 30721) is None
    # The curve that never rises and fits best ends at (4 + 4.5) / 2 in the middle of the last two.
    assert cost_to_reach(run, "tokens", 4.625) == pytest.approx(10240 + 0.5 * 15360)
    assert cost_to_reach(run, "flops", 4.25) == pytest.approx(25600 * 6e5)
    assert cost_to_reach(run, "seconds", 4.2) == NOT_REACHED
    assert cost_to_reach(run, "tokens", 7.0) == 0
    falling = read_numbers(curve(root, [6.0, 5.0, 4.0, 3.5], "falling"))
    assert cost_to_reach(falling, "tokens", 4.75) == 12800  # where nothing rises, the straight line
    assert (run.evaluated["val_loss"].min(), run.status) == (4.0, "finished")


def test_equal_tokens_are_the_largest_that_all_runs_reached(root):
    curve(root, [6.0, 5.0, 4.0, 3.0, 2.0], "long")
    curve(root, [6.0, 5.5, 5.0], "short")
    comparison = of("long", "short")
    assert comparison.points["tokens"].value == 20480
    assert comparison.points["tokens"].limited_by == "short-seed0"
    assert mean(comparison, "loss_at_tokens", "long") == 4.0
    assert mean(comparison, "loss_at_tokens", "short") == 5.0


def test_a_target_not_reached_is_a_bound_and_is_used_by_rank(root):
    """3 of 5 baselines never come to 2.5: the ratio is a bound, the verdict the exact rank
    sum's."""
    for seed, last in enumerate((3.0, 2.9, 2.8, 2.4, 2.3)):
        curve(root, [6.0, 4.0, last], "base", seed)
        curve(root, [6.0, 2.2 + seed / 100, 2.1], "method", seed, more=SLW)
    comparison = of("base", "method", target_loss=2.5)
    assert mean(comparison, "tokens_to_target", "base") is None
    costs = values(comparison, "tokens_to_target", "base")
    assert [costs[seed] for seed in range(3)] == [NOT_REACHED] * 3
    tokens = comparison.verdict("tokens_to_target", "method")
    assert (tokens.exact.wins, tokens.text, tokens.estimate.bound) == (1.0, "better", 1)
    assert tokens.exact.p == pytest.approx(2 / 252)
    assert tokens.estimate.mean == pytest.approx(2.12, abs=0.01)
    assert (
        tokens.note
        == "3 of 5 baseline runs and 0 of this arm's did not reach the target; exact rank-sum test"
    )
    row = next(row for row in answers(comparison).rows if row[0] == "tokens to loss 2.5")
    assert row[1] == "2 of 5 runs"
    assert row[3] == "more than 2.12x, ahead in 100 % of pairs"
    # Seen from the other side the method is worse: a fixed target has two sides.
    other = verdict_of("tokens_to_target", "base", "method", target_loss=2.5)
    assert other.text == "worse" and other.estimate.bound == -1


def test_without_a_target_costs_are_to_match_the_worse_run_of_a_pair(root):
    """By hand: the method passes the baseline's 3.0 midway between 20480 and 30720 tokens; then the
    other way round."""
    for seed in range(3):
        curve(root, [6.0, 5.0, 4.0, 3.0], "base", seed)
        curve(root, [6.0, 5.0, 3.5, 2.5], "method", seed, more=SLW)
    a, b = (read_end(read_numbers(root / f"{name}-seed0"), "tokens") for name in ("base", "method"))
    assert match(a, b) == pytest.approx(math.log(30720 / 25600))
    assert match(b, a) == pytest.approx(-math.log(30720 / 25600))
    assert match(a, a) == 0
    forward = verdict_of("tokens_to_match", "method", "base")
    back = verdict_of("tokens_to_match", "base", "method")
    assert forward.estimate.mean == pytest.approx(1.2)
    assert back.estimate.mean == pytest.approx(1 / 1.2)


def test_updates_to_match_are_judged_where_steps_differ_in_tokens(root):
    """By hand: the method, with two updates for each of the baseline's, falls to 3.0 in 500, 500
    and 480 updates."""
    for seed, slope in enumerate((0.12, 0.12, 0.125)):
        curve(root, [6 - 0.1 * i for i in range(31)], "base", seed)
        losses = [6 - slope * i for i in range(31)]
        curve(root, losses, "alike", seed, more=SLW)
        path = curve(root, losses, "method", seed, more=PLD)
        rows = [json.loads(line) for line in (path / "metrics.jsonl").open()]
        write_rows(path, [row | {"step": 2 * row["step"]} for row in rows])
    assert of("base", "alike").verdict("updates_to_match", "alike") is None
    assert of("base", "method", target_loss=3.0).verdict("updates_to_match", "method") is None
    comparison = of("base", "method")
    found = comparison.verdict("updates_to_match", "method")
    assert found.estimate.mean == pytest.approx((0.6 * 0.6 * 0.625) ** (1 / 3))
    assert found.outcome == "worse"
    assert comparison.verdict("tokens_to_match", "method").outcome == "better"
    costs = [v for v in comparison.verdicts if v.question.section == "Cost" and v.p is not None]
    # Tokens, FLOPs and seconds are near-copies of each other; updates are not.
    assert len(costs) > 2 and count_members(costs) == 2
    assert "updates to match" in {row[0] for row in answers(comparison).rows}


@pytest.mark.parametrize(("tokens", "unequal"), [(81.6, False), (81.7, True)])
def test_steps_are_unequal_beyond_2_percent_of_their_tokens(tokens, unequal):
    """At steps 1 and 10 of one run 8 tokens a step; at step 10 of the other 8.16 are 2 % more."""
    runs = []
    for steps, spent in (((0, 1, 10), (0, 8, 80)), ((0, 10), (0, tokens))):
        evaluated = {"step": np.array(steps), "tokens": np.array(spent)}
        runs.append(SimpleNamespace(status="finished", evaluated=evaluated))
    assert has_unequal_steps(runs) == unequal
    runs[1].status = "crashed"
    assert not has_unequal_steps(runs)


def test_the_end_of_a_run_is_read_from_its_last_fifth(root):
    """The line through the last four of twenty evaluations, at the last: 2.0 where they lie on it,
    and the mean of what jitters."""
    run = read_numbers(curve(root, [6.0] * 16 + [2.3, 2.2, 2.1, 2.0], "line"))
    assert smooth_end(run, "tokens") == pytest.approx(2.0)
    run = read_numbers(curve(root, [6.0] * 16 + [3.1, 2.9, 2.9, 3.1], "jitter"))
    assert smooth_end(run, "tokens") == pytest.approx(3.0)
    run = read_numbers(curve(root, [6.0] * 10 + [2.2, 2.1, 2.0], "few"))
    assert smooth_end(run, "tokens") == 2.0, "a line through two says no more than the last"


def shown_in(comparison: Comparison) -> list[str]:
    """The cells of the line of jumps in the default table."""
    rows = answers(comparison).rows
    return [cell for row in rows if row[0] == "validation jumps" for cell in row[1:3]]


def test_jumps_are_those_of_the_validation_loss(root):
    """The losses of small batches are above 1.2 times their best in every run; 3.7 is above 1.2 x
    3.0, 3.5 is not."""
    noisy = {"loss_ratio": 1.3}
    for seed in range(4):
        for name, losses, more in (
            ("base", [6.0, 3.0, 3.7, 3.7, 2.5], ""),
            ("calm", [6.0, 3.0, 3.5, 2.9, 2.5], SLW),
            ("calmer", [6.0, 3.5, 3.4, 2.9, 2.4], PLD),
        ):
            path = curve(root, losses, name, seed, more=more)
            rows = [json.loads(line) | noisy for line in (path / "metrics.jsonl").open()]
            write_rows(path, rows)
    comparison = of("base", "calm")
    assert mean(comparison, "validation_jumps", "base") == 2.0
    assert shown_in(comparison) == ["2", "0"]
    assert comparison.verdict("validation_jumps", "calm").exact.p == pytest.approx(2 / 70)
    assert shown_in(of("calm", "calmer")) == []
    assert mean(comparison, "share_over_1_2", "calm") == 100.0
    assert comparison.verdict("share_over_1_2", "calm") is None


def test_one_seed_makes_no_claim(root):
    """F49."""
    write_pair(root, seeds=1)
    comparison = of("small", "small-slw")
    judged = {d.text for d in comparison.verdicts if d.question.axis != "seconds"} - {"none"}
    assert judged == {"one seed: no claim"}
    assert all(difference.p_holm is None for difference in comparison.verdicts)
    (sentence,) = verdict_sentences(comparison)
    assert sentence.startswith("B small-slw against A small in final loss: one seed: no claim; -0.")
    # The verdict "one seed" says it in the table.
    assert "one seed: no claim" not in answers(comparison).note


def test_clear_difference_over_three_seeds_is_claimed_from_either_side(root):
    write_pair(root)
    for key in ("final_loss", "tokens_to_match", "flops_to_match"):
        assert verdict_of(key).text == "better"
        assert verdict_of(key, "small", "small-slw").text == "worse"
    # Shown, never tested.
    assert of("small", "small-slw").verdict("best_loss", "small-slw") is None


def test_undecided_says_what_the_study_could_have_seen_and_asks_for_no_more_seeds(root):
    for seed, (a, b) in enumerate([(3.0, 3.1), (3.2, 3.0), (3.1, 3.05)]):
        curve(root, [6.0, 4.0, a], "base", seed)
        curve(root, [6.0, 4.0, b], "method", seed, more=SLW)
    comparison = of("base", "method")
    final = comparison.verdict("final_loss", "method")
    sd = np.std([0.1, -0.2, -0.05], ddof=1)
    assert final.text == "undecided"
    assert final.min_detectable_effect == pytest.approx(3.26 * sd, rel=0.01)
    (sentence,) = verdict_sentences(comparison)
    assert sentence == (
        "B method against A base is undecided in final loss: -0.0500 [-0.4226, +0.3226] nats/token,"
        " p = 0.62, 3 pairs; "
        # The spread of three differences is known within sqrt(2 / 7.378) and sqrt(2 / 0.0506).
        "such a study shows a difference of 0.49 nats/token in 80 % of cases (0.25 to 3.1 by the"
        " spread's own interval)."
    )
    assert verdict_of("final_loss", "method", "base", margin=0.7).text == "equivalent"


def test_partly_shared_seeds_use_every_run(root):
    for seed in (0, 1, 2):
        write_run(root, "small", seed)
    for seed in (1, 2, 3):
        write_run(root, "small-slw", seed, speed=1.3, more=SLW)
    for seed in (7, 8):
        write_run(root, "small-pld", seed, speed=1.1, more=PLD)
    comparison = of("small", "small-slw", "small-pld")
    final = {d.arm: d for d in comparison.verdicts if d.question.key == "final_loss"}
    means = {
        label: mean(comparison, "final_loss", label)
        for label in ("small", "small-slw", "small-pld")
    }
    assert final["small-slw"].seeds == (1, 2)
    assert "too few to pair" in final["small-slw"].estimate.method
    assert final["small-pld"].seeds == () and "not paired" in final["small-pld"].estimate.method
    for label, difference in final.items():  # the interval is about the means that are shown
        assert difference.estimate.mean == pytest.approx(means[label] - means["small"])
    match = comparison.verdict("tokens_to_match", "small-pld")
    assert match.estimate.method.startswith("all pairs") and match.estimate.mean > 1


def test_holm_is_applied_over_the_recipes_and_over_what_is_beside_the_final_loss(root):
    write_pair(root)
    for seed in range(3):
        write_run(root, "small-pld", seed, speed=1.01, more=PLD)
    comparison = of("small", "small-slw", "small-pld")
    final = [d for d in comparison.verdicts if d.question.key == "final_loss"]
    raw = [d.estimate.p for d in final]
    assert final[0].p_holm == pytest.approx(2 * raw[0]) and final[1].p_holm == pytest.approx(raw[1])
    # What the study could have seen is planned at the stricter alpha / 2 of two recipes.
    assert final[1].min_detectable_effect == pytest.approx(
        inference.detectable(final[1].estimate, 0.025)
    )
    beside = [
        d for d in comparison.verdicts if d.question.key != "final_loss" and d.p_holm is not None
    ]
    assert (
        len(beside) == 4
    )  # tokens and FLOPs to match, of two recipes; seconds are not judged, nothing jumped
    # Both costs of an arm are one member of the family, as they are near-copies.
    costs = [d.estimate.p for d in beside[:2]]
    assert [d.p_holm for d in beside] == pytest.approx([*inference.holm(costs)] * 2)


def test_20_seeds_are_judged_by_t_as_3_are(root):
    write_pair(root, seeds=20)
    found = verdict_of("tokens_to_match").estimate
    assert (found.method, found.n) == ("paired t on log ratios", 20)


START = {"event": "start"}
HALF = {"steps": 50, "budget": 102400}
RESUMED = rows_of(60, 0) + rows_of(100, 0, segment=1, first=41)
BAD = {"loss": None, "nonfinite": True}
DIVERGED_ONCE = [*rows_of(59, 0), rows_of(60, 0)[-1] | BAD, *rows_of(100, 0, segment=1, first=41)]
MOVED = [
    START | {"device": "cpu"},
    {"event": "resume", "device": "cuda"},
    {"event": "override", "differences": [["optim.lr", 1e-3, 2e-3]]},
]


@pytest.mark.parametrize(
    ("run", "events", "marks"),
    [
        (HALF, [START], ["unfinished: crashed at step 50 (50 % of its tokens)"]),
        (
            HALF,
            [START, {"event": "end", "status": "disk"}],
            ["unfinished: crashed (disk) at step 50 (50 % of its tokens)"],
        ),
        (
            HALF,
            [START, {"event": "end", "status": "paused"}],
            ["unfinished: stopped at step 50 (50 % of its tokens)"],
        ),
        (
            HALF,
            [START, {"event": "diverged", "step": 50}, {"event": "checkpoint"}],
            ["diverged at step 50 (50 % of its tokens)"],
        ),
        ({"rows": RESUMED}, [START, {"event": "resume"}], ["resumed 1 time"]),
        (
            {"rows": DIVERGED_ONCE},
            [START, {"event": "diverged"}, {"event": "resume"}],
            ["resumed 1 time", "non-finite 1 time"],
        ),
        (
            {"rows": [row for row in rows_of(100, 0) if row["step"] not in (7, 8)]},
            MOVED,
            [
                "resumed 1 time",
                "ran on cpu and cuda",
                "continued although what decides it had changed (optim.lr)",
                "2 steps missing in metrics.jsonl",
            ],
        ),
    ],
)
def test_runs_that_were_not_smooth_are_marked(root, run, events, marks):
    """F49: crashed, stopped, diverged, resumed, moved."""
    write_run(root, "small", 0, events=events, **run)
    comparison = of("small")
    (numbers,) = comparison.runs
    assert [mark.text for mark in numbers.marks] == marks
    assert {f"small-seed0: {mark}" for mark in marks} <= {each.text for each in comparison.labels}
    assert numbers.nonfinite_stops == ("non-finite 1 time" in marks)


def test_abandoned_steps_are_not_measured_twice(root):
    """Segment 0 to step 60 with a jump at 55, then a resume from 41: the jump is not in the run
    that counts."""
    first = rows_of(60, 0, loss_ratio=1.0)
    first[55]["loss_ratio"] = 3.0
    run = read_numbers(
        write_run(
            root,
            "small",
            0,
            rows=first + rows_of(50, 0, segment=1, first=41, loss_ratio=1.0),
            budget=102400,
        )
    )
    assert run.stability.max_loss_ratio == 1.0
    assert (run.stability.above_severe, run.stability.steps) == (0, 51)


def test_a_ratio_of_exactly_the_limit_is_not_above_it(root):
    rows = rows_of(10, 0, loss_ratio=1.0)
    rows[3]["loss_ratio"], rows[4]["loss_ratio"], rows[5]["loss_ratio"] = 1.5, 1.2, 1.51
    run = read_numbers(write_run(root, "small", 0, steps=10, rows=rows))
    assert (run.stability.above_slight, run.stability.above_severe) == (2, 1)


def test_groups_know_the_number_of_devices(root):
    write_run(root, "small", 0)
    write_run(root, "small", 1, origin={"world_size": 2})
    found = of("small")
    assert {group.label for group in found.groups} == {"small devices=1", "small devices=2"}
    assert found.recipe_differences == {"devices": [1, 2]}
    assert "small devices=1 and small devices=2 are one recipe: none of its keys differs" in [
        label.text for label in found.labels
    ]
    assert as_json(found)["recipe_differences"] == {
        "devices": {"small devices=1": 1, "small devices=2": 2}
    }


def test_duplicate_rows_and_torn_lines_change_nothing(root):
    """F30."""
    write_pair(root)
    before = as_json(of("small", "small-slw"))
    path = root / "small-seed1"
    whole = rows_of(100, 1)
    # The same steps again, as an exact resume from step 40 writes them, after rows that it
    # replaces.
    write_rows(path, whole[:61] + [row | {"segment": 1} for row in whole[41:]])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 101, "seg')
    after = as_json(of("small", "small-slw"))
    for value in (before, after):
        for group in value["groups"]:
            for run in group["runs"]:
                # That it was resumed is said, and each segment has its own clock.
                run.pop("marks")
                run.pop("seconds")
        value.pop("labels")
    assert before == after


def test_price_and_energy(root):
    """At 3600 an hour and 3.6 MW a second costs 1 and 1 kWh: 0.5 of them to a loss of 4, 1 in
    all."""
    curve(root, [6.0, 4.0, 3.0])
    costs = Costs(price_per_hour=3600.0, power_watts=3.6e6)
    comparison = of("c", target_loss=4.0, costs=costs)
    assert mean(comparison, "seconds_to_target", "c") == pytest.approx(0.5)
    assert mean(comparison, "price_to_target", "c") == pytest.approx(0.5)
    assert mean(comparison, "kwh_to_target", "c") == pytest.approx(0.5)
    assert values(of("c", target_loss=2.0, costs=costs), "price_to_target", "c") == {0: NOT_REACHED}
    comparison = of("c", costs=costs)
    assert mean(comparison, "price", "c") == pytest.approx(1.0)
    assert mean(comparison, "kwh", "c") == pytest.approx(1.0)


def test_throughput_is_tokens_over_training_seconds(root):
    """F46, and with a resume in between."""
    path = write_run(root, "small", 0, rows=rows_of(60, 0) + rows_of(100, 0, segment=1, first=41))
    run = read_numbers(path)
    assert run.tokens_per_second == pytest.approx(100 * 1024 / 5.0, rel=1e-3)


def test_mfu_is_weighted_by_seconds_and_absent_where_unknown(root):
    rows = rows_of(10, 0)
    assert read_numbers(write_run(root, "a", 0, rows=rows)).mfu is None
    for row in rows[1:]:
        row["mfu"], row["seconds"] = (0.5, 1.0) if row["step"] == 1 else (0.2, 0.1)
    assert read_numbers(write_run(root, "b", 0, rows=rows)).mfu == pytest.approx(
        (0.5 + 9 * 0.02) / 1.9
    )


def test_seconds_add_up(root):
    """F43, reader's side: evaluation is apart from training."""
    run = read_numbers(write_run(root, "small", 0))
    rows = rows_of(60, 0) + [
        row | {"wall_seconds": (row["step"] - 40) * 0.06}
        for row in rows_of(100, 0, segment=1, first=41)
    ]
    assert read_numbers(write_run(root, "resumed", 0, rows=rows)).spent[
        "wall_seconds"
    ] == pytest.approx(40 * 0.06 + 60 * 0.06)
    assert run.seconds == pytest.approx(5.0) and run.spent["eval_seconds"] == pytest.approx(
        11 * 0.25
    )


def test_what_is_not_judged_today_is_planned(root):
    """Three settings of one recipe: without a name for the baseline the same is planned as with it,
    for two arms."""
    for seed in range(3):
        for lr, speed in ((1e-3, 1.0), (2e-3, 1.3), (3e-3, 1.1)):
            write_run(root, "small", seed, name=f"{lr}-seed{seed}", speed=speed, lr=lr)
    compared = of("small")
    assert compared.verdicts[0].why.kind == "settings"
    planned = plan_table(compared, [0.001]).rows
    named = of("small", baseline="small optim.lr=0.002")
    assert planned == plan_table(named, [0.001]).rows
    final = compared.verdicts[0].estimate
    assert planned[0][0] == "final loss" and planned[0][-1] == "pairs: 3 so far"
    # The 20th percentile of chi-squared on 2 degrees of freedom is 0.4463 (tables).
    n = seeds_needed(0.001, final.sd * (2 / 0.4463) ** 0.5, alpha=0.025)
    assert planned[0][-2] == str(n)


def test_plan_gives_seeds_for_wanted_differences(root):
    write_pair(root)
    table = plan_table(of("small", "small-slw"), [0.001, 0.1])
    final = next(row for row in table.rows if row[0] == "final loss")
    assert int(final[3]) > int(final[4]) >= 2
    # With a second arm Holm's strictest step is at half the level.
    for seed in range(3):
        write_run(root, "small-pld", seed, speed=1.01, more=PLD)
    table = plan_table(of("small", "small-slw", "small-pld"), [0.001])
    assert int(table.rows[0][3]) > int(final[3])
    pair_of_one = plan_table(of("small-seed0", "small-slw-seed0"), [0.01])
    assert pair_of_one.rows[0][-1] == "one seed: no claim"


def code_blocks(kind: str) -> list[str]:
    text = (Path(__file__).parent.parent.parent / "docs" / "compare.md").read_text()
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def test_every_number_can_be_recomputed_by_the_snippet_in_the_docs(root):
    for seed in range(3):
        rows = rows_of(60, seed) + rows_of(100, seed, segment=1, first=51)
        rows = [
            row | {"loss_ratio": 1.0 + row["step"] % 7 / 10} if row["step"] > 1 else row
            for row in rows
        ]
        # Stopped during the evaluation of step 50, which the next segment makes up for.
        late = rows[50] | {"segment": 1}
        rows[50]["val_loss"] = None
        write_run(root, "small", seed, rows=[*rows[:61], late, *rows[61:]])
        # Slower by a tenth, so that tokens and seconds are not the same axis in disguise.
        slower = [
            row | {"train_seconds": row["step"] * 0.055 + 0.001 * row["step"] ** 1.5}
            for row in rows_of(120, seed, 1.3)
        ]
        write_run(root, "small-slw", seed, steps=120, rows=slower, more=SLW)
    found = as_json(of("small", "small-slw", target_loss=3.3))
    read_one, over_seeds = code_blocks("python")
    assert len(ast.parse(read_one).body) <= 12  # statements that a reader must follow
    points = {axis: point["value"] for axis, point in found["equal_points"].items()}
    equal = {
        "tokens": points["tokens"],
        "total_flops": points["flops"],
        "train_seconds": points["seconds"],
    }
    by_seed: dict[str, dict[str, list[float]]] = {}
    for group in found["groups"]:
        for run in group["runs"]:
            values: dict[str, object] = {"runs": str(root), "name": run["name"], "equal": equal}
            exec(read_one, values)
            at = values["loss_at"]
            to = {axis: values["needed"](axis, 3.3) for axis in equal}
            expected = {
                "final_loss": values["final_loss"],
                "best_loss": values["best_loss"],
                "final_perplexity": np.exp(values["final_loss"]),
                "final_bits_per_byte": values["final_loss"] / np.log(2) / 2.5,
                "loss_at_tokens": at["tokens"],
                "loss_at_flops": at["total_flops"],
                "loss_at_seconds": at["train_seconds"],
                "tokens_to_target": to["tokens"],
                "flops_to_target": to["total_flops"],
                "seconds_to_target": to["train_seconds"],
                "validation_jumps": values["jumps"],
                "share_over_1_2": values["over"][0],
                "share_over_1_5": values["over"][1],
                "max_loss_ratio": values["largest_ratio"],
                "tokens_per_second": values["speed"],
                "trained_tokens": values["rows"].tokens.iloc[-1],
                "trained_flops": values["rows"].total_flops.iloc[-1],
                "train_seconds": values["rows"].train_seconds.iloc[-1],
                "nonfinite_stops": 0,
                "diverged": 0,
                "mfu": None,
                "train_cpu_seconds": None,
            }
            rows = {row["measure"]: row for row in found["rows"] if row["arm"] == group["label"]}
            assert set(rows) == set(expected)
            for key, value in expected.items():
                there = rows[key]["values"][rows[key]["seeds"].index(run["seed"])]
                if value is None:
                    assert there == "N/A", key
                else:
                    assert there == pytest.approx(value, rel=1e-9), key
                by_seed.setdefault(key, {}).setdefault(group["label"], []).append(value)
        for key, row in rows.items():
            if row["mean"] is not None:
                column = pd.Series(by_seed[key][group["label"]])
                assert (row["mean"], row["sd"]) == pytest.approx(
                    (column.mean(), column.std()), rel=1e-9, abs=1e-12
                )
    tested = 0
    for difference in found["rows"]:
        if difference["tested"] not in ("difference", "ratio"):
            continue
        baseline, method = (
            by_seed[difference["measure"]][label] for label in ("small", "small-slw")
        )
        values = {"np": np, "baseline": baseline, "method": method}
        exec(over_seeds, values)
        if difference["tested"] == "ratio":
            low, high = np.exp(values["speedup"].confidence_interval())
            p = values["speedup"].pvalue
            estimate = float(stats.gmean(np.divide(baseline, method)))
        else:
            low, high, p = values["low"], values["high"], values["difference"].pvalue
            estimate = float(np.mean(method) - np.mean(baseline))
        assert [difference[key] for key in ("estimate", "low", "high", "p")] == pytest.approx(
            [estimate, low, high, p]
        )
        tested += 1
    assert tested == 7  # the final loss, losses at equal tokens, FLOPs and seconds, three costs
