"""The page on tuning a warmup: its plans are printed, and its figures are those of the program and
of the table."""

from __future__ import annotations

import csv
import re
import shlex

import pytest

from efftrain_cli.cli.commands import register
from tests.conftest import REPOSITORY, cli
from tests.docs.pages import blocks_of, commands_of, text_of

PAGE = text_of("tune-warmup")


@pytest.mark.slow
def test_the_plans_in_the_page_are_printed():
    register()
    commands = [line for line in commands_of("tune-warmup") if line.endswith("--plan")]
    assert len(commands) >= 8
    for command in commands:
        assert "probes, " in " ".join(cli(*shlex.split(command)[1:]).output.split())


def test_the_cost_in_the_page_is_that_of_the_plan():
    register()
    (cost,) = [block for block in blocks_of("tune-warmup", "text") if "at most" in block]
    printed = cli("tune-warmup", "--recipe", "unstable-slw", "--plan").output
    for part in cost.split("..."):
        assert " ".join(part.split()) in " ".join(printed.split())


def test_the_shares_in_the_page_are_those_of_the_table():
    path = REPOSITORY / "benchmarks" / "simulations" / "tuning.csv"
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    printed = re.findall(r"^\| `([\w.-]+)` \| (\d) \| ([^|]+) \|(.*)\|$", PAGE, re.MULTILINE)
    assert len(printed) == len(rows)
    for row, (recipe, seeds, budget, cells) in zip(rows, printed, strict=True):
        assert (recipe, seeds, budget != "none") == (
            row["recipe"],
            row["seeds"],
            bool(row["budget"]),
        )
        values = [float(cell.strip().removesuffix(" %")) for cell in cells.split("|")]
        for value, name in zip(values, ("verified", "within one", "mean", "95 %"), strict=True):
            assert value == pytest.approx(100 * float(row[name]), abs=0.56), (recipe, name)
