"""Sizes that no computer holds are refused before memory is taken for them: one message, in
seconds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import CheckpointError, RecipeError
from efftrain_cli.model.hf import read_hf
from efftrain_cli.recipe.recipe import load_recipe
from tests.launch import BASELINE

LITTLE_MEMORY = """
import resource
from pathlib import Path
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""
"""Lets a process take a gigabyte more than it has."""

LARGE = ("--set", "model.n_embd=100000", "--set", "model.n_layer=1000")


@pytest.mark.parametrize(
    "words, code, message",
    [
        (("sweep", "--seeds", "0..1000000000"), 2, "1,000,000,001 runs are more than the 10,000"),
        (("sweep", "--seeds", f"0..{'9' * 100_000}"), 2, "write 0..4"),
        (("pretrain", "--plan", "--set", "model.n_embd=1000000000"), 2, "at most 131072"),
        (("pretrain", "--plan", "--set", "model.n_layer=100000000"), 2, "at most 1024"),
        (("bench", *LARGE), 5, "a model of 120T parameters needs 1.92 PB"),
        (("pretrain", "--name", "r", *LARGE), 5, "a model of 120T parameters needs 1.92 PB"),
    ],
    ids=lambda part: " ".join(part)[:40] if isinstance(part, tuple) else None,
)
def test_numbers_on_the_command_line(lab, words, code, message):
    """F97."""
    errors = lab.call(words[0], lab.recipe(), *words[1:], inject=LITTLE_MEMORY, code=code).errors
    assert message in errors and "Traceback" not in errors
    assert not (lab.folder / "runs" / "r").exists()


def test_growth_factors(lab):
    """F97: by the sizes that are believed, then by the memory that the grown model needs."""
    lab.train("r", "--steps", "1")
    for operator, code, message in (
        ("width:1000", 2, "the stages grow model.n_head to 2000: input should be less"),
        ("depth:100000", 2, "the stages grow model.n_layer to 200000: input should be less"),
        (f"depth:{'9' * 5000}", 2, "the factor must be a whole number"),
        ("width:500 depth:500", 5, "a model of 12.3T parameters needs 197 TB"),
    ):
        words = [word for each in operator.split() for word in ("--operator", each)]
        errors = lab.call("grow", "r", *words, inject=LITTLE_MEMORY, code=code).errors
        assert message in errors, errors
        assert not lab.run("r-grown").exists()


def test_a_recipe_with_thousands_of_mistakes(tmp_path):
    """F97: they are counted, and the first hundred told."""
    path = tmp_path / "many.toml"
    path.write_text(BASELINE + "".join(f"unknown_{i} = {i}\n" for i in range(4000)))
    with pytest.raises(RecipeError) as raised:
        load_recipe(str(path))
    text = str(raised.value)
    assert "has 4,000 mistakes" in text and text.endswith("and 3,900 more")
    assert "checkpoint.unknown_99 " in text and "checkpoint.unknown_100 " not in text
    assert len(raised.value.problems) == 4000


@pytest.mark.parametrize("kind", ["a pipe", "/dev/zero"])
def test_what_is_no_ordinary_file_is_not_read(tmp_path, kind):
    """F97: a pipe would be waited for, and /dev/zero never ends."""

    def place(path: Path) -> Path:
        path.parent.mkdir(exist_ok=True)
        if kind == "a pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        return path

    config = place(tmp_path / "hf" / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json .*not an ordinary file"):
        read_hf(config.parent)
    place(tmp_path / "text.toml")
    with pytest.raises(RecipeError, match="there is no recipe"):
        load_recipe(str(tmp_path / "text.toml"))
