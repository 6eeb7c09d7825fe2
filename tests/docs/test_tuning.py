"""The page on tuning a warmup: its plans are printed, and its figures are those of the table."""

from __future__ import annotations

import csv
import re
import shlex

import pytest

from tests.conftest import REPOSITORY, cli
from tests.docs.pages import commands_of, text_of

PAGE = text_of("tune-warmup")


@pytest.mark.parametrize("command", commands_of("tune-warmup"))
def test_the_plans_in_the_page_are_printed(command):
    assert command.endswith("--plan")
    assert "stable on all of them" in cli(*shlex.split(command)[1:]).output


def test_the_threshold_in_the_page_is_the_default():
    (threshold,) = re.findall(r"A fluctuation is (\S+) times the", PAGE)
    assert f"[default: {threshold}]" in cli("tune-warmup --help").output


def test_the_shares_in_the_page_are_those_of_the_table():
    path = REPOSITORY / "benchmarks" / "simulations" / "tuning.csv"
    reader = csv.DictReader(path.open(encoding="utf-8"))
    rows = {(row["recipe"], row["seeds"]): row for row in reader}
    printed = re.findall(r"^\| `([\w.-]+)` \| (\d) \|(.*)\|$", PAGE, re.MULTILINE)
    assert len(printed) == 4
    for recipe, seeds, cells in printed:
        row = rows[recipe, seeds]
        values = [float(cell.strip().removesuffix(" %")) for cell in cells.split("|")]
        names = ("found", "within one", "unstable", "mean", "95 %")
        for value, name in zip(values, names, strict=True):
            assert value == pytest.approx(100 * float(row[name]), abs=0.56), (recipe, name)
