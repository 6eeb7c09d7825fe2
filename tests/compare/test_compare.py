"""What a comparison says, against runs whose numbers are known; and that it can be recomputed from metrics.jsonl."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from efftrain_cli.compare.comparison import Comparison, compare, read_all
from efftrain_cli.compare.formats import as_json
from efftrain_cli.compare.groups import select_runs
from efftrain_cli.compare.measures import Costs, loss_at, needed_for
from efftrain_cli.compare.reading import read_numbers
from efftrain_cli.compare.tables import plan_table, tables_of
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
    assert needed_for(run, "tokens", 4.75) == 12800
    assert needed_for(run, "flops", 4.0) == pytest.approx(20480 * 6e5)
    assert needed_for(run, "seconds", 3.9) is None
    assert needed_for(run, "tokens", 7.0) == 0
    assert (run.evaluated["val_loss"].min(), run.status) == (4.0, "finished")


def test_equal_tokens_are_the_largest_that_all_runs_reached(root: Path) -> None:
    curve(root, [6.0, 5.0, 4.0, 3.0, 2.0], "long")
    curve(root, [6.0, 5.5, 5.0], "short")
    comparison = of("long", "short")
    assert comparison.points["tokens"].value == 20480
    assert comparison.points["tokens"].limited_by == "short-seed0"
    assert comparison.cells["loss_at_tokens", "long"].mean == 4.0
    assert comparison.cells["loss_at_tokens", "short"].mean == 5.0


def test_a_seed_that_did_not_reach_the_target_is_never_averaged_away(root: Path) -> None:
    for seed, last in enumerate((3.0, 3.0, 3.0)):
        curve(root, [6.0, 4.0, last], "base", seed)
    for seed, last in enumerate((2.0, 2.1, 3.5)):
        curve(root, [6.0, 4.0, last], "method", seed, more=SLW)
    comparison = of("base", "method")
    cell = comparison.cells["tokens_to_target", "method"]
    assert cell.mean is None and cell.values[2] == "not reached"
    tokens = next(d for d in comparison.differences if d.measure.key == "tokens_to_target")
    assert tokens.verdict == "not reached (1 of 3 seeds of method): no claim"
    assert math.isnan(tokens.estimate.mean) and tokens.p_holm is None
    cost = next(table for table in tables_of(comparison) if table.title.startswith("Cost"))
    assert cost.rows[0][2] == "not reached (1 of 3 seeds)"


def test_default_target_is_what_every_baseline_seed_reached(root: Path) -> None:
    for seed, best in enumerate((3.0, 3.2, 3.1)):
        curve(root, [6.0, best, 3.5], "base", seed)
    comparison = of("base")
    assert comparison.target_loss == 3.2
    assert comparison.cells["tokens_to_target", "base"].mean is not None


def test_one_seed_makes_no_claim(root: Path) -> None:
    """F49."""
    pair(root, seeds=1)
    comparison = of("small", "small-slw")
    assert {difference.verdict for difference in comparison.differences} == {"one seed: no claim"}
    assert all(difference.p_holm is None for difference in comparison.differences)


def test_clear_difference_over_three_seeds_is_claimed(root: Path) -> None:
    pair(root)
    verdicts = {d.measure.key: d.verdict for d in of("small", "small-slw").differences}
    assert verdicts["best_loss"] == "lower" and verdicts["tokens_to_target"] == "less needed"
    verdicts = {d.measure.key: d.verdict for d in of("small", "small-slw", baseline="small-slw").differences}
    assert verdicts["best_loss"] == "higher"
    # The target is now the faster recipe's best, which the slower never reached.
    assert verdicts["tokens_to_target"].startswith("not reached")


def test_no_difference_asks_for_more_seeds(root: Path) -> None:
    for seed, (a, b) in enumerate([(3.0, 3.1), (3.2, 3.0), (3.1, 3.05)]):
        curve(root, [6.0, 4.0, a], "base", seed)
        curve(root, [6.0, 4.0, b], "method", seed, more=SLW)
    best = next(d for d in of("base", "method").differences if d.measure.key == "best_loss")
    assert best.seeds_needed is not None
    assert best.verdict == f"no difference shown; to show one of this size, about {best.seeds_needed - 3} more seeds"


def test_only_shared_seeds_are_paired_and_unshared_ones_compared_by_welch(root: Path) -> None:
    for seed in (0, 1, 2):
        write_run(root, "small", seed)
    for seed in (1, 2, 3):
        write_run(root, "small-slw", seed, speed=1.3, more=SLW)
    for seed in (7, 8):
        write_run(root, "small-pld", seed, speed=1.1, more=PLD)
    comparison = of("small", "small-slw", "small-pld")
    best = {d.label: d for d in comparison.differences if d.measure.key == "best_loss"}
    assert best["small-slw"].seeds == (1, 2)
    assert best["small-pld"].seeds == () and "not paired" in best["small-pld"].estimate.method
    assert any("different seeds" in label.text for label in comparison.labels)


def test_holm_is_applied_over_the_recipes(root: Path) -> None:
    pair(root)
    for seed in range(3):
        write_run(root, "small-pld", seed, speed=1.01, more=PLD)
    best = [d for d in of("small", "small-slw", "small-pld").differences if d.measure.key == "best_loss"]
    raw = [d.estimate.p for d in best]
    assert best[0].p_holm == pytest.approx(2 * raw[0]) and best[1].p_holm == pytest.approx(raw[1])


def test_bootstrap_from_20_seeds_on_is_repeatable_and_states_its_coverage(root: Path) -> None:
    """F50."""
    pair(root, seeds=20)
    first, second = of("small", "small-slw"), of("small", "small-slw")
    assert first.differences == second.differences
    tokens = next(d for d in first.differences if d.measure.key == "tokens_to_target")
    assert tokens.estimate.method.startswith("bootstrap") and 0.9 < tokens.coverage < 0.96
    note = next(table for table in tables_of(first) if table.title == "Against small").note
    assert f"measured coverage {100 * tokens.coverage:.1f} %" in note


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
    labels = of("small", "small-slw", allow=True).labels
    assert any(label.severity == "allowed" and word in label.text for label in labels)


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
    assert any("limits the comparison at equal cost" in label.text for label in comparison.labels)


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
    assert [group.label for group in of("small").groups] == ["small optim.lr=0.003", "small optim.lr=0.001"]


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
    best = next(row for row in table.rows if row[0] == "best")
    assert int(best[3]) > int(best[4]) >= 2
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
    assert rows[1].differences[0].verdict == "no shared seed: no claim"


def test_zero_shot_over_seeds_uses_the_seeds(root: Path) -> None:
    pair(root)
    for seed in range(3):
        zero_shot(root / f"small-seed{seed}", [True] * (10 + seed) + [False] * (20 - seed))
        zero_shot(root / f"small-slw-seed{seed}", [True] * (16 + 2 * seed) + [False] * (14 - 2 * seed))
    (row,) = of("small", "small-slw").zero_shot
    assert row.differences[0].over_seeds.mean == pytest.approx(7 / 30)
    assert row.differences[0].verdict == "higher"
    assert row.differences[0].over_items.n == 30 and row.differences[0].mcnemar_p is None
    table = next(table for table in tables_of(of("small", "small-slw")) if table.title == "Zero-shot")
    assert table.rows[0][1] == "0.3667 ± 0.033"


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
    found = as_json(of("small", "small-slw"))
    read_one, over_seeds = code_blocks("python")
    assert len([line for line in read_one.splitlines() if not line.startswith("#")]) <= 10
    points = {axis: point["value"] for axis, point in found["equal_points"].items()}
    equal = {"tokens": points["tokens"], "total_flops": points["flops"], "train_seconds": points["seconds"]}
    by_seed: dict[str, dict[str, list[float]]] = {}
    for group in found["groups"]:
        for run in group["runs"]:
            values: dict[str, object] = {"runs": str(root), "name": run["name"], "target": found["target_loss"], "equal": equal}
            exec(read_one, values)
            at, to = values["loss_at"], values["to_target"]
            expected = {
                "final_loss": values["final_loss"],
                "best_loss": values["best_loss"],
                "final_perplexity": np.exp(values["final_loss"]),
                "best_perplexity": np.exp(values["best_loss"]),
                "best_bits_per_byte": values["best_loss"] / np.log(2) / 2.5,
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
                "mfu": None,
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
    assert tested == 8
