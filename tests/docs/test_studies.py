"""docs/studies.md: its commands run, its keys are those of a study file, its example is planned and
rehearsed."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from efftrain_cli.study.file import Primary, Study
from efftrain_cli.study.load import read_study
from tests.conftest import REPOSITORY, cli
from tests.docs.pages import commands_of, text_of

TEXT = text_of("studies")
COMMANDS = commands_of("studies")
EVIDENCE = sorted((REPOSITORY / "docs" / "evidence").glob("*.toml"))
EXAMPLE = "docs/studies/length-warmup.toml"
HASHES = {
    "baselines": "ab7e274620bcb55b",
    "chunk-based-accumulation": "f594e419cf7e5d98",
    "layer-dropping": "08ef4a472d2dcb1c",
    "layer-dropping-equal": "d69bb0fbaedd3720",
    "long-contexts": "1c1a3a3e82397178",
    "long-contexts-batch-ramp": "4a8e4308a8f8af11",
    "long-contexts-low-rate": "f6411d9d15f90c11",
    "ouroboros": "09e11876202c529f",
    "ouroboros-muon": "4619b73d27512323",
    "simigrad": "550f43e154e10ca0",
    "staged-training": "c6ac0ca84c9bf5c8",
    "standardization-loss": "93a4b9392f3784da",
    "tuned-warmup": "5636e95c788e4980",
    "warmup-rivals": "d7699ca250c7e8a1",
    "warmup-stability": "d0d4b4528e51beda",
}
"""Beginnings of the hashes of the studies that were run: whatever is renamed, they train and judge
what they did."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the project's docs."""
    shutil.copytree(REPOSITORY / "docs" / "studies", tmp_path / "docs" / "studies")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_has_commands():
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, folder):
    """Without its training: the plan of it, or the status of nothing yet."""
    words = shlex.split(command, comments=True)[1:]
    assert words[0] in ("study", "sweep")
    if not {"--plan", "--status"} & {*words}:
        words = [word for word in words if word != "--rehearse"] + ["--plan"]
    cli(*words)


def test_the_example_is_a_plan_of_minutes(folder):
    found = json.loads(cli("study", EXAMPLE, "--plan", "--format", "json").output)
    assert (
        found["runs_left"] == 16
        and found["tokens_left"] == 16 * 150_000
        and found["looks"] == [3, 5]
    )
    assert not (folder / "runs").exists()


def test_the_study_on_the_page_is_planned_with_drawn_seeds(folder):
    """Three rates, grown by two at either end, two arms, five seeds."""
    (block,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (folder / "mine.toml").write_text(block)
    result = cli("study", "mine.toml", "--plan")
    tuning = (
        "seeds 5 drawn when registered; grids may grow at their edges, to 70 tuning runs at most"
    )
    assert (
        f"tuning     {tuning}" in result.output
        and "5 drawn when registered, judged" in result.output
    )
    assert "40 of 40 runs to train, at most 6M tokens" in result.output


def test_studies_of_the_evidence_keep_their_hashes():
    """Read with all their recipes, as by --plan; none is trained."""
    assert {path.stem: read_study(path).sha256[:16] for path in EVIDENCE} == HASHES


def test_the_page_names_every_key():
    told = {
        key
        for row in re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE)
        for key in re.findall(r"`\[*([a-z_]+)\]*`", row)
    }
    assert {field.name for field in fields(Study)} - {"primary", "tuning", "arms"} <= told
    for kind in ("measure", "direction"):
        annotation = next(field.type for field in fields(Primary) if field.name == kind)
        for word in re.findall(r'"(\w+)"', str(annotation)):
            assert f"`{word}`" in TEXT, word


def rows_of(table: str) -> list[dict[str, str]]:
    """Return the rows of a table of the simulations."""
    path = REPOSITORY / "benchmarks" / "simulations" / table
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_what_looks_cost_is_in_the_table():
    table = {}
    for row in rows_of("looks.csv"):
        place = row["seeds"], row["looks"], row["rule"].partition(",")[0]
        if row["measure"] == "decided" and row["differences"].startswith("effect"):
            table.setdefault(place, []).append((float(row["value"]), row["mean seeds"]))
    shown = re.findall(r"^\| (\d+), (\d+) \| (\w+) \|(.*)\|$", TEXT, re.MULTILINE)
    assert len(shown) == 6
    for seeds, looks, rule, cells in shown:
        expected = table[seeds, looks, rule]
        for cell, (share, taken) in zip(cells.split("|"), expected, strict=True):
            percent, mean = re.fullmatch(r" ([\d.]+) % \(([\d.]+)\) ", cell).groups()
            assert float(percent) == pytest.approx(100 * share, abs=0.06) and mean == taken


def test_what_blocks_cost_is_in_the_table():
    rates = {"identical methods": [], "methods 1.5 sd of a pair apart": []}
    more = []
    for row in rows_of("compare.csv"):
        if row["part"] == "blocks" and row["what is true"].endswith("each tuned on 1"):
            rates[row["what is judged"]].append(row["how often"].removesuffix(" %"))
        if row["part"] == "blocks" and row["what is true"].startswith("as many"):
            more.append(row["how often"].removesuffix(" %"))
    for four, six, ten in rates.values():
        assert f"{four}, {six} and {ten} %" in " ".join(TEXT.split())
    assert f"{more[0]} and {more[2]} %" in TEXT


@pytest.mark.slow
def test_the_example_rehearses(folder, efftrain):
    done = efftrain("study", EXAMPLE, "--rehearse", "--jobs", "2", timeout=600)
    assert "rehearsal: every phase of length-warmup works" in done.stderr
    assert "confirmation  none     4" in done.stdout and "undecided" not in done.stdout
    assert [path.name for path in (folder / "runs").iterdir()] == ["length-warmup-study"]
