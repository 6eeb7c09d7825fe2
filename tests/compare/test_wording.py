"""Words decide nothing: with every text replaced by "x" each verdict is the same."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import efftrain_cli
from efftrain_cli.compare.engine import Verdict
from efftrain_cli.compare.frames import frame_of
from efftrain_cli.compare.measures import Costs, measures
from efftrain_cli.compare.verdicts import short_verdict
from efftrain_cli.foundation.why import Why
from efftrain_cli.study.file import MEASURES, Primary
from tests.compare import made
from tests.study.test_judge import BASE, cost_study, curves, judge, runs, shifted, study


def answer(found: Verdict) -> tuple[object, ...]:
    return (
        found.question.key,
        found.arm,
        found.outcome,
        found.why and found.why.kind,
        found.p,
        found.p_holm,
        found.p_equivalent,
        found.min_detectable_effect,
        found.opposite,
        found.estimate.low,
        found.exact and found.exact.p,
        found.items_p,
    )


@pytest.fixture
def reword(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Replace every reason's text from now on, those that modules keep included."""

    def replace() -> None:
        import efftrain_cli.compare.comparability as comparability
        import efftrain_cli.compare.engine as engine
        import efftrain_cli.compare.inference as inference
        import efftrain_cli.compare.measures as measures

        def init(why: Why, kind: str, text: str) -> None:
            object.__setattr__(why, "kind", kind)
            object.__setattr__(why, "text", "x")

        monkeypatch.setattr(Why, "__init__", init)
        for module in (engine, comparability, inference, measures):
            for name, value in vars(module).copy().items():
                if isinstance(value, Why):
                    monkeypatch.setattr(module, name, Why(value.kind, value.text))

    return replace


@pytest.mark.parametrize(
    "make",
    [
        made.plain,
        made.one_seed_with_scores,
        made.failed,
        made.pending,
        made.few,
        made.settings,
        made.moved,
        made.allowed,
    ],
)
def test_a_comparison_does_not_depend_on_words(root, make, reword):
    before = make(root)
    for path in root.iterdir():
        shutil.rmtree(path)
    reword()
    after = make(root)
    assert {why.text for why in after.labels} <= {"x"}
    assert [answer(found) for found in after.verdicts] == [
        answer(found) for found in before.verdicts
    ]
    assert list(map(short_verdict, after.verdicts)) == list(map(short_verdict, before.verdicts))
    columns = ["measure", "arm", "baseline", "mean", "estimate", "p_holm", "verdict", "kind"]
    assert frame_of(after)[columns].equals(frame_of(before)[columns])


def test_a_study_does_not_depend_on_words(reword):
    speeds = [0.80, 0.81, 0.79, 0.80, 0.82, 0.78, 0.80]
    faster = [speed * 1.1 + 0.001 * i for i, speed in enumerate(speeds)]

    def judged() -> list[tuple[object, ...]]:
        many, two = [*BASE, 3.51, 3.48], study("better", seeds="0..6", looks=2)
        mixed = curves(base=speeds, method=faster)
        mixed["method"][3].recipe = {"train.tokens": 200_000}
        states = [
            judge(study(), runs(base=BASE, method=shifted(-0.05))),
            judge(study(), runs(base=BASE, method=BASE)),
            judge(two, runs(base=many, method=[None] * 6 + [3.45])),
            judge(two, runs(base=[None] * 6 + [3.45], method=many)),
            judge(cost_study(target=4.0), curves(base=[0.5] * 7, method=speeds)),
            judge(cost_study(), mixed),
            judge(study(), runs(base=BASE, method=shifted(-0.05)), Why("not_judged", "no")),
        ]
        return [answer(found) for state in states for found in state.verdicts]

    before = judged()
    assert {found[2] for found in before} == {"better", "undecided"}
    reword()
    assert judged() == before


def test_every_measure_of_a_study_is_a_question():
    assert tuple(MEASURES) == get_args(get_type_hints(Primary)["measure"])
    assert {name for name, asked in MEASURES.items() if asked.over_rates} == {"lr_sensitivity"}
    assert [asked.axis for asked in MEASURES.values()] == ["", "", "tokens", "flops"]


def test_nothing_asks_for_a_question_by_the_spelling_of_its_key(root):
    """In `compare` and `study` no `==`, `in`, startswith or endswith has a question's key beside
    it."""
    groups = made.plain(root).groups
    asked = [*measures(groups), *measures(groups, 3.0, Costs(1.0, 1.0))]
    keys = {*MEASURES, "updates_to_match"} | {question.key for question in asked}
    root = Path(efftrain_cli.__file__).parent
    found = []
    for path in (*root.glob("compare/*.py"), *root.glob("study/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                words = [
                    each for operand in (node.left, *node.comparators) for each in texts(operand)
                ]
                found += [(path.name, node.lineno, word) for word in words if word in keys]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("startswith", "endswith"):
                    words = [
                        word for operand in node.args for word in texts(operand) if "_" in word
                    ]
                    parts = [word for word in words if any(word in key for key in keys)]
                    found += [(path.name, node.lineno, word) for word in parts]
    # The status of a run has the name of the question that counts it.
    assert [each for each in found if each[2] != "diverged"] == []


def texts(expression: ast.expr) -> list[str]:
    found = [each.value for each in ast.walk(expression) if isinstance(each, ast.Constant)]
    return [value for value in found if isinstance(value, str)]
