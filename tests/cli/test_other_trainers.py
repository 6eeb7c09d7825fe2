"""Options that people know from other trainers are answered with ours."""

from __future__ import annotations

import re

import pytest

from efftrain_cli.recipe.check import read_aliases
from efftrain_cli.recipe.recipe import load_recipe
from tests.faults.damage import call


@pytest.mark.parametrize(
    "options, answer",
    [
        ("--lr 1e-3", "use --set optim.lr=1e-3"),
        ("--batch-size=32", "use --set train.batch_size=32"),
        ("--lr --seed 1", "use --set optim.lr=VALUE"),
        ("--data 'my text.txt'", "use --set data.train='my text.txt'"),
        ("--max-steps 3", "use --steps N"),
        ("--train.batch-size=4", "use --set train.batch_size=4"),
        ("--stages.0.lr 1e-3", "use --set stages.0.lr=1e-3"),
        ("--wandb.tensorboard", "use --set wandb.tensorboard=VALUE"),
    ],
)
def test_option_of_another_trainer_names_ours(options, answer):
    option = re.split("[ =]", options)[0]
    code, said = call(f"pretrain small {options}")
    assert code == 2 and said.startswith(f"no option {option}\n  {answer}")


def test_keys_of_other_trainers_are_recipe_keys():
    values = {
        "data.train": "x.txt",
        "data.tokenizer": "bytes",
        "train.dtype": "fp32",
        "optim.name": "lion",
        "optim.min_lr": "1e-5",
        "train.tokens": "1000000",
    }
    for advice in read_aliases("options").values():
        for key, value in re.findall(r"--set ([\w.]+)=(\w+)", advice):
            if value in ("VALUE", "N"):
                value = values.get(key, "4")
            load_recipe("small", [f"{key}={value}"])


@pytest.mark.parametrize(
    "command", ["pretrain", "prepare", "bench", "tune-warmup", "verify-resume"]
)
def test_a_recipe_is_an_argument_or_an_option(command):
    """A mistake shows that the recipe was read, before anything is trained."""
    for given in ("small", "--recipe small"):
        assert "optim.lr = -1" in call(f"{command} {given} --set optim.lr=-1")[1]
    both = call(f"{command} small --recipe small-slw")
    assert both == (2, "two recipes: small and --recipe small-slw\n  leave one of them out")
    code, said = call(command)
    assert code == 2 and said.startswith("no recipe\n  give one")
