"""What other programs read: `--format json` of the commands that read, and `--quiet`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import cli
from tests.data.test_cli import RECIPE
from tests.trained_run import make_run


def read(line: str) -> object:
    return json.loads(cli(line).stdout)


def test_a_recipe_as_json():
    about = read("recipes show unstable-slw --set optim.lr=0.5 --format json")
    assert about["values"]["optim"]["lr"] == 0.5 and about["values"]["seq_len_warmup"]
    assert (
        about["origins"]["optim.lr"] == "--set optim.lr=0.5"
        and about["origins"]["data.format"] == "default"
    )
    assert [Path(base).stem for base in about["bases"]] == ["unstable"]


def test_checkpoints_as_json(tmp_path):
    run = make_run(tmp_path, steps=(10, 20))
    found = read("runs checkpoints random --format json")
    assert [entry["step"] for entry in found] == [10, 20]
    path = run / "checkpoints" / "step-00000020"
    assert found[1]["path"] == str(path) and found[1]["bytes"] == sum(
        file.stat().st_size for file in path.iterdir()
    )


TINY = RECIPE.replace("tokens = 2048", "tokens = 512").replace("windows = 4", "windows = 8")


def test_quiet_prints_nothing(efftrain, tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "book.txt").write_text(
        "".join(f"line {i}: {i * i} sheep cross the river {i % 13}\n" for i in range(500))
    )
    cache = {"EFFTRAIN_CACHE": str(tmp_path / "cache")}
    prepared = efftrain("prepare --recipe tiny.toml -q", **cache)
    assert (prepared.stdout, prepared.stderr) == ("", "")
    trained = efftrain("pretrain --recipe tiny.toml -q", **cache)
    assert trained.stdout == ""
    assert (tmp_path / "runs" / "tiny-seed1234" / "metrics.jsonl").is_file()
    swept = efftrain("sweep tiny.toml --seeds 1234,1235 -q --format json", **cache)
    assert "val loss" not in swept.stderr and "training " not in swept.stderr, swept.stderr
    assert [run["status"] for run in json.loads(swept.stdout)] == ["finished"] * 2
