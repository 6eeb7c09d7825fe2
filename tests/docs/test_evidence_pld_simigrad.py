"""The evidence pages of layer dropping and SimiGrad: their tables are those of the rows beside them, and the arms cost what is said."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import load_recipe
from tests.conftest import REPOSITORY

PAGES = REPOSITORY / "docs" / "evidence"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts that made the pages, by the page's name."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import evidence_pld
    import evidence_simigrad

    yield {"progressive-layer-dropping": evidence_pld, "simigrad": evidence_simigrad}
    for name in ("evidence_pld", "evidence_simigrad", "evidence_runs"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("page", "baseline"), [("progressive-layer-dropping", "dense"), ("simigrad", "fixed batch 16")]
)
def test_tables_are_those_of_the_rows(scripts: dict[str, ModuleType], page: str, baseline: str) -> None:
    from evidence_runs import in_order, read_rows, table

    rows = in_order(read_rows(Path(scripts[page].RESULTS)), scripts[page].ARMS)
    assert table(rows, baseline) in (PAGES / f"{page}.md").read_text(encoding="utf-8")


def test_arms_of_equal_flops_plan_equal_flops(scripts: dict[str, ModuleType]) -> None:
    script = scripts["progressive-layer-dropping"]

    def flops(arm: str) -> float:
        return summarize_plan(load_recipe("small", [*script.COMMON, *script.ARMS[arm]]), vocab_size=512).flops

    for arm in script.ARMS:
        assert (flops(arm) == pytest.approx(flops("dense"), rel=0.005)) == ("tokens" not in arm), arm


def test_arms_of_simigrad_train_on_equal_tokens(scripts: dict[str, ModuleType]) -> None:
    script = scripts["simigrad"]
    for overrides in script.ARMS.values():
        assert load_recipe("small", [*script.COMMON, *overrides]).train.tokens == 500_736
