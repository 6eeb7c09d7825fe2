"""Recipes: inheritance, overrides, every mistake at once, and writing them back."""

from __future__ import annotations

import itertools
import random
import string
import time
from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.recipe.check import aliases_of, known_keys
from efftrain_cli.recipe.file import recipe_name, recipe_names
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, load_recipe, recipe_differences
from efftrain_cli.recipe.rules import warnings_of
from efftrain_cli.recipe.toml import toml_value

TINY = """
[model]
n_layer = 2
n_head = 2
n_embd = 64
seq_len = 64

[optim]
lr = 1e-3

[train]
tokens = 100_000
batch_size = 4
"""


STAGED = (
    TINY
    + """
[[stages]]
model = { n_layer = 1 }
switch = { rule = "steps", value = 10 }

[[stages]]
operators = ["depth"]
"""
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with recipes/tiny.toml."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    (folder / "recipes" / f"{name}.toml").write_text(text)


def problems(name: str, *overrides: str) -> dict[str, object]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, overrides)
    return {problem.key: problem for problem in caught.value.problems}


# --- finding and inheriting ------------------------------------------------------------------------------------------


def test_a_recipe_is_found_by_name_by_path_and_among_the_shipped(folder: Path) -> None:
    by_name = load_recipe("tiny")
    assert by_name == load_recipe("recipes/tiny.toml") == load_recipe(str(folder / "recipes" / "tiny.toml"))
    assert load_recipe("gpt2-117m").model.n_embd == 768
    assert {"tiny", "gpt2-117m", "quickstart"} <= set(recipe_names())


def test_runs_are_named_after_recipe_file_or_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recipe_name("gpt2-1.5b") == "gpt2-1.5b"
    assert recipe_name("recipes/gpt2-1.5b.toml") == recipe_name("gpt2-1.5b.toml") == "gpt2-1.5b"
    assert recipe_name("runs/tiny-seed1/recipe.toml") == "tiny-seed1"
    monkeypatch.chdir(folder / "recipes")
    assert recipe_name("recipe.toml") == "recipes"


def test_a_local_recipe_hides_the_shipped_one_and_may_build_on_it(folder: Path) -> None:
    write(folder, "gpt2-117m", 'base = "gpt2-117m"\n[model]\nn_layer = 3\n')
    assert load_recipe("gpt2-117m").model.n_layer == 3
    assert load_recipe("gpt2-117m").model.n_embd == 768


def test_bases_chain_and_the_nearest_wins(folder: Path) -> None:
    write(folder, "a", 'base = "tiny"\n[model]\nn_layer = 5\nn_embd = 32\n')
    write(folder, "b", 'base = "a"\nseed = 7\n[model]\nn_layer = 6\n')
    recipe = load_recipe("b")
    assert (recipe.model.n_layer, recipe.model.n_embd, recipe.model.seq_len, recipe.seed) == (6, 32, 64, 7)


def test_a_base_may_be_a_path_relative_to_its_file(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "mine.toml").write_text('base = "../recipes/tiny.toml"\n')
    assert load_recipe("elsewhere/mine.toml") == load_recipe("tiny")


def test_a_loop_of_bases_is_refused(folder: Path) -> None:
    write(folder, "a", 'base = "b"\n')
    write(folder, "b", 'base = "a"\n')
    with pytest.raises(RecipeError, match="loop: a -> b -> a"):
        load_recipe("a")


def test_a_missing_recipe_names_the_nearest(folder: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean gpt2-117m"):
        load_recipe("gpt2-117")
    write(folder, "a", 'base = "tinny"\n')
    problem = problems("a")["base"]
    assert "did you mean tiny" in problem.rule
    assert problem.source == "recipes/a.toml:1"


@pytest.mark.parametrize("name", ["x.yaml", "x.yml", "x.json"])
def test_other_formats_are_refused_with_a_hint(folder: Path, name: str) -> None:
    (folder / name).write_text("optim:\n  lr: 6e-4\n")
    with pytest.raises(RecipeError, match="recipes are TOML"):
        load_recipe(name)


def test_a_text_is_told_from_a_name(folder: Path) -> None:
    (folder / "novel.txt").write_text("Call me Ishmael.")
    with pytest.raises(RecipeError, match=r"novel\.txt is a file and not a recipe(.|\n)*--set data\.train=novel\.txt"):
        load_recipe("novel.txt")


def test_a_run_folder_points_to_its_recipe(folder: Path) -> None:
    (folder / "runs" / "x").mkdir(parents=True)
    (folder / "runs" / "x" / "recipe.toml").write_text(TINY)
    with pytest.raises(RecipeError, match=r"did you mean runs/x/recipe\.toml"):
        load_recipe("runs/x")
    assert load_recipe("runs/x/recipe.toml") == load_recipe("tiny")


def test_false_takes_an_inherited_section_or_key_away(folder: Path) -> None:
    write(folder, "slw", 'base = "tiny"\n[seq_len_warmup]\nsteps = 50\n[optim]\ndecay_tokens = "50K"\n')
    write(folder, "plain", 'base = "slw"\nseq_len_warmup = false\noptim.decay_tokens = false\n')
    assert load_recipe("slw").seq_len_warmup is not None
    assert load_recipe("plain") == load_recipe("tiny")
    assert load_recipe("slw", ["seq_len_warmup=false", "optim.decay_tokens=false"]) == load_recipe("tiny")
    # and what was taken away can be given anew
    write(folder, "again", 'base = "plain"\n[seq_len_warmup]\nsteps = 30\n')
    assert load_recipe("again").seq_len_warmup == load_recipe("plain", ["seq_len_warmup.steps=30"]).seq_len_warmup
    assert "must be a number" in problems("tiny", "optim.lr=false")["optim.lr"].rule


def test_stages_are_taken_away_and_overridden_by_number(folder: Path) -> None:
    write(folder, "staged", STAGED)
    write(folder, "plain", 'base = "staged"\nstages = false\n')
    assert load_recipe("plain") == load_recipe("staged", ["stages=false"]) == load_recipe("tiny")
    assert "stages" not in dump_recipe(load_recipe("tiny"))
    recipe = load_recipe("staged", ["stages.0.switch.value=20", "stages.1.rewarmup_steps=7"])
    assert recipe.stages[0].switch is not None
    assert (recipe.stages[0].switch.value, recipe.stages[1].rewarmup_steps) == (20, 7)
    (folder / "copy.toml").write_text(dump_recipe(recipe))
    assert load_recipe("copy.toml") == recipe
    assert "there are 2 of them" in problems("staged", "stages.2.lr=1")["stages.2"].rule
    changed = recipe_differences(load_recipe("staged"), recipe)
    assert changed == [("stages.0.switch.value", 10, 20), ("stages.1.rewarmup_steps", 150, 7)]


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written", ["300_000_000", '"300M"', "300M", "3e8", "0.3B", "300000K", "3_00_000_000.0", "  300M "]
)
def test_tokens_are_written_as_one_likes(folder: Path, written: str) -> None:
    assert load_recipe("tiny", [f"train.tokens={written}"]).train.tokens == 300_000_000


def test_override_values_are_toml_and_else_text(folder: Path) -> None:
    recipe = load_recipe(
        "tiny",
        [
            "optim.lr=1",  # int for a float
            "optim.betas=[0.8, 0.9]",
            "data.train=books/*.txt",
            "data.tokenizer='bpe:700'",
            "data.repeat=true",
            "train.compile=on",
            "checkpoint.every=30s",
            "seq_len_warmup.steps=20",
            "wandb = {mode = 'offline', project = 'p=q'}",
        ],
    )
    assert recipe.optim.lr == 1.0
    assert isinstance(recipe.optim.lr, float)
    assert recipe.optim.betas == (0.8, 0.9)
    assert recipe.data.train == "books/*.txt"
    assert recipe.data.tokenizer == "bpe:700"
    assert recipe.data.repeat is True
    assert recipe.train.compile == "on"
    assert recipe.checkpoint.every == "30s"
    assert recipe.seq_len_warmup is not None
    assert recipe.seq_len_warmup.steps == 20
    assert (recipe.wandb.mode, recipe.wandb.project) == ("offline", "p=q")
    assert load_recipe("tiny", ["seed=1", "seed=2"]).seed == 2
    assert load_recipe("tiny", ['data.train=["a.txt", "b.txt"]']).data.train == ("a.txt", "b.txt")


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("model.n_layer='6'", "must be a whole number"),
        ("model.n_layer=true", "must be a whole number"),
        ("model.n_layer=2.0", "must be a whole number"),
        ("model.n_layer=0", "must be at least 1"),
        ("train.tokens=true", "must be a whole number"),
        ("train.tokens=1.5", "1.5 is not a whole number"),
        ("train.tokens=1e999", "not a whole number"),
        ("train.tokens=9e999999999M", "write a count as"),
        ("train.tokens=1e30", "beyond 64 bits"),
        ("train.tokens='9e90T'", "beyond 64 bits"),
        ("seed=99999999999999999999", "beyond 64 bits"),
        ("model.seq_len=2_000_000", "must be at most 1048576"),
        ("train.tokens=300X", "write a count as"),
        ("train.deterministic=1", "must be true or false"),
        ("train.deterministic=True", "must be true or false"),
        ("optim.lr=inf", "must be a finite number"),
        ("optim.lr=nan", "must be a finite number"),
        ("optim.lr='3e-4'", "must be a number"),
        ("optim.betas=[0.9]", "needs 2 items"),
        ("optim.betas=[0.9, 0.95, 1]", "must have 2 items, not 3"),
        ("optim.betas=[0.9, 1.0]", "item 2 must be less than 1"),
        ("optim.betas=0.9", "must be a list"),
        ("optim.schedule=cosin", "must be one of 'cosine', 'linear', 'constant' or 'wsd'"),
        ("checkpoint.every=0", "at least 1 step"),
        ("checkpoint.every=10minutes", "is not a duration"),
        ("checkpoint.every=true", "must be a whole number or must be text"),
        ("data.train=1979-05-27", "must be text"),
        ("model=3", "is a section: write [model]"),
        ("simigrad=true", "or simigrad = false to do without"),
        ("data.train=", "must not be empty"),
        ("data.train=[]", "at least 1 items"),
        ("data.train=['a', '']", "item 2 must not be empty"),
        ("data.train.0=x", "is one list"),
        ("data.train.0.x=1", "is one list"),
        ("data.train.7=x", "is one list"),
        ("optim.betas.0=0.8", "must be a list"),
        ("base=small", "only a file has a base"),
        ("lr", "an override is written key=value"),
        ("=3", "an override is written key=value"),
        ("optim..lr=3", "an override is written key=value"),
    ],
)
def test_wrong_values_are_refused_with_the_rule(folder: Path, override: str, rule: str) -> None:
    write(folder, "listed", TINY + '[data]\ntrain = ["a.txt", "b.txt"]\n')
    (problem,) = problems("listed", override).values()
    assert rule in problem.rule
    assert override in f"{problem.source} {problem.value}"


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_every_mistake_is_reported_at_once_with_its_place_and_meaning(folder: Path) -> None:
    write(folder, "parent", TINY.replace("seq_len = 64", 'seq_len = "64"'))
    write(
        folder,
        "bad",
        "\n".join(
            [
                'base = "parent"',  # 1
                "[optim]",
                "learning_rate = 3e-4",  # 3
                "min_lr = 0.5",
                "schedule = cosine",  # 5: no quotes
                "[trian]",
                "batch_size = 8",
                "[model]",
                "n_head = 7",  # 9: does not divide n_embd
                "[simigrad]",
                "target = 0.5",
            ]
        ),
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe("bad", ["train.batch_size=-1", "wandb.mode=onlyne"])
    found = {problem.key: problem for problem in caught.value.problems}
    places = {key: problem.source for key, problem in found.items()}
    assert places == {
        "": "recipes/bad.toml:5",
        "trian": "recipes/bad.toml:6",
        "model.seq_len": "recipes/parent.toml:6",
        "optim.learning_rate": "recipes/bad.toml:3",
        "train.batch_size": "--set train.batch_size=-1",
        "wandb.mode": "--set wandb.mode=onlyne",
        "simigrad.min_batch_size": "recipes/bad.toml:10",
        "simigrad.max_batch_size": "recipes/bad.toml:10",
        "model.n_head": "recipes/bad.toml:9",
        "optim.min_lr": "recipes/bad.toml:4",
    }
    assert 'text takes quotes: schedule = "cosine"' in found[""].rule
    assert found["optim.learning_rate"].suggestion == "optim.lr"
    assert found["optim.learning_rate"].doc == "optim.lr: Peak learning rate."
    assert found["trian"].suggestion == "train"
    assert found["wandb.mode"].suggestion == "online"
    assert found["model.n_head"].value == "7"
    message = str(caught.value)
    for problem in caught.value.problems:
        assert problem.source in message
        assert problem.rule in message


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("optim:\n  lr: 6e-4", 1, "looks like YAML"),
        ("seed = None", 1, "TOML has no null"),
        ("[data]\nrepeat = True", 2, "write repeat = true"),
        ("[optim]\nlr = .5", 2, "digits on both sides"),
        ("[train]\ntokens = 300M", 2, 'tokens = "300M"'),
        ("seed = 1\nseed = 2", 2, "cannot overwrite a value"),
        ("[optim\nlr = 1", 1, "expected"),
        ('x = "open', 1, ""),
    ],
)
def test_lines_that_are_not_toml_are_pointed_at(folder: Path, text: str, line: int, hint: str) -> None:
    write(folder, "bad", text)
    with pytest.raises(RecipeError) as caught:
        load_recipe("bad")
    first = caught.value.problems[0]
    assert first.source == f"recipes/bad.toml:{line}"
    assert hint in first.rule


def test_a_text_is_not_taken_for_a_recipe(folder: Path) -> None:
    """A novel as --recipe: ten lines that are not TOML are enough, however many there are."""
    (folder / "novel.toml").write_text("It was a dark and stormy night; the rain fell in torrents.\n" * 15_000)
    with pytest.raises(
        RecipeError, match=r"novel\.toml is not a recipe: 10 of its first 10 lines are not TOML"
    ) as caught:
        load_recipe("novel.toml")
    assert "--set data.train=novel.toml" in str(caught.value)
    (folder / "large.toml").write_bytes(b"# " + b"x" * (1 << 20))
    with pytest.raises(RecipeError, match="is not a recipe: it has 1,048,578 bytes"):
        load_recipe("large.toml")


def test_nine_wrong_lines_are_still_mistakes_of_a_recipe(folder: Path) -> None:
    write(folder, "nine", TINY + "".join(f"[x{i}]\ny = True\n" for i in range(9)))
    with pytest.raises(RecipeError, match="mistakes; nothing was run") as caught:
        load_recipe("nine")
    assert sum("not TOML" in problem.rule for problem in caught.value.problems) == 9


@pytest.mark.parametrize("base", ["alone", "./alone.toml", "alone.toml"])
def test_a_recipe_based_on_itself_says_so(folder: Path, base: str) -> None:
    write(folder, "alone", f'base = "{base}"\n')
    problem = problems("alone")["base"]
    assert "is the recipe itself" in problem.rule
    assert problem.source == "recipes/alone.toml:1"


def test_binary_and_unreadable_files_are_refused(folder: Path) -> None:
    (folder / "recipes" / "bad.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe("bad")


def test_windows_files_are_read(folder: Path) -> None:
    (folder / "recipes" / "dos.toml").write_bytes(b"\xef\xbb\xbf" + TINY.replace("\n", "\r\n").encode())
    assert load_recipe("dos") == load_recipe("tiny")


def test_places_are_right_in_unusual_files(folder: Path) -> None:
    text = (
        'data.train = """\nseed = 9\n"""\n'  # 1-3
        "wandb = { mode = 3, project = 4 }\n"  # 4
        "[ optim ]\n"  # 5
        '"lr" = "x" # lr = 3\n'  # 6
        "betas = [\n  0.9, # [model]\n  7,\n]\n"  # 7-10
        "  eps=-1\n"  # 11
    )
    write(folder, "odd", text)
    places = {key: problem.source for key, problem in problems("odd").items() if "required" not in problem.rule}
    assert places == {
        "wandb.mode": "recipes/odd.toml:4",
        "wandb.project": "recipes/odd.toml:4",
        "optim.lr": "recipes/odd.toml:6",
        "optim.betas": "recipes/odd.toml:7",
        "optim.eps": "recipes/odd.toml:11",
    }


def typos(word: str) -> list[str]:
    """Every word that is one deletion, insertion, replacement or swap away, and none that is itself a letter short
    of."""
    letters = string.ascii_lowercase + "_"
    splits = [(word[:i], word[i:]) for i in range(len(word) + 1)]
    return sorted(
        {a + b[1:] for a, b in splits if b}
        | {a + b[1] + b[0] + b[2:] for a, b in splits if len(b) > 1}
        | {a + c + b[1:] for a, b in splits if b for c in letters}
        | {a + c + b for a, b in splits for c in letters} - {word}
    )


def test_a_hundred_typos_are_refused_and_the_right_key_is_suggested(folder: Path) -> None:
    """RELIABILITY F40: single-edit typos of any key, or of its section, in a file or by --set."""
    write(folder, "staged", STAGED)
    known = known_keys(Recipe)
    leaves = [key for key in known if not any(other.startswith(f"{key}.") for other in known)]
    before = sorted(folder.rglob("*"))
    draw = random.Random(40)
    right, slowest, count = 0, 0.0, 0
    while count < 100:
        parts = draw.choice(leaves).split(".")
        place = draw.randrange(len(parts))
        wanted = ".".join(parts[: place + 1])  # nobody can say more of what stands in a misspelt section
        parts[place] = draw.choice(typos(parts[place]))
        if ".".join(parts) in known or not all(parts):
            continue
        count += 1
        if parts[0] == "stages":
            parts.insert(1, "0")
        started = time.process_time()
        with pytest.raises(RecipeError) as caught:
            load_recipe("staged", [f"{'.'.join(parts)}=1"])
        slowest = max(slowest, time.process_time() - started)
        assert caught.value.exit_code == 2
        right += any(problem.suggestion == wanted for problem in caught.value.problems)
    assert right >= 0.95 * count
    assert slowest < 0.5
    assert sorted(folder.rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("learning_rate", "optim.lr"),
        ("optim.learning-rate", "optim.lr"),
        ("seqlen", "model.seq_len"),
        ("model.block_size", "model.seq_len"),
        ("lr", "optim.lr"),
        ("batch_size", "train.batch_size"),
        ("optim.batch_size", "train.batch_size"),
        ("train.max_steps", "train.tokens"),
        ("optim.beta2", "optim.betas"),
        ("data.vocab_size", "data.tokenizer"),
        ("train.precision", "train.dtype"),
        ("pld.theta", "progressive_layer_drop"),
        ("optimizer.lr", "optim"),
        ("seq_len_warmup.min_difficulty", "seq_len_warmup.start"),
        ("simigrad.gamma", None),
    ],
)
def test_other_programs_names_are_understood(folder: Path, written: str, meant: str | None) -> None:
    found = problems("tiny", f"{written}=1")
    assert found[written.split(".")[0] if meant and "." not in meant else written].suggestion == meant


def test_no_recipe_however_odd_ends_in_a_traceback(folder: Path) -> None:
    """Random values at random keys, in files and by --set: a recipe or a RecipeError, nothing else."""
    write(folder, "staged", STAGED)
    known = sorted(known_keys(Recipe))
    values = [
        "0",
        "-1",
        "1",
        "2.5",
        "1e400",
        "nan",
        "true",
        "false",
        '""',
        '"x"',
        "[]",
        "[1]",
        '["a", 2]',
        "[[1]]",
        "{}",
        "[{}]",
    ]
    values += [
        "{ x = 1 }",
        "[{ lr = 1 }]",
        "1979-05-27",
        "07:32:00",
        "'300M'",
        "9" * 400,
        "x",
        "",
        "=",
        "[",
        '"\\ud800"',
    ]
    draw = random.Random(2)
    loaded = 0
    for _ in range(200):
        keys = [draw.choice(known) for _ in range(draw.choice((1, 1, 1, 3)))]
        keys = [
            key.replace("stages.", f"stages.{draw.randrange(3)}.") if draw.random() < 0.9 else f"{key}.x"
            for key in keys
        ]
        written = [f"{key}={draw.choice(values)}" for key in keys]
        if draw.random() < 0.5:
            write(folder, "odd", 'base = "staged"\n' + "\n".join(written))
            arguments: tuple[str, list[str]] = ("odd", [])
        else:
            arguments = ("staged", written)
        try:
            recipe = load_recipe(*arguments)
        except RecipeError as error:
            assert error.problems, written
            continue
        loaded += 1
        (folder / "copy.toml").write_text(dump_recipe(recipe), encoding="utf-8")
        assert load_recipe("copy.toml") == recipe, written
    assert loaded  # most of it is refused


def test_a_misspelt_key_is_not_also_called_missing(folder: Path) -> None:
    write(folder, "a", TINY.replace("lr = 1e-3", "learning_rate = 1e-3").replace("[train]", "[training]"))
    assert set(problems("a")) == {"optim.learning_rate", "training"}


def test_every_required_key_that_is_missing_is_named(folder: Path) -> None:
    write(folder, "empty", "")
    needed = {
        "model.n_layer",
        "model.n_head",
        "model.n_embd",
        "model.seq_len",
        "optim.lr",
        "train.tokens",
        "train.batch_size",
    }
    assert set(problems("empty")) == needed


# --- rules between sections ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.n_head=3"], "model.n_head"),
        (["optim.min_lr=1"], "optim.min_lr"),
        (["optim.decay_tokens=1M", "optim.decay_steps=10"], "optim.decay_steps"),
        (["optim.decay_steps=10", "optim.warmup_steps=10"], "optim.decay_steps"),
        (["optim.schedule=wsd"], "optim.decay_share"),
        (["optim.decay_share=0.2"], "optim.decay_share"),
        (["optim.name=muon"], "optim.muon_lr"),
        (["optim.muon_lr=0.02"], "optim.muon_lr"),
        (["optim.name=muon", "optim.muon_lr=0.02", "staged_growth.dynamics=small"], "staged_growth.dynamics"),
        (["seq_len_warmup.start=72", "seq_len_warmup.steps=10"], "seq_len_warmup.start"),
        (["seq_len_warmup.steps=100_000"], "seq_len_warmup.steps"),
        (["seq_len_warmup={steps=10, batch='tokens', mode='truncate'}"], "seq_len_warmup.batch"),
        (
            ["seq_len_warmup={steps=10, batch='tokens'}", "simigrad={target=0.5, min_batch_size=2, max_batch_size=8}"],
            "seq_len_warmup.batch",
        ),
        (["batch_size_warmup={start=8, increment=1, sequences=100}"], "batch_size_warmup.start"),
        (["batch_size_warmup={start=1, increment=2, sequences=100}"], "batch_size_warmup.increment"),
        (["batch_size_warmup={start=1, increment=1, sequences=1_000_000}"], "batch_size_warmup.sequences"),
        (["batch_size_warmup={start=1, increment=1, sequences=100}", "seq_len_warmup.steps=10"], "batch_size_warmup"),
        (
            [
                "batch_size_warmup={start=1, increment=1, sequences=100}",
                "simigrad={target=0.5, min_batch_size=2, max_batch_size=8}",
            ],
            "batch_size_warmup",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused(folder: Path, overrides: list[str], key: str) -> None:
    assert key in problems("tiny", *overrides)


def test_a_section_with_a_mistake_is_still_refused_beside_another(folder: Path) -> None:
    mistaken = "simigrad={target=7.0, min_batch_size=2, max_batch_size=8}"
    found = problems("tiny", mistaken, "ouroboros.modules=2", "batch_size_warmup={start=1, increment=1, sequences=100}")
    assert found.keys() == {"simigrad.target", "simigrad", "batch_size_warmup"}


def test_a_recipe_built_in_python_obeys_the_same_rules(folder: Path) -> None:
    from dataclasses import replace

    recipe = load_recipe("tiny")
    with pytest.raises(ValueError, match=r"optim\.min_lr: must not exceed"):
        replace(recipe, optim=replace(recipe.optim, min_lr=1.0))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.warmup_steps=1000", "never reaches its peak"),
        ("optim.decay_tokens=200K", "never reaches min_lr"),
        ("optim.decay_steps=1000", "never reaches min_lr"),
        ("train.tokens=100", "less than one full step"),
        ("train.micro_batch_tokens=32", "less than one sequence"),
    ],
)
def test_unwise_settings_are_warned_of(folder: Path, override: str, words: str) -> None:
    assert warnings_of(load_recipe("tiny")) == []
    assert any(words in warning for warning in warnings_of(load_recipe("tiny", [override])))


def test_decay_by_steps_under_a_warmup_is_warned_of(folder: Path) -> None:
    recipe = load_recipe("tiny", ["optim.decay_steps=300", "seq_len_warmup.steps=20"])
    assert any("falls too early" in warning for warning in warnings_of(recipe))


# --- writing ---------------------------------------------------------------------------------------------------------


def test_a_recipe_written_and_read_is_equal(folder: Path) -> None:
    recipe = load_recipe(
        "tiny",
        [
            "optim.lr=1e-05",
            "optim.eps=1.2345678901234567e-09",
            'data.train=["a \\"quoted\\" name", "tab\\tand\\nnewline", "ünïcode 日本 \\u007f \\\\"]',
            "seq_len_warmup={pacing='discrete', lengths=[8, 64], until=[100]}",
            "checkpoint.every=90min",
            "optim.decay_tokens=77777",
        ],
    )
    (folder / "copy.toml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe("copy.toml") == recipe


def test_every_shipped_recipe_survives_being_written(folder: Path) -> None:
    for name in recipe_names():
        recipe = load_recipe(name)
        (folder / "copy.toml").write_text(dump_recipe(recipe), encoding="utf-8")
        assert load_recipe("copy.toml") == recipe, name


@pytest.mark.parametrize(
    "value", [True, 0, -7, 10**12, 0.1, 1e-5, 1e22, 1.0, -0.0, "", "a\x00b\x7f\\\"'\n", [1, [2.5, "x"]]]
)
def test_toml_values_are_exact(value: object) -> None:
    import tomllib

    read = tomllib.loads(f"x = {toml_value(value)}")["x"]
    assert read == value
    assert type(read) is type(value)
    assert repr(read) == repr(value)


def test_differences_are_exactly_the_keys_that_differ(folder: Path) -> None:
    a = load_recipe("tiny")
    assert recipe_differences(a, a) == []
    b = load_recipe("tiny", ["optim.lr=2e-3", "seq_len_warmup.steps=9", "optim.betas=[0.9, 0.99]"])
    assert recipe_differences(a, b)[:2] == [("optim.lr", 0.001, 0.002), ("optim.betas", [0.9, 0.95], [0.9, 0.99])]
    added = {key: (x, y) for key, x, y in recipe_differences(a, b)[2:]}
    assert all(key.startswith("seq_len_warmup.") and x is None for key, (x, _) in added.items())
    assert added["seq_len_warmup.steps"] == (None, 9)
    assert sorted((k, y, x) for k, x, y in recipe_differences(b, a)) == sorted(recipe_differences(a, b))


def test_no_two_aliases_mean_a_key_that_does_not_exist() -> None:
    known, aliases = known_keys(Recipe), aliases_of(Recipe)
    assert aliases["slw"] == "seq_len_warmup" and aliases["min_difficulty"] == "seq_len_warmup.start"
    assert [target for target in aliases.values() if target not in known] == []
    # a valid key is never an alias of another one in its own section
    assert not [
        a for a, target in itertools.product(aliases, known) if target == f"{aliases[a].rpartition('.')[0]}.{a}"
    ]


def test_a_warmup_of_most_of_the_run_is_warned_of(folder: Path) -> None:
    """TINY has 100,000 tokens in steps of 256: 391 steps."""

    def warned(steps: int) -> str:
        return " ".join(warnings_of(load_recipe("tiny", [f"optim.warmup_steps={steps}"])))

    assert "is 77% of the run's 391 steps" in warned(300)
    assert "never reaches its peak" in warned(391)
    assert warned(195) == ""
