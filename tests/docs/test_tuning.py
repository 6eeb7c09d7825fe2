"""The page on sequence length warmup: its commands are taken, and its table of costs is what they print."""

from __future__ import annotations

import re
import shlex

import pytest

from efftrain_cli.cli.commands import register
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.tune_warmup.printing import plan_values
from efftrain_cli.tune_warmup.search import Search
from tests.conftest import cli
from tests.docs.pages import text_of

PAGE = text_of("methods/sequence-length-warmup")


@pytest.mark.slow
def test_the_plans_in_the_page_are_printed():
    register()
    commands = [
        line.partition("#")[0].strip()
        for line in re.findall(r"^efftrain tune-warmup .*--plan.*$", PAGE, re.MULTILINE)
    ]
    assert len(commands) >= 8
    for command in commands:
        assert "probes, " in " ".join(cli(*shlex.split(command)[1:]).output.split())


def test_the_costs_in_the_page_are_those_of_the_plans():
    rows = re.findall(r"^\| `([\w.-]+)` \| ([\d.]+) % \| (\d+) \| (\d+) % \|$", PAGE, re.MULTILINE)
    assert {"gpt2-117m-slw", "gpt2-1.5b-slw", "gpt3-125m-slw", "unstable-slw"} <= {
        name for name, *_ in rows
    }
    for name, *printed in rows:
        recipe = load_recipe(name)
        plan = plan_values(Search(recipe=recipe))
        worst = plan["cost"]["worst"]
        least, most = (
            100 * tokens / recipe.train.tokens
            for tokens in (plan["smallest_budget"], worst["tokens"])
        )
        assert [f"{least:.1f}", str(worst["probes"]), f"{most:.0f}"] == printed, name
