"""Recipes: inheritance, overrides, rules between sections, and writing them back."""

from __future__ import annotations

from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.recipe.draft import recipe_name, recipe_names
from efftrain_cli.recipe.recipe import dump_recipe, load_recipe, recipe_differences
from efftrain_cli.recipe.rules import warnings_of
from tests.recipe.mistaken import STAGED, TINY, problems, write, write_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path)


def test_a_recipe_is_found_by_name_by_path_and_among_the_shipped(folder):
    by_name = load_recipe("tiny")
    for path in ("recipes/tiny.toml", str(folder / "recipes" / "tiny.toml")):
        assert load_recipe(path) == by_name
    assert load_recipe("gpt2-117m").model.n_embd == 768
    assert {"tiny", "gpt2-117m", "quickstart"} <= set(recipe_names())


def test_runs_are_named_after_recipe_file_or_run(folder, monkeypatch):
    assert recipe_name("gpt2-1.5b") == "gpt2-1.5b"
    assert recipe_name("recipes/gpt2-1.5b.toml") == recipe_name("gpt2-1.5b.toml") == "gpt2-1.5b"
    assert recipe_name("runs/tiny-seed1/recipe.toml") == "tiny-seed1"
    monkeypatch.chdir(folder / "recipes")
    assert recipe_name("recipe.toml") == "recipes"


def test_a_local_recipe_hides_the_shipped_one_and_may_build_on_it(folder):
    write(folder, "gpt2-117m", 'base = "gpt2-117m"\n[model]\nn_layer = 3\n')
    assert load_recipe("gpt2-117m").model.n_layer == 3
    assert load_recipe("gpt2-117m").model.n_embd == 768


def test_bases_chain_and_the_nearest_wins(folder):
    write(folder, "a", 'base = "tiny"\n[model]\nn_layer = 5\nn_embd = 32\n')
    write(folder, "b", 'base = "a"\nseed = 7\n[model]\nn_layer = 6\n')
    recipe = load_recipe("b")
    model = recipe.model
    assert (model.n_layer, model.n_embd, model.seq_len, recipe.seed) == (6, 32, 64, 7)


def test_a_missing_base_is_the_one_mistake(folder):
    """What it would have given is not called missing: tiny has all seven required keys."""
    write(folder, "a", '\nbase = "tinny"\n')
    found = problems("a")
    assert list(found) == ["base"]
    assert found["base"].source == "recipes/a.toml:2"
    with pytest.raises(
        RecipeError,
        match=r"\n    there is no recipe 'tinny': looked .*\n      did you mean tiny\?",
    ):
        load_recipe("a")


def test_a_missing_recipe_is_named_with_where_it_was_looked_for(folder):
    with pytest.raises(RecipeError) as caught:
        load_recipe("xyzzy")
    first, fix = str(caught.value).split("\n")
    assert first.startswith("there is no recipe 'xyzzy': looked for recipes/xyzzy.toml and ")
    assert fix == "  `efftrain recipes list` shows all"


def test_a_text_is_told_from_a_name(folder):
    (folder / "novel.txt").write_text("Call me Ishmael.")
    with pytest.raises(RecipeError, match=r"train on it as text: .* --set data\.train=novel\.txt"):
        load_recipe("novel.txt")


def test_a_run_folder_points_to_its_recipe(folder):
    (folder / "runs" / "x").mkdir(parents=True)
    (folder / "runs" / "x" / "recipe.toml").write_text(TINY)
    with pytest.raises(RecipeError, match=r"did you mean runs/x/recipe\.toml"):
        load_recipe("runs/x")
    assert load_recipe("runs/x/recipe.toml") == load_recipe("tiny")


def test_false_takes_an_inherited_section_or_key_away(folder):
    warmup = "[seq_len_warmup]\nsteps = 50\n"
    write(folder, "slw", f'base = "tiny"\n{warmup}[optim]\ndecay_tokens = "50K"\n')
    write(folder, "plain", 'base = "slw"\nseq_len_warmup = false\noptim.decay_tokens = false\n')
    tiny = load_recipe("tiny")
    assert load_recipe("plain") == tiny
    assert load_recipe("slw", ["seq_len_warmup=false", "optim.decay_tokens=false"]) == tiny
    # What was taken away can be given anew.
    write(folder, "again", 'base = "plain"\n[seq_len_warmup]\nsteps = 30\n')
    assert load_recipe("again") == load_recipe("tiny", ["seq_len_warmup.steps=30"])
    assert "must be a number" in problems("tiny", "optim.lr=false")["optim.lr"].rule


def test_stages_are_taken_away_and_overridden_by_number(folder):
    write(folder, "staged", STAGED)
    write(folder, "plain", 'base = "staged"\nstages = false\n')
    assert load_recipe("plain") == load_recipe("staged", ["stages=false"]) == load_recipe("tiny")
    assert "stages" not in dump_recipe(load_recipe("tiny"))
    recipe = load_recipe("staged", ["stages.0.switch.value=20", "stages.1.rewarmup_steps=7"])
    assert recipe.stages[0].switch is not None
    assert (recipe.stages[0].switch.value, recipe.stages[1].rewarmup_steps) == (20, 7)
    (folder / "copy.toml").write_text(dump_recipe(recipe))
    assert load_recipe("copy.toml") == recipe
    assert "there are 2 of them" in problems("staged", "stages.2.lr=1")["stages.2.lr"].rule
    assert recipe_differences(recipe, recipe) == []
    changed = recipe_differences(load_recipe("staged"), recipe)
    assert changed == [("stages.0.switch.value", 10, 20), ("stages.1.rewarmup_steps", 150, 7)]


# --- values ---------------------------------------------------------------------------------------


def test_tokens_are_written_as_one_likes(folder):
    for written in ("300_000_000", "300M", "3e8", "0.3B", "300000K", "  0.0003T "):
        assert load_recipe("tiny", [f"train.tokens={written}"]).train.tokens == 300_000_000


def test_override_values_are_toml_and_else_text(folder):
    overrides = ["optim.lr=1", "data.train=books/*.txt", "data.repeat=true", "train.compile=on"]
    lists = ["optim.betas=[0.8, 0.9]", "wandb = {mode = 'offline', project = 'p=q'}"]
    recipe = load_recipe("tiny", [*overrides, *lists, "seed=1", "seed=2"])
    assert isinstance(recipe.optim.lr, float)
    assert recipe.optim.betas == (0.8, 0.9)
    assert (recipe.data.train, recipe.data.repeat) == ("books/*.txt", True)
    assert recipe.train.compile == "on"
    assert (recipe.wandb.mode, recipe.wandb.project) == ("offline", "p=q")
    assert recipe.seed == 2


def test_a_recipe_that_does_not_say_how_often_evaluates_twenty_times(folder):
    """TINY has 100,000 tokens in steps of 256: 391 steps, a twentieth of which is 19.5."""
    assert load_recipe("tiny").eval.every == 20
    assert load_recipe("tiny", ["eval.every=7"]).eval.every == 7
    assert load_recipe("tiny", ["train.tokens=256"]).eval.every == 1
    written = dump_recipe(load_recipe("tiny"))
    (folder / "copy.toml").write_text(written)
    longer = load_recipe("copy.toml", ["train.tokens=200_000"])
    assert longer.eval.every == 20, "a run that is trained longer keeps its interval"


def test_windows_files_are_read(folder):
    (folder / "recipes" / "dos.toml").write_bytes(
        b"\xef\xbb\xbf" + TINY.replace("\n", "\r\n").encode()
    )
    assert load_recipe("dos") == load_recipe("tiny")


# --- rules between sections -----------------------------------------------------------------------


RAMP = "batch_size_warmup={start=1,increment=1,sequences=100}"
SIMIGRAD = "simigrad={target=0.5,min_batch_size=2,max_batch_size=8}"
BY_TOKENS = "seq_len_warmup={steps=10,batch='tokens'}"
REFUSED = {
    "model.n_head=3": "model.n_head",
    "optim.min_lr=1": "optim.min_lr",
    "optim.decay_tokens=1M optim.decay_steps=10": "optim.decay_steps",
    "optim.decay_steps=10 optim.warmup_steps=10": "optim.decay_steps",
    "optim.schedule=wsd": "optim.decay_share",
    "optim.schedule=inverse_sqrt optim.warmup_steps=0": "optim.warmup_steps",
    "optim.decay_share=0.2": "optim.decay_share",
    "optim.name=muon": "optim.muon_lr",
    "optim.muon_lr=0.02": "optim.muon_lr",
    "optim.name=muon optim.muon_scale=original": "optim.muon_lr",
    "optim.muon_scale=match_rms_adamw": "optim.muon_scale",
    "optim.decay_shape=square": "optim.decay_shape",
    "optim.name=lion optim.beta2_tokens=1M": "optim.beta2_tokens",
    "optim.z_loss=1e-4 ouroboros.modules=2": "optim.z_loss",
    "seq_len_warmup.start=72 seq_len_warmup.steps=10": "seq_len_warmup.start",
    "seq_len_warmup={steps=10,batch='tokens',mode='truncate'}": "seq_len_warmup.batch",
    f"{BY_TOKENS} {SIMIGRAD}": "seq_len_warmup.batch",
    f"{RAMP} {BY_TOKENS}": "seq_len_warmup.batch",
    f"{RAMP} {SIMIGRAD}": "batch_size_warmup",
}
"""Overrides -> the key that is named."""


def test_combinations_that_cannot_work_are_refused(folder):
    for overrides, key in REFUSED.items():
        assert key in problems("tiny", *overrides.split()), overrides


def test_a_recipe_built_in_python_obeys_the_same_rules(folder):
    from dataclasses import replace

    recipe = load_recipe("tiny")
    with pytest.raises(ValueError, match=r"optim\.min_lr: must not exceed"):
        replace(recipe, optim=replace(recipe.optim, min_lr=1.0))


UNWISE = {
    "optim.lr=0.11": "optim.lr = 0.11: adamw moves a weight by",
    "optim.decay_tokens=100_001": "optim.decay_tokens = 100,001 lies beyond the budget,",
    "optim.decay_steps=392": "optim.decay_steps = 392 lies beyond the budget's 391 steps",
    "optim={schedule = 'constant', decay_steps = 9}": 'optim.schedule = "constant" has no end',
    "train.tokens=255": "train.tokens = 255 is less than one full step, 256 tokens",
    "train.micro_batch_tokens=63": "train.micro_batch_tokens = 63 is less than one sequence of 64",
}


def test_unwise_settings_are_warned_of(folder):
    """TINY has 100,000 tokens in 391 steps of 256; at each edge nothing is said."""
    for override, words in UNWISE.items():
        (warning,) = warnings_of(load_recipe("tiny", [override]))
        assert warning.startswith(words)
    edges = ["optim.lr=0.1", "train.micro_batch_tokens=64", "optim.decay_steps=391"]
    for overrides in (edges, ["train.tokens=256"], ["optim.schedule=constant"]):
        assert warnings_of(load_recipe("tiny", overrides)) == []


def test_a_sharded_run_lacks_some_options(folder):
    write(folder, "staged", STAGED)
    load_recipe("tiny", ["parallel.strategy=shard"])
    (problem,) = problems("staged", "parallel.strategy=shard", "eval.sample=a").values()
    lacks = '"shard" works without stages, eval.sample: take this out, or replicate'
    assert problem.rule == lacks
    (problem,) = problems("tiny", "parallel.strategy=shard", "eval.positions=true").values()
    assert "without eval.positions: take" in problem.rule


def test_a_budget_that_the_first_step_exceeds_by_more_than_half_is_refused(folder):
    """A step is 4 sequences of 64 tokens, the first of a batch ramp from 2 has 128."""
    (problem,) = problems("tiny", "train.tokens=170").values()
    assert problem.key == "train.tokens"
    assert problem.rule.startswith("170 is less than two thirds of the first step, 256 tokens")
    assert list(problems("tiny", "train.batch_size=1_000_000")) == ["train.tokens"]
    ramp = "batch_size_warmup={start = 2, increment = 1, sequences = 2}"
    load_recipe("tiny", ["train.tokens=128", ramp])


def test_a_name_that_is_not_utf_8_is_named_by_a_pattern(folder):
    """As on the command line of Linux: a byte of Latin-1 is a lone surrogate."""
    (problem,) = problems("tiny", "data.train=caf\udce9.txt").values()
    assert problem.rule == (
        'is not UTF-8, as recipes are; a pattern names the same file: "caf?.txt"'
    )


# --- writing --------------------------------------------------------------------------------------


def test_a_recipe_written_and_read_is_equal(folder):
    recipe = load_recipe(
        "tiny",
        [
            "optim.lr=1e-05",
            "optim.eps=1.2345678901234567e-09",
            (
                'data.train=["a \\"quoted\\" name", "tab\\tand\\nnewline", "ünïcode 日本 \\u007f'
                ' \\\\"]'
            ),
            "seq_len_warmup={pacing='discrete', lengths=[8, 64], until=[100]}",
            "checkpoint.every=90min",
            "optim.decay_tokens=10_000",
            "seed=9999",
        ],
    )
    written = dump_recipe(recipe).splitlines()
    assert written[0] == "seed = 9999" and "decay_tokens = 10_000" in written
    (folder / "copy.toml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe("copy.toml") == recipe


def test_a_warmup_of_most_of_the_run_is_warned_of(folder):
    """TINY has 100,000 tokens in steps of 256: 391 steps, of which the last may have the peak."""

    def warned(steps: int) -> str:
        return " ".join(warnings_of(load_recipe("tiny", [f"optim.warmup_steps={steps}"])))

    assert "is 77 % of the run's 391 steps" in warned(300)
    assert "is 100 % of the run's 391 steps" in warned(391)
    assert "never reaches its peak" in warned(392)
    assert warned(195) == ""
