"""What a study prints: its plan, where it stands, what tuning chose, and the verdicts, the answer first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from efftrain_cli.compare.inference import Estimate
from efftrain_cli.foundation.console import (
    Row,
    human_bytes,
    human_count,
    human_seconds,
    table_lines,
)
from efftrain_cli.study.file import LOSSES, Primary, StudyFile
from efftrain_cli.study.judge import Judgement, Verdict, sides_of
from efftrain_cli.study.phases import Phase, Tuned, left_of
from efftrain_cli.study.registration import Registration
from efftrain_cli.sweep.screen import settings_table
from efftrain_cli.sweep.trials import RULE

MEASURES = {
    "final_loss": "final loss",
    "lr_sensitivity": "learning-rate sensitivity",
    "tokens_to_target": "tokens to the target",
    "flops_to_target": "FLOPs to the target",
    "seconds_to_target": "seconds to the target",
}


# --- the plan --------------------------------------------------------------------------------------------------------


def plan_lines(file: StudyFile, phases: Sequence[Phase], jobs: int, free: int) -> list[str]:
    """What the study is going to spend, before anything is."""
    study = file.study
    lines = [
        f"study      {file.name}: {study.question}" if study.question else f"study      {file.name}"
    ]
    lines.append(f"hash       {file.sha256[:16]} of its meaning; fixed when the first run starts")
    arms = ", ".join(
        f"{arm.name} (baseline)" if arm.name == study.baseline else arm.name for arm in study.arms
    )
    lines += [
        f"arms       {arms}",
        f"seeds      {study.seeds}, judged after {_numbers(file.looks)} seeds",
    ]
    lines += [f"primary    {primary_text(primary, study.baseline)}" for primary in study.primary]
    lines += [f"looks      {looks_line(file)}", ""]
    rows: list[Row] = []
    for phase in phases:
        time = "unknown" if phase.seconds_left is None else human_seconds(phase.seconds_left)
        tokens = human_count(phase.tokens_left)
        rows.append(
            (
                phase.phase,
                phase.arm,
                str(phase.runs),
                str(phase.done),
                tokens,
                time,
                human_bytes(phase.disk_bytes),
            )
        )
    lines += table_lines(("phase", "arm", "runs", "done", "tokens left", "time left", "disk"), rows)
    left = left_of(phases)
    total = f"{left.runs_left} runs to train, {human_count(left.tokens_left)} tokens"
    if left.seconds_left is None:
        total += "; time unknown: nothing was measured here yet"
    else:
        total += f", about {human_seconds(left.seconds_left)} of training one run after the other, by the nearest measurements here"
        if jobs > 1:
            total += f"; --jobs {jobs} divides the processor among as many runs"
    lines += [
        "",
        total,
        f"disk: {human_bytes(left.disk_bytes)} needed at most, {human_bytes(free)} free",
    ]
    if left.disk_bytes > free:
        lines.append(
            "warning: that does not fit; lower checkpoint.keep, or set EFFTRAIN_RUNS to another disk"
        )
    if study.looks > 1:
        lines.append(
            "It ends at the first look at which every primary is decided, and is cheaper then."
        )
    return lines


def primary_text(primary: Primary, baseline: str) -> str:
    """What must be shown."""
    words = MEASURES[primary.measure]
    if primary.target is not None:
        words += f" {primary.target:g}"
    margin = "" if primary.margin is None else _margin(primary)
    return {
        "better": f"{words} better than {baseline}'s (one-sided)",
        "different": f"{words} different from {baseline}'s (two-sided)",
        "noninferior": f"{words} not worse than {baseline}'s by {margin} or more (one-sided)",
        "equivalent": f"{words} within {margin} of {baseline}'s (two one-sided tests)",
    }[primary.direction]


def _margin(primary: Primary) -> str:
    return (
        f"{primary.margin:g} nats"
        if primary.measure in LOSSES
        else f"{100 * (primary.margin or 0):g} %"
    )


def looks_line(file: StudyFile) -> str:
    """The rule of the looks."""
    from efftrain_cli.compare.sequential import nominal_levels

    looks, alpha = file.looks, file.study.alpha
    holm = f"; Holm over {file.comparisons} comparisons" if file.comparisons > 1 else ""
    if len(looks) == 1:
        return f"one, at level {alpha:g}{holm}"
    # Each direction has its own boundary.
    words = []
    for sides in dict.fromkeys(map(sides_of, file.study.primary)):
        nominal = ", ".join(f"{level:.2g}" for level in nominal_levels(alpha, looks, sides))
        words.append(f"{'two' if sides == 2 else 'one'}-sided levels {nominal}")
    return (
        f"{len(looks)}, at nominal {' and '.join(words)}, which err together in {alpha:.0%} of studies without a "
        f"difference (group-sequential t){holm}"
    )


def _numbers(values: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, values[:-1])), str(values[-1]))))


# --- tuning ----------------------------------------------------------------------------------------------------------


def tuning_lines(tuned: Sequence[Tuned]) -> list[str]:
    """Every setting tried with its losses, what was chosen, and by which rule."""
    named = [
        (arm.arm, " ".join(choice.settings[-max(1, len(arm.settings)) :]), choice)
        for arm in tuned
        for choice in arm.tried
    ]
    head = ("arm", "setting", "mean loss", "by tuning seed", "")
    return ["Tuning", *settings_table(head, named, "diverged", "chosen")]


# --- verdicts --------------------------------------------------------------------------------------------------------


def verdict_lines(file: StudyFile, judgement: Judgement, registration: Registration) -> list[str]:
    """The answer, then how it was reached."""
    lines = []
    if reasons := [f"  - {reason}" for reason in why_exploratory(judgement, registration)]:
        lines += ["EXPLORATORY: no verdict below is a confirmation, because", *reasons, ""]
    if not judgement.look:
        done = f"No verdict yet: the first look is at {judgement.looks[0]} seeds"
        return [
            *lines,
            f"{done}, and {len(judgement.pending)} runs are still to end, such as {judgement.pending[0]}.",
        ]
    lines += [sentence(file, verdict) for verdict in judgement.verdicts]
    lines.append("")
    rows: list[Row] = []
    for verdict in judgement.verdicts:
        p = "<.0001" if verdict.p_holm < 1e-4 else f"{verdict.p_holm:.4f}"
        numbers = (interval_text(verdict.estimate), p, str(len(verdict.seeds)))
        rows.append((MEASURES[verdict.primary.measure], verdict.arm, *numbers, verdict.outcome))
    level = 100 * (1 - file.study.alpha)
    lines += table_lines(
        ("measure", "arm", f"difference [{level:g} %]", "p", "seeds", "verdict"), rows
    )
    unit = (
        "arm less baseline, nats per token"
        if any(v.primary.measure in LOSSES for v in judgement.verdicts)
        else ""
    )
    ratio = (
        "baseline / arm, above 1 the arm needs less"
        if any(v.estimate.log for v in judgement.verdicts)
        else ""
    )
    paid = "p and intervals are adjusted for every look"
    if file.comparisons > 1:
        paid += f", p for {file.comparisons} comparisons too; intervals are not corrected for the number of comparisons"
    lines.append(f"differences: {'; '.join(filter(None, (unit, ratio, paid)))}")
    taken = f"look {judgement.look} of {len(judgement.looks)}"
    if judgement.complete:
        early = judgement.decided and judgement.look < len(judgement.looks)
        lines.append(f"{taken}: the study has ended" + (", everything is decided" if early else ""))
    else:
        lines.append(f"{taken}; the next is at {judgement.looks[judgement.look]} seeds")
    lines.append(f"looks: {looks_line(file)}")
    lines.append(f"registered {registration.registered}, hash {registration.sha256[:16]}")
    lines += [f"warning: {warning}" for arm in judgement.tuned for warning in arm.warnings]
    for severity in ("warning", "note"):
        lines += [
            f"{severity}: {label.text}" for label in judgement.labels if label.severity == severity
        ]
    return lines


def why_exploratory(judgement: Judgement, registration: Registration | None) -> list[str]:
    """Why no verdict is a confirmation; empty where they are."""
    reasons = list(registration.exploratory) if registration else ["not registered"]
    return [*reasons, *(label.text for label in judgement.labels if label.severity == "allowed")]


def sentence(file: StudyFile, verdict: Verdict) -> str:
    """One verdict as one sentence."""
    base, primary, arm = file.study.baseline, verdict.primary, verdict.arm
    words = MEASURES[primary.measure]
    ranked = math.isnan(verdict.estimate.mean)
    by = "" if ranked else f": {interval_text(verdict.estimate)}"
    by += f" ({verdict.note})" if verdict.note else ""
    if verdict.outcome in ("better", "worse"):
        return f"{arm}: {verdict.outcome} than {base} in {words}{by}."
    if verdict.outcome == "noninferior":
        return f"{arm}: not worse than {base} in {words} by {_margin(primary)} or more{by}."
    if verdict.outcome == "equivalent":
        return f"{arm}: equivalent to {base} in {words}, within {_margin(primary)}{by}."
    if verdict.opposite:
        word = "beyond the margin" if primary.direction == "equivalent" and not ranked else "worse"
        test = "rank test" if ranked else "interval"
        return f"{arm}: {primary.direction} is not shown; the {test} says {word} in {words}{by}."
    seen = (
        ""
        if verdict.could_see is None
        else f"; such a study shows {_size(verdict)} in 80 % of cases"
    )
    return f"{arm}: undecided in {words}{by}{seen}."


def _size(verdict: Verdict) -> str:
    size, nats = verdict.could_see or 0.0, verdict.primary.measure in LOSSES
    if verdict.primary.direction in ("noninferior", "equivalent"):
        return f"a margin of {size:.2g} nats" if nats else f"a margin of {100 * size:.2g} %"
    return f"a difference of {size:.2g} nats" if nats else f"a factor of {1 + size:.2f}"


def interval_text(estimate: Estimate) -> str:
    """The estimate with its interval."""
    if math.isnan(estimate.mean):
        return "-"
    form = "{:.3f}x" if estimate.log else "{:+.4f}"
    mean = form.format(estimate.mean)
    if estimate.low is None or estimate.high is None:
        return mean
    return f"{mean} [{form.format(estimate.low)}, {form.format(estimate.high)}]"


# --- for programs ----------------------------------------------------------------------------------------------------


def as_json(
    file: StudyFile, judgement: Judgement, registration: Registration | None
) -> dict[str, Any]:
    """Plan and verdicts as plain values; null where there is no number."""
    return {
        "schema_version": 1,
        "study": file.name,
        "question": file.study.question,
        "sha256": file.sha256,
        "registered": registration.registered if registration else None,
        "exploratory": why_exploratory(judgement, registration),
        "labels": [asdict(label) for label in judgement.labels],
        "baseline": file.study.baseline,
        "alpha": file.study.alpha,
        "looks": list(judgement.looks),
        "look": judgement.look,
        "nominal_levels": list(judgement.levels),
        "complete": judgement.complete,
        "pending": list(judgement.pending),
        "tuning": {
            "rule": RULE,
            "arms": [
                {
                    "arm": arm.arm,
                    "chosen": list(arm.settings),
                    "tried": [
                        {"settings": list(c.settings), "losses": list(c.losses)} for c in arm.tried
                    ],
                    "warnings": list(arm.warnings),
                }
                for arm in judgement.tuned
            ],
        },
        "verdicts": [
            {
                **asdict(verdict.primary),
                "arm": verdict.arm,
                "seeds": list(verdict.seeds),
                "estimate": verdict.estimate.mean if math.isfinite(verdict.estimate.mean) else None,
                "low": verdict.estimate.low,
                "high": verdict.estimate.high,
                "ratio": verdict.estimate.log,
                "p": verdict.p,
                "p_holm": verdict.p_holm,
                "outcome": verdict.outcome,
                "could_see": verdict.could_see,
                "note": verdict.note,
            }
            for verdict in judgement.verdicts
        ],
    }
