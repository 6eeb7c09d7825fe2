"""`efftrain recipes` and the shell's TAB, as a user meets them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from efftrain_cli.cli import complete
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.recipe.recipe import load_recipe
from tests.conftest import REPOSITORY, cli, invoke, python, sets
from tests.terminal import on_terminal

MINE = """\
# My own recipe.
# Its second line.
base = "small"

[optim]
lr = 4e-3
[train]
tokens = "3M"
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """./recipes/mine.toml."""
    path = tmp_path / "recipes" / "mine.toml"
    path.parent.mkdir()
    path.write_text(MINE)
    return path


def test_list_is_one_line_each_ones_own_first(mine):
    """small has 4 x (12 x 128^2 + 13 x 128) + 2 x 128 = 793,344 parameters and (1,024 + 256) x 128
    of tables: `pretrain --plan` counts them too."""
    lines = cli("recipes list").stdout.splitlines()
    names = [line.split()[0] for line in lines]
    assert names[1:] == sorted(names[1:]) and {"quickstart", "gpt2-117m"} <= set(names)
    assert lines[0] == f"{'mine':{max(map(len, names))}}   957K     3M  (yours) My own recipe."
    assert ": 957K parameters" in cli("pretrain mine --plan").stdout


def test_list_shows_those_with_a_word_in_name_or_summary(mine):
    lines = cli("recipes list 'MY own'").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["mine"]
    lines = cli("recipes list slw").stdout.splitlines()
    assert {line.split()[0] for line in lines} >= {"small-slw", "gpt2-117m-slw"}
    with pytest.raises(UsageError, match="no recipe has 'xyzzy'"):
        cli("recipes list xyzzy")


def test_one_bad_file_does_not_hide_the_others(mine):
    mine.with_name("odd.toml").write_text("lr = = 3\n")
    mine.with_name("text.toml").write_bytes(b"\xff\xfe")
    mine.with_name("orphan.toml").write_text('base = "nowhere"\n')
    shown = cli("recipes list").stdout.splitlines()
    lines = dict(line.split(maxsplit=1) for line in shown)
    assert "not TOML" in lines["odd"]
    assert "not UTF-8" in lines["text"]
    assert "no recipe 'nowhere'" in lines["orphan"]
    assert lines["mine"].endswith("My own recipe.")


def test_list_is_cut_to_the_terminal(tmp_path, mine):
    lines = on_terminal(tmp_path, 60, "recipes", "list").splitlines()
    assert max(map(len, lines)) == 60
    assert len(lines) == 1 + len(list((REPOSITORY / "recipes").glob("*.toml")))


def test_show_is_toml_that_loads_and_names_origins(mine, tmp_path):
    done = cli("recipes show mine --set seed=7")
    copy = tmp_path / "copy.toml"
    copy.write_text(done.stdout)
    assert load_recipe(str(copy)) == load_recipe(str(mine), ["seed=7"])
    origin = dict(re.findall(r"^(\w+) = .*?  # (.*)$", done.stdout, re.MULTILINE))
    assert origin["lr"] == "mine.toml:6"
    assert origin["n_layer"].startswith("small.toml:")
    assert origin["seed"] == "--set"
    assert origin["eps"] == "default"
    assert done.stdout.startswith("# recipes/mine.toml\n#   based on ")


def test_show_describes_each_key():
    """Long descriptions go on in comments of their own lines."""
    shown = cli("recipes show small --describe").stdout
    assert re.search(r"^lr = .*# Peak learning rate\.$", shown, re.MULTILINE)
    whole = "# Seed of initialization, data order and every other random draw."
    assert whole in re.sub(r"\n +# ", " ", shown)
    assert max(map(len, shown.splitlines()[1:])) <= 80
    tomllib.loads(shown)


def test_a_new_recipe_has_what_differs_and_overwrites_nothing(tmp_path):
    done = cli("recipes new books --set data.train=books/ --set train.tokens=5M")
    path = tmp_path / "recipes" / "books.toml"
    assert done.stdout.splitlines() == [
        'recipes/books.toml: base "small" and 3 keys',
        "next    efftrain pretrain books --plan",
    ]
    assert tomllib.loads(path.read_text()) == {
        "base": "small",
        "data": {"train": "books/", "valid_fraction": 0.05},
        "train": {"tokens": "5M"},
    }
    with pytest.raises(
        UsageError, match="exists already and is left as it is\n  give another name"
    ):
        cli("recipes new books")
    assert load_recipe("books").train.tokens == 5_000_000


def test_an_edit_of_the_base_edits_the_new_recipe(mine):
    done = cli("recipes new warmed --base mine --set seq_len_warmup.steps=9")
    assert done.stdout.endswith("\nnext    efftrain race mine warmed\n")
    cli("recipes new by-path --base recipes/mine.toml")
    mine.write_text(mine.read_text() + "[model]\nn_layer = 3\n[data]\ntrain = 'my.txt'\n")
    assert load_recipe("warmed") == load_recipe("mine", ["seq_len_warmup.steps=9"])
    assert load_recipe("by-path") == load_recipe("mine")


@pytest.mark.parametrize(
    ("base", "overrides"),
    [
        ("small", ["seq_len_warmup={start = 16, steps = 100}", "optim.betas=[0.8, 0.9]"]),
        ("small", ['data.sources=[{path = "a", weight = 2.0}]', "data.valid_fraction=0.1"]),
        ("small-staged-depth", ["stages.0.switch.value=500_000", "staged_growth.depth=identity"]),
    ],
)
def test_a_new_recipe_writes_every_key_that_was_set(base, overrides):
    cli(f"recipes new mine --base {base}", *sets(*overrides))
    assert load_recipe("mine") == load_recipe(base, overrides)


def test_the_example_in_a_new_recipe_can_be_uncommented(tmp_path):
    cli("recipes new mine --set eval.windows=8")
    path = tmp_path / "recipes" / "mine.toml"
    path.write_text(re.sub(r"^# (\[seq|start|steps)", r"\1", path.read_text(), flags=re.MULTILINE))
    overrides = ["eval.windows=8", "seq_len_warmup.start=32", "seq_len_warmup.steps=100"]
    assert load_recipe("mine") == load_recipe("small", overrides)


def test_a_new_recipe_has_the_size_that_its_text_is_enough_for(tmp_path):
    """1.5 MB are 500,000 tokens, enough for 100,000 parameters: two blocks of 32 have 58,240, with
    a head of 1,024 x 32. 2,171 tokens a step are 8 sequences; 20 tokens a parameter are 569 such
    steps. A rate by --set keeps the base's min_lr."""
    (tmp_path / "my.txt").write_text("a" * 1_500_000)
    cli("recipes new mine --text my.txt --set optim.lr=1e-3")
    sizes = ["model.n_layer=2", "model.n_head=2", "model.n_embd=32", "train.tokens=1_164_800"]
    rates = ["optim.lr=1e-3", "optim.betas=[0.9, 0.99]"]
    steps = ["train.batch_size=8", "optim.warmup_steps=28", "eval.every=28"]
    text = ["data.train=my.txt", "data.valid_fraction=0.05"]
    assert load_recipe("mine") == load_recipe("small", [*sizes, *rates, *steps, *text])
    lines = (tmp_path / "recipes" / "mine.toml").read_text()
    assert re.search("^n_layer = 2 +# 58,240 parameters with the head$", lines, re.MULTILINE)
    cli("recipes new four --parameters 4M")
    lines = (tmp_path / "recipes" / "four.toml").read_text()
    assert re.search("^lr = 0.004 +# best at 0.4M: a start for a sweep$", lines, re.MULTILINE)


def test_diff_shows_exactly_what_differs(mine):
    done = cli("recipes diff small mine")
    small = load_recipe("small")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["key", "small", "mine"],
        ["optim.lr", str(small.optim.lr), "0.004"],
        ["train.tokens", f"{small.train.tokens:_}", "3_000_000"],
    ]
    as_json = json.loads(cli("recipes diff small recipes/mine.toml --format json").stdout)
    assert as_json == [
        {"key": "optim.lr", "a": small.optim.lr, "b": 4e-3},
        {"key": "train.tokens", "a": small.train.tokens, "b": 3_000_000},
    ]
    assert "are the same" in cli("recipes diff small small").stdout
    assert re.search(r"\.steps +not set +\d", cli("recipes diff small small-slw").stdout)


def test_misspelt_commands_and_options_are_corrected():
    for line, meant in (("recpes list", "'recipes'"), ("recipes list --formt json", "--format")):
        assert meant in invoke(line).stderr


def test_a_closed_pipe_is_no_error(tmp_path):
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"{sys.executable} -m efftrain_cli recipes list | head -1; exit $PIPESTATUS",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout and not done.stderr


COMPLETING = "import sys; sys.argv = ['efftrain']; import efftrain_cli.__main__ as m; m.main()"


def test_tab_offers_recipes_and_keys(tmp_path, mine):
    words = "efftrain recipes show mine --set optim.l"
    place = {"COMP_WORDS": words, "COMP_CWORD": "5", "_EFFTRAIN_COMPLETE": "complete_bash"}
    assert python(COMPLETING, cwd=tmp_path, **place).stdout.split() == ["optim.lr="]
    assert {"mine", "quickstart"} <= {name for name, _ in complete.recipe_names("")}
    assert [name for name, _ in complete.recipe_names("mi")] == ["mine"]
    assert complete.recipe_names("recipes/m") == []  # bash then offers files


def test_run_names_are_offered(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path))
    for name, file in (("small-seed1", "recipe.toml"), ("smaller-study", "runs.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("small-seed1\n")
    assert complete.run_names("small") == ["small-seed1"]
    assert complete.run_names("x") == []
    assert complete.run_or_group_names("small") == ["small-seed1", "smaller"]
    assert complete.run_or_recipe_names("small")[:3] == ["small-seed1", "smaller", "small"]
