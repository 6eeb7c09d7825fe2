"""CSV files: a text never runs as a formula, and a number stays a number."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest

from efftrain_cli.compare.comparison import compare
from efftrain_cli.compare.show import render
from efftrain_cli.foundation.files import csv_text
from efftrain_cli.plan.preview import csv_lines
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.run.reading import load_run
from tests.fake_runs import write_run


@pytest.mark.parametrize(
    "cell, written",
    [
        ("=1+1", "'=1+1"),
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+a", "'+a"),
        ("-a", "'-a"),
        ("@sum", "'@sum"),
        ("\t=1", "'\t=1"),
        ("a=1", "a=1"),
        ("-1.5", "-1.5"),
        ("+2e-3", "+2e-3"),
        ("-inf", "-inf"),
        ("-0.1;-0.2", "-0.1;-0.2"),
        ("-0.1;=1", "'-0.1;=1"),
        (-3, "-3"),
        (None, ""),
    ],
)
def test_a_cell(cell, written):
    """F100."""
    text = csv_text(["a", "b"], [[cell, 1]])
    assert pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)["a"][0] == written


def test_numbers_are_read_back_as_numbers():
    rows = [["=x", -1, "-0.25", 2.5], ["y", 3, "1e-3", -2.5]]
    frame = pd.read_csv(io.StringIO(csv_text(["name", "a", "b", "c"], rows)))
    assert frame["name"].tolist() == ["'=x", "y"]
    assert [frame[column].dtype for column in "abc"] == [np.int64, np.float64, np.float64]
    assert frame["b"].tolist() == [-0.25, 0.001]


def test_the_csv_of_a_comparison_and_of_a_plan(tmp_path):
    """F100: recipes whose names begin with = and -, and differences below 0."""
    runs = []
    for name, speed in (("=plain", 1.0), ("-warm", 1.3)):
        for seed in range(3):
            path = write_run(tmp_path, name, seed, name=f"{name[1:]}-{seed}", speed=speed)
            runs.append(load_run(path))
    frame = pd.read_csv(io.StringIO(render(compare(runs, baseline="=plain"), "csv")))
    assert set(frame["arm"]) == {"'-warm"}
    numbers = ("baseline", "mean", "estimate", "low", "high")
    for column in numbers:
        assert frame[column].dtype == np.float64, column
    differences = frame[(frame["measure"] == "final_loss") & (frame["arm"] == "'-warm")]
    assert (differences["estimate"] < 0).all()

    plan = pd.read_csv(io.StringIO("\n".join(csv_lines(load_recipe("small"), 20))))
    assert all(np.issubdtype(kind, np.number) for kind in plan.dtypes)
