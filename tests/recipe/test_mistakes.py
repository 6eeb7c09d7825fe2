"""Mistakes in recipes: every one at once with its place, its rule, and the key that was probably
meant."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.recipe.check import known_keys
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, load_recipe
from tests.recipe.mistaken import STAGED, TINY, problems, write, write_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path)


RULES = {
    "model.n_layer='6'": "must be a whole number",
    "model.n_layer=0": "must be at least 1",
    "model.n_layer=1025": "must be at most 1024",
    "model.n_head=0": "must be at least 1",
    "model.n_head=1025": "must be at most 1024",
    "model.n_embd=0": "must be at least 1",
    "model.n_embd=131073": "must be at most 131072",
    "model.seq_len=0": "must be at least 1",
    "model.seq_len=1_048_577": "must be at most 1048576",
    "model.vocab_multiple=0": "must be at least 1",
    "model.vocab_multiple=16_777_217": "must be at most 16777216",
    "model.norm_eps=0": "must be greater than 0",
    "model.rope_theta=0": "must be greater than 0",
    "model.softcap=0": "must be greater than 0",
    "data.sources=[{path = 'a', weight = 0}]": "must be greater than 0",
    "data.valid_fraction=0": "must be greater than 0",
    "data.valid_fraction=0.5": "must be less than 0.5",
    "data.train=[]": "must have at least 1 item, not 0",
    "data.train=['a', '']": "item 2 must not be empty",
    "data.train.0=x": "is one list",
    "train.tokens=true": "must be a whole number",
    "train.tokens=1.5": "1.5 is not a whole number",
    "train.tokens=0": "must be at least 1",
    "train.tokens=9223372036854775808.0": "is beyond 64 bits",
    "train.tokens=300X": "write a count as",
    "train.batch_size=0": "must be at least 1",
    "train.deterministic=1": "must be true or false",
    "optim.lr=0": "must be greater than 0",
    "optim.lr=inf": "must be a finite number",
    "optim.lr='3e-4'": "must be a number",
    "optim.min_lr=-1": "must be at least 0",
    "optim.betas=[0.9]": "needs 2 items",
    "optim.betas=[0.9, 0.95, 1]": "at most 2 items, not 3",
    "optim.betas=[-1, 0.9]": "item 1 must be at least 0",
    "optim.betas=[0.9, 1.0]": "item 2 must be less than 1",
    "optim.warmup_steps=-1": "must be at least 0",
    "optim.decay_share=0": "must be greater than 0",
    "optim.decay_share=1.1": "must be at most 1",
    "optim.decay_steps=0": "must be at least 1",
    "optim.schedule=cosin": (
        "must be one of 'cosine', 'linear', 'constant', 'wsd' or 'inverse_sqrt'"
    ),
    "eval.every=-1": "must be at least 0",
    "eval.windows=0": "must be at least 1",
    "eval.internals=-1": "must be at least 0",
    "checkpoint.every=0": "at least 1 step",
    "checkpoint.every=0s": "is longer than 0s",
    "checkpoint.every=10minutes": "is not a duration",
    "checkpoint.keep=0": "must be at least 1",
    "checkpoint.at=[0]": "item 1 must be at least 1",
    "seed=-1": "must be at least 0",
    "seed=9223372036854775808": "beyond 64 bits",
    "seed=-9223372036854775809": "beyond 64 bits",
    "model=3": "is a section: write [model]",
    "stages=3": "is a list of sections: write [[stages]] before the keys of each",
    "batch_size_warmup={start = 2, increment = 1, switch = [0, 9]}": "item 1 must be at least 1",
    "base=small": "only a file has a base",
    "modl.x=1": "unknown key; did you mean model?",
    "simigrad={target = 0.5, min_batch_size = 4}": "is required",
    "optim..lr=3": "an override is written key=value",
}
"""Override -> what is said of it."""


def test_wrong_values_are_refused_with_the_rule(folder):
    write(folder, "listed", TINY + '[data]\ntrain = ["a.txt", "b.txt"]\n')
    for override, rule in RULES.items():
        (problem,) = problems("listed", override).values()
        assert rule in problem.rule, override
        assert override in f"{problem.source} {problem.value}"


# --- mistakes -------------------------------------------------------------------------------------


def test_every_mistake_is_reported_at_once_with_its_place(folder):
    """Bad keys and values of a file, of its base and of --set, each where it is written; what they
    break together is told once they are right: F41."""
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
    assert found["trian"].rule == "unknown key; did you mean train?"
    lines = str(caught.value).split("\n")
    assert lines[0] == "recipe 'bad' has 7 mistakes; nothing was run"
    assert len(lines) == 1 + 2 * 7
    place = lines.index("  optim.learning_rate = 0.0003   (recipes/bad.toml:3)")
    assert lines[place + 1] == "    unknown key; did you mean optim.lr?"


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
    for end in ("\n", " "):
        text = f"It was a dark and stormy night; the rain fell in torrents.{end}" * 15_000
        (folder / "novel.toml").write_text(text)
        shown = text.split("\n")[0][:100]
        with pytest.raises(RecipeError, match=rf"  {shown}   \(novel\.toml:1\)\n    not TOML"):
            load_recipe("novel.toml")
    (folder / "large.toml").write_bytes(b"# " + b"x" * (1 << 20))
    with pytest.raises(RecipeError, match="is not a recipe: it has 1,048,578 bytes") as caught:
        load_recipe("large.toml")
    assert "--set data.train=large.toml" in str(caught.value)


def test_long_keys_and_values_are_cut(folder):
    write(folder, "long", f"{'k' * 200} = '{'v' * 200}'\n")
    with pytest.raises(RecipeError, match=r'\n  k{100} = "v{99}   \(recipes/long'):
        load_recipe("long")


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


def test_a_lost_letter_finds_its_key(folder):
    """RELIABILITY F40: any key without its second letter, by --set; 95 of 100 are understood."""
    write(folder, "staged", STAGED)
    leaves = [key for key, about in known_keys(Recipe).items() if about.section is None]
    before = sorted(folder.rglob("*"))
    right = 0
    for key in leaves:
        section, _, name = key.replace("stages.", "stages.0.").rpartition(".")
        typed = f"{section}.{name[0]}{name[2:]}".lstrip(".")
        rules = [problem.rule for problem in problems("staged", f"{typed}=1").values()]
        right += f"unknown key; did you mean {key}?" in rules
    assert right >= 0.95 * len(leaves)
    assert sorted(folder.rglob("*")) == before, "nothing is written"


MEANT = {
    "learning_rate": "optim.lr",
    "model.block_size": "model.seq_len",
    "lr": "optim.lr",
    "optim.batch_size": "train.batch_size",
    "train.max_steps": "train.tokens",
    "pld.theta": "progressive_layer_drop",
    "optimizer.lr": "optim",
    "seq_len_warmup.min_difficulty": "seq_len_warmup.start",
    "hidden_siz": "model.n_embd",
}
"""Key of another program -> ours."""


def test_other_programs_names_are_understood(folder):
    for written, meant in MEANT.items():
        (problem,) = problems("tiny", f"{written}=1").values()
        assert problem.rule == f"unknown key; did you mean {meant}?"
    (problem,) = problems("tiny", "model.dropout=1").values()
    assert problem.rule.startswith("unknown key; [model] has arch, n_layer, ")


ODD = """0 -1 2.5 1e400 nan true false '' 'x' [] [1] ['a',2] [[1]] {} [{}] {x=1} x = [ [{lr=1}]
    1979-05-27 07:32:00 '300M' "\\ud800" """
"""Values that few keys can have."""


def test_no_recipe_however_odd_ends_in_a_traceback(folder):
    """Random values at random keys, in files and by --set: a recipe or a RecipeError, nothing
    else."""
    write(folder, "staged", STAGED)
    known = sorted(known_keys(Recipe))
    values = [*ODD.split(), "9" * 400, ""]
    draw = random.Random(2)
    loaded = 0
    for _ in range(200):
        written = []
        for _ in range(draw.choice((1, 1, 1, 3))):
            key = draw.choice(known).replace("stages.", f"stages.{draw.randrange(3)}.")
            deeper = draw.choice(["", "", "", ".x"])
            written.append(f"{key}{deeper}={draw.choice(values)}")
        write(folder, "odd", "\n".join(['base = "staged"', *written]))
        arguments = draw.choice([("odd", []), ("staged", written)])
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
