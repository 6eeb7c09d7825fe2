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


@pytest.mark.slow
def test_every_command_works_in_order_at_toy_length(efftrain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my", "text", "valid"):
        (tmp_path / f"{name}.txt").write_text(made_text())
    (study,) = blocks_of(PAGE, "toml")
    study = study.replace("300_000", "1_536").replace("steps=30", "steps=5").replace("=32", "=8")
    (tmp_path / "warmup.toml").write_text(study)
    commands = commands_of(PAGE)
    assert len(commands) == 8
    for line in commands:
        words = shlex.split(line.replace("300_000", "1_536"), comments=True)[1:]
        done = efftrain(*words, timeout=500)
        if "--check" in words:
            assert re.search(r"^slw: 2 steps, validation loss \d", done.stdout, re.MULTILINE)
        if "--jobs" in words:
            assert re.search(r"^5 pairs: slw .* nats/token: \w+", done.stderr, re.MULTILINE)
        if words[:2] == ["recipes", "new"]:
            written = Path("recipes/mine.toml")
            toy = toy_recipe(load_recipe(str(written)), tmp_path)
            written.write_text(dump_recipe(replace(toy, data=replace(toy.data, train="my.txt"))))
    verdict = r"^slw (is|against plain is) \w+ (than plain )?in final loss"
    assert re.search(verdict, done.stdout, re.MULTILINE)
