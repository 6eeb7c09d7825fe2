"""Runs of other programs: tables, wandb, and what is refused of them."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from efftrain_cli.compare.comparison import compare
from efftrain_cli.compare.sources import UNKNOWN, read_table, read_wandb, runs_of
from efftrain_cli.foundation.errors import DataError, UsageError
from tests.compare.known_runs import row_of

BASE = [4.01, 4.12, 4.05, 4.2, 3.97]
ARM = [3.95, 4.02, 4.01, 4.1, 3.99]


def table(**more: object) -> pd.DataFrame:
    """A row per evaluation, two a run, of five seeds of two arms."""
    rows = []
    for arm, finals in (("adam", BASE), ("muon", ARM)):
        for seed, final in enumerate(finals):
            for step, loss in ((50, final + 1), (100, final)):
                rows.append({"arm": arm, "seed": seed, "step": step, "val_loss": loss} | more)
    return pd.DataFrame(rows)


WRITERS = {
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "parquet": lambda frame, path: frame.to_parquet(path),
    "jsonl": lambda frame, path: frame.to_json(
        path, orient="records", lines=True, double_precision=15
    ),
}


@pytest.mark.parametrize("ending", WRITERS)
def test_verdicts_of_a_table_are_those_of_scipy(tmp_path, ending):
    path = tmp_path / f"runs.{ending}"
    WRITERS[ending](table(), path)
    comparison = compare(read_table(path))
    row = row_of(comparison, arm="muon")
    expected = stats.ttest_rel(ARM, BASE)
    interval = expected.confidence_interval()
    assert row.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert (row.low, row.high) == pytest.approx((interval.low, interval.high), rel=1e-6)
    assert row.unit == "" and UNKNOWN in comparison.caveats


def test_without_seeds_it_is_welch_s_test():
    finals = pd.DataFrame({"arm": ["a"] * 5 + ["b"] * 5, "val_loss": [*BASE, *ARM]})
    # Seeds are numbers of runs, so none is shared.
    row = row_of(compare(runs_of(finals, "x")), arm="b")
    assert row.p == pytest.approx(stats.ttest_ind(ARM, BASE, equal_var=False).pvalue)
    assert row.n == 0 and row.why == "no shared seed: Welch's test of all runs"


def test_how_a_run_ended():
    """One says that it failed, the last loss of another is infinite, one ends before the others of
    its arm."""
    frame = table(failed=False)
    frame.loc[0, "failed"] = True
    frame.loc[3, "val_loss"] = math.inf
    frame = frame.drop(frame.index[-1])
    statuses = [run.status for run in runs_of(frame, "x")]
    assert statuses == ["diverged", "diverged", *["finished"] * 7, "stopped"]


def test_last_steps_must_agree():
    longer = table()
    longer.loc[longer.arm == "muon", "step"] *= 2
    row = row_of(compare(runs_of(longer, "x")), arm="muon")
    assert row.why == "the last steps differ by more than 2 %" and row.verdict == ""


def test_a_table_with_a_schedule_has_costs():
    rows = []
    for arm, rate in (("adam", 0.2), ("muon", 0.25)):
        for seed in range(3):
            for step in range(11):
                rows.append([arm, seed, step, step * 10.0, 6.0 - (rate + seed / 100) * step])
    frame = pd.DataFrame(rows, columns=["arm", "seed", "step", "tokens", "val_loss"])
    unknown = compare(runs_of(frame, "x"))
    assert row_of(unknown, "tokens_to_match", "muon").why == "no schedule known"
    known = compare(runs_of(frame.assign(schedule="cosine"), "x"))
    by_hand = np.log([0.25 / 0.2, 0.26 / 0.21, 0.27 / 0.22]).mean()
    estimate = row_of(known, "tokens_to_match", "muon").estimate
    assert estimate == pytest.approx(math.exp(by_hand))


@pytest.mark.parametrize(
    ("change", "columns", "message"),
    [
        (lambda t: t.drop(columns="arm"), {}, "has no column 'arm'.*\n.*--columns arm=NAME"),
        (lambda t: t, {"val_loss": "val_bpb"}, "only arm, seed, step, val_loss\n"),
        (
            lambda t: t.assign(**dict.fromkeys("abcdefghij", 0)),
            {"val_loss": "val_bpb"},
            "g, h and 2 more\n",
        ),
        (lambda t: t, {"loss": "val_loss"}, "--columns loss=: no such column\n  did you mean"),
        (lambda t: pd.concat([t, t[:1]]), {}, "two rows of run adam-seed0, step 50\n"),
        (lambda t: t.assign(val_loss="low"), {}, "column 'val_loss' holds no numbers"),
        (lambda t: t.assign(seed=0.5), {}, "column 'seed' holds values that are not whole"),
        (
            lambda t: t.assign(run="one"),
            {},
            "run 'one' has several arms or seeds\n",
        ),
    ],
)
def test_what_a_table_lacks_is_one_message(change, columns, message):
    with pytest.raises(UsageError, match=message):
        runs_of(change(table()), "runs.csv", columns)


def test_equal_curves_under_two_seeds_are_a_copy():
    frame = table()
    frame["step"] += 50
    frame = pd.concat([frame.assign(step=0, val_loss=9.0)[::2], frame])
    frame.loc[frame.seed == 1, "val_loss"] = frame.val_loss[frame.seed == 0].to_numpy()
    with pytest.raises(UsageError, match="adam-seed1 began with the losses of adam-seed0"):
        compare(runs_of(frame, "x"))


def test_files_that_hold_no_table(tmp_path):
    with pytest.raises(UsageError, match=r"not a table\n  give a file that ends in .csv"):
        read_table(tmp_path / "runs.xlsx")
    with pytest.raises(DataError, match="cannot be read"):
        read_table(tmp_path / "runs.csv")


# --- wandb ----------------------------------------------------------------------------------------


def answer() -> list[SimpleNamespace]:
    """wandb's answer for a project of ten runs; not every row has every key."""
    runs = []
    for arm, finals in (("adam", BASE), ("muon", ARM)):
        for seed, final in enumerate(finals):
            rows = [
                {"_step": 50, "eval/loss": 5.0, "_runtime": 3.2},
                {"_step": 60, "lr": 1e-3},
                {"_step": 100, "eval/loss": final},
            ]
            run = SimpleNamespace(
                id=f"{arm}{seed}",
                name="a name",
                state="finished",
                config={"optim": {"name": arm}, "seed": seed},
                scan_history=rows.copy,
            )
            runs.append(run)
    runs[-1].state = "crashed"
    return runs


COLUMNS = {"val_loss": "eval/loss", "arm": "optim.name"}


def test_wandb_is_asked_for_the_project(monkeypatch):
    asked = []

    class Api:
        def runs(self, project):
            asked.append(project)
            if project == "gone":
                raise ValueError("Could not find project")
            return [] if project == "empty" else answer()

    fake = SimpleNamespace(Api=Api, errors=SimpleNamespace(Error=RuntimeError))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    runs = read_wandb("me/project", COLUMNS)
    assert asked == ["me/project"]
    assert [run.status for run in runs] == ["finished"] * 9 + ["diverged"]
    assert runs[0].curve.val_loss.tolist() == [5.0, BASE[0]], "scan_history, not history"
    assert row_of(compare(runs), arm="muon").n == 4
    with pytest.raises(UsageError, match="wandb:empty has no rows"):
        read_wandb("empty")
    with pytest.raises(DataError, match="wandb:gone cannot be read: Could not find"):
        read_wandb("gone")
