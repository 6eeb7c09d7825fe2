"""Pages of evidence that stand on a study: every estimate and interval of its last look is on the
page as the study printed it."""

from __future__ import annotations

import csv

import pytest

from tests.conftest import REPOSITORY

EVIDENCE = REPOSITORY / "docs" / "evidence"
LOOKS = sorted(EVIDENCE.glob("*/looks.csv"))


def shown(value: str, digits: int) -> str:
    return f"{float(value):+.{digits}f}".replace("-", "−")


def test_there_are_pages():
    assert len(LOOKS) >= 3


@pytest.mark.parametrize("path", LOOKS, ids=lambda path: path.parent.name)
def test_the_page_has_the_verdicts_of_its_study(path):
    page = path.parent.with_suffix(".md").read_text().replace("-0.", "−0.")
    rows = list(csv.DictReader(path.open()))
    assert rows
    for row in rows:
        assert row["arm"] in page
        if row["measure"].endswith("_to_target"):
            continue  # printed as a ratio
        if not row["estimate"]:  # too many runs failed or got stuck
            assert f"{float(row['p_holm']):.2f} | {row['outcome']}" in page
            continue
        digits = next(digits for digits in (4, 3) if shown(row["estimate"], digits) in page)
        assert f"[{shown(row['low'], digits)}, {shown(row['high'], digits)}]" in page, row


def test_the_table_of_all_evidence_names_every_page_and_study():
    table = (EVIDENCE / "README.md").read_text()
    for path in [*EVIDENCE.glob("*.toml"), *EVIDENCE.glob("*.md")]:
        assert path.name == "README.md" or f"({path.name})" in table, path.name


@pytest.mark.parametrize(
    "path",
    sorted(EVIDENCE.glob("*/*looks.csv")),
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_the_picture_shows_every_arm(path):
    picture = (EVIDENCE / "effects.svg").read_text()
    judged = [row for row in csv.DictReader(path.open()) if row["low"]]
    for arm in {row["arm"] for row in judged}:
        assert f">{arm}</text>" in picture, (
            "draw it again: python benchmarks/figures/evidence_picture.py"
        )


@pytest.mark.parametrize(
    "path",
    sorted(EVIDENCE.glob("*/*curves.csv")),
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_the_curves_end_where_the_runs_do(path):
    ends = {row["run"]: row for row in csv.DictReader(path.open())}
    runs = path.with_name(path.name.replace("curves", "runs"))
    for row in csv.DictReader(runs.open()):
        end = ends.pop(row["run"])
        assert end["tokens"] == row["tokens"]
        if row["final_loss"]:
            assert float(end["val_loss"]) == pytest.approx(float(row["final_loss"]), abs=6e-6)
    assert not ends
