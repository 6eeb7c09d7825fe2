"""Mistakes in recipes: every one at once with its place, its rule, and the key that was probably
meant."""

from __future__ import annotations

import random
import string
import time

import pytest

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.recipe.check import known_keys
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, load_recipe
from tests.recipe.conftest import STAGED, TINY, problems, write


@pytest.mark.parametrize(
    "override, rule",
    [
        ("model.n_layer='6'", "must be a whole number"),
        ("model.n_layer=2.0", "must be a whole number"),
        ("model.n_layer=0", "must be at least 1"),
        ("train.tokens=true", "must be a whole number"),
        ("train.tokens=1.5", "1.5 is not a whole number"),
        ("train.tokens=9e999999999M", "write a count as"),
        ("train.tokens=1e30", "beyond 64 bits"),
        ("seed=99999999999999999999", "beyond 64 bits"),
        ("model.seq_len=2_000_000", "must be at most 1048576"),
        ("train.tokens=300X", "write a count as"),
        ("train.deterministic=1", "must be true or false"),
        ("optim.lr=inf", "must be a finite number"),
        ("optim.lr='3e-4'", "must be a number"),
        ("optim.betas=[0.9]", "needs 2 items"),
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
        ("model=3", "is a section: write [model]"),
        ("simigrad=true", "is a section: write [simigrad] with its keys below"),
        ("stages=3", "is a list of sections: write [[stages]] before the keys of each"),
        ("data.train=", "must not be empty"),
        ("data.train=[]", "must have at least 1 item, not 0"),
        ("data.train=['a', '']", "item 2 must not be empty"),
        ("data.train.0=x", "is one list"),
        ("base=small", "only a file has a base"),
        ("lr", "an override is written key=value"),
        ("optim..lr=3", "an override is written key=value"),
    ],
)
def test_wrong_values_are_refused_with_the_rule(folder, override, rule):
    write(folder, "listed", TINY + '[data]\ntrain = ["a.txt", "b.txt"]\n')
    (problem,) = problems("listed", override).values()
    assert rule in problem.rule
    assert override in f"{problem.source} {problem.value}"


# --- mistakes -------------------------------------------------------------------------------------


def test_every_mistake_is_reported_at_once_with_its_place(folder):
    """Bad keys and values of a file, of its base and of --set, each where it is written; what they
    break together is told once they are right."""
    write(folder, "parent", TINY.replace("seq_len = 64", 'seq_len = "64"'))
    write(
        folder,
        "bad",
        """\
base = "parent"
[optim]
learning_rate = 3e-4
min_lr = 0.5
[trian]
batch_size = 8
[simigrad]
target = 0.5
""",
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe("bad", ["train.batch_size=-1", "wandb.mode=onlyne"])
    found = {problem.key: problem for problem in caught.value.problems}
    assert {key: problem.source for key, problem in found.items()} == {
        "trian": "recipes/bad.toml:5",
        "model.seq_len": "recipes/parent.toml:6",
        "optim.learning_rate": "recipes/bad.toml:3",
        "train.batch_size": "--set train.batch_size=-1",
        "wandb.mode": "--set wandb.mode=onlyne",
        "simigrad.min_batch_size": "recipes/bad.toml:7",
        "simigrad.max_batch_size": "recipes/bad.toml:7",
    }
    assert found["trian"].suggestion == "train"
    lines = str(caught.value).split("\n")
    assert lines[0] == "recipe 'bad' has 7 mistakes; nothing was run"
    place = lines.index("  optim.learning_rate = 0.0003   (recipes/bad.toml:3)")
    assert lines[place + 1 : place + 3] == [
        "    unknown key; did you mean optim.lr?",
        "    optim.lr: Peak learning rate.",
    ]


def test_a_rule_that_an_override_breaks_names_the_override(folder):
    """The file's n_head and min_lr are right without it."""
    write(folder, "two", 'base = "tiny"\n[optim]\nmin_lr = 1e-4\n')
    found = problems("two", "model.n_embd=63", "optim.lr=1e-5")
    assert {key: problem.source for key, problem in found.items()} == {
        "model.n_head": "recipes/tiny.toml:4, --set model.n_embd=63",
        "optim.min_lr": "recipes/two.toml:3, --set optim.lr=1e-5",
    }


@pytest.mark.parametrize(
    "text, line, fault",
    [
        ("optim:\n  lr: 6e-4", 1, "expected '=' after a key in a key/value pair"),
        ("[train]\ntokens = 300M", 2, "expected newline or end of document after a statement"),
        ("[optim]\nlr = 1e-3\nlr = 2.5e-3", 3, "cannot overwrite a value"),
        ('x = "open', 1, ""),
    ],
)
def test_lines_that_are_not_toml_are_pointed_at(folder, text, line, fault):
    write(folder, "bad", text)
    (problem,) = problems("bad").values()
    assert problem.source == f"recipes/bad.toml:{line}"
    assert problem.rule.startswith(f"not TOML: {fault}")
    assert 'text has quotes, as in "300M"' in problem.rule


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
    leaves = [key for key, about in known.items() if about.section is None]
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
        "2.5",
        "1e400",
        "nan",
        "true",
        "false",
        "''",
        "'x'",
        "[]",
        "[1]",
        "['a',2]",
        "[[1]]",
        "{}",
        "[{}]",
        "{x=1}",
        "x",
        "=",
        "[",
    ]
    values += ["[{ lr = 1 }]", "1979-05-27", "07:32:00", "'300M'", "9" * 400, "", '"\\ud800"']
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


def test_a_misspelt_key_is_not_also_called_missing(folder):
    write(
        folder,
        "a",
        TINY.replace("lr = 1e-3", "learning_rate = 1e-3").replace("[train]", "[training]"),
    )
    assert set(problems("a")) == {"optim.learning_rate", "training"}


def test_every_required_key_that_is_missing_is_named(folder):
    write(folder, "empty", "[model]\nn_layer = 2\n[train]\n")
    assert problems("empty").keys() == {
        "model.n_head",
        "model.n_embd",
        "model.seq_len",
        "optim",
        "train.tokens",
        "train.batch_size",
    }
