"""`compare` and `study` say the same of the same runs, whatever decides or withholds a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from efftrain_cli.compare.comparability import INCOMPARABLE
from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.engine import Verdict
from efftrain_cli.study.file import Arm, Primary, Study, StudyFile
from efftrain_cli.study.judge import JudgedRun, judge
from tests.compare import made


def judged_as_study(comparison: Comparison, found: Verdict) -> Verdict:
    """The verdict of a study with one look whose only primary is the question of a comparison's
    verdict."""
    question = found.question
    base = comparison.baseline
    measure = f"{question.axis}_to_target" if question.axis else question.key
    primary = Primary(measure=measure, direction="different", target=question.target)
    names = (base.label, found.arm)
    study = Study(
        seeds=f"0..{len(base.seeds) - 1}",
        baseline=base.label,
        primary=(primary,),
        arms=tuple(Arm(name=name, recipe=name) for name in names),
        equal=comparison.questions[0].equal or "tokens",
    )
    runs = []
    for group in comparison.groups:
        runs += [JudgedRun(group.label, None, run) for run in group.runs]
    is_allowed = any(label.kind == "allowed" for label in comparison.labels)
    file = StudyFile(Path("made.toml"), study)
    (verdict,) = judge(file, runs, INCOMPARABLE if is_allowed else None).verdicts
    return verdict


def reason(found: Verdict) -> tuple[str, str]:
    """The kind and words of a verdict's reason, without the runs of other recipes."""
    assert found.why is not None
    return found.why.kind, found.why.text


@pytest.mark.parametrize(
    ("make", "key", "text"),
    [
        (made.plain, "tokens_to_match", "better"),
        (made.one_seed_with_scores, "final_loss", "one seed: no claim"),
        (made.failed, "flops_to_target", "better"),
        (made.failed_once, "tokens_to_match", "undecided"),
        (made.allowed, "final_loss", "not judged: these losses are not comparable"),
        (made.uncounted, "flops_to_match", "not judged: muon-seed0, muon-seed1, muon-seed2: begun"),
        (made.half_decayed, "final_loss", "not judged: small is at 100 % of its decay, small-slw"),
        (made.other_evaluations, "final_loss", "better"),
        (made.sparse, "tokens_to_match", "not judged: evaluations every 10 steps leave it open"),
        (made.longer, "final_loss", "better"),
        (made.much_longer, "final_loss", "not judged: long spent 2.00x the tokens of small"),
        (made.not_reached, "tokens_to_target", "better"),
    ],
)
def test_compare_and_study_say_the_same_of_the_same_runs(root, make, key, text):
    comparison = make(root)
    asked = [v for v in comparison.verdicts if v.question.key == key]
    assert asked[0].text.startswith(text)
    for found in comparison.verdicts:
        question = found.question
        if question.point is not None or question.axis in ("step", "seconds"):
            continue
        if question.tested not in ("difference", "match", "ratio"):
            continue
        other = judged_as_study(comparison, found)
        if found.why and found.why.kind != "too_few":
            assert reason(other) == reason(found)
            assert (other.outcome, other.p) == ("undecided", 1.0)
            continue
        assert (other.exact, other.p, other.note) == (found.exact, found.p, found.note)
        assert other.differed == found.differed
        if found.exact is None:
            assert other.estimate == found.estimate
        if found.p_holm == found.p:
            assert other.outcome == found.outcome
