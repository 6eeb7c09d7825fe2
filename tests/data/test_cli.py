"""`efftrain prepare`, and what `pretrain` makes of data it cannot use."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import python
from tests.data.conftest import write_texts

RECIPE = """
[model]
n_layer = 1
n_head = 1
n_embd = 16
seq_len = 32
[data]
train = "book.txt"
valid_fraction = 0.1
tokenizer = "bpe:300"
[optim]
lr = 1e-3
[train]
tokens = 2048
batch_size = 8
[eval]
windows = 4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    lines = [f"line {i}: {i * i} sheep cross the river {i % 13}\n" for i in range(500)]
    (tmp_path / "book.txt").write_text("".join(lines))
    return "tiny.toml"


def test_prepare_says_what_it_made_and_then_finds_it(efftrain, recipe, tmp_path):
    cache = {"EFFTRAIN_CACHE": str(tmp_path / "cache")}
    first = efftrain("prepare", "--recipe", recipe, **cache)
    assert first.stderr.startswith("preparing the data (once)")
    text, shards, following = first.stdout.splitlines()
    assert re.fullmatch(r"text    1 document: \S+ tokens for training, \S+ for validation", text)
    assert re.fullmatch(r"shards  \S+ kB in the cache; \d+ m?s", shards)
    assert following == "next    efftrain pretrain tiny.toml --plan"
    again = efftrain(
        "prepare", "--recipe", recipe, "--verify-data", "full", "--format", "json", **cache
    )
    assert again.stderr == ""
    about = json.loads(again.stdout)
    train, valid = about["train"], about["valid"]
    assert train["bytes"] + valid["bytes"] == (tmp_path / "book.txt").stat().st_size
    assert about["windows_per_epoch"] == train["tokens"] // 32 - 1
    assert about["windows_needed"] == 64 and about["epochs"] == 64 / about["windows_per_epoch"]
    assert about["disk_bytes"] == 2 * (train["tokens"] + valid["tokens"])
    assert about["bytes_per_token"] == valid["bytes"] / valid["tokens"]
    assert (about["vocab_size"], about["validation_windows"], about["problems"]) == (300, 4, [])


def test_mistakes_in_the_data_exit_with_3_and_no_traceback(efftrain, recipe, tmp_path):
    missing = efftrain("prepare", "--recipe", recipe, "--set", "data.train=books/", code=3)
    assert missing.stdout == ""
    assert missing.stderr.startswith("error: data.train = 'books/': no such file or folder")
    (tmp_path / "bad.txt").write_bytes(b"fine\nnot \xff fine\n")
    bad = efftrain("pretrain", "--recipe", recipe, "--set", "data.train=bad.txt", code=3)
    assert "Traceback" not in bad.stderr
    assert "bad.txt: line 2: not UTF-8: byte 0xff" in bad.stderr
    assert not (tmp_path / "runs").exists()


def test_a_budget_beyond_the_corpus_is_refused_before_there_is_a_run(efftrain, recipe, tmp_path):
    """F37: prepare says it, pretrain refuses it, data.repeat allows it."""
    budget = ("--recipe", recipe, "--set", "train.tokens=100_000")
    said = efftrain("prepare", *budget)
    assert "this recipe cannot train on it yet: the budget needs" in said.stderr
    refused = efftrain("pretrain", *budget, code=2)
    assert "epochs" in refused.stderr and "data.repeat = true" in refused.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_training_on_ready_shards_imports_little(efftrain, recipe, tmp_path):
    """Neither wandb nor datasets nor pandas, from the first import to the summary."""
    efftrain("prepare", "--recipe", recipe)
    script = """
import sys
sys.argv = ["efftrain", "pretrain", "--recipe", "tiny.toml", "--no-probe"]
from efftrain_cli.cli.app import run_app
try:
    run_app()
except SystemExit as end:
    assert not end.code, end.code
heavy = ("torch", "wandb", "datasets", "pandas", "pyarrow")
print("heavy:", [name for name in heavy if name in sys.modules])
"""
    assert python(script, cwd=tmp_path).stdout.splitlines()[-1] == "heavy: ['torch']"


@pytest.mark.slow
def test_the_commands_of_the_documentation_run(efftrain, tmp_path):
    (tmp_path / "books").mkdir()
    text = "".join(f"line {i}: {i * i} sheep cross the river {i % 13}\n" for i in range(3000))
    (tmp_path / "books" / "one.txt").write_text(text)
    write_texts(tmp_path / "stories.jsonl", text.splitlines())
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "data.md").read_text()
    commands = [line.split()[1:] for line in page.split("```sh\n")[1].split("```")[0].splitlines()]
    assert len(commands) == 3
    for command in commands:
        efftrain(*command)
