"""Mistakes in recipes: every one at once with its place, its rule, and the key that was probably
meant."""

from __future__ import annotations

import itertools
import random
import string
import time

import pytest

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.recipe.check import aliases_of, known_keys
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, load_recipe
from tests.recipe.conftest import STAGED, TINY, problems, write


@pytest.mark.parametrize(
    "override, rule",
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
        ("optim.betas=[]", "needs 1 item or more"),
        ("optim.betas=[0.9, 0.95, 1]", "must have 2 items, not 3"),
        ("optim.betas=[0.9, 1.0]", "item 2 must be less than 1"),
        ("optim.betas=0.9", "must be a list"),
        (
            "optim.schedule=cosin",
            "must be one of 'cosine', 'linear', 'constant', 'wsd' or 'inverse_sqrt'",
        ),
        ("checkpoint.every=0", "at least 1 step"),
        ("checkpoint.every=10minutes", "is not a duration"),
        ("checkpoint.every=true", "must be a whole number or must be text"),
        ("data.train=1979-05-27", "must be text"),
        ("model=3", "is a section: write [model]"),
        ("simigrad=true", "or simigrad = false to do without"),
        ("data.train=", "must not be empty"),
        ("data.train=[]", "must have at least 1 item, not 0"),
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
def test_wrong_values_are_refused_with_the_rule(folder, override, rule):
    write(folder, "listed", TINY + '[data]\ntrain = ["a.txt", "b.txt"]\n')
    (problem,) = problems("listed", override).values()
    assert rule in problem.rule
    assert override in f"{problem.source} {problem.value}"


# --- mistakes -------------------------------------------------------------------------------------


def test_every_mistake_is_reported_at_once_with_its_place_and_meaning(folder):
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
                'schedule = "linear"',
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
    assert found["optim.learning_rate"].suggestion == "optim.lr"
    assert found["optim.learning_rate"].doc == "optim.lr: Peak learning rate."
    assert found["trian"].suggestion == "train"
    assert found["model.n_head"].value == "7"
    message = str(caught.value)
    for problem in caught.value.problems:
        assert problem.source in message
        assert problem.rule in message


@pytest.mark.parametrize(
    "text, line, hint",
    [
        ("optim:\n  lr: 6e-4", 1, "looks like YAML"),
        ("seed = None", 1, "TOML has no null"),
        ("[data]\nrepeat = True", 2, "write repeat = true"),
        ("[optim]\nlr = .5", 2, "digits on both sides"),
        ("[train]\ntokens = 300M", 2, 'tokens = "300M"'),
        ("[optim]\nschedule = cosine", 2, 'text takes quotes: schedule = "cosine"'),
        ("seed = 1\nseed = 2", 2, "cannot overwrite a value\n"),
        ("[optim]\nlr = 1e-3\nlr = 2.5e-3", 3, "cannot overwrite a value\n"),
        ("[data]\nrepeat = true\nrepeat = false", 3, "cannot overwrite a value\n"),
        ("[optim\nlr = 1", 1, "expected"),
        ('x = "open', 1, ""),
    ],
)
def test_lines_that_are_not_toml_are_pointed_at(folder, text, line, hint):
    write(folder, "bad", text)
    with pytest.raises(RecipeError) as caught:
        load_recipe("bad")
    (problem,) = caught.value.problems
    assert problem.source == f"recipes/bad.toml:{line}"
    assert hint in f"{problem.rule}\n"
    assert str(caught.value).startswith("recipe 'bad' has 1 mistake; nothing was run")


def test_a_text_is_not_taken_for_a_recipe(folder):
    """A novel as --recipe: its first line is pointed at, however long it is."""
    (folder / "novel.toml").write_text(
        "It was a dark and stormy night; the rain fell in torrents.\n" * 15_000
    )
    with pytest.raises(RecipeError, match=r"novel\.toml:1\)\n    not TOML"):
        load_recipe("novel.toml")
    (folder / "large.toml").write_bytes(b"# " + b"x" * (1 << 20))
    with pytest.raises(RecipeError, match="is not a recipe: it has 1,048,578 bytes") as caught:
        load_recipe("large.toml")
    assert "--set data.train=large.toml" in str(caught.value)


@pytest.mark.parametrize(
    "base, rule",
    [
        ('"alone"', "bases form a loop: alone -> alone"),
        ('"./alone.toml"', "bases form a loop: alone -> alone"),
        ('["tiny"]', "must be the name or path of one recipe, in quotes"),
        ('""', "must be the name or path of one recipe, in quotes"),
    ],
)
def test_a_base_that_cannot_be_built_on_says_why(folder, base, rule):
    write(folder, "alone", f"base = {base}\n")
    problem = problems("alone")["base"]
    assert rule in problem.rule
    assert problem.source == "recipes/alone.toml:1"


def test_binary_and_unreadable_files_are_refused(folder):
    (folder / "recipes" / "bad.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe("bad")


def test_places_are_right_in_unusual_files(folder):
    text = (
        'data.train = """\nseed = 9\n"""\n'  # 1-3
        "wandb = { mode = 3, project = 4 }\n"  # 4
        "[ optim ]\n"  # 5
        '"lr" = "x" # lr = 3\n'  # 6
        "betas = [\n  0.9, # [model]\n  7,\n]\n"  # 7-10
        "  eps=-1\n"  # 11
    )
    write(folder, "odd", text)
    places = {
        key: problem.source
        for key, problem in problems("odd").items()
        if "required" not in problem.rule
    }
    assert places == {
        "wandb.mode": "recipes/odd.toml:4",
        "wandb.project": "recipes/odd.toml:4",
        "optim.lr": "recipes/odd.toml:6",
        "optim.betas": "recipes/odd.toml:7",
        "optim.eps": "recipes/odd.toml:11",
    }


def typos(word: str) -> list[str]:
    """Every word that is one deletion, insertion, replacement or swap away, and none that is itself
    a letter short of."""
    letters = string.ascii_lowercase + "_"
    splits = [(word[:i], word[i:]) for i in range(len(word) + 1)]
    return sorted(
        {a + b[1:] for a, b in splits if b}
        | {a + b[1] + b[0] + b[2:] for a, b in splits if len(b) > 1}
        | {a + c + b[1:] for a, b in splits if b for c in letters}
        | {a + c + b for a, b in splits for c in letters} - {word}
    )


def test_a_hundred_typos_are_refused_and_the_right_key_is_suggested(folder):
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
        wanted = ".".join(
            parts[: place + 1]
        )  # nobody can say more of what stands in a misspelt section
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
    "written, meant",
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
        ("optim.learning_rat", "optim.lr"),
        ("hidden_siz", "model.n_embd"),
        ("model.dropout", None),
        ("simigrad.gamma", None),
    ],
)
def test_other_programs_names_are_understood(folder, written, meant):
    found = problems("tiny", f"{written}=1")
    assert (
        found[written.split(".")[0] if meant and "." not in meant else written].suggestion == meant
    )


def test_no_recipe_however_odd_ends_in_a_traceback(folder):
    """Random values at random keys, in files and by --set: a recipe or a RecipeError, nothing
    else."""
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
            key.replace("stages.", f"stages.{draw.randrange(3)}.")
            if draw.random() < 0.9
            else f"{key}.x"
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


@pytest.mark.parametrize("mistake", ["seq_len=0", "softcap='x'", "no_such_key=1"])
def test_stages_are_checked_beside_a_mistake_in_model(folder, mistake):
    """[model] has 2 layers; stage 0 has 2 too, and doubles them."""
    write(folder, "staged", STAGED.replace("{ n_layer = 1 }", "{ n_layer = 2 }"))
    found = problems("staged", f"model.{mistake}")
    assert list(found) == [f"model.{mistake.partition('=')[0]}", "stages"]
    assert "the operators end at n_layer = 4, but [model] has 2" in found["stages"].rule


def test_stages_of_an_unknown_size_are_checked_for_their_switches(folder):
    write(folder, "staged", STAGED.replace("switch = ", "# "))
    found = problems("staged", "model.n_layer=0")
    assert list(found) == ["model.n_layer", "stages"]
    assert "stage 0 has no switch" in found["stages"].rule


def test_a_misspelt_key_is_not_also_called_missing(folder):
    write(
        folder,
        "a",
        TINY.replace("lr = 1e-3", "learning_rate = 1e-3").replace("[train]", "[training]"),
    )
    assert set(problems("a")) == {"optim.learning_rate", "training"}


def test_every_required_key_that_is_missing_is_named(folder):
    write(folder, "empty", "")
    needed = set(
        [
            "model.n_layer",
            "model.n_head",
            "model.n_embd",
            "model.seq_len",
            "optim.lr",
            "train.tokens",
            "train.batch_size",
        ]
    )
    assert set(problems("empty")) == needed


def test_no_two_aliases_mean_a_key_that_does_not_exist():
    known, aliases = known_keys(Recipe), aliases_of(Recipe)
    assert (
        aliases["slw"] == "seq_len_warmup" and aliases["min_difficulty"] == "seq_len_warmup.start"
    )
    assert [target for target in aliases.values() if target not in known] == []
    # a valid key is never an alias of another one in its own section
    assert not [
        a
        for a, target in itertools.product(aliases, known)
        if target == f"{aliases[a].rpartition('.')[0]}.{a}"
    ]
