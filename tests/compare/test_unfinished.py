"""Runs that failed, are still to finish, or were judged at another place of their schedule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from efftrain_cli.compare.frames import as_json
from efftrain_cli.compare.tables import answers
from efftrain_cli.compare.verdicts import verdict_sentences
from efftrain_cli.foundation.why import Why
from tests.compare.known_runs import (
    DEAD,
    PLD,
    SLW,
    curve,
    of,
    values,
    verdict_of,
    write_pair,
)
from tests.fake_runs import rows_of, write_run


def test_an_unfinished_run_has_no_final_loss(root):
    write_run(root, "small", 0)
    write_run(root, "small-slw", 0, steps=50, budget=102400, more=SLW)
    comparison = of("small", "small-slw")
    assert values(comparison, "final_loss", "small-slw") == {0: Why("crashed", "crashed")}
    assert {d.text for d in comparison.verdicts} == {"pending: 1 of 2 runs not finished"}
    assert "small-slw-seed0: unfinished: crashed at step 50 (50 % of its tokens)" in {
        label.text for label in comparison.labels
    }
    # What has not finished moves no point.
    assert comparison.points["tokens"].limited_by == "small-seed0"
    # It is never the baseline while another has finished, whatever the order.
    assert of("small-slw", "small").baseline.label == "small"
    write_run(root, "small-pld", 0, more=PLD)
    assert of("small-slw", "small-pld").baseline.label == "small-pld"


def test_a_run_that_was_not_started_is_pending(root):
    write_pair(root)
    (root / "small-slw-seed1" / "metrics.jsonl").unlink()
    assert verdict_of("final_loss").text.startswith("pending: 1 of 6")
    # No run has diverged or jumped so far: lines of zeros are left out.
    titles = {row[0] for row in answers(of("small", "small-slw")).rows}
    assert "final loss" in titles
    assert titles.isdisjoint({"runs that diverged", "validation jumps"})


def write_failing(
    root: Path, name: str, seeds: int, failed: int = 0, stuck: int = 0, **more: Any
) -> None:
    """Runs of a recipe, of which the first fail, or end above where they began."""
    for seed in range(seeds):
        rows = rows_of(100, seed)
        if seed < stuck:
            for row in rows:
                if row["val_loss"]:
                    row["val_loss"] = 9.0 + seed / 100
        options = DEAD if seed < failed else {"rows": rows}
        write_run(root, name, seed, **options, **more)


@pytest.mark.parametrize(
    ("seeds", "base", "method", "p", "text", "shares"),
    [
        # Four failures among ten runs: 5 of the 210 ways give all of them to one recipe, 5 all to
        # the other.
        (
            5,
            {"failed": 4},
            {},
            10 / 210,
            "better",
            # Clopper and Pearson: 1 - (0.025)^(1/5) = 0.522
            "small 4 of 5 (28 to 99 %), small-slw 0 of 5 (0 to 52 %)",
        ),
        (3, {"failed": 3}, {}, 2 / 20, "undecided: so few runs cannot give p below 0.1", ""),
        (5, {}, {"stuck": 5}, 2 / 252, "worse", ""),
        # Three of ten: in 42 of 252 ways one recipe has them all.
        (5, {}, {"stuck": 3}, 42 / 252, "undecided", ""),
    ],
)
def test_failures_alone_decide_where_too_few_runs_finished(
    root, seeds, base, method, p, text, shares
):
    write_failing(root, "small", seeds, **base)
    write_failing(root, "small-slw", seeds, more=SLW, **method)
    comparison = of("small", "small-slw", baseline="small")
    final = comparison.verdict("final_loss", "small-slw")
    assert final.exact.p == pytest.approx(p) and final.text.startswith(text)
    assert final.exact.method == "Fisher's exact test"
    assert f"failed or got stuck: {shares}" in verdict_sentences(comparison)[0]
    assert comparison.points["tokens"].value == 102400
    diverged = comparison.verdict("diverged", "small-slw")
    if base:
        assert diverged.exact.p == pytest.approx(p)
    else:
        assert diverged.why.kind == "nothing"


def test_the_sentence_about_failures_says_the_adjusted_p(root):
    write_failing(root, "small", 5)
    write_failing(root, "small-slw", 5, failed=5, more=SLW)
    write_failing(root, "small-pld", 5, failed=5, more=PLD)
    first, second = verdict_sentences(of("small", "small-slw", "small-pld"))
    # 2 * 2 / 252 by Holm
    assert "B small-slw is worse than A small in final loss: p = 0.016; failed" in first
    assert "C small-pld is worse than A small in final loss: p = 0.016; failed" in second


def test_a_verdict_at_another_place_of_the_decay_is_withheld(root):
    """Steps of half the time: seconds are shown and never judged."""
    for seed in range(3):
        write_run(root, "small", seed)
        fast = []
        for row in rows_of(100, seed, 1.3):
            fast.append(row | {"train_seconds": row["train_seconds"] / 2})
        write_run(root, "small-slw", seed, rows=fast, more=SLW)
        # A decay that was cut short is said for the final loss too; 2 % and less are not.
        path = write_run(root, "short", seed, more=SLW, lr=2e-3) / "recipe.toml"
        recipe = path.read_text()
        path.write_text(recipe.replace("[optim]", "[optim]\ndecay_tokens = 200_000"))
    comparison = of("small", "small-slw")
    for measure in ("loss_at_seconds", "seconds_to_match"):
        seconds = comparison.verdict(measure, "small-slw")
        assert seconds.text == "not judged: by these machines' clocks"
        assert seconds.p_holm is None and not math.isnan(seconds.estimate.mean)
    assert comparison.verdict("final_loss", "small-slw").text == "better"
    assert (
        verdict_of("final_loss", "short").text
        == "not judged: small is at 100 % of its decay, short at 51 %"
    )


def test_each_recipe_stands_at_its_own_best(root):
    """After a sweep: the worst learning rate comes first by name, and must not be the baseline."""
    for seed in range(3):
        for recipe, name, lr, speed, more in (
            ("small", "a", 1e-3, 0.7, ""),
            ("small", "b", 2e-3, 1.2, ""),
            ("small-slw", "a", 1e-3, 1.0, SLW),
            ("small-slw", "b", 2e-3, 1.1, SLW),
        ):
            run = f"{recipe}-{name}-seed{seed}"
            write_run(root, recipe, seed, name=run, lr=lr, speed=speed, more=more)
    comparison = of("small", "small-slw")
    best = ["small optim.lr=0.002", "small-slw optim.lr=0.002"]
    assert [group.label for group in comparison.groups] == best
    assert comparison.verdict("final_loss", best[1]).text == "worse"
    assert [(trial.label, trial.chosen) for trial in comparison.trials] == [
        ("small optim.lr=0.001", False),
        ("small optim.lr=0.002", True),
        ("small-slw optim.lr=0.001", False),
        ("small-slw optim.lr=0.002", True),
    ]
    rule = "at its own best setting: the setting with the fewest unfinished runs"
    assert any(rule in label.text for label in comparison.labels)
    assert not any("not tuned alike" in label.text for label in comparison.labels)
    fewer = of("small", "small-slw-?-seed[01]", baseline="small")
    unlike = "not tuned alike: small 2 settings in 6 runs, small-slw 2 settings in 4 runs; the best"
    assert any(label.text.startswith(unlike) for label in fewer.labels)
    assert len(of("small", "small-slw", every_setting=True).groups) == 4
    named = of("small", "small-slw", baseline="small optim.lr=0.001")
    assert [group.label for group in named.groups] == ["small optim.lr=0.001", best[1]]
    # Settings of one recipe are not tested against whichever comes first.
    alone = of("small")
    assert alone.baseline.label == best[0]
    why = alone.verdict("final_loss", "small optim.lr=0.001").text
    assert why.startswith("settings of one recipe")
    named = of("small", baseline="small optim.lr=0.001")
    assert named.verdict("final_loss", best[0]).text == "better"


def test_the_best_setting_waits_for_runs_that_have_not_finished(root):
    """The better learning rate has a run to come; as if it had failed, the worse one would be
    taken."""
    for seed in range(3):
        for lr, speed in ((1e-3, 0.7), (2e-3, 1.2)):
            half = {"steps": 50, "budget": 102400} if lr == 2e-3 and seed == 2 else {}
            name = f"small-{lr}-seed{seed}"
            write_run(root, "small", seed, name=name, lr=lr, speed=speed, **half)
        write_run(root, "small-slw", seed, more=SLW)
    comparison = of("small", "small-slw")
    assert comparison.baseline.label == "small optim.lr=0.001"
    why = "pending: the best setting waits for small-0.002-seed2"
    assert comparison.verdict("final_loss", "small-slw").text == why
    assert why in verdict_sentences(comparison)[0]
    named = of("small", "small-slw", baseline="small optim.lr=0.001")
    assert named.verdict("final_loss", "small-slw").text == "better"


@pytest.mark.parametrize(
    ("every", "failed", "common"),
    [
        (15, False, (0, 30, 60, 90, 100)),
        # A run that failed takes no evaluation away.
        (20, True, (0, 20, 40, 60, 80, 100)),
    ],
)
def test_only_common_evaluations_are_compared(root, every, failed, common):
    more = SLW + f"\n[eval]\nevery = {every}\n"
    for seed in range(3):
        write_run(root, "small", seed, more="\n[eval]\nevery = 10\n")
        write_run(root, "small-slw", seed, rows=rows_of(100, seed, every=every), more=more)
    if failed:
        rows = rows_of(25, 3, every=every)
        write_run(root, "small-slw", 3, **DEAD | {"rows": rows, "more": more})
    comparison = of("small", "small-slw")
    finished = [run for run in comparison.runs if run.status == "finished"]
    assert {tuple(run.evaluated["step"].tolist()) for run in finished} == {common}
    note = f"only the {len(common)} evaluations"
    assert any(note in label.text for label in comparison.labels)


@pytest.mark.parametrize(
    ("base", "method", "verdict"),
    [
        (
            "",
            "[[stages]]\nn_layer = 1\n",
            (
                "not judged: where b stood on the learning-rate schedule is known only at the"
                " run's end"
            ),
        ),
        ("[[stages]]\nn_layer = 2\n", "[[stages]]\nn_layer = 1\n", "not judged: where b stood on"),
        (
            'schedule = "constant"',
            "",
            "not judged: b is at 50 % of its decay, that of a has no end",
        ),
        ('schedule = "constant"', 'schedule = "constant"\nmin_lr = 0', "worse"),
    ],
)
def test_a_place_on_the_schedule_that_is_not_known_is_not_taken_for_equal(
    root, base, method, verdict
):
    """At the FLOPs of `a`, whose tokens cost half as many, `b` is in the middle of its run."""
    for seed in range(3):
        for name, own, share, speed in (("a", base, 0.5, 1.0), ("b", method, 1.0, 1.1)):
            rows = []
            for row in rows_of(100, seed, speed):
                rows.append(row | {"total_flops": share * row["total_flops"]})
            more = f"\n{own}" if own.startswith("[[") else ""
            path = write_run(root, name, seed, rows=rows, more=more)
            if own and not more:
                recipe = path / "recipe.toml"
                recipe.write_text(recipe.read_text().replace("[optim]", f"[optim]\n{own}"))
    assert verdict_of("loss_at_flops", "b", "a").text.startswith(verdict)
    assert verdict_of("final_loss", "b", "a").text == "better"


def test_costs_are_not_judged_over_different_budgets(root):
    """With twice the budget the longer run comes down to the shorter one's loss, and to a target,
    in mid-decay."""
    for seed in range(3):
        write_run(root, "short", seed, steps=50)
        write_run(root, "long", seed, rows=rows_of(100, seed, speed=0.6), steps=100)
        write_run(root, "quick", seed, rows=rows_of(50, seed, speed=1.3), steps=50)
    found = [verdict_of("tokens_to_match", "long", "short")]
    for axis in ("tokens", "flops"):
        found.append(verdict_of(f"{axis}_to_target", "long", "short", target_loss=4.4))
    for each in found:
        assert each.text.startswith("not judged: schedules of 51.2K and 102.4K tokens")
        assert "train.tokens=a,b,c" in each.text and each.p_holm is None
    quick = verdict_of("tokens_to_target", "quick", "short", target_loss=4.4)
    assert quick.text == "better"


def test_a_side_that_fails_more_is_not_claimed(root):
    """The method has the lower loss at three times the FLOPs, over the four pairs that finished."""
    for seed in range(5):
        write_run(root, "small", seed)
        rows = []
        for row in rows_of(100 if seed else 30, seed, 1.3):
            rows.append(row | {"total_flops": 3 * row["total_flops"]})
        options = {"rows": rows, "more": SLW}
        write_run(root, "small-slw", seed, **options if seed else DEAD | options)
    comparison = of("small", "small-slw")
    final = comparison.verdict("final_loss", "small-slw")
    assert (final.outcome, final.p_holm, final.estimate.n) == ("undecided", 1.0, 4)
    # Exact intervals: 0.0051 and 0.7164 for 1 of 5, 0.5218 for 0 of 5.
    note = "small 0 of 5 (0 to 52 %), small-slw 1 of 5 (1 to 72 %)"
    assert final.note.startswith("lower loss, more failures; failed or got stuck: " + note)
    flops = comparison.verdict("flops_to_match", "small-slw")
    assert flops.text == "worse" and flops.estimate.n == 4
    # The table and programs have the note of every line.
    assert f"\ntokens to match, seconds to match: {final.note}.\n" in answers(comparison).note
    rows = [row for row in as_json(comparison)["rows"] if row["note"] == final.note]
    assert [row["measure"] for row in rows] == ["final_loss", "tokens_to_match", "seconds_to_match"]


def test_a_run_that_failed_after_the_target_is_the_worst_rank(root):
    for seed in range(5):
        curve(root, [6.0, 4.0, 3.5, 3.0], "base", seed)
        dead = {"budget": 102400, "events": DEAD["events"]}
        curve(root, [6.0, 2.0, 2.0, 2.0], "method", seed, more=SLW, **dead)
    tokens = verdict_of("tokens_to_target", "method", "base", target_loss=3.2)
    assert tokens.exact.wins == 0 and tokens.text == "worse"


@pytest.mark.parametrize("dead", [False, True])
def test_a_run_with_fewer_tokens_is_not_stuck(root, dead):
    """After 12 of the baseline's 100 steps a loss is above the baseline's at 20; a run that
    diverged has failed."""
    for seed in range(4):
        write_run(root, "small", seed)
        options = {"steps": 12}
        if dead and seed == 3:
            options = {"steps": 10, "budget": 12288, "events": DEAD["events"]}
        write_run(root, "short", seed, more=SLW, **options)
    comparison = of("small", "short")
    final = comparison.verdict("final_loss", "short")
    assert final.why.kind == "not_judged" and "short spent 0.12x the tokens" in final.why.text
    assert ("got stuck: small 0 of 4 (0 to 60 %), short 1 of 4 (1 to 81 %)" in final.note) == dead
    assert ("stuck" in answers(comparison).note) == dead
    # The same noise on both sides: 3 exp(-12 / 40) - 3 exp(-100 / 40).
    assert final.estimate.mean == pytest.approx(1.9762, abs=1e-4)
