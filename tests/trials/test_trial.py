"""The grid of a sweep: seeds, settings, names, and what may be compared."""

from __future__ import annotations

import re

import pytest

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.trials.trial import check_comparable, grid, parse_seeds, parse_settings, run_name
from tests.trials.stubs import TINY, both


def test_seeds():
    assert parse_seeds("0..4") == (0, 1, 2, 3, 4)
    assert parse_seeds("7") == (7,)
    assert parse_seeds("1, 3..3 ,5..6") == (1, 3, 5, 6)
    for wrong in ("", "4..0", "a", "1..", "-1", "1,1", "0..2,1"):
        with pytest.raises(UsageError, match="--seeds"):
            parse_seeds(wrong)
    assert len(parse_seeds("0..9999")) == 10_000


def test_too_many_runs_are_refused_before_they_are_listed():
    """F97: of seeds, and of 3 recipes x 2 seeds x 100 x 100 values."""
    for text in ("0..1000000000", "0..9999,10000", f"0..{'9' * 5000}"):
        with pytest.raises(UsageError, match=r"more than the 10,000|write 0\.\.4"):
            parse_seeds(text)
    values = [str(i) for i in range(1, 101)]
    with pytest.raises(UsageError, match="60,000 runs are more than the 10,000"):
        grid(["a", "b", "c"], (0, 1), {"optim.lr": values, "train.batch_size": values})


def test_settings():
    assert parse_settings(
        [
            "optim.lr=1e-3,2e-3",
            "optim.betas=[0.9,0.95],[0.8,0.9]",
            'data.train="a,b"',
            "wandb.mode=offline",
        ]
    ) == {
        "wandb.mode": ["offline"],
        "optim.lr": ["1e-3", "2e-3"],
        "optim.betas": ["[0.9,0.95]", "[0.8,0.9]"],
        "data.train": ['"a,b"'],
    }
    for wrong in (
        "optim.lr",
        "optim.lr=",
        "optim.lr=1,",
        "=1",
        "seed=1",
        "base=x",
        "wandb.mode=off,online",
        "optim.lr=1e-3,0.001",
        "optim.name=lion,lion",
    ):
        with pytest.raises(UsageError, match="--set"):
            parse_settings([wrong])
    with pytest.raises(UsageError, match="seed has its own option\n  use --seeds"):
        parse_settings(["seed=1"])
    with pytest.raises(UsageError, match="names a number twice\n  leave one out"):
        parse_seeds("1,0..1")
    with pytest.raises(UsageError, match="twice"):
        parse_settings(["optim.lr=1", "optim.lr=2"])


def test_grid_has_seeds_outermost_and_names_that_tell(folder):
    trials = grid(["plain.toml", "warm.toml"], (0, 1), {"optim.lr": ["1e-3", "2e-3"]})
    assert [trial.name for trial in trials[:4]] == [
        "plain-lr1e-3-seed0",
        "plain-lr2e-3-seed0",
        "warm-lr1e-3-seed0",
        "warm-lr2e-3-seed0",
    ]
    assert [trial.seed for trial in trials] == [0] * 4 + [1] * 4
    assert [trial.name for trial in grid(["plain.toml"], (3,), {}, "mine")] == ["mine-plain-seed3"]
    assert grid(["plain.toml"], (3,), {"wandb.mode": ["offline"]})[0].name == "plain-seed3"
    values = ["x" * 80, "y" * 80]
    names = [each.name for each in grid(["plain", "warm"], (0, 1), {"data.train": values})]
    assert len({*names}) == 8 and max(map(len, names)) <= 64
    assert run_name(["a" * 58, "seed1"], ()) == f"{'a' * 58}-seed1"
    assert re.fullmatch("a{40,}-[0-9a-f]{8}-seed1", run_name(["a" * 59, "seed1"], ()))
    texts = grid(["plain.toml"], (0,), {"data.train": ["a_b.txt", "ab.txt"]})
    assert len({trial.name for trial in texts}) == 2
    with pytest.raises(UsageError, match="twice"):
        grid(["plain.toml", "sub/plain.toml"], (0,), {})


def test_what_could_not_be_compared_is_refused_before_training(folder):
    (folder / "long.toml").write_text('base = "plain.toml"\n[model]\nseq_len = 64\n')
    with pytest.raises(UsageError, match=r"model\.seq_len: 32 in plain\.toml; 64 in long\.toml"):
        check_comparable(grid(["plain.toml", "long.toml"], (0, 1), {}))
    check_comparable(both(0, 1))
    with pytest.raises(UsageError, match="validation text"):
        check_comparable(grid(["plain.toml"], (0,), {"data.valid": ["valid.txt", "text.txt"]}))
    for name, fraction in (("cut", 0.05), ("less", 0.01)):
        held_out = f"valid_fraction = {fraction}"
        (folder / f"{name}.toml").write_text(TINY.replace('valid = "valid.txt"', held_out))
    said = "the validation text: 0.05 of text.txt in cut.toml; 0.01 of text.txt in less.toml"
    with pytest.raises(UsageError, match=said):
        check_comparable(grid(["cut.toml", "less.toml"], (0,), {}))
