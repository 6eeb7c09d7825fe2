"""docs/first-hour.md: every command of it runs, in order, at toy length."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from tests.docs.pages import blocks_of, commands_of
from tests.launch import made_text
from tests.toy import toy_recipe

PAGE = "first-hour"
VERDICT = re.compile(r"warmed (is \w+ than mine|against mine is undecided) in final loss:")


@pytest.mark.slow
def test_every_command_works_in_order_at_toy_length(efftrain, tmp_path):
    for name in ("my", "text", "valid"):
        (tmp_path / f"{name}.txt").write_text(made_text())
    shown = {}
    for line in commands_of(PAGE):
        toy = line.replace("start=32", "start=8").replace("steps=100", "steps=5")
        words = shlex.split(toy)[1:]
        shown[line] = efftrain(*words, timeout=500)
        if line == "efftrain recipes new mine --text my.txt":
            written = Path("recipes/mine.toml")
            recipe = toy_recipe(load_recipe("mine"), tmp_path)
            data = replace(recipe.data, train="my.txt")
            written.write_text(dump_recipe(replace(recipe, data=data)))
    race = shown["efftrain race mine warmed"]
    assert re.search(r"^3 pairs: warmed .* nats/token: \w+", race.stderr, re.MULTILINE)
    assert VERDICT.match(race.stdout)
    assert shown["efftrain pretrain mine"].stdout.splitlines()[-1] == (
        'next    efftrain sample mine-seed1234 --prompt "The"'
    )


def test_the_answer_agrees_with_itself():
    """The estimate is the difference of the means to the last digit, and in its interval."""
    answer = blocks_of(PAGE, "text")[-1]
    assert VERDICT.match(answer)
    mine, warmed = map(float, re.findall(r"^[ ?+-] (?:mine|warmed) +([\d.]+)", answer, re.M))
    gap, low, high = map(float, re.findall(r"[-+]\d\.\d{4}", answer)[:3])
    assert gap == pytest.approx(warmed - mine, abs=1.01e-4) and low < gap < high
