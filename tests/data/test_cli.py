"""`efftrain prepare`, and what `pretrain` makes of data it cannot use."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.prepare import print_corpus
from tests.conftest import REPOSITORY, cli, python
from tests.data.book import LINES, write_texts

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


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    """A working directory with tiny.toml and its text."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    (tmp_path / "book.txt").write_text("".join(LINES[:500]))
    return tmp_path


def test_prepare_says_what_it_made_and_then_finds_it(folder):
    first = cli("prepare tiny.toml")
    assert first.stderr.startswith("preparing the data (once)")
    text, shards, following = first.stdout.splitlines()
    assert re.fullmatch(r"text    1 document: \S+ tokens for training, \S+ for validation", text)
    assert re.fullmatch(r"shards  \S+ kB in the cache; \d+ m?s", shards)
    assert following == "next    efftrain pretrain tiny.toml --plan"
    again = cli("prepare --recipe tiny.toml --verify-data full --format json")
    assert again.stderr == ""
    about = json.loads(again.stdout)
    bytes_of_text = about["train"]["bytes"] + about["valid"]["bytes"]
    assert bytes_of_text == (folder / "book.txt").stat().st_size
    assert about["tokens"] == [*about["train"]["parts"], *about["valid"]["parts"]]
    assert about["windows_per_epoch"] == about["tokens"][0] // 32 - 1
    assert about["windows_needed"] == 64
    assert about["epochs"] == 64 / about["windows_per_epoch"]
    assert about["disk_bytes"] == 2 * sum(about["tokens"])
    assert about["tokenizer"]["vocab_size"] == 300
    assert (about["validation_windows"], about["problems"]) == (4, [])


def test_a_budget_beyond_the_corpus_is_refused_before_there_is_a_run(folder):
    """F37: prepare says it, pretrain refuses it."""
    said = cli("prepare tiny.toml --set train.tokens=100_000")
    assert "this recipe cannot train on it yet: the budget needs" in said.stderr
    with pytest.raises(RecipeError, match=r"epochs[^\n]*\n.*data\.repeat = true"):
        cli("pretrain tiny.toml --set train.tokens=100_000")
    assert not (folder / "runs").exists()


def test_what_a_reader_needs_of_a_corpus_is_four_lines(capsys):
    """As on docs/data.md, and rows that were left out."""
    about = {
        "tokens": [4_490_000, 107_000],
        "train": {"documents": 700},
        "valid": {"documents": 29},
        "split": "held out",
        "disk_bytes": 9_200_000,
        "tally": {"skipped": 2},
        "warnings": [],
        "problems": [],
    }
    print_corpus(about, seconds=15, command="efftrain pretrain quickstart --plan")
    assert (
        capsys.readouterr().out
        == """\
text    729 documents: 4.49M tokens for training, 107K for validation
shards  9.2 MB in the cache; 15 s
rows    2 that cannot be read are left out
next    efftrain pretrain quickstart --plan
"""
    )


@pytest.mark.slow
def test_training_on_ready_shards_imports_little(folder):
    """Neither wandb nor datasets nor pandas, from the first import to the summary."""
    cli("prepare tiny.toml")
    script = """
import sys
sys.argv = ["efftrain", "pretrain", "tiny.toml", "--no-probe"]
from efftrain_cli.cli.app import run_app
try:
    run_app()
except SystemExit as end:
    assert not end.code, end.code
heavy = ("torch", "wandb", "datasets", "pandas", "pyarrow")
print("heavy:", [name for name in heavy if name in sys.modules])
"""
    assert python(script, cwd=folder).stdout.splitlines()[-1] == "heavy: ['torch']"


@pytest.mark.slow
def test_the_commands_of_the_documentation_run(folder):
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text("".join(LINES))
    write_texts(folder / "stories.jsonl")
    page = (REPOSITORY / "docs" / "data.md").read_text()
    commands = page.split("```sh\n")[1].split("```")[0].splitlines()
    assert len(commands) == 3
    for command in commands:
        cli(command.removeprefix("efftrain "))
