"""The rows of docs/evidence: as published, and as the published runs and curves are judged now.

A look that a later one followed is left out, as is the study without curves, which asks for the
sensitivity to the learning rate.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from efftrain_cli.compare.comparison import compare
from efftrain_cli.compare.inference import shares
from efftrain_cli.compare.judge import Result
from efftrain_cli.run.reading import CURVE, Run
from efftrain_cli.study.plans import read_study
from tests.compare.runs import KNOWN
from tests.conftest import REPOSITORY

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
    plan = read_study(EVIDENCE / f"{study}.toml")
    comparison = compare(
        published_runs(curves),
        baseline=plan.arms[0].name,
        claims=plan.study.primary,
        alpha=plan.study.alpha,
        share=shares(plan.looks)[-1],
    )
    return {row.key: values_of(row) for row in comparison.verdicts}


def published_runs(curves: Path) -> Iterator[Run]:
    """Yield the confirmation's runs of a file of curves, each with its final loss in runs.csv."""
    points = pd.read_csv(curves)
    runs = pd.read_csv(curves.with_name(curves.name.replace("curves", "runs")))
    for row in runs[runs.phase == "confirmation"].itertuples():
        curve = points[points.run == row.run].reindex(columns=CURVE)
        curve.iloc[-1, -1] = row.final_loss
        yield Run(
            row.run,
            row.arm,
            row.seed,
            row.status,
            curve,
            settings={"label": row.arm},
            conditions=KNOWN,
        )


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
