"""docs/compare.md: its commands run, and its numbers agree with each other."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, cli
from tests.docs.pages import blocks_of, commands_of
from tests.fake_runs import write_run

COMMANDS = commands_of("compare")
(OUTPUT,) = blocks_of("compare", "text")
WARMUP = "\n[seq_len_warmup]\nstart = 32\nsteps = 10\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three seeds of each recipe that the page names, and a table."""
    for seed in range(3):
        write_run(tmp_path / "runs", "quickstart", seed)
        write_run(tmp_path / "runs", "quickstart-slw", seed, speed=1.3, more=WARMUP)
    rows = [f"{arm},{seed},{3 + seed / 7 + len(arm) / 9}" for arm in ("a", "bb") for seed in (0, 1)]
    (tmp_path / "runs.csv").write_text("\n".join(["arm,seed,eval/loss", *rows]))
    return tmp_path


@pytest.mark.parametrize("command", [line for line in COMMANDS if "wandb:" not in line])
def test_command(command, folder):
    words = shlex.split(command, comments=True)[1:]
    if words[0] in ("sweep", "race"):  # their plans: training is tested elsewhere
        for recipe in folder.glob("runs/*/recipe.toml"):
            recipe.unlink()
        words.append("--plan")
    cli(*words)


def test_the_output_has_the_form_that_compare_prints(folder):
    printed = cli("compare", "quickstart", "quickstart-slw").stdout
    for text in (printed, OUTPUT):
        flat = re.sub(r"\s+", " ", text)
        assert re.match(r"quickstart-slw (is better than|against) quickstart ", flat)
        assert " final loss tokens to match FLOPs to match time quickstart " in flat
        assert " note: exploratory: nothing was fixed before these runs" in flat


def test_the_rates_of_the_evidence_are_those_of_its_table():
    rates = (REPOSITORY / "docs" / "evidence" / "error-rates.md").read_text()
    path = REPOSITORY / "benchmarks" / "simulations" / "error-rates.csv"
    cells: dict[str, list[float]] = {}
    for row in csv.DictReader(path.read_text().splitlines()):
        cells.setdefault(row["cell"], []).append(float(row["percent"]))
    shown = {}
    for line in re.findall(r"^\| (.+) \|$", rates, re.MULTILINE):
        cell, *figures = line.split(" | ")
        if cell in cells:
            shown[cell] = [float(figure) for figure in figures[: len(cells[cell])]]
            assert shown[cell] == pytest.approx(cells[cell], abs=0.051), cell
    assert len(shown) == 19
