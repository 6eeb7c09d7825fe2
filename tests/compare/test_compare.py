"""What a comparison says, against runs whose numbers are known; and that it can be recomputed from metrics.jsonl."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from efftrain_cli.compare import inference
from efftrain_cli.compare.comparison import Comparison, compare, read_all
from efftrain_cli.compare.formats import as_json
from efftrain_cli.compare.groups import select_runs
from efftrain_cli.compare.measures import (
    Costs,
    loss_at,
    match_ratio,
    needed_for,
    schedule_position,
    smooth_end,
)
from efftrain_cli.compare.reading import read_numbers
from efftrain_cli.compare.tables import answers, plan_table, tables_of
from efftrain_cli.compare.verdicts import verdict_sentences
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.zeroshot.results import save_result
from tests.fake_runs import rows_of, write_rows, write_run

SLW = "\n[seq_len_warmup]\nstart = 8\nsteps = 10\n"
PLD = "\n[progressive_layer_drop]\ntheta = 0.5\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of runs."""
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path))
    return tmp_path


def of(*names: str, **options: object) -> Comparison:
    return compare(read_all(select_runs(names)), **options)  # type: ignore[arg-type]


def pair(root: Path, seeds: int = 3) -> None:
    for seed in range(seeds):
        write_run(root, "small", seed)
        write_run(root, "small-slw", seed, speed=1.3, more=SLW)


def curve(root: Path, losses: list[float], name: str = "c", seed: int = 0, **options: object) -> Path:
    """A run whose evaluated losses are given, one per 10 steps of 1024 tokens, 6e5 FLOPs a token and 0.05 s a step."""
    rows = rows_of(10 * (len(losses) - 1), seed)
    for row in rows:
        row["val_loss"] = losses[row["step"] // 10] if row["step"] % 10 == 0 else None
    return write_run(root, name, seed, steps=10 * (len(losses) - 1), rows=rows, **options)  # type: ignore[arg-type]


def test_interpolation_by_hand(root: Path) -> None:
    """Evaluations at 0, 10240, 20480, 30720 tokens: 6, 5, 4, 4.5."""
    run = read_numbers(curve(root, [6.0, 5.0, 4.0, 4.5]))
    assert loss_at(run, "tokens", 5120) == 5.5
    assert loss_at(run, "seconds", 1.25) == pytest.approx(4.25)
    assert loss_at(run, "tokens", 30721) is None
    # The curve that never rises and fits best ends at (4 + 4.5) / 2 in the middle of the last two.
    assert needed_for(run, "tokens", 4.625) == pytest.approx(10240 + 0.5 * 15360)
    assert needed_for(run, "flops", 4.25) == pytest.approx(25600 * 6e5)
    assert needed_for(run, "seconds", 4.2) is None
    assert needed_for(run, "tokens", 7.0) == 0
    falling = read_numbers(curve(root, [6.0, 5.0, 4.0, 3.5], "falling"))
    assert needed_for(falling, "tokens", 4.75) == 12800  # where nothing rises, the straight line
    assert (run.evaluated["val_loss"].min(), run.status) == (4.0, "finished")


def test_equal_tokens_are_the_largest_that_all_runs_reached(root: Path) -> None:
    curve(root, [6.0, 5.0, 4.0, 3.0, 2.0], "long")
    curve(root, [6.0, 5.5, 5.0], "short")
    comparison = of("long", "short")
    assert comparison.points["tokens"].value == 20480
    assert comparison.points["tokens"].limited_by == "short-seed0"
    assert comparison.cells["loss_at_tokens", "long"].mean == 4.0
    assert comparison.cells["loss_at_tokens", "short"].mean == 5.0


def test_a_target_not_reached_is_a_bound_and_is_used_by_rank(root: Path) -> None:
    """3 of 5 baselines never come to 2.5: the ratio is a bound, the verdict the exact rank sum's."""
    for seed, last in enumerate((3.0, 2.9, 2.8, 2.4, 2.3)):
        curve(root, [6.0, 4.0, last], "base", seed)
        curve(root, [6.0, 2.2 + seed / 100, 2.1], "method", seed, more=SLW)
    comparison = of("base", "method", target_loss=2.5)
    cell = comparison.cells["tokens_to_target", "base"]
    assert cell.mean is None and cell.values[:3] == ("not reached",) * 3
    tokens = comparison.difference("tokens_to_target", "method")
    assert tokens.exact.p == pytest.approx(2 / 252) and tokens.exact.wins == 1.0 and tokens.verdict == "better"
    assert tokens.estimate.bound == 1 and tokens.estimate.mean == pytest.approx(2.12, abs=0.01)
    row = next(row for row in answers(comparison).rows if row[0] == "tokens to target")
    assert row[1] == "2 of 5 runs" and row[3].startswith("more than 2.12x") and row[3].endswith("ahead in 100 % of pairs")
    # Seen from the other side the method is worse: a fixed target has two sides.
    other = of("base", "method", target_loss=2.5, baseline="method").difference("tokens_to_target", "base")
    assert other.verdict == "worse" and other.estimate.bound == -1


def test_without_a_target_costs_are_to_match_the_worse_run_of_a_pair(root: Path) -> None:
    """By hand: the method passes the baseline's 3.0 midway between 20480 and 30720 tokens; then the other way round."""
    for seed in range(3):
        curve(root, [6.0, 5.0, 4.0, 3.0], "base", seed)
        curve(root, [6.0, 5.0, 3.5, 2.5], "method", seed, more=SLW)
    runs = {run.name: run for run in of("base", "method").runs}
    a, b = runs["base-seed0"], runs["method-seed0"]
    assert match_ratio(a, b, "tokens") == pytest.approx(math.log(30720 / 25600))
    assert match_ratio(b, a, "tokens") == pytest.approx(-math.log(30720 / 25600))
    assert match_ratio(a, a, "tokens") == 0
    forward = of("base", "method").difference("tokens_to_match", "method")
    back = of("base", "method", baseline="method").difference("tokens_to_match", "base")
    assert forward.estimate.mean == pytest.approx(1.2) and back.estimate.mean == pytest.approx(1 / 1.2)


def test_the_end_of_a_run_is_read_from_its_last_fifth(root: Path) -> None:
    """The line through the last four of twenty evaluations, at the last: 2.0 where they lie on it, and the mean of what jitters."""
    (run,) = read_all([curve(root, [6.0] * 16 + [2.3, 2.2, 2.1, 2.0], "line")])
    assert smooth_end(run, "tokens") == pytest.approx(2.0)
    (run,) = read_all([curve(root, [6.0] * 16 + [3.1, 2.9, 2.9, 3.1], "jitter")])
    assert smooth_end(run, "tokens") == pytest.approx(3.0)
    (run,) = read_all([curve(root, [6.0] * 10 + [2.2, 2.1, 2.0], "few")])
    assert smooth_end(run, "tokens") == 2.0, "a line through two says no more than the last"


def test_one_seed_makes_no_claim(root: Path) -> None:
    """F49."""
    pair(root, seeds=1)
    comparison = of("small", "small-slw")
    judged = {d.verdict for d in comparison.differences if d.measure.axis != "seconds"} - {"none"}
    assert judged == {"one seed: no claim"}
    assert all(difference.p_holm is None for difference in comparison.differences)
    assert verdict_sentences(comparison)[0].startswith("B small-slw against A small: one seed: no claim (")


def test_clear_difference_over_three_seeds_is_claimed_from_either_side(root: Path) -> None:
    pair(root)
    verdicts = {d.measure.key: d.verdict for d in of("small", "small-slw").differences}
    assert verdicts["final_loss"] == verdicts["tokens_to_match"] == verdicts["flops_to_match"] == "better"
    verdicts = {d.measure.key: d.verdict for d in of("small", "small-slw", baseline="small-slw").differences}
    assert verdicts["final_loss"] == verdicts["tokens_to_match"] == "worse"
    assert "best_loss" not in verdicts  # shown, never tested


def test_undecided_says_what_the_study_could_have_seen_and_asks_for_no_more_seeds(root: Path) -> None:
    for seed, (a, b) in enumerate([(3.0, 3.1), (3.2, 3.0), (3.1, 3.05)]):
        curve(root, [6.0, 4.0, a], "base", seed)
        curve(root, [6.0, 4.0, b], "method", seed, more=SLW)
    comparison = of("base", "method")
    final = comparison.difference("final_loss", "method")
    sd = np.std([0.1, -0.2, -0.05], ddof=1)
    assert final.verdict == "undecided" and final.decision.could_see == pytest.approx(3.26 * sd, rel=0.01)
    (sentence,) = verdict_sentences(comparison)
    assert sentence == (
        "B method against A base is undecided: final loss better by 0.0500 nats/token, 95 % -0.3226 to 0.4226, p = 0.62, 3 pairs. "
        "This study could have seen 0.49 nats/token or more."
    )
    assert of("base", "method", margin=0.7).difference("final_loss", "method").verdict == "equivalent"


def test_partly_shared_seeds_use_every_run(root: Path) -> None:
    for seed in (0, 1, 2):
        write_run(root, "small", seed)
    for seed in (1, 2, 3):
        write_run(root, "small-slw", seed, speed=1.3, more=SLW)
    for seed in (7, 8):
        write_run(root, "small-pld", seed, speed=1.1, more=PLD)
    comparison = of("small", "small-slw", "small-pld")
    final = {d.label: d for d in comparison.differences if d.measure.key == "final_loss"}
    means = {label: comparison.cells["final_loss", label].mean for label in ("small", "small-slw", "small-pld")}
    assert final["small-slw"].seeds == (1, 2) and "too few to pair" in final["small-slw"].estimate.method
    assert final["small-pld"].seeds == () and "not paired" in final["small-pld"].estimate.method
    for label, difference in final.items():  # the interval is about the means that are shown
        assert difference.estimate.mean == pytest.approx(means[label] - means["small"])
    match = comparison.difference("tokens_to_match", "small-pld")
    assert match.estimate.method.startswith("all pairs") and match.estimate.mean > 1
    assert any("different seeds" in label.text for label in comparison.labels)


def test_holm_is_applied_over_the_recipes_and_over_what_is_beside_the_final_loss(root: Path) -> None:
    pair(root)
    for seed in range(3):
        write_run(root, "small-pld", seed, speed=1.01, more=PLD)
    comparison = of("small", "small-slw", "small-pld")
    final = [d for d in comparison.differences if d.measure.key == "final_loss"]
    raw = [d.estimate.p for d in final]
    assert final[0].p_holm == pytest.approx(2 * raw[0]) and final[1].p_holm == pytest.approx(raw[1])
    # What the study could have seen is planned at the stricter alpha / 2 of two recipes.
    assert final[1].decision.could_see == pytest.approx(inference.detectable(final[1].estimate, 0.025))
    beside = [d for d in comparison.differences if d.measure.key != "final_loss" and d.p_holm is not None]
    assert len(beside) == 4  # tokens and FLOPs to match, of two recipes; seconds are not judged, nothing jumped
    assert [d.p_holm for d in beside] == pytest.approx(inference.holm([d.estimate.p for d in beside]))


def test_20_seeds_are_judged_by_t_as_3_are(root: Path) -> None:
    pair(root, seeds=20)
    found = of("small", "small-slw").difference("tokens_to_match", "small-slw")
    assert found.estimate.method == "paired t on log ratios" and found.estimate.n == 20


def test_recipe_differences_are_exactly_the_keys_that_differ(root: Path) -> None:
    write_run(root, "small", 0)
    write_run(root, "small-slw", 0, lr=2e-3, more=SLW + '\n[wandb]\nmode = "offline"\n')
    comparison = of("small", "small-slw")
    assert comparison.recipe_differences == (
        ("optim.lr", ("0.001", "0.002")),
        ("seq_len_warmup.start", ("-", "8")),
        ("seq_len_warmup.steps", ("-", "10")),
    )
    assert any("different learning rate" in label.text for label in comparison.labels)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ({"valid_hash": "d" * 64}, "the validation text differs"),
        ({"tokenizer_hash": "d" * 64}, "the tokenizer differs"),
        ({"valid_windows": 32}, "number of validation windows differs"),
        ({"seq_len": 64}, "length of a validation window differs"),
        ({"valid_hash": None}, "the validation text of small-slw-seed0 is unknown"),
    ],
)
def test_incomparable_runs_are_refused_or_labelled(root: Path, data: dict[str, object], word: str) -> None:
    """F49."""
    write_run(root, "small", 0)
    write_run(root, "small-slw", 0, more=SLW, data=data)
    with pytest.raises(UsageError, match=word) as refusal:
        of("small", "small-slw")
    assert refusal.value.exit_code == 2 and "--allow" in str(refusal.value)
    shown = of("small", "small-slw", allow=True)
    assert any(label.severity == "allowed" and word in label.text for label in shown.labels)
    # Shown is not judged.
    assert {d.verdict for d in shown.differences} <= {"not judged: these losses are not comparable", "none"}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"origin": {"device": "Other"}}, "different device: Some CPU in small-seed0; Other in small-slw-seed0"),
        ({"origin": {"torch": "2.11"}}, "different torch version"),
        ({"origin": {"threads": 8}}, "seconds and throughput are not comparable"),
        ({"origin": {"git_commit": "ffff"}}, "different efftrain commit"),
        ({"origin": {"dtype": "bf16"}}, "different compute type"),
        ({"data": {"train_hash": "d" * 64}, "origin": {"python": "3.12.1"}}, "standard library's source"),
        ({"budget": 100 * 1024 - 1}, "different budget: train.tokens"),
    ],
)
def test_other_differences_are_said(root: Path, options: dict[str, object], word: str) -> None:
    """F49."""
    write_run(root, "small", 0)
    write_run(root, "small-slw", 0, more=SLW, **options)  # type: ignore[arg-type]
    assert any(label.severity == "warning" and word in label.text for label in of("small", "small-slw").labels)


def test_an_unsteady_machine_is_said(root: Path) -> None:
    pair(root)
    rows = [row | {"train_seconds": row["step"] * 0.1} for row in rows_of(100, 1)]
    write_rows(root / "small-seed1", rows)
    texts = [label.text for label in of("small", "small-slw").labels]
    assert texts == [
        "small ran 2.0 times as fast in small-seed2 as in small-seed1: the machine was not steady, so do not trust seconds"
    ]


def test_runs_that_were_not_smooth_are_marked(root: Path) -> None:
    """F49: crashed, stopped, diverged, rewound, resumed, unfinished."""
    start = {"event": "start"}
    write_run(root, "crashed", 0, steps=50, budget=102400)
    write_run(root, "disk", 0, steps=50, budget=102400, events=[start, {"event": "end", "status": "disk"}])
    write_run(root, "stopped", 0, steps=50, budget=102400, events=[start, {"event": "end", "status": "paused"}])
    write_run(root, "diverged", 0, steps=50, budget=102400, events=[start, {"event": "diverged", "step": 50}, {"event": "checkpoint"}])
    resumed = rows_of(60, 0) + rows_of(100, 0, segment=1, first=41)
    write_run(root, "resumed", 0, rows=resumed, events=[start, {"event": "resume"}])
    bad = rows_of(60, 0)
    bad[-1] |= {"loss": None, "nonfinite": True}
    rewound = bad + rows_of(100, 0, segment=1, first=41)
    write_run(root, "rewound", 0, rows=rewound, events=[start, {"event": "diverged"}, {"event": "rewind"}])
    names = ("crashed", "disk", "stopped", "diverged", "resumed", "rewound")
    numbers = {name: read_numbers(root / f"{name}-seed0") for name in names}
    assert numbers["disk"].marks == ("unfinished: crashed (disk) at step 50 (50 % of its tokens)",)
    changed = {"event": "override", "differences": [["optim.lr", 1e-3, 2e-3]]}
    gap = [row for row in rows_of(100, 0) if row["step"] not in (7, 8)]
    events = [start | {"device": "cpu"}, {"event": "resume", "device": "cuda"}, changed]
    odd = read_numbers(write_run(root, "odd", 0, rows=gap, events=events))
    assert odd.marks == (
        "resumed once",
        "ran on cpu and cuda",
        "continued although what decides it had changed (optim.lr)",
        "2 steps are missing in metrics.jsonl",
    )
    assert numbers["crashed"].marks == ("unfinished: crashed at step 50 (50 % of its tokens)",)
    assert numbers["stopped"].marks == ("unfinished: stopped at step 50 (50 % of its tokens)",)
    assert numbers["diverged"].marks == ("diverged at step 50 (50 % of its tokens)",)
    assert numbers["resumed"].marks == ("resumed once",)
    assert numbers["rewound"].marks == ("rewound once", "non-finite once")
    assert (numbers["rewound"].rewinds, numbers["rewound"].nonfinite_stops) == (1, 1)
    labels = [label.text for label in of(*(f"{name}-seed0" for name in numbers)).labels]
    assert all(any(f"{name}-seed0: {mark}" == text for text in labels) for name, n in numbers.items() for mark in n.marks)


def test_an_unfinished_run_has_no_final_loss(root: Path) -> None:
    write_run(root, "small", 0)
    write_run(root, "small-slw", 0, steps=50, budget=102400, more=SLW)
    comparison = of("small", "small-slw")
    assert comparison.cells["final_loss", "small-slw"].values == ("crashed",)
    assert {d.verdict for d in comparison.differences} == {"pending: 1 of 2 runs not finished"}
    assert any("the verdict waits" in label.text for label in comparison.labels)
    assert comparison.points["tokens"].limited_by == "small-seed0"  # what has not finished moves no point
    # It is never the baseline while another has finished, whatever the order.
    assert of("small-slw", "small").baseline.label == "small"
    write_run(root, "small-pld", 0, more=PLD)
    assert of("small-slw", "small-pld").baseline.label == "small-pld"


def test_a_run_that_was_not_started_is_pending(root: Path) -> None:
    pair(root)
    (root / "small-slw-seed1" / "metrics.jsonl").unlink()
    assert of("small", "small-slw").difference("final_loss", "small-slw").verdict.startswith("pending: 1 of 6")


def test_a_failed_seed_is_the_worst_rank_and_moves_nothing(root: Path) -> None:
    for seed in range(5):
        write_run(root, "small-slw", seed, speed=1.3, more=SLW)
        dead = {"steps": 30, "budget": 102400, "events": [{"event": "start"}, {"event": "diverged", "step": 30}]}
        write_run(root, "small", seed, **(dead if seed < 4 else {}))
    comparison = of("small", "small-slw")
    final = comparison.difference("final_loss", "small-slw")
    assert final.exact.p == pytest.approx(2 / 252) and final.verdict == "better"
    assert comparison.points["tokens"].value == 102400
    diverged = comparison.difference("diverged", "small-slw")
    assert diverged.exact.method == "Fisher's exact test" and diverged.exact.p == pytest.approx(10 / 210)
    assert "4 of 5 runs of A failed, 0 of 5 runs of B failed" in verdict_sentences(comparison)[0]


def test_the_sentence_about_ranks_says_the_adjusted_p(root: Path) -> None:
    dead = {"steps": 30, "budget": 102400, "events": [{"event": "start"}, {"event": "diverged", "step": 30}]}
    for seed in range(5):
        write_run(root, "small", seed)
        write_run(root, "small-slw", seed, more=SLW, **dead)
        write_run(root, "small-pld", seed, more=PLD, **dead)
    sentences = verdict_sentences(of("small", "small-slw", "small-pld"))
    assert all("p = 0.016" in sentence for sentence in sentences)  # 2 * 2 / 252 by Holm


def test_three_failed_of_three_is_undecided_with_its_reason(root: Path) -> None:
    for seed in range(3):
        write_run(root, "small-slw", seed, more=SLW)
        write_run(root, "small", seed, steps=30, budget=102400, events=[{"event": "diverged", "step": 30}])
    verdict = of("small", "small-slw", baseline="small").difference("final_loss", "small-slw").verdict
    assert verdict == "undecided: so few runs cannot give p below 0.1"


def test_a_verdict_at_another_place_of_the_decay_is_withheld(root: Path) -> None:
    """Twice as fast a machine: at equal seconds the baseline is at half its decay. Tokens are judged, seconds are not."""
    speed = [{"event": "start", "calibrated_gflops": 10.0}, {"event": "end", "status": "finished", "calibrated_gflops": 10.0}]
    for seed in range(3):
        write_run(root, "small", seed, events=speed)
        fast = [row | {"train_seconds": row["train_seconds"] / 2} for row in rows_of(100, seed, 1.3)]
        write_run(root, "small-slw", seed, rows=fast, more=SLW, events=speed)
    comparison = of("small", "small-slw")
    at = comparison.difference("loss_at_seconds", "small-slw")
    assert at.verdict == "not judged: small is at 50 % of its decay, small-slw at 100 %" and at.p_holm is None
    assert comparison.difference("final_loss", "small-slw").verdict == "better"
    assert comparison.difference("seconds_to_match", "small-slw").verdict == "better"
    # A decay that was cut short is said for the final loss too; 2 % and less are not.
    for seed in range(3):
        write_run(root, "short", seed, more=SLW + "\n", lr=2e-3)
        text = (root / f"short-seed{seed}" / "recipe.toml").read_text()
        (root / f"short-seed{seed}" / "recipe.toml").write_text(text.replace("[optim]", "[optim]\ndecay_tokens = 200_000"))
    assert of("small", "short").difference("final_loss", "short").verdict == (
        "not judged: small is at 100 % of its decay, short at 51 %"
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, ""),
        ({"origin": {"device": "GPU"}}, "different device"),
        ({"origin": {"threads": 1}}, "different number of threads"),
        ({"origin": {"dtype": "bf16"}}, "different compute type"),
        ({"origin": {"torch": "2.12"}}, "different torch version"),
        ({"origin": {"jobs": 2}}, "different number of runs side by side"),
        ({"events": [{"event": "start"}]}, "was not measured before and after"),
        ({"resume": {"threads": 4}}, "small-slw-seed0 ran with threads 2 and 4"),
        ({"resume": {"torch": "2.14"}}, "small-slw-seed0 ran with PyTorch 2.13.0+cpu and 2.14"),
        ({"speed": 11.4}, ""),
        ({"speed": 11.6}, "varied 1.16x, more than 1.15x"),
    ],
)
def test_seconds_are_judged_only_on_one_machine_at_one_speed(root: Path, change: dict[str, object], word: str) -> None:
    def events(rate: object) -> list[dict[str, object]]:
        return [{"event": "start", "calibrated_gflops": 10.0}, {"event": "end", "status": "finished", "calibrated_gflops": rate}]

    rate = change.pop("speed", 10.0)
    if "resume" in change:
        resume = {"event": "resume", "calibrated_gflops": 10.0} | change.pop("resume")
        change["events"] = [events(rate)[0], resume, events(rate)[1]]
    for seed in range(3):
        write_run(root, "small", seed, events=events(10.0))
        write_run(root, "small-slw", seed, speed=1.3, more=SLW, **{"events": events(rate), **change})
    comparison = of("small", "small-slw")
    verdict = comparison.difference("seconds_to_match", "small-slw").verdict
    assert verdict == "better" if not word else verdict.startswith("not judged: ") and word in verdict
    assert comparison.difference("tokens_to_match", "small-slw").verdict == "better"


def test_each_recipe_stands_at_its_own_best(root: Path) -> None:
    """After a sweep: the worst learning rate comes first by name, and must not be the baseline."""
    for seed in range(3):
        for name, lr, speed, more in (("a", 1e-3, 0.7, ""), ("b", 2e-3, 1.2, ""), ("a", 1e-3, 1.0, SLW), ("b", 2e-3, 1.1, SLW)):
            recipe = "small-slw" if more else "small"
            write_run(root, recipe, seed, name=f"{recipe}-{name}-seed{seed}", lr=lr, speed=speed, more=more)
    comparison = of("small", "small-slw")
    assert [group.label for group in comparison.groups] == ["small optim.lr=0.002", "small-slw optim.lr=0.002"]
    assert comparison.difference("final_loss", "small-slw optim.lr=0.002").verdict == "worse"
    assert [(trial.label, trial.chosen) for trial in comparison.trials] == [
        ("small optim.lr=0.001", False),
        ("small optim.lr=0.002", True),
        ("small-slw optim.lr=0.001", False),
        ("small-slw optim.lr=0.002", True),
    ]
    assert any("at its own best setting: the setting with the fewest unfinished runs" in label.text for label in comparison.labels)
    assert len(of("small", "small-slw", every_setting=True).groups) == 4
    named = of("small", "small-slw", baseline="small optim.lr=0.001")
    assert [group.label for group in named.groups] == ["small optim.lr=0.001", "small-slw optim.lr=0.002"]
    # Settings of one recipe are not tested against whichever comes first.
    alone = of("small")
    assert alone.baseline.label == "small optim.lr=0.002"
    assert alone.difference("final_loss", "small optim.lr=0.001").verdict.startswith("settings of one recipe")
    assert of("small", baseline="small optim.lr=0.001").difference("final_loss", "small optim.lr=0.002").verdict == "better"


def test_the_best_setting_waits_for_runs_that_have_not_finished(root: Path) -> None:
    """The better learning rate has a run to come; as if it had failed, the worse one would be taken."""
    for seed in range(3):
        for lr, speed in ((1e-3, 0.7), (2e-3, 1.2)):
            half = {"steps": 50, "budget": 102400} if lr == 2e-3 and seed == 2 else {}
            write_run(root, "small", seed, name=f"small-{lr}-seed{seed}", lr=lr, speed=speed, **half)
        write_run(root, "small-slw", seed, more=SLW)
    comparison = of("small", "small-slw")
    assert comparison.baseline.label == "small optim.lr=0.001"
    assert comparison.difference("final_loss", "small-slw").verdict == "pending: the best setting waits for small-0.002-seed2"
    assert "the verdict waits: the best setting waits for small-0.002-seed2" in verdict_sentences(comparison)[0]
    named = of("small", "small-slw", baseline="small optim.lr=0.001")
    assert named.difference("final_loss", "small-slw").verdict == "better"


def test_only_common_evaluations_are_compared(root: Path) -> None:
    for seed in range(3):
        write_run(root, "small", seed, more="\n[eval]\nevery = 10\n")
        write_run(root, "small-slw", seed, rows=rows_of(100, seed, every=15), more=SLW + "\n[eval]\nevery = 15\n")
    comparison = of("small", "small-slw")
    assert {tuple(run.evaluated["step"].tolist()) for run in comparison.runs} == {(0, 30, 60, 90, 100)}
    assert any("only the 5 evaluations" in label.text for label in comparison.labels)


def test_a_run_that_failed_takes_no_common_evaluations_away(root: Path) -> None:
    for seed in range(3):
        write_run(root, "small", seed, more="\n[eval]\nevery = 10\n")
        more = SLW + "\n[eval]\nevery = 20\n"
        write_run(root, "small-slw", seed, rows=rows_of(100, seed, every=20), more=more)
    dead = [{"event": "start"}, {"event": "diverged", "step": 25}]
    write_run(root, "small-slw", 3, rows=rows_of(25, 3, every=20), budget=102400, more=more, events=dead)
    finished = [run for run in of("small", "small-slw").runs if run.status == "finished"]
    assert {tuple(run.evaluated["step"].tolist()) for run in finished} == {(0, 20, 40, 60, 80, 100)}


@pytest.mark.parametrize(
    ("base", "method", "verdict"),
    [
        ("", "[[stages]]\nn_layer = 1\n", "not judged: where b stood on the learning-rate schedule is known only at the run's end"),
        ("[[stages]]\nn_layer = 2\n", "[[stages]]\nn_layer = 1\n", "not judged: where b stood on"),
        ('schedule = "constant"', "", "not judged: b is at 50 % of its decay, a does not decay"),
        ('schedule = "constant"', 'schedule = "constant"\nmin_lr = 0', "worse"),
    ],
)
def test_a_place_on_the_schedule_that_is_not_known_is_not_taken_for_equal(root: Path, base: str, method: str, verdict: str) -> None:
    """At the FLOPs of `a`, whose tokens cost half as many, `b` is in the middle of its run."""
    for seed in range(3):
        for name, own, share, speed in (("a", base, 0.5, 1.0), ("b", method, 1.0, 1.1)):
            rows = [row | {"total_flops": share * row["total_flops"]} for row in rows_of(100, seed, speed)]
            more = f"\n{own}" if own.startswith("[[") else ""
            path = write_run(root, name, seed, rows=rows, more=more)
            if own and not more:
                recipe = path / "recipe.toml"
                recipe.write_text(recipe.read_text().replace("[optim]", f"[optim]\n{own}"))
    found = of("a", "b", baseline="a").difference("loss_at_flops", "b")
    assert found.verdict.startswith(verdict)
    assert of("a", "b", baseline="a").difference("final_loss", "b").verdict == "better"


def test_cost_to_match_is_not_judged_over_different_budgets(root: Path) -> None:
    """One recipe with twice the budget: to the shorter one's loss it would be called slower."""
    for seed in range(3):
        write_run(root, "short", seed, steps=50)
        write_run(root, "long", seed, rows=rows_of(100, seed, speed=0.6), steps=100)
    found = of("short", "long", baseline="short").difference("tokens_to_match", "long")
    assert found.verdict.startswith("not judged: schedules of 51.2K and 102.4K tokens") and "train.tokens=a,b,c" in found.verdict
    assert found.p_holm is None


def test_cost_to_a_target_is_not_judged_over_different_budgets(root: Path) -> None:
    """The longer run comes down to the target too, in the middle of its decay."""
    for seed in range(3):
        write_run(root, "short", seed, steps=50)
        write_run(root, "long", seed, rows=rows_of(100, seed), steps=100)
        write_run(root, "quick", seed, rows=rows_of(50, seed, speed=1.3), steps=50)
    compared = of("short", "long", "quick", baseline="short", target_loss=4.4)
    for axis in ("tokens", "flops"):
        verdict = compared.difference(f"{axis}_to_target", "long").verdict
        assert verdict.startswith("not judged: schedules of 51.2K and 102.4K tokens") and "train.tokens=a,b,c" in verdict
    assert compared.difference("tokens_to_target", "quick").verdict == "better"


def test_cost_to_match_is_ranked_only_at_equal_cost(root: Path) -> None:
    """The method has the lower loss at three times the FLOPs; one of its runs failed."""
    for seed in range(5):
        write_run(root, "small", seed)
        rows = [row | {"total_flops": 3 * row["total_flops"]} for row in rows_of(100 if seed else 30, seed, 1.3)]
        dead = [{"event": "start"}, {"event": "diverged", "step": 30}]
        write_run(root, "small-slw", seed, rows=rows, budget=102400, more=SLW, events=None if seed else dead)
    comparison = of("small", "small-slw")
    flops = comparison.difference("flops_to_match", "small-slw")
    assert flops.verdict == "not judged: cost to match cannot be ranked where a run failed and costs differ"
    assert comparison.difference("tokens_to_match", "small-slw").reason == ""


def test_a_run_that_failed_after_the_target_is_the_worst_rank(root: Path) -> None:
    dead = [{"event": "start"}, {"event": "diverged", "step": 30}]
    for seed in range(5):
        curve(root, [6.0, 4.0, 3.5, 3.0], "base", seed)
        curve(root, [6.0, 2.0, 2.0, 2.0], "method", seed, more=SLW, budget=102400, events=dead)
    tokens = of("base", "method", target_loss=3.2, baseline="base").difference("tokens_to_target", "method")
    assert tokens.exact.wins == 0 and tokens.verdict == "worse"


def test_tokens_that_a_rewind_abandoned_are_cost(root: Path) -> None:
    """Step 60 was reached, 20 steps were given up, so the run ends after 120 steps' worth of tokens, not 100."""
    rows = rows_of(60, 0) + rows_of(100, 0, segment=1, first=41)
    rewind = {"event": "rewind", "from_step": 60, "to_step": 40, "tokens_abandoned": 20 * 1024}
    run = read_numbers(write_run(root, "small", 0, rows=rows, events=[{"event": "start"}, rewind]))
    assert run.tokens == 120 * 1024 and run.status == "finished"
    assert run.evaluated["tokens"].tolist() == [1024 * s for s in (0, 10, 20, 30, 40, 70, 80, 90, 100, 110, 120)]
    assert run.evaluated["schedule_tokens"][-1] == 100 * 1024
    # 100 steps' worth was spent by step 80, where the schedule, which went back with the run, has a fifth to go.
    assert schedule_position(run, "tokens", 100 * 1024) == pytest.approx(0.8)


def test_abandoned_steps_are_not_measured_twice(root: Path) -> None:
    """Segment 0 to step 60 with a jump at 55, then a resume from 41: the jump is not in the run that counts."""
    first = rows_of(60, 0, loss_ratio=1.0)
    first[55]["loss_ratio"] = 3.0
    run = read_numbers(write_run(root, "small", 0, rows=first + rows_of(50, 0, segment=1, first=41, loss_ratio=1.0), budget=102400))
    assert (run.max_ratio, run.over_1_5, run.ratio_steps) == (1.0, 0, 51)


def test_a_ratio_of_exactly_the_limit_is_not_above_it(root: Path) -> None:
    rows = rows_of(10, 0, loss_ratio=1.0)
    rows[3]["loss_ratio"], rows[4]["loss_ratio"], rows[5]["loss_ratio"] = 1.5, 1.2, 1.51
    run = read_numbers(write_run(root, "small", 0, steps=10, rows=rows))
    assert (run.over_1_2, run.over_1_5) == (2, 1)


def test_groups_know_the_number_of_devices(root: Path) -> None:
    write_run(root, "small", 0)
    write_run(root, "small", 1, origin={"world_size": 2})
    found = of("small")
    assert {group.label for group in found.groups} == {"small devices=1", "small devices=2"}
    assert found.recipe_differences == (("devices", ("1", "2")),)
    assert "small devices=1 and small devices=2 are one recipe on 1 and on 2 devices: nothing in it differs" in [label.text for label in found.labels]
    assert as_json(found)["recipe_differences"] == {"devices": {"small devices=1": 1, "small devices=2": 2}}


def test_duplicate_rows_and_torn_lines_change_nothing(root: Path) -> None:
    """F30."""
    pair(root)
    before = as_json(of("small", "small-slw"))
    path = root / "small-seed1"
    whole = rows_of(100, 1)
    # The same steps again, as an exact resume from step 40 writes them, after rows that it replaces.
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


def test_names_globs_recipes_and_paths(root: Path) -> None:
    pair(root)
    write_run(root, "other", 0, name="small-slw", more=SLW, lr=2e-3)
    names = lambda *given: [path.name for path in select_runs(given)]  # noqa: E731
    assert names("small") == ["small-seed0", "small-seed1", "small-seed2"]
    assert names("small-slw") == ["small-slw"]  # a run wins over a recipe of its name
    assert names("small-slw-*") == ["small-slw-seed0", "small-slw-seed1", "small-slw-seed2"]
    assert names("small-seed1", "small") == ["small-seed1", "small-seed0", "small-seed2"]
    assert names(str(root / "small-seed0")) == ["small-seed0"]
    with pytest.raises(UsageError, match=r"'smal' \(did you mean small or small-slw"):
        select_runs(["smal"])
    with pytest.raises(UsageError, match="nothing-\\*"):
        select_runs(["nothing-*"])


def test_seeds_are_ordered_as_numbers(root: Path) -> None:
    for seed in (10, 9, 2):
        write_run(root, "small", seed)
    assert [path.name for path in select_runs(["small"])] == ["small-seed2", "small-seed9", "small-seed10"]


def test_copies_of_a_run_are_refused(root: Path) -> None:
    write_run(root, "small", 0)
    write_run(root, "small", 0, name="small-seed0-2", origin={"started": "2026-02-02"})
    with pytest.raises(UsageError, match="small-seed0, small-seed0-2 are runs of one recipe and seed"):
        of("small")
    assert [run.name for run in of("small", allow=True).runs] == ["small-seed0-2"]


def test_unknown_baseline_is_refused(root: Path) -> None:
    pair(root, 1)
    with pytest.raises(UsageError, match="'small', 'small-slw'"):
        of("small", "small-slw", baseline="tiny")
    assert of("small", "small-slw", baseline="small-slw-seed0").baseline.label == "small-slw"


def test_groups_of_one_recipe_name_are_told_apart_by_their_keys(root: Path) -> None:
    write_run(root, "small", 0)
    write_run(root, "small", 0, name="small-fast", lr=3e-3)
    assert {group.label for group in of("small").groups} == {"small optim.lr=0.003", "small optim.lr=0.001"}


def test_a_run_of_an_older_version_is_of_the_same_recipe(root: Path) -> None:
    """Its recipe.toml lacks keys that came later, and computed what their defaults say."""
    write_run(root, "small", 0)
    for seed, norm in ((1, "layernorm"), (2, "none")):
        path = write_run(root, "small", seed) / "recipe.toml"
        path.write_text(path.read_text().replace("seq_len = 128", f'seq_len = 128\nnorm = "{norm}"'))
    groups = {group.label: group.seeds for group in of("small").groups}
    assert groups == {"small model.norm=layernorm": (0, 1), "small model.norm=none": (2,)}


def test_price_and_energy(root: Path) -> None:
    curve(root, [6.0, 4.0, 3.0])
    comparison = of("c", target_loss=4.0, costs=Costs(price_per_hour=3600.0, power_watts=3.6e6))
    seconds = comparison.cells["seconds_to_target", "c"].mean
    assert seconds == pytest.approx(0.5)
    assert comparison.cells["price_to_target", "c"].mean == pytest.approx(seconds)
    assert comparison.cells["kwh_to_target", "c"].mean == pytest.approx(seconds)


def test_throughput_is_tokens_over_training_seconds(root: Path) -> None:
    """F46, and with a resume in between."""
    path = write_run(root, "small", 0, rows=rows_of(60, 0) + rows_of(100, 0, segment=1, first=41))
    run = read_numbers(path)
    assert run.tokens_per_second == pytest.approx(100 * 1024 / 5.0, rel=1e-3)


def test_mfu_is_weighted_by_seconds_and_absent_where_unknown(root: Path) -> None:
    rows = rows_of(10, 0)
    assert read_numbers(write_run(root, "a", 0, rows=rows)).mfu is None
    for row in rows[1:]:
        row["mfu"], row["seconds"] = (0.5, 1.0) if row["step"] == 1 else (0.2, 0.1)
    assert read_numbers(write_run(root, "b", 0, rows=rows)).mfu == pytest.approx((0.5 + 9 * 0.02) / 1.9)


def test_seconds_add_up(root: Path) -> None:
    """F43, reader's side: evaluation is apart from training."""
    run = read_numbers(write_run(root, "small", 0))
    rows = rows_of(60, 0) + [row | {"wall_seconds": (row["step"] - 40) * 0.06} for row in rows_of(100, 0, segment=1, first=41)]
    assert read_numbers(write_run(root, "resumed", 0, rows=rows)).wall_seconds == pytest.approx(40 * 0.06 + 60 * 0.06)
    assert run.seconds == pytest.approx(5.0) and run.other_seconds["eval_seconds"] == pytest.approx(11 * 0.25)


def test_plan_gives_seeds_for_wanted_differences(root: Path) -> None:
    pair(root)
    table = plan_table(of("small", "small-slw"), [0.001, 0.1])
    final = next(row for row in table.rows if row[0] == "final loss")
    assert int(final[3]) > int(final[4]) >= 2
    pair_of_one = plan_table(of("small-seed0", "small-slw-seed0"), [0.01])
    assert pair_of_one.rows[0][-1] == "one seed: no claim"


def zero_shot(path: Path, right: list[bool], limit: int | None = None, task: str = "lambada") -> None:
    """Results in the format of eval-zeroshot."""
    key = {"checkpoint_sha256": path.name, "task": task, "protocol": "p", "limit": limit}
    acc = {"value": float(np.mean(right)), "stderr": 0.1}
    entry = {"schema_version": 1, **key, "checkpoint": "step-00000100", "metric": "acc", "metrics": {"acc": acc}}
    save_result(path, entry, [{"doc_id": i, "doc_hash": "h", "acc": float(value)} for i, value in enumerate(right)])


def test_zero_shot_of_one_seed_is_paired_per_item(root: Path) -> None:
    a, b = write_run(root, "small", 0), write_run(root, "small-slw", 0, more=SLW)
    # 30 items: 10 both right, 12 only the method, 3 only the baseline, 5 neither.
    zero_shot(a, [True] * 10 + [False] * 12 + [True] * 3 + [False] * 5)
    zero_shot(b, [True] * 10 + [True] * 12 + [False] * 3 + [False] * 5)
    zero_shot(b, [True] * 9, limit=9)
    rows = of("small", "small-slw").zero_shot
    assert [(row.task, row.limit, row.metric) for row in rows] == [("lambada", "", "acc"), ("lambada", "9", "acc")]
    (difference,) = rows[0].differences
    assert difference.over_items.mean == pytest.approx(0.3) and difference.over_items.n == 30
    assert difference.mcnemar_p == pytest.approx(stats.binomtest(3, 15).pvalue)
    assert difference.verdict == "one seed: no claim; on its items these two checkpoints differ (p = 0.035)"
    # Under a limit the baseline has no result: nothing is compared with the full one.
    assert rows[1].scores == {"small": (None,), "small-slw": (1.0,)}
    assert rows[1].differences[0].verdict == "missing: no claim"


def test_zero_shot_over_seeds_uses_the_seeds(root: Path) -> None:
    pair(root)
    for seed in range(3):
        zero_shot(root / f"small-seed{seed}", [True] * (10 + seed) + [False] * (20 - seed))
        zero_shot(root / f"small-slw-seed{seed}", [True] * (16 + 2 * seed) + [False] * (14 - 2 * seed))
    (row,) = of("small", "small-slw").zero_shot
    assert row.differences[0].over_seeds.mean == pytest.approx(7 / 30)
    assert row.differences[0].verdict == "better"
    # Items speak for two single checkpoints only.
    assert row.differences[0].over_items is None and row.differences[0].mcnemar_p is None
    table = next(table for table in tables_of(of("small", "small-slw")) if table.title == "Zero-shot")
    assert table.rows[0][1] == "0.3667 ± 0.033"


def test_zero_shot_is_corrected_over_tasks_and_refused_at_different_tokens(root: Path) -> None:
    pair(root)
    for seed in range(3):
        for task, more in (("a", 2), ("b", 0)):
            zero_shot(root / f"small-seed{seed}", [True] * (10 + seed) + [False] * (20 - seed), task=task)
            right = 12 + 2 * seed + more
            zero_shot(root / f"small-slw-seed{seed}", [True] * right + [False] * (30 - right), task=task)
    rows = of("small", "small-slw").zero_shot
    raw = [row.differences[0].over_seeds.p for row in rows]
    assert [row.differences[0].p_holm for row in rows] == pytest.approx(inference.holm(raw)) and raw[0] != raw[1]
    # Another checkpoint of one run: 50 steps instead of 100.
    results = json.loads((root / "small-seed1" / "zeroshot.json").read_text())
    for entry in results:
        entry["checkpoint"] = "step-00000050"
    (root / "small-seed1" / "zeroshot.json").write_text(json.dumps(results))
    verdicts = {row.differences[0].verdict for row in of("small", "small-slw").zero_shot}
    assert verdicts == {"not judged: checkpoints after different tokens (51.2K to 102.4K)"}
    allowed = of("small", "small-slw", allow=True).zero_shot[0].differences[0]
    assert allowed.p_holm is not None and allowed.verdict.endswith(" (but checkpoints after different tokens (51.2K to 102.4K))")
    for entry in results:
        entry["checkpoint"] = "imported"
    (root / "small-seed1" / "zeroshot.json").write_text(json.dumps(results))
    verdicts = {row.differences[0].verdict for row in of("small", "small-slw").zero_shot}
    assert verdicts == {"not judged: the tokens of a checkpoint are unknown"}


def test_zero_shot_items_are_corrected_over_tasks(root: Path) -> None:
    a, b = write_run(root, "small", 0), write_run(root, "small-slw", 0, more=SLW)
    for task in ("a", "b"):  # 12 against 3 each: p = 0.035 alone, twice that of two
        zero_shot(a, [False] * 12 + [True] * 3, task=task)
        zero_shot(b, [True] * 12 + [False] * 3, task=task)
    verdicts = {row.differences[0].verdict for row in of("small", "small-slw").zero_shot}
    assert verdicts == {"one seed: no claim; on its items these two checkpoints do not differ clearly (p = 0.07)"}


def test_zero_shot_is_not_judged_over_the_runs_that_survived_or_among_settings(root: Path) -> None:
    pair(root)
    for seed in range(3):
        zero_shot(root / f"small-seed{seed}", [True] * (10 + seed) + [False] * (20 - seed))
        zero_shot(root / f"small-slw-seed{seed}", [True] * (16 + 2 * seed) + [False] * (14 - 2 * seed))
        write_run(root, "small", seed, name=f"small-fast-seed{seed}", lr=2e-3)
        zero_shot(root / f"small-fast-seed{seed}", [True] * (16 + 2 * seed) + [False] * (14 - 2 * seed))
    settings = [f"small{which}-seed{seed}" for which in ("", "-fast") for seed in range(3)]
    assert of(*settings).zero_shot[0].differences[0].verdict.startswith("settings of one recipe: name one with --baseline")
    named = of(*settings, baseline="small optim.lr=0.001")
    assert named.zero_shot[0].differences[0].verdict == "better"
    dead = [{"event": "start"}, {"event": "diverged", "step": 30}]
    write_run(root, "small-slw", 3, steps=30, budget=102400, more=SLW, events=dead)
    difference = of("small-seed*", "small-slw").zero_shot[0].differences[0]
    assert difference.verdict == "not judged: 1 failed run has no score" and difference.p_holm is None


def code_blocks(kind: str) -> list[str]:
    text = (Path(__file__).parent.parent.parent / "docs" / "compare.md").read_text()
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def test_every_number_can_be_recomputed_by_the_snippet_in_the_docs(root: Path) -> None:
    for seed in range(3):
        rows = rows_of(60, seed) + rows_of(100, seed, segment=1, first=51)
        rows = [row | {"loss_ratio": 1.0 + row["step"] % 7 / 10} if row["step"] > 1 else row for row in rows]
        # Stopped during the evaluation of step 50, which the next segment makes up for.
        late = {key: rows[50][key] for key in rows[0]} | {"segment": 1}
        rows[50]["val_loss"] = None
        write_run(root, "small", seed, rows=[*rows[:61], late, *rows[61:]])
        # Slower by a tenth, so that tokens and seconds are not the same axis in disguise.
        slower = [row | {"train_seconds": row["step"] * 0.055 + 0.001 * row["step"] ** 1.5} for row in rows_of(120, seed, 1.3)]
        write_run(root, "small-slw", seed, steps=120, rows=slower, more=SLW)
    found = as_json(of("small", "small-slw", target_loss=3.3))
    read_one, over_seeds = code_blocks("python")
    assert len(read_one.splitlines()) <= 15
    points = {axis: point["value"] for axis, point in found["equal_points"].items()}
    equal = {"tokens": points["tokens"], "total_flops": points["flops"], "train_seconds": points["seconds"]}
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
                "share_over_1_2": values["over"][0],
                "share_over_1_5": values["over"][1],
                "max_loss_ratio": values["largest_ratio"],
                "tokens_per_second": values["speed"],
                "trained_tokens": values["rows"].tokens.iloc[-1],
                "trained_flops": values["rows"].total_flops.iloc[-1],
                "train_seconds": values["rows"].train_seconds.iloc[-1],
                "nonfinite_stops": 0,
                "rewinds": 0,
                "diverged": 0,
                "mfu": None,
                "train_cpu_seconds": None,
            }
            assert set(run["measures"]) == set(expected)
            for key, value in expected.items():
                assert run["measures"][key] == (None if value is None else pytest.approx(value, rel=1e-9)), key
                by_seed.setdefault(key, {}).setdefault(group["label"], []).append(value)
        for key, mean in group["mean"].items():
            if mean is not None:
                column = pd.Series(by_seed[key][group["label"]])
                assert (mean, group["sd"][key]) == pytest.approx((column.mean(), column.std()), rel=1e-9, abs=1e-12)
    tested = 0
    for difference in found["differences"]:
        if difference["kind"] not in ("difference", "ratio"):
            continue
        baseline, method = (by_seed[difference["measure"]][label] for label in ("small", "small-slw"))
        values = {"np": np, "baseline": baseline, "method": method}
        exec(over_seeds, values)
        if difference["kind"] == "ratio":
            low, high = np.exp(values["speedup"].confidence_interval())
            p = values["speedup"].pvalue
            estimate = float(stats.gmean(np.divide(baseline, method)))
        else:
            low, high, p = values["low"], values["high"], values["difference"].pvalue
            estimate = float(np.mean(method) - np.mean(baseline))
        assert [difference[key] for key in ("estimate", "low", "high", "p")] == pytest.approx([estimate, low, high, p])
        tested += 1
    assert tested == 7  # the final loss, losses at equal tokens, FLOPs and seconds, three costs
