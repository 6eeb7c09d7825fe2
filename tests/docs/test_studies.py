"""docs/studies.md: its commands run, its keys are those of a study file, its example is planned."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from efftrain_cli.compare.inference import Direction
from efftrain_cli.compare.judge import Judged
from efftrain_cli.foundation.records import digest_of
from efftrain_cli.study.file import Study
from efftrain_cli.study.plans import read_study
from tests.conftest import REPOSITORY, cli
from tests.docs.pages import blocks_of, commands_of, text_of

TEXT = text_of("studies")
COMMANDS = commands_of("studies")
EVIDENCE = sorted((REPOSITORY / "docs" / "evidence").glob("*.toml"))
EXAMPLE = "docs/studies/length-warmup.toml"
HASHES = {
    "baselines": "7d5af99d56ce383a",
    "chunk-based-accumulation": "565571388ddb7fda",
    "layer-dropping-equal": "aee65d653db2a768",
    "layer-dropping": "aee65d653db2a768",
    "long-contexts-batch-ramp": "fb90fffabd7c33ab",
    "long-contexts-low-rate": "c88ae5b1e5380e38",
    "long-contexts": "7fb805f326f86f1c",
    "ouroboros-muon": "779400e0083357a2",
    "ouroboros": "7a9117519fc45250",
    "simigrad": "00d6bb6c5e506be6",
    "staged-training": "453a5aff96221c1f",
    "standardization-loss": "62970ac57a6b6eb8",
    "tuned-warmup": "3989e438b7b991da",
    "warmup-rivals": "803b1ae43348c701",
}
"""Beginnings of the hashes of the studies that were run, under today's keys: whatever is renamed,
they train and judge what they did."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with the project's docs."""
    shutil.copytree(REPOSITORY / "docs" / "studies", tmp_path / "docs" / "studies")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, folder):
    """Without its training: the plan of it, or the status of nothing yet."""
    words = shlex.split(command, comments=True)[1:]
    if not {"--plan", "--status"} & {*words}:
        words = [word for word in words if word != "--check"] + ["--plan"]
    cli(*words)
    assert not (folder / "runs").exists()


def test_the_example_and_the_study_on_the_page_are_planned(folder):
    assert "runs    6 to tune (1 seed), 10 to judge" in cli("study", EXAMPLE, "--plan").stdout
    (block,) = blocks_of("studies", "toml")
    (folder / "mine.toml").write_text(block)
    text = cli("study", "mine.toml", "--plan").stdout
    assert "runs    18 to tune (3 seeds), 10 to judge (5 pairs); looks at 3, 5 pairs" in text
    assert "28 runs, 4.2M tokens" in text


def test_studies_of_the_evidence_keep_their_hashes():
    """Read with all their recipes, as by --plan; none is trained."""
    hashes = {}
    for path in EVIDENCE:
        hashes[path.stem] = digest_of(read_study(path).values)[:16]
    assert hashes == HASHES


def test_the_page_names_every_key():
    named = set(re.findall(r"`\[*([a-z_]+)\]*`", TEXT))
    assert {field.name for field in fields(Study)} <= named | {"primary", "tuning", "arms"}
    assert {*get_args(Judged), *get_args(Direction)} <= named
