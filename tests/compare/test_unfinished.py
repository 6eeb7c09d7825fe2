"""Runs that failed, are still to finish, or were judged at another place of their schedule."""

from __future__ import annotations

import pytest

from efftrain_cli.compare.frames import as_json
from efftrain_cli.compare.tables import answers
from efftrain_cli.compare.verdicts import verdict_sentences
from efftrain_cli.foundation.why import Why
from efftrain_cli.run.calibrations import read_calibrations
from tests.compare.calibrations import calibrated
from tests.compare.known_runs import PLD, SLW, curve, of, pair, values
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
    assert (
        comparison.points["tokens"].limited_by == "small-seed0"
    )  # what has not finished moves no point
    # It is never the baseline while another has finished, whatever the order.
    assert of("small-slw", "small").baseline.label == "small"
    write_run(root, "small-pld", 0, more=PLD)
    assert of("small-slw", "small-pld").baseline.label == "small-pld"


def test_a_run_that_was_not_started_is_pending(root):
    pair(root)
    (root / "small-slw-seed1" / "metrics.jsonl").unlink()
    assert (
        of("small", "small-slw")
        .verdict("final_loss", "small-slw")
        .text.startswith("pending: 1 of 6")
    )


def test_failures_alone_decide_where_too_few_runs_finished(root):
    for seed in range(5):
        write_run(root, "small-slw", seed, speed=1.3, more=SLW)
        dead = {
            "steps": 30,
            "budget": 102400,
            "events": [{"event": "start"}, {"event": "diverged", "step": 30}],
        }
        write_run(root, "small", seed, **(dead if seed < 4 else {}))
    comparison = of("small", "small-slw")
    final = comparison.verdict("final_loss", "small-slw")
    # Four failures among ten runs: 5 of the 210 ways give all of them to A, 5 all to B.
    assert final.exact.p == pytest.approx(10 / 210) and final.text == "better"
    assert comparison.points["tokens"].value == 102400
    diverged = comparison.verdict("diverged", "small-slw")
    assert diverged.exact.method == "Fisher's exact test" and diverged.exact.p == pytest.approx(
        10 / 210
    )
    # Clopper and Pearson: 1 - (0.025)^(1/5) = 0.522
    words = "failed or got stuck: small 4 of 5 (28 to 99 %), small-slw 0 of 5 (0 to 52 %)"
    assert words in verdict_sentences(comparison)[0]


@pytest.mark.parametrize(("stuck", "p", "text"), [(5, 2 / 252, "worse"), (3, 1 / 6, "undecided")])
def test_stuck_runs_alone_decide(root, stuck, p, text):
    """Stuck in every seed, 2 of 252 ways, is worse; in three of five, 42 of 252, shows nothing."""
    for seed in range(5):
        write_run(root, "small", seed)
        rows = rows_of(100, seed)
        if seed < stuck:
            for row in rows:
                if row.get("val_loss"):
                    row["val_loss"] = 9.0 + seed / 100
        write_run(root, "small-slw", seed, rows=rows, more=SLW)
    final = of("small", "small-slw").verdict("final_loss", "small-slw")
    assert final.exact.p == pytest.approx(p) and final.text.startswith(text)


def test_the_sentence_about_ranks_says_the_adjusted_p(root):
    dead = {
        "steps": 30,
        "budget": 102400,
        "events": [{"event": "start"}, {"event": "diverged", "step": 30}],
    }
    for seed in range(5):
        write_run(root, "small", seed)
        write_run(root, "small-slw", seed, more=SLW, **dead)
        write_run(root, "small-pld", seed, more=PLD, **dead)
    comparison = of("small", "small-slw", "small-pld")
    finals = [line for line in verdict_sentences(comparison) if "final loss" in line]
    # 2 * 2 / 252 by Holm
    assert len(finals) == 2 and all("in final loss: p = 0.016; failed" in line for line in finals)


def test_three_failed_of_three_is_undecided_with_its_reason(root):
    for seed in range(3):
        write_run(root, "small-slw", seed, more=SLW)
        write_run(
            root, "small", seed, steps=30, budget=102400, events=[{"event": "diverged", "step": 30}]
        )
    verdict = of("small", "small-slw", baseline="small").verdict("final_loss", "small-slw").text
    assert verdict == "undecided: so few runs cannot give p below 0.1"


def test_a_verdict_at_another_place_of_the_decay_is_withheld(root):
    """Steps of half the time: at equal seconds the baseline is at half its decay. Seconds to match are judged, the
    loss at equal seconds is not."""
    for seed in range(3):
        write_run(root, "small", seed)
        fast = [
            row | {"train_seconds": row["train_seconds"] / 2} for row in rows_of(100, seed, 1.3)
        ]
        write_run(root, "small-slw", seed, rows=fast, more=SLW)
    calibrated(root, {"small": [0.05] * 3, "small-slw": [0.025, 0.02501, 0.025]})
    comparison = of("small", "small-slw", calibrations=read_calibrations())
    at = comparison.verdict("loss_at_seconds", "small-slw")
    assert (
        at.text == "not judged: small is at 50 % of its decay, small-slw at 100 %"
        and at.p_holm is None
    )
    assert comparison.verdict("final_loss", "small-slw").text == "better"
    assert comparison.verdict("seconds_to_match", "small-slw").text == "better"
    # A decay that was cut short is said for the final loss too; 2 % and less are not.
    for seed in range(3):
        write_run(root, "short", seed, more=SLW + "\n", lr=2e-3)
        text = (root / f"short-seed{seed}" / "recipe.toml").read_text()
        (root / f"short-seed{seed}" / "recipe.toml").write_text(
            text.replace("[optim]", "[optim]\ndecay_tokens = 200_000")
        )
    assert of("small", "short").verdict("final_loss", "short").text == (
        "not judged: small is at 100 % of its decay, short at 51 %"
    )


def test_each_recipe_stands_at_its_own_best(root):
    """After a sweep: the worst learning rate comes first by name, and must not be the baseline."""
    for seed in range(3):
        for name, lr, speed, more in (
            ("a", 1e-3, 0.7, ""),
            ("b", 2e-3, 1.2, ""),
            ("a", 1e-3, 1.0, SLW),
            ("b", 2e-3, 1.1, SLW),
        ):
            recipe = "small-slw" if more else "small"
            write_run(
                root,
                recipe,
                seed,
                name=f"{recipe}-{name}-seed{seed}",
                lr=lr,
                speed=speed,
                more=more,
            )
    comparison = of("small", "small-slw")
    assert [group.label for group in comparison.groups] == [
        "small optim.lr=0.002",
        "small-slw optim.lr=0.002",
    ]
    assert comparison.verdict("final_loss", "small-slw optim.lr=0.002").text == "worse"
    assert [(trial.label, trial.chosen) for trial in comparison.trials] == [
        ("small optim.lr=0.001", False),
        ("small optim.lr=0.002", True),
        ("small-slw optim.lr=0.001", False),
        ("small-slw optim.lr=0.002", True),
    ]
    assert any(
        "at its own best setting: the setting with the fewest unfinished runs" in label.text
        for label in comparison.labels
    )
    assert len(of("small", "small-slw", every_setting=True).groups) == 4
    named = of("small", "small-slw", baseline="small optim.lr=0.001")
    assert [group.label for group in named.groups] == [
        "small optim.lr=0.001",
        "small-slw optim.lr=0.002",
    ]
    # Settings of one recipe are not tested against whichever comes first.
    alone = of("small")
    assert alone.baseline.label == "small optim.lr=0.002"
    assert alone.verdict("final_loss", "small optim.lr=0.001").text.startswith(
        "settings of one recipe"
    )
    assert (
        of("small", baseline="small optim.lr=0.001")
        .verdict("final_loss", "small optim.lr=0.002")
        .text
        == "better"
    )


def test_the_best_setting_waits_for_runs_that_have_not_finished(root):
    """The better learning rate has a run to come; as if it had failed, the worse one would be taken."""
    for seed in range(3):
        for lr, speed in ((1e-3, 0.7), (2e-3, 1.2)):
            half = {"steps": 50, "budget": 102400} if lr == 2e-3 and seed == 2 else {}
            write_run(
                root, "small", seed, name=f"small-{lr}-seed{seed}", lr=lr, speed=speed, **half
            )
        write_run(root, "small-slw", seed, more=SLW)
    comparison = of("small", "small-slw")
    assert comparison.baseline.label == "small optim.lr=0.001"
    assert (
        comparison.verdict("final_loss", "small-slw").text
        == "pending: the best setting waits for small-0.002-seed2"
    )
    assert (
        "pending: the best setting waits for small-0.002-seed2" in verdict_sentences(comparison)[0]
    )
    named = of("small", "small-slw", baseline="small optim.lr=0.001")
    assert named.verdict("final_loss", "small-slw").text == "better"


def test_only_common_evaluations_are_compared(root):
    for seed in range(3):
        write_run(root, "small", seed, more="\n[eval]\nevery = 10\n")
        write_run(
            root,
            "small-slw",
            seed,
            rows=rows_of(100, seed, every=15),
            more=SLW + "\n[eval]\nevery = 15\n",
        )
    comparison = of("small", "small-slw")
    assert {tuple(run.evaluated["step"].tolist()) for run in comparison.runs} == {
        (0, 30, 60, 90, 100)
    }
    assert any("only the 5 evaluations" in label.text for label in comparison.labels)


def test_a_run_that_failed_takes_no_common_evaluations_away(root):
    for seed in range(3):
        write_run(root, "small", seed, more="\n[eval]\nevery = 10\n")
        more = SLW + "\n[eval]\nevery = 20\n"
        write_run(root, "small-slw", seed, rows=rows_of(100, seed, every=20), more=more)
    dead = [{"event": "start"}, {"event": "diverged", "step": 25}]
    write_run(
        root, "small-slw", 3, rows=rows_of(25, 3, every=20), budget=102400, more=more, events=dead
    )
    finished = [run for run in of("small", "small-slw").runs if run.status == "finished"]
    assert {tuple(run.evaluated["step"].tolist()) for run in finished} == {(0, 20, 40, 60, 80, 100)}


@pytest.mark.parametrize(
    ("base", "method", "verdict"),
    [
        (
            "",
            "[[stages]]\nn_layer = 1\n",
            "not judged: where b stood on the learning-rate schedule is known only at the run's end",
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
            rows = [
                row | {"total_flops": share * row["total_flops"]}
                for row in rows_of(100, seed, speed)
            ]
            more = f"\n{own}" if own.startswith("[[") else ""
            path = write_run(root, name, seed, rows=rows, more=more)
            if own and not more:
                recipe = path / "recipe.toml"
                recipe.write_text(recipe.read_text().replace("[optim]", f"[optim]\n{own}"))
    found = of("a", "b", baseline="a").verdict("loss_at_flops", "b")
    assert found.text.startswith(verdict)
    assert of("a", "b", baseline="a").verdict("final_loss", "b").text == "better"


def test_cost_to_match_is_not_judged_over_different_budgets(root):
    """One recipe with twice the budget: to the shorter one's loss it would be called slower."""
    for seed in range(3):
        write_run(root, "short", seed, steps=50)
        write_run(root, "long", seed, rows=rows_of(100, seed, speed=0.6), steps=100)
    found = of("short", "long", baseline="short").verdict("tokens_to_match", "long")
    assert (
        found.text.startswith("not judged: schedules of 51.2K and 102.4K tokens")
        and "train.tokens=a,b,c" in found.text
    )
    assert found.p_holm is None


def test_cost_to_a_target_is_not_judged_over_different_budgets(root):
    """The longer run comes down to the target too, in the middle of its decay."""
    for seed in range(3):
        write_run(root, "short", seed, steps=50)
        write_run(root, "long", seed, rows=rows_of(100, seed), steps=100)
        write_run(root, "quick", seed, rows=rows_of(50, seed, speed=1.3), steps=50)
    compared = of("short", "long", "quick", baseline="short", target_loss=4.4)
    for axis in ("tokens", "flops"):
        verdict = compared.verdict(f"{axis}_to_target", "long").text
        assert (
            verdict.startswith("not judged: schedules of 51.2K and 102.4K tokens")
            and "train.tokens=a,b,c" in verdict
        )
    assert compared.verdict("tokens_to_target", "quick").text == "better"


def test_a_side_that_fails_more_is_not_claimed(root):
    """The method has the lower loss at three times the FLOPs, over the four pairs that finished."""
    for seed in range(5):
        write_run(root, "small", seed)
        rows = [
            row | {"total_flops": 3 * row["total_flops"]}
            for row in rows_of(100 if seed else 30, seed, 1.3)
        ]
        dead = [{"event": "start"}, {"event": "diverged", "step": 30}]
        write_run(
            root,
            "small-slw",
            seed,
            rows=rows,
            budget=102400,
            more=SLW,
            events=None if seed else dead,
        )
    comparison = of("small", "small-slw")
    final = comparison.verdict("final_loss", "small-slw")
    assert (final.outcome, final.p_holm, final.estimate.n) == ("undecided", 1.0, 4)
    # Exact intervals: 0.0051 and 0.7164 for 1 of 5, 0.5218 for 0 of 5.
    note = "small 0 of 5 (0 to 52 %), small-slw 1 of 5 (1 to 72 %)"
    assert final.note.startswith("lower loss, more failures; failed or got stuck: " + note)
    flops = comparison.verdict("flops_to_match", "small-slw")
    assert flops.text == "worse" and flops.estimate.n == 4
    # The table and programs have the note of every line.
    tokens = comparison.verdict("tokens_to_match", "small-slw")
    assert tokens.note == final.note
    assert f"\ntokens to match, seconds to match: {final.note}.\n" in answers(comparison).note
    rows = [row for row in as_json(comparison)["rows"] if row["note"] == final.note]
    assert [row["measure"] for row in rows] == ["final_loss", "tokens_to_match", "seconds_to_match"]


def test_a_run_that_failed_after_the_target_is_the_worst_rank(root):
    dead = [{"event": "start"}, {"event": "diverged", "step": 30}]
    for seed in range(5):
        curve(root, [6.0, 4.0, 3.5, 3.0], "base", seed)
        curve(root, [6.0, 2.0, 2.0, 2.0], "method", seed, more=SLW, budget=102400, events=dead)
    tokens = of("base", "method", target_loss=3.2, baseline="base").verdict(
        "tokens_to_target", "method"
    )
    assert tokens.exact.wins == 0 and tokens.text == "worse"
