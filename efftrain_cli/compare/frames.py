"""A comparison as a table with a row per measure and recipe, for pandas, CSV and JSON.

`rows_of` computes every row once; the tables for people (compare.tables) are views of the same
rows.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING, Any

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.engine import Verdict
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.inference import ALPHA
from efftrain_cli.compare.measures import PRIMARY, mean_sd
from efftrain_cli.compare.verdicts import short_verdict, verdict_sentences
from efftrain_cli.foundation.files import csv_text
from efftrain_cli.foundation.why import Why

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 3
"""Format of `--format json`."""
COLUMNS = (
    "section measure unit arm baseline"
    " seeds values mean sd estimate low high p p_holm verdict reason kind"
)
"""Columns of the data frame."""
_JSON_COLUMNS = (
    "tested shared_seeds method n spread se df bound exact p_equivalent could_see items items_p"
    " text note"
)
"""Keys of a JSON row beyond COLUMNS."""
_CSV_COLUMNS = (
    "section measure unit recipe baseline seeds values mean sd estimate kind low high p p_holm"
    " shared_seeds method verdict exploratory"
)


Row = dict[str, Any]
"""Column -> value for one measure of one recipe: COLUMNS, JSON's, and those of the text tables."""


def frame_of(comparison: Comparison) -> pd.DataFrame:
    """Return a data frame with COLUMNS and a row per measure and recipe.

    `seeds` and `values` are lists; a value without a number is the reason in words. `verdict` is
    empty if nothing was judged: `reason` says why in words, `kind` for programs. `attrs` holds
    the caveat, and the labels as JSON has them.
    """
    import pandas as pd

    frame = pd.DataFrame(rows_of(comparison))[COLUMNS.split()]
    frame.attrs = {"caveat": comparison.caveat, "labels": _labels(comparison)}
    return frame


def _labels(comparison: Comparison) -> list[dict[str, str]]:
    return [{"severity": label.kind, "text": label.text} for label in comparison.labels]


def rows_of(comparison: Comparison) -> list[Row]:
    """Return every row of a comparison: each measure of each group, the baseline first."""
    columns = f"{COLUMNS} {_JSON_COLUMNS} short ratio".split()
    untested = dict.fromkeys(columns)
    rows = []
    for question, group in product(comparison.questions, comparison.groups):
        values = []
        # A cost to match belongs to a pair of runs: a run alone has none.
        if question.tested != "match":
            values = list(question.values(group).values())
        mean, sd = mean_sd(values)
        row = untested | {
            "section": question.section,
            "measure": question.key,
            "title": question.title,
            "unit": question.unit,
            "axis": question.axis,
            "test": question.tested,
            "arm": group.label,
            "letter": comparison.letter(group),
            "baseline": group is comparison.baseline,
            "seeds": list(group.seeds),
            "values": [value.text if isinstance(value, Why) else value for value in values],
            "mean": mean,
            "sd": sd,
        }
        verdict = comparison.verdict(question.key, group.label)
        if verdict:
            row |= _verdict_columns(verdict)
        rows.append(row)
    return rows


def rows_by_question(comparison: Comparison) -> list[list[Row]]:
    """Return the rows of each question: the baseline's, then the other groups'."""
    rows = rows_of(comparison)
    n_groups = len(comparison.groups)
    return [rows[start : start + n_groups] for start in range(0, len(rows), n_groups)]


def _verdict_columns(verdict: Verdict) -> Row:
    estimate = verdict.estimate
    bound_words = {1: "more than", -1: "less than"}
    exact = None
    if verdict.exact:
        exact = asdict(verdict.exact)
        exact["wins"] = _number(verdict.exact.wins)

    columns = {
        "estimate": _number(estimate.mean),
        "low": estimate.low,
        "high": estimate.high,
        "p": verdict.test.p,
        "p_holm": verdict.p_holm,
        "tested": verdict.question.tested,
        "shared_seeds": list(verdict.seeds),
        "method": verdict.test.method,
        "n": estimate.n,
        "spread": estimate.sd,
        "se": estimate.se,
        "df": estimate.df,
        "bound": bound_words.get(estimate.bound),
        "exact": exact,
        "p_equivalent": verdict.p_equivalent,
        "could_see": _number(verdict.min_detectable_effect),
        "items": verdict.items and asdict(verdict.items),
        "items_p": verdict.items_p,
        "text": verdict.text,
        "note": verdict.note,
        "short": short_verdict(verdict),
        "ratio": estimate.log,
    }
    if verdict.why:
        return columns | {"reason": verdict.why.text, "kind": verdict.why.kind}
    return columns | {"verdict": verdict.outcome}


def comma_separated(comparison: Comparison) -> str:
    """Return the rows as CSV, at full precision.

    Column `recipe` is `arm` of the frame; `kind` says how two recipes are compared.
    """
    columns = _CSV_COLUMNS.split()
    rows = []
    for row in rows_of(comparison):
        shared = row["shared_seeds"]
        row |= {
            "recipe": row["arm"],
            "baseline": str(row["baseline"]).lower(),
            "seeds": " ".join(map(str, row["seeds"])),
            # A reason may hold spaces, so semicolons separate the values.
            "values": ";".join(map(str, row["values"])),
            "kind": row["tested"],
            "shared_seeds": None if shared is None else len(shared),
            "verdict": row["text"],
            "exploratory": str(bool(comparison.caveat)).lower(),
        }
        rows.append([row[name] for name in columns])
    return csv_text(columns, rows)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return everything as plain values, at full precision; None for a number that is missing."""
    names = f"{COLUMNS} {_JSON_COLUMNS}".split()
    labels = [group.label for group in comparison.groups]
    return {
        "schema_version": SCHEMA_VERSION,
        "verdicts": verdict_sentences(comparison),
        "baseline": comparison.baseline.label,
        "primary": PRIMARY,
        "alpha": ALPHA,
        "caveat": comparison.caveat,
        "margin": comparison.margin,
        "target_loss": comparison.target_loss,
        "equal_points": {
            axis: {"value": point.value, "limited_by": point.limited_by}
            for axis, point in comparison.points.items()
        },
        "labels": _labels(comparison),
        "recipe_differences": {
            key: dict(zip(labels, values, strict=True))
            for key, values in comparison.recipe_differences.items()
        },
        "settings_tried": [asdict(trial) for trial in comparison.trials],
        "groups": [_group_values(comparison, group) for group in comparison.groups],
        "rows": [{name: row[name] for name in names} for row in rows_of(comparison)],
    }


def _group_values(comparison: Comparison, group: Group) -> dict[str, Any]:
    runs = []
    for run in group.runs:
        runs.append(
            {
                "name": run.name,
                "seed": run.seed,
                "status": run.status,
                "marks": [mark.text for mark in run.marks],
                "steps": run.step,
                "seconds": run.spent,
            }
        )
    return {
        "letter": comparison.letter(group),
        "label": group.label,
        "recipe": group.recipe_name,
        "runs": runs,
    }


def _number(value: float | None) -> float | None:
    """Return a number that JSON can hold; None for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None
