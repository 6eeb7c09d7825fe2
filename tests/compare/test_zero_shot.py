"""Zero-shot scores side by side: paired by items or seeds, corrected over tasks, and what is not
judged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from efftrain_cli.compare import inference
from efftrain_cli.compare.measures import NOT_AVAILABLE
from efftrain_cli.compare.tables import tables_of
from efftrain_cli.zeroshot.results import save_result
from tests.compare.known_runs import DEAD, SLW, of, scores, values, write_pair
from tests.fake_runs import write_run


def zero_shot(
    path: Path,
    right: list[bool],
    limit: int | None = None,
    task: str = "lambada",
    checkpoint: str = "step-00000100",
) -> None:
    """Results in the format of eval-zeroshot."""
    sha256 = f"{path.name} {checkpoint}"
    key = {"checkpoint_sha256": sha256, "task": task, "protocol": "p", "limit": limit}
    acc = {"value": float(np.mean(right)), "stderr": 0.1}
    entry = {
        "schema_version": 1,
        **key,
        "checkpoint": checkpoint,
        "metric": "acc",
        "metrics": {"acc": acc},
    }
    save_result(
        path,
        entry,
        [{"doc_id": i, "doc_hash": "h", "acc": float(value)} for i, value in enumerate(right)],
    )


def test_zero_shot_of_one_seed_is_paired_per_item(root):
    a, b = write_run(root, "small", 0), write_run(root, "small-slw", 0, more=SLW)
    # 30 items: 10 both right, 12 only the method, 3 only the baseline, 5 neither.
    zero_shot(a, [True] * 10 + [False] * 12 + [True] * 3 + [False] * 5)
    zero_shot(b, [True] * 10 + [True] * 12 + [False] * 3 + [False] * 5)
    zero_shot(b, [True] * 9, limit=9)
    comparison = of("small", "small-slw")
    difference, limited = scores(comparison)
    assert difference.question.key == "lambada/p//acc"
    assert limited.question.key == "lambada/p/9/acc"
    assert difference.items.mean == pytest.approx(0.3) and difference.items.n == 30
    assert difference.items_p == pytest.approx(stats.binomtest(3, 15).pvalue)
    assert (
        difference.text
        == "one seed: no claim; on its items these two checkpoints differ (p = 0.035)"
    )
    # Under a limit the baseline has no result: nothing is compared with the full one.
    assert values(comparison, "lambada/p/9/acc", "small") == {0: NOT_AVAILABLE}
    assert values(comparison, "lambada/p/9/acc", "small-slw") == {0: 1.0}
    assert limited.text == "missing: no claim"


def test_the_score_is_that_of_the_latest_checkpoint(root):
    """The half-trained checkpoint was evaluated last."""
    path = write_run(root, "small", 0)
    for checkpoint, right in (("step-00000100", True), ("step-00000050", False)):
        zero_shot(path, [right] * 4, checkpoint=checkpoint)
    assert values(of("small"), "lambada/p//acc", "small") == {0: 1.0}


def test_zero_shot_over_seeds_uses_the_seeds(root):
    write_pair(root)
    for seed in range(3):
        zero_shot(root / f"small-seed{seed}", [True] * (10 + seed) + [False] * (20 - seed))
        zero_shot(
            root / f"small-slw-seed{seed}", [True] * (16 + 2 * seed) + [False] * (14 - 2 * seed)
        )
    (found,) = scores(of("small", "small-slw"))
    assert found.estimate.mean == pytest.approx(7 / 30)
    assert found.text == "better"
    # Items speak for two single checkpoints only.
    assert found.items is None and found.items_p is None
    tables = {table.title: table for table in tables_of(of("small", "small-slw"))}
    assert tables["Zero-shot"].rows[0][1] == "0.3667 ± 0.033"
    assert tables[""].rows[0][0] == "final loss"
    assert [row[0] for row in tables["Zero-shot scores"].rows] == ["lambada (p), acc"]


def test_zero_shot_is_corrected_over_tasks_and_refused_at_different_tokens(root):
    write_pair(root)
    for seed in range(3):
        for task, more in (("a", 2), ("b", 0)):
            zero_shot(
                root / f"small-seed{seed}", [True] * (10 + seed) + [False] * (20 - seed), task=task
            )
            right = 12 + 2 * seed + more
            zero_shot(
                root / f"small-slw-seed{seed}", [True] * right + [False] * (30 - right), task=task
            )
    found = scores(of("small", "small-slw"))
    raw = [each.estimate.p for each in found]
    assert [each.p_holm for each in found] == pytest.approx(inference.holm(raw)) and raw[0] != raw[
        1
    ]
    # Another checkpoint of one run: 50 steps instead of 100.
    results = json.loads((root / "small-seed1" / "zeroshot.json").read_text())
    for entry in results:
        entry["checkpoint"] = "step-00000050"
        del entry["sha256"]
    (root / "small-seed1" / "zeroshot.json").write_text(json.dumps(results))
    for allow in (False, True):
        verdicts = {each.text for each in scores(of("small", "small-slw", allow=allow))}
        assert verdicts == {"not judged: checkpoints after different tokens (51.2K to 102.4K)"}
    for entry in results:
        entry["checkpoint"] = "imported"
    (root / "small-seed1" / "zeroshot.json").write_text(json.dumps(results))
    verdicts = {each.text for each in scores(of("small", "small-slw"))}
    assert verdicts == {"not judged: the tokens of a checkpoint are unknown"}


def test_zero_shot_items_are_corrected_over_tasks(root):
    a, b = write_run(root, "small", 0), write_run(root, "small-slw", 0, more=SLW)
    for task in ("a", "b"):  # 12 against 3 each: p = 0.035 alone, twice that of two
        zero_shot(a, [False] * 12 + [True] * 3, task=task)
        zero_shot(b, [True] * 12 + [False] * 3, task=task)
    verdicts = {each.text for each in scores(of("small", "small-slw"))}
    assert verdicts == {
        "one seed: no claim; on its items these two checkpoints do not differ clearly (p = 0.07)"
    }


def test_zero_shot_is_not_judged_over_the_runs_that_survived_or_among_settings(root):
    write_pair(root)
    for seed in range(3):
        zero_shot(root / f"small-seed{seed}", [True] * (10 + seed) + [False] * (20 - seed))
        zero_shot(
            root / f"small-slw-seed{seed}", [True] * (16 + 2 * seed) + [False] * (14 - 2 * seed)
        )
        write_run(root, "small", seed, name=f"small-fast-seed{seed}", lr=2e-3)
        zero_shot(
            root / f"small-fast-seed{seed}", [True] * (16 + 2 * seed) + [False] * (14 - 2 * seed)
        )
    settings = [f"small{which}-seed{seed}" for which in ("", "-fast") for seed in range(3)]
    assert scores(of(*settings))[0].text.startswith(
        "settings of one recipe: name one with --baseline"
    )
    named = of(*settings, baseline="small optim.lr=0.001")
    assert scores(named)[0].text == "better"
    write_run(root, "small-slw", 3, more=SLW, **DEAD)
    difference = scores(of("small-seed*", "small-slw"))[0]
    assert difference.text == "not judged: 1 failed run without a score"
    assert difference.p_holm is None


def test_scores_wait_until_every_run_is_evaluated(root):
    """Else the seeds would be evaluated one after the other until a difference shows."""
    write_pair(root)
    for seed in range(2):
        zero_shot(root / f"small-seed{seed}", [True] * 10 + [False] * 20)
        zero_shot(root / f"small-slw-seed{seed}", [True] * (16 + seed) + [False] * (14 - seed))
    assert scores(of("small", "small-slw"))[0].text == "pending: 2 runs without a score"
    zero_shot(root / "small-seed2", [True] * 10 + [False] * 20)
    zero_shot(root / "small-slw-seed2", [True] * 17 + [False] * 13)
    assert scores(of("small", "small-slw"))[0].text == "better"
