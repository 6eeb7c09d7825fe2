"""The rows of docs/evidence: as published, and as the published runs and curves are judged now.

A look that a later one followed is left out, as is the study without curves, which asks for the
sensitivity to the learning rate.
"""

from __future__ import annotations

import csv
import math
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from efftrain_cli.compare.comparison import compare
from efftrain_cli.compare.inference import shares
from efftrain_cli.compare.judge import Result
from efftrain_cli.run.reading import Run, load_run
from efftrain_cli.study.plans import read_study
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
                # "to_target" without a target was the worse run's final loss.
                "judged": judged[row["measure"].replace("_target", "_match"), row["arm"]],
            }
    return rows


def judge_again(study: str, curves: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Judge the runs of a study's curves; return the verdicts by measure and arm."""
    with TemporaryDirectory() as folder, patch.dict(os.environ, EFFTRAIN_RUNS=folder):
        plan = read_study(EVIDENCE / f"{study}.toml")
        runs = []
        for row, run in published_runs(Path(folder), curves):
            if row["phase"] == "confirmation":
                # The training losses are made up, and equal for all seeds.
                settings = {"label": row["arm"]}
                runs.append(replace(run, arm=row["arm"], settings=settings, opening=()))
        comparison = compare(
            runs,
            baseline=plan.arms[0].name,
            claims=plan.study.primary,
            alpha=plan.study.alpha,
            share=shares(plan.looks)[-1],
        )
    return {row.key: values_of(row) for row in comparison.verdicts}


def published_runs(root: Path, curves: Path) -> list[tuple[dict[str, str], Run]]:
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
            runs.append((row, load_run(path)))
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


def values_of(row: Result) -> dict[str, Any]:
    """Return numbers and verdict of a claim; None: blank."""
    numbers = {
        "estimate": row.estimate,
        "low": row.low,
        "high": row.high,
        "p": row.p,
        "p_holm": row.p_corrected,
    }
    known = {name: None if math.isnan(value) else value for name, value in numbers.items()}
    return {**known, "outcome": row.verdict}
