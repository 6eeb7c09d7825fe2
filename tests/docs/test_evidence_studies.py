"""Pages of evidence that stand on a study: every estimate and interval of its last look is on the page as the study
printed it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

EVIDENCE = REPOSITORY / "docs" / "evidence"
LOOKS = sorted(EVIDENCE.glob("*/looks.csv"))


def shown(value: str, digits: int) -> str:
    return f"{float(value):+.{digits}f}".replace("-", "−")


def test_there_are_pages() -> None:
    assert len(LOOKS) >= 3


@pytest.mark.parametrize("path", LOOKS, ids=lambda path: path.parent.name)
def test_the_page_has_the_verdicts_of_its_study(path: Path) -> None:
    page = path.parent.with_suffix(".md").read_text().replace("-0.", "−0.")
    rows = list(csv.DictReader(path.open()))
    assert rows
    for row in rows:
        if row["measure"].endswith("_to_target"):
            continue  # printed as a ratio
        digits = next(digits for digits in (4, 3) if shown(row["estimate"], digits) in page)
        assert f"[{shown(row['low'], digits)}, {shown(row['high'], digits)}]" in page, row
        assert row["arm"] in page


def test_the_table_of_all_evidence_names_every_page_and_study() -> None:
    table = (EVIDENCE / "README.md").read_text()
    for path in [*EVIDENCE.glob("*.toml"), *EVIDENCE.glob("*.md")]:
        assert path.name == "README.md" or f"({path.name})" in table, path.name


@pytest.mark.parametrize(
    "path",
    sorted(EVIDENCE.glob("*/*looks.csv")),
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_the_picture_shows_every_arm(path: Path) -> None:
    picture = (EVIDENCE / "effects.svg").read_text()
    for arm in {row["arm"] for row in csv.DictReader(path.open())}:
        assert f">{arm}</text>" in picture, (
            "draw it again: python benchmarks/figures/evidence_picture.py"
        )
