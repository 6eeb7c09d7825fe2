"""What a study prints: its plan, where it stands, what tuning chose, and the verdicts, the answer first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from efftrain_cli.compare.engine import Looks, Verdict, sides_of
from efftrain_cli.compare.formats import format_estimate
from efftrain_cli.compare.groups import BEST_RULE
from efftrain_cli.compare.inference import POWER, Estimate, detectable
from efftrain_cli.compare.measures import AXIS_WORDS, Question
from efftrain_cli.compare.sensitivity import BESIDE, Curve
from efftrain_cli.foundation.console import (
    Row,
    human_bytes,
    human_count,
    human_seconds,
    printable,
    table_lines,
)
from efftrain_cli.study.file import Primary, Study, StudyFile, Tuning
from efftrain_cli.study.judge import StudyState
from efftrain_cli.study.phases import Phase, Tuned, left_of
from efftrain_cli.study.records import read_plan
from efftrain_cli.study.registration import Registration, why_not_registered
from efftrain_cli.study.tuning import expected_best, growth_trials, parabola_optimum
from efftrain_cli.trials.screen import settings_table
from efftrain_cli.trials.trial import recipe_of

# --- the plan --------------------------------------------------------------------------------------------------------


def plan_lines(file: StudyFile, phases: Sequence[Phase], jobs: int, free: int) -> list[str]:
    """Return what the study is going to spend, before anything is."""
    study = file.study
    question = f": {printable(study.question)}" if study.question else ""
    names = [arm.name + " (baseline)" * (arm.name == study.baseline) for arm in study.arms]
    registered = read_plan(file.name) is not None
    lines = [
        f"study      {file.name}{question}",
        f"hash       {file.sha256[:16]} of its meaning; fixed when the first run starts",
        f"arms       {', '.join(names)}",
        f"seeds      {_seeds_text(study, registered)}, judged after {_numbers(file.looks)} seeds",
    ]
    if study.tuning:
        lines.append(
            f"tuning     seeds {_seeds_text(study.tuning, registered)}{_growth_text(file)}"
        )
    lines += [f"primary    {primary_text(primary, study.baseline)}" for primary in study.primary]
    if 0 < len(file.rates) <= 2 * BESIDE:
        lines.append(
            f"warning: lr_sensitivity is judged from {2 * BESIDE + 1} rates on; give seven"
        )
    lines.append(f"looks      {looks_line(file)}")
    fault = "" if registered else why_not_registered(file)
    if fault:
        lines.append(f"warning: {fault}")

    rows: list[Row] = []
    for phase in phases:
        time = "unknown" if phase.seconds_left is None else human_seconds(phase.seconds_left)
        counts = (str(phase.runs), str(phase.done), human_count(phase.tokens_left), time)
        rows.append((phase.phase, phase.arm, *counts, human_bytes(phase.disk_bytes)))
    head = ("phase", "arm", "runs", "done", "tokens left", "time left", "disk")
    lines += ["", *table_lines(head, rows), ""]

    left = left_of(phases)
    total = f"{left.runs_left} runs to train, {human_count(left.tokens_left)} tokens"
    if left.seconds_left is None:
        total += "; time unknown: nothing was measured here yet"
    else:
        time = human_seconds(left.seconds_left)
        total += (
            f", about {time} of training one run after the other, by the nearest measurements here"
        )
        if jobs > 1:
            total += f"; --jobs {jobs} divides the processor among as many runs"
    lines.append(total)
    lines.append(f"disk: {human_bytes(left.disk_bytes)} needed at most, {human_bytes(free)} free")
    if left.disk_bytes > free:
        lines.append(
            "warning: that does not fit; lower checkpoint.keep, or set EFFTRAIN_RUNS to another disk"
        )
    if study.looks > 1:
        lines.append(
            "It ends at the first look at which every primary is decided, and is cheaper then."
        )
    return lines


def _seeds_text(section: Study | Tuning, registered: bool) -> str:
    """Return the seeds of a section as they are written, or that they are drawn."""
    if not section.n_seeds:
        return section.seeds or ""
    return f"{section.seeds}, drawn" if registered else f"{section.n_seeds} drawn when registered"


def _growth_text(file: StudyFile) -> str:
    """Return what growing grids may cost beyond the table, if they may still grow."""
    trials = growth_trials(file)
    if not trials:
        return ""
    tokens = sum(recipe_of(trial).train.tokens for trial in trials)
    return (
        f"; if a best learning rate is at the edge, all grids grow there, by {len(trials)} runs and "
        f"{human_count(tokens)} tokens at most"
    )


def primary_text(primary: Primary, baseline: str) -> str:
    """What must be shown."""
    question = primary.question
    words, margin = _title(question), _margin(question)
    if primary.target is not None:
        words += f" {primary.target:g}"
    return {
        "better": f"{words} better than {baseline}'s (one-sided)",
        "different": f"{words} different from {baseline}'s (two-sided)",
        "noninferior": f"{words} not worse than {baseline}'s by {margin} or more (one-sided)",
        "equivalent": f"{words} within {margin} of {baseline}'s (two one-sided tests)",
    }[primary.direction]


def _title(question: Question) -> str:
    """A study names a cost to match as one to the target, which is each pair's worse final loss."""
    if question.axis:
        return f"{AXIS_WORDS[question.axis].removeprefix('training ')} to the target"
    return question.title


def _margin(question: Question) -> str:
    margin = question.margin or 0.0
    return f"{100 * margin:g} %" if question.axis else f"{margin:g} nats"


def looks_line(file: StudyFile) -> str:
    """The rule of the looks."""
    from efftrain_cli.compare.sequential import nominal_levels

    looks, alpha = file.looks, file.study.alpha
    holm = f"; Holm over {file.comparisons} comparisons" if file.comparisons > 1 else ""
    shown = _shown_effect(file)
    if len(looks) == 1:
        return f"one, at level {alpha:g}{holm}{shown}"
    # Each direction has its own boundary.
    words = []
    for sides in dict.fromkeys(sides_of(primary.direction) for primary in file.study.primary):
        nominal = ", ".join(f"{level:.2g}" for level in nominal_levels(alpha, looks, sides))
        words.append(f"{'two' if sides == 2 else 'one'}-sided levels {nominal}")
    return (
        f"{len(looks)}, at nominal {' and '.join(words)}, which err together in {alpha:.0%} of studies without a "
        f"difference (group-sequential t){holm}{shown}"
    )


def _shown_effect(file: StudyFile) -> str:
    """The difference that the last look shows in 80 % of studies, after Holm and looks."""
    n, direction = len(file.seeds), file.study.primary[0].direction
    sides = sides_of(direction)
    looks = Looks(file.looks, len(file.looks), file.study.alpha, registered=True)
    one_sd = Estimate(0.0, se=1 / math.sqrt(n), df=n - 1)
    level = looks.level(looks.alpha / file.comparisons, sides)
    power = (1 + POWER) / 2 if direction == "equivalent" else POWER
    size = detectable(one_sd, level, power, one_sided=sides == 1)
    return f"; shows {size:.1f} standard deviations of a pair's difference in 80 % of studies"


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
    return ["Tuning", *settings_table(head, named, "diverged", "chosen"), "", *_expected(tuned)]


def _expected(tuned: Sequence[Tuned]) -> list[str]:
    """Return the lowest loss to expect of k settings, for each arm that was tuned."""
    columns = {arm.arm: expected_best(arm) for arm in tuned if arm.tried}
    rows: list[Row] = []
    for k in range(max(map(len, columns.values()))):
        cells = (f"{losses[k]:.4f}" if k < len(losses) else "-" for losses in columns.values())
        rows.append((str(k + 1), *cells))
    return [
        "Lowest mean loss to expect of so many settings drawn at random (Dodge et al. 2019)",
        *table_lines(("settings", *columns), rows),
    ]


def optima_line(curves: Sequence[Curve]) -> list[str]:
    """Return where parabolas through the best rates and their neighbours have their bottoms."""
    optima = [(curve.label, parabola_optimum(curve)) for curve in curves]
    words = [f"{label} {rate:.2g}" for label, rate in optima if rate is not None]
    if not words:
        return []
    each = ", ".join(words)
    return [
        f"optimum by a parabola through the best rate and its neighbours: {each}; it decides nothing"
    ]


# --- verdicts --------------------------------------------------------------------------------------------------------


def verdict_lines(file: StudyFile, judgement: StudyState, registration: Registration) -> list[str]:
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
    for verdict in judgement.verdicts:
        lines.append(sentence(file, verdict))
        if verdict.differed:
            lines.append(f"  {verdict.differed}.")
    lines.append("")
    rows: list[Row] = []
    for verdict in judgement.verdicts:
        p_holm = 1.0 if verdict.p_holm is None else verdict.p_holm
        p = "<.0001" if p_holm < 1e-4 else f"{p_holm:.4f}"
        numbers = (interval_text(verdict.estimate), p, str(len(verdict.seeds)))
        rows.append((_title(verdict.question), verdict.arm, *numbers, verdict.outcome))
    level = 100 * (1 - file.study.alpha)
    lines += table_lines(
        ("measure", "arm", f"difference [{level:g} %]", "p", "seeds", "verdict"), rows
    )
    unit = (
        "arm less baseline, nats per token"
        if any(not verdict.question.axis for verdict in judgement.verdicts)
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
            f"{severity}: {label.text}" for label in judgement.labels if label.kind == severity
        ]
    return lines


def why_exploratory(judgement: StudyState, registration: Registration | None) -> list[str]:
    """Why no verdict is a confirmation; empty where they are."""
    reasons = list(registration.exploratory) if registration else ["not registered"]
    return [*reasons, *(label.text for label in judgement.labels if label.kind == "allowed")]


def sentence(file: StudyFile, verdict: Verdict) -> str:
    """One verdict as one sentence."""
    base, question, arm = file.study.baseline, verdict.question, verdict.arm
    words, note = _title(question), note_of(verdict)
    by = "" if math.isnan(verdict.estimate.mean) else f": {interval_text(verdict.estimate)}"
    by += f" ({note})" if note else ""
    if verdict.outcome in ("better", "worse"):
        return f"{arm}: {verdict.outcome} than {base} in {words}{by}."
    if verdict.outcome == "noninferior":
        return f"{arm}: not worse than {base} in {words} by {_margin(question)} or more{by}."
    if verdict.outcome == "equivalent":
        return f"{arm}: equivalent to {base} in {words}, within {_margin(question)}{by}."
    if verdict.opposite:
        test = "interval" if verdict.exact is None else "exact test"
        beyond = question.direction == "equivalent" and verdict.exact is None
        word = "beyond the margin" if beyond else "worse"
        return f"{arm}: {question.direction} is not shown; the {test} says {word} in {words}{by}."
    seen = ""
    if verdict.min_detectable_effect is not None:
        seen = f"; such a study shows {_size(verdict)} in 80 % of cases{_between(verdict)}"
    return f"{arm}: undecided in {words}{by}{seen}."


def note_of(verdict: Verdict) -> str:
    """Why there is no interval, or by which test the verdict was reached."""
    why = verdict.why.text if verdict.why else ""
    return "; ".join(text for text in (why, verdict.note) if text)


def _size(verdict: Verdict) -> str:
    size, question = verdict.min_detectable_effect or 0.0, verdict.question
    if question.direction in ("noninferior", "equivalent"):
        return (
            f"a margin of {100 * size:.2g} %" if question.axis else f"a margin of {size:.2g} nats"
        )
    return f"a factor of {1 + size:.2f}" if question.axis else f"a difference of {size:.2g} nats"


def _between(verdict: Verdict) -> str:
    """The interval of that size, from the spread's own."""
    if verdict.min_detectable_range is None:
        return ""
    low, high = verdict.min_detectable_range
    if not verdict.question.axis:
        return f" (by the spread's own interval {low:.2g} to {high:.2g})"
    if verdict.question.direction in ("noninferior", "equivalent"):
        low, high = 100 * low, 100 * high
        return f" (by the spread's own interval {low:.2g} to {high:.2g} %)"
    return f" (by the spread's own interval {1 + low:.2f} to {1 + high:.2f})"


def interval_text(estimate: Estimate) -> str:
    """Write the estimate with its interval, a ratio with three decimals."""
    mean = None if math.isnan(estimate.mean) else estimate.mean
    return format_estimate(mean, estimate.low, estimate.high, estimate.log, decimals=3)


# --- for programs ----------------------------------------------------------------------------------------------------


def as_json(
    file: StudyFile, judgement: StudyState, registration: Registration | None
) -> dict[str, Any]:
    """Plan and verdicts as plain values; null where there is no number."""
    return {
        "schema_version": 1,
        "study": file.name,
        "question": file.study.question,
        "sha256": file.sha256,
        "registered": registration.registered if registration else None,
        "exploratory": why_exploratory(judgement, registration),
        "labels": [{"severity": each.kind, "text": each.text} for each in judgement.labels],
        "baseline": file.study.baseline,
        "alpha": file.study.alpha,
        "looks": list(judgement.looks),
        "look": judgement.look,
        "nominal_levels": list(judgement.levels),
        "complete": judgement.complete,
        "pending": list(judgement.pending),
        "tuning": {
            "rule": BEST_RULE,
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
                "measure": verdict.question.key,
                "direction": verdict.question.direction,
                "margin": verdict.question.margin,
                "target": verdict.question.target,
                "rates": list(file.rates) if verdict.question.over_rates else None,
                "arm": verdict.arm,
                "seeds": list(verdict.seeds),
                "estimate": verdict.estimate.mean if math.isfinite(verdict.estimate.mean) else None,
                "low": verdict.estimate.low,
                "high": verdict.estimate.high,
                "ratio": verdict.estimate.log,
                "p": verdict.p,
                "p_holm": verdict.p_holm,
                "outcome": verdict.outcome,
                "could_see": verdict.min_detectable_effect,
                "note": note_of(verdict),
                "differed": verdict.differed,
            }
            for verdict in judgement.verdicts
        ],
    }
