"""The rows of docs/evidence: as published, and as the published runs and curves are judged now.

A look that a later one followed is left out, as is the study without curves, which asks for the
sensitivity to the learning rate.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from efftrain_cli.compare.engine import Verdict
from efftrain_cli.compare.reading import RunNumbers, read_numbers
from efftrain_cli.study.judge import JudgedRun, judge
from efftrain_cli.study.load import read_study
from tests.conftest import REPOSITORY
from tests.fake_runs import rows_of, write_run

EVIDENCE = REPOSITORY / "docs" / "evidence"
NUMBERS = ("estimate", "low", "high", "p", "p_holm")


def record() -> dict[str, Any]:
    """Return each row by study, measure and arm: "published" and "judged"."""
    rows: dict[str, Any] = {}
    for curves in sorted(EVIDENCE.glob("*/*curves.csv")):
        prefix = curves.name.removesuffix("curves.csv")
        study = f"{curves.parent.name}-{prefix}".strip("-")
        looks = curves.with_name(f"{prefix}looks.csv")
        if not looks.exists():
            looks = curves.with_name("looks.csv")
        with looks.open(encoding="utf-8") as file:
            published = list(csv.DictReader(file))
        last = max(row["look"] for row in published)
        judged = judge_again(study, curves)
        for row in published:
            if row["look"] != last:
                continue
            numbers = {name: float(row[name]) if row[name] else None for name in NUMBERS}
            rows[f"{study}: {row['measure']} of {row['arm']}"] = {
                "published": {**numbers, "outcome": row["outcome"]},
                "judged": judged[row["measure"], row["arm"]],
            }
    return rows


def judge_again(study: str, curves: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Judge the runs of a study's curves; return the verdicts by measure and arm."""
    with TemporaryDirectory() as folder, patch.dict(os.environ, EFFTRAIN_RUNS=folder):
        file = read_study(EVIDENCE / f"{study}.toml")
        runs = []
        for row, run in published_runs(Path(folder), curves):
            if row["phase"] == "confirmation":
                runs.append(JudgedRun(row["arm"], None, run))
        verdicts = judge(file, runs).verdicts
    measures = [primary.measure for primary in file.study.primary]
    return {
        (measure, verdict.arm): _values(verdict)
        for measure, verdict in zip(
            [each for each in measures for _ in file.study.arms[1:]], verdicts, strict=True
        )
    }


def published_runs(root: Path, curves: Path) -> list[tuple[dict[str, str], RunNumbers]]:
    """Write the runs of a file of curves into `root`; return each with its row of runs.csv."""
    points = defaultdict(list)
    with curves.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            points[row["run"]].append(row)
    runs = []
    with curves.with_name(curves.name.replace("curves", "runs")).open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            curve = points[row["run"]]
            curve[-1]["val_loss"] = row["final_loss"]
            path = write_run(
                root,
                row["arm"],
                int(row["seed"]),
                name=row["run"],
                budget=int(row["tokens"]),
                rows=[_row(point) for point in curve],
            )
            runs.append((row, read_numbers(path)))
    return runs


def _row(point: dict[str, str]) -> dict[str, Any]:
    """Return the row of metrics.jsonl for a point of curves.csv."""
    step = int(point["step"])
    (row,) = rows_of(
        step,
        seed=0,
        first=step,
        tokens=int(point["tokens"]),
        total_flops=float(point["flops"]),
        val_loss=float(point["val_loss"]),
    )
    return row


def _values(verdict: Verdict) -> dict[str, Any]:
    estimate = verdict.estimate
    mean = estimate.mean if estimate.low is not None else None
    return {
        "estimate": mean,
        "low": estimate.low,
        "high": estimate.high,
        "p": verdict.p,
        "p_holm": verdict.p_holm,
        "outcome": verdict.outcome,
    }
