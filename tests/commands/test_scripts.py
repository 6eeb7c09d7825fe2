"""What other programs read: `--format json` of the commands that read, and `--quiet`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from efftrain_cli.foundation import console
from efftrain_cli.trials import runner
from tests.conftest import cli
from tests.launch import write_recipe
from tests.tune_warmup.search import train_here


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


def test_quiet_prints_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(console, "_silent", False)  # as before, at the end
    monkeypatch.setattr(runner, "TrialRunner", partial(runner.TrialRunner, launch=train_here))
    write_recipe(tmp_path, windows="8")
    for command in ("prepare", "pretrain"):
        assert cli(f"{command} r.toml -q").output == ""
    assert (tmp_path / "runs" / "r-seed1234" / "metrics.jsonl").is_file()
    swept = cli("sweep r.toml --seeds 1234,1235 -q --format json")
    assert "val loss" not in swept.stderr and "training " not in swept.stderr, swept.stderr
    assert [run["status"] for run in json.loads(swept.stdout)] == ["finished"] * 2
