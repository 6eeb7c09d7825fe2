"""`efftrain recipes` and the shell's TAB, as a user meets them."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from efftrain_cli.cli.recipes import _numbers
from efftrain_cli.recipe.recipe import load_recipe
from tests.conftest import REPOSITORY, invoke, python, sets
from tests.terminal import on_terminal


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """./recipes/mine.toml in the folder where `efftrain` runs."""
    path = tmp_path / "recipes" / "mine.toml"
    path.parent.mkdir()
    path.write_text(
        '# My own recipe. Its second sentence.\nbase = "small"\n\n[optim]\nlr ='
        ' 4e-3\n[train]\ntokens = "3M"\n'
    )
    return path


# --- list -----------------------------------------------------------------------------------------


def test_list_in_a_pipe_is_one_plain_line_each(efftrain, mine):
    header, *lines = efftrain("recipes list").stdout.splitlines()
    names = [line.split()[0] for line in lines]
    assert header == "recipe"
    assert names[0] == "mine", "one's own recipes come first"
    assert names[1:] == sorted(names[1:]) and {"quickstart", "gpt2-117m"} <= set(names)
    # small's shape: 4 x (12 x 128^2 + 13 x 128) + 2 x 128 = 793,344 parameters without embeddings.
    assert (
        lines[0].split(maxsplit=1)[1]
        == "4 x 128, 793K parameters, context 256, batch 16, 3M tokens  My own recipe."
    )
    assert "\x1b" not in "".join(lines)


def test_numbers_are_short_and_what_is_none_is_shown_as_written():
    card = {
        "mistake": None,
        "n_layer": 2,
        "n_embd": "x",
        "parameters_without_embeddings": None,
        "seq_len": 128,
        "batch_size": "many",
        "tokens": 3_000_000,
    }
    assert _numbers(card) == "2 x x, ? parameters, context 128, batch many, 3M tokens"


def test_list_as_json(efftrain, mine):
    cards = {
        card["name"]: card for card in json.loads(efftrain("recipes list --format json").stdout)
    }
    small = load_recipe("small")
    assert cards["mine"] == {
        "name": "mine",
        "path": "recipes/mine.toml",
        "own": True,
        "summary": "My own recipe.",
        "mistake": None,
        "n_layer": small.model.n_layer,
        "n_embd": small.model.n_embd,
        "seq_len": small.model.seq_len,
        "batch_size": small.train.batch_size,
        "tokens": 3_000_000,
        "parameters_without_embeddings": 793_344,
    }
    assert not cards["quickstart"]["own"]


def test_one_bad_file_does_not_hide_the_others(efftrain, mine):
    mine.with_name("odd.toml").write_text("lr = = 3\n")
    mine.with_name("text.toml").write_bytes(b"\xff\xfe")
    mine.with_name("orphan.toml").write_text('base = "nowhere"\n')
    shown = efftrain("recipes list").stdout.splitlines()[1:]
    lines = dict(line.split(maxsplit=1) for line in shown)
    assert "not TOML" in lines["odd"]
    assert "not UTF-8" in lines["text"]
    assert "no recipe 'nowhere'" in lines["orphan"]
    assert lines["mine"].endswith("My own recipe.")


@pytest.mark.parametrize("columns", [40, 80, 140])
def test_list_fits_the_terminal(tmp_path, mine, columns):
    shown = on_terminal(tmp_path, columns, "recipes", "list")
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns
    assert "gpt2-117m-large-batch" in shown, "names are never cut"
    unwrapped = " ".join(shown.split())
    assert "4 x 128, 793K parameters, context 256, batch 16, 3M tokens My own recipe." in unwrapped


# --- show -----------------------------------------------------------------------------------------


def test_show_is_toml_that_loads_and_names_origins(efftrain, mine, tmp_path):
    done = efftrain("recipes show mine --set seed=7")
    copy = tmp_path / "copy.toml"
    copy.write_text(done.stdout)
    assert load_recipe(str(copy)) == load_recipe(str(mine), ["seed=7"])
    origin = dict(re.findall(r"^(\w+) = .*?  # (.*)$", done.stdout, re.MULTILINE))
    assert origin["lr"] == "mine.toml:5"
    assert origin["n_layer"].startswith("small.toml:")
    assert origin["seed"] == "--set"
    assert origin["eps"] == "default"
    assert done.stdout.startswith("# recipes/mine.toml\n#   based on ")


def test_show_describes_each_key(efftrain):
    """Long descriptions go on in comments of their own lines."""
    shown = efftrain("recipes show small --describe").stdout
    assert re.search(r"^lr = .*# Peak learning rate\.$", shown, re.MULTILINE)
    whole = "# Seed of initialization, data order and every other random draw."
    assert whole in re.sub(r"\n +# ", " ", shown)
    assert max(map(len, shown.splitlines()[1:])) <= 80
    tomllib.loads(shown)


def test_show_warns_of_unwise_settings(efftrain):
    done = efftrain("recipes show small --set optim.warmup_steps=100_000")
    assert "never reaches its peak" in done.stderr


def test_mistakes_exit_with_2_and_no_traceback(efftrain):
    done = efftrain(
        "recipes show small --set optim.learning_rate=1 --set train.tokens=soon",
        code=2,
    )
    assert done.stdout == ""
    assert "did you mean optim.lr?" in done.stderr
    assert 'train.tokens = "soon"' in done.stderr
    assert "Traceback" not in done.stderr
    efftrain("recipes show smal", code=2)


def test_a_typo_starts_nothing(efftrain, tmp_path):
    """RELIABILITY F40."""
    done = efftrain("pretrain --recipe small --set optim.lrr=1", code=2)
    assert "optim.lrr = 1   (--set optim.lrr=1)" in done.stderr
    assert "did you mean optim.lr?" in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- new ------------------------------------------------------------------------------------------


def test_a_new_recipe_loads_and_overwrites_nothing(efftrain, tmp_path, monkeypatch):
    done = efftrain("recipes new books --set data.train=books/ --set train.tokens=5M")
    path = tmp_path / "recipes" / "books.toml"
    assert "recipes/books.toml written" in done.stdout
    monkeypatch.chdir(tmp_path)
    assert load_recipe("books") == load_recipe(
        "small", ["data.train=books/", "data.valid_fraction=0.05", "train.tokens=5M"]
    )
    text = path.read_text()
    assert 'base = "small"' in text and "tokens = 5_000_000" in text
    again = efftrain("recipes new books", code=2)
    assert "exists already and is left as it is\n  give another name" in again.stderr
    assert path.read_text() == text


@pytest.mark.parametrize(
    "overrides",
    [
        ["seed=7", "train.dtype=bf16", "optim.weight_decay=0.3", "optim.lr=1e-3"],
        ["seq_len_warmup.start=16", "seq_len_warmup.steps=100"],
        ["seq_len_warmup={start = 16, steps = 100}", "eval.windows=8", "checkpoint.every=10min"],
        ["optim.betas=[0.8, 0.9]", "model.vocab_multiple=32", "wandb.mode=online"],
        ['data.train=["a", "b"]', "data.valid=held.txt", "data.valid_fraction=0.1"],
        ['data.sources=[{path = "a", weight = 2.0}]', "parallel.strategy=shard"],
    ],
)
def test_a_new_recipe_writes_every_key_that_was_set(efftrain, tmp_path, monkeypatch, overrides):
    efftrain("recipes new mine", *sets(*overrides))
    monkeypatch.chdir(tmp_path)
    usual = ["data.valid_fraction=0.05"]
    if not any(override.startswith(("data.train", "data.sources")) for override in overrides):
        usual.append("data.train=my.txt")
    assert load_recipe("mine") == load_recipe("small", [*usual, *overrides])


def test_the_example_in_a_new_recipe_can_be_uncommented(efftrain, tmp_path, monkeypatch):
    efftrain("recipes new mine --set eval.windows=8")
    path = tmp_path / "recipes" / "mine.toml"
    text = path.read_text()
    for line in ("[seq_len_warmup]", "start = 32", "steps = 100"):
        assert f"\n# {line}" in text
        text = text.replace(f"\n# {line}", f"\n{line}")
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    overrides = ["eval.windows=8", "seq_len_warmup.start=32", "seq_len_warmup.steps=100"]
    usual = ["data.valid_fraction=0.05", "data.train=my.txt"]
    assert load_recipe("mine") == load_recipe("small", [*usual, *overrides])


def test_a_new_recipe_has_the_size_that_its_text_is_enough_for(efftrain, tmp_path, monkeypatch):
    """1.5 MB are 500,000 tokens, enough for 100,000 parameters: two blocks of 32 have 58,240, with
    a head of 1,024 x 32. 2,171 tokens a step are 8 sequences; 20 tokens a parameter are 569 such
    steps. A rate by --set keeps the base's min_lr."""
    (tmp_path / "my.txt").write_text("a" * 1_500_000)
    done = efftrain("recipes new mine --text my.txt --set optim.lr=1e-3")
    assert "start of a sweep" not in done.stdout, "the rate is the user's"
    monkeypatch.chdir(tmp_path)
    sizes = ["model.n_layer=2", "model.n_head=2", "model.n_embd=32", "train.tokens=1_164_800"]
    rates = ["optim.lr=1e-3", "optim.betas=[0.9, 0.99]"]
    steps = ["train.batch_size=8", "optim.warmup_steps=28", "eval.every=28"]
    text = ["data.train=my.txt", "data.valid_fraction=0.05"]
    assert load_recipe("mine") == load_recipe("small", [*sizes, *rates, *steps, *text])
    line = "n_layer = 2 # 58,240 parameters with the head"
    assert line in (tmp_path / "recipes" / "mine.toml").read_text()


def test_a_new_recipe_below_five_million_parameters_names_the_sweep(efftrain):
    said = "optim.lr is the start of a sweep"
    assert said in efftrain("recipes new four --parameters 4M").stdout
    assert said not in efftrain("recipes new ten --parameters 10M").stdout


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--parameters 5K", "5,000 parameters hold no model: the smallest has 19,696"),
        ("--parameters ten", "--parameters ten: write a count as"),
        ("--text nowhere", "--text nowhere does not exist"),
    ],
)
def test_a_size_without_a_model_writes_nothing(efftrain, tmp_path, options, why):
    assert why in efftrain(f"recipes new mine {options}", code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_a_new_recipe_changes_one_of_its_bases_stages(efftrain, tmp_path, monkeypatch):
    overrides = [
        "stages.0.switch.value=500_000",
        "train.batch_size=8",
        "staged_growth.depth=identity",
    ]
    efftrain("recipes new mine --base small-staged-depth", *sets(*overrides))
    monkeypatch.chdir(tmp_path)
    usual = ["data.valid_fraction=0.05", "data.train=my.txt"]
    assert load_recipe("mine") == load_recipe("small-staged-depth", [*usual, *overrides])


def test_a_new_recipe_says_that_the_text_of_its_base_is_not_used(efftrain):
    said = "put your text into my.txt, or name it in data.train: small's is not used"
    assert said in efftrain("recipes new first").stdout
    assert "is not used" not in efftrain("recipes new b --set data.train=b.txt").stdout


def test_a_full_disk_leaves_no_part_of_a_new_recipe(tmp_path, monkeypatch):
    """As under `ulimit -f`: what is left would refuse the same command afterwards."""
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        refused = invoke("recipes", "new", "mine")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large: 'recipes/mine.toml'" in str(refused.exception)
    assert invoke("recipes", "new", "mine").exit_code == 0


def test_a_new_recipe_keeps_the_text_of_a_base_of_ones_own(efftrain, tmp_path, monkeypatch):
    (tmp_path / "books.txt").write_text("text")
    efftrain("recipes new books --set data.train=books.txt --set data.valid_fraction=0.1")
    said = efftrain("recipes new books-slw --base books --set seq_len_warmup.steps=9").stdout
    assert "is not used" not in said
    monkeypatch.chdir(tmp_path)
    assert load_recipe("books-slw") == load_recipe("books", ["seq_len_warmup.steps=9"])


@pytest.mark.parametrize("name", ["../x", "x.toml", "-x", "", "my recipe"])
def test_a_new_recipe_needs_a_plain_name(efftrain, tmp_path, name):
    efftrain("recipes new --", name, code=2)
    assert list(tmp_path.iterdir()) == []


# --- diff -----------------------------------------------------------------------------------------


def test_diff_shows_exactly_what_differs(efftrain, mine):
    done = efftrain("recipes diff small mine")
    small = load_recipe("small")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["key", "small", "mine"],
        ["optim.lr", str(small.optim.lr), "0.004"],
        ["train.tokens", f"{small.train.tokens:_}", "3_000_000"],
    ]
    assert done.stdout.startswith(f"{'key':14}{'small':>9}  {'mine':>9}\n{'optim.lr':14}")
    as_json = json.loads(efftrain("recipes diff small recipes/mine.toml --format json").stdout)
    assert as_json == [
        {"key": "optim.lr", "a": small.optim.lr, "b": 4e-3},
        {"key": "train.tokens", "a": small.train.tokens, "b": 3_000_000},
    ]
    assert "are the same" in efftrain("recipes diff small small").stdout


def test_diff_fits_the_terminal(tmp_path):
    wide = on_terminal(tmp_path, 120, "recipes", "diff", "gpt2-117m", "gpt3-125m")
    narrow = on_terminal(tmp_path, 40, "recipes", "diff", "gpt2-117m", "gpt3-125m")
    assert re.search(r"^model\.seq_len +1024 +2048$", wide, re.MULTILINE)
    assert "model.seq_len\n  gpt2-117m 1024\n  gpt3-125m 2048\n" in narrow
    assert "batch_size_warmup.increment\n  gpt2-117m not set\n  gpt3-125m 16\n" in narrow


# --- the command line as a whole ------------------------------------------------------------------


def test_misspelt_commands_and_options_are_corrected(efftrain):
    assert "recipes" in efftrain("recpes list", code=2).stderr
    assert "--format" in efftrain("recipes list --formt json", code=2).stderr


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
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout and done.stderr == ""
    assert done.returncode == 0


# --- completion -----------------------------------------------------------------------------------


COMPLETING = "import sys; sys.argv = ['efftrain']; import efftrain_cli.__main__ as m; m.main()"


def completed(cwd: Path, words: str) -> list[str]:
    """What bash is offered for the last word."""
    place = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    return python(COMPLETING, cwd=cwd, _EFFTRAIN_COMPLETE="complete_bash", **place).stdout.split()


def test_tab_offers_recipes_paths_and_keys(tmp_path, mine):
    offered = completed(tmp_path, "efftrain recipes show ")
    assert {"mine", "quickstart", "gpt2-1.5b"} <= set(offered)
    assert completed(tmp_path, "efftrain recipes show mi") == ["mine"]
    assert completed(tmp_path, "efftrain recipes show recipes/m") == []  # bash then offers files
    assert completed(tmp_path, "efftrain recipes show mine --set optim.l") == ["optim.lr="]


def test_tab_descriptions_stay_on_one_line(tmp_path):
    """Shells with descriptions take a broken line for one more candidate."""
    asked = {
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": "efftrain recipes show gpt2-",
    }
    lines = python(
        COMPLETING, cwd=tmp_path, _EFFTRAIN_COMPLETE="complete_fish", **asked
    ).stdout.splitlines()
    assert len(lines) >= 3
    assert all(line.startswith("gpt2-") and "\t" in line for line in lines)


def test_run_names_are_offered(tmp_path, monkeypatch):
    from efftrain_cli.cli import complete

    monkeypatch.chdir(tmp_path)
    for root in ("runs", "elsewhere"):
        run = tmp_path / root / f"small-seed1-{root}"
        run.mkdir(parents=True)
        (run / "recipe.toml").write_text("")
    monkeypatch.delenv("EFFTRAIN_RUNS", raising=False)
    assert complete.run_names("small") == ["small-seed1-runs"]
    assert complete.run_names("x") == []
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path / "elsewhere"))
    assert complete.run_names("") == ["small-seed1-elsewhere"]
    assert complete.run_or_recipe_names("small")[:2] == ["small-seed1-elsewhere", "small"]
