"""What a study prints: its plan, where it stands, what tuning chose, and the verdicts, the answer first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from efftrain_cli.compare import sensitivity
from efftrain_cli.compare.engine import Verdict, chance_of_claim, min_detectable_effect, sides_of
from efftrain_cli.compare.groups import BEST_RULE
from efftrain_cli.compare.inference import Estimate
from efftrain_cli.compare.sensitivity import BESIDE, Curve
from efftrain_cli.compare.verdicts import interval_text, margin_text, note_of, sentence
from efftrain_cli.foundation.console import (
    Row,
    counted,
    human_bytes,
    human_count,
    human_seconds,
    printable,
    table_lines,
)
from efftrain_cli.study.file import Primary, StudyFile
from efftrain_cli.study.judge import StudyState
from efftrain_cli.study.phases import (
    Phase,
    Tuned,
    best_of_k,
    choices,
    expected_best,
    sum_phases,
    tuning,
    widest,
)
from efftrain_cli.study.records import Plan, read_plan
from efftrain_cli.study.registration import why_not_registered
from efftrain_cli.trials.curves import optimum
from efftrain_cli.trials.screen import settings_table
from efftrain_cli.trials.trial import Choice

# --- the plan ---------------------------------------------------------------------------------


def plan_lines(
    file: StudyFile,
    phases: Sequence[Phase],
    jobs: int,
    free: int,
) -> list[str]:
    """Return what the study is going to spend, before anything is.

    Args:
        free: bytes free in the folder of runs.
    """
    study = file.study
    question = f": {printable(study.question)}" if study.question else ""
    names = [arm.name + " (baseline)" * (arm.name == study.baseline) for arm in study.arms]
    lines = [
        f"study      {file.name}{question}",
        f"hash       {file.sha256[:16]} of its meaning; fixed when the first run starts",
        f"arms       {', '.join(names)}",
        f"seeds      {_seeds_text(file, 'seeds', study.seeds)}, judged after {_numbers(file.looks)} seeds",
    ]
    if study.blocks:
        each = counted(file.seeds_to_draw["tuning.seeds"] // study.blocks, "seed")
        lines.append(f"blocks     each tunes every arm on {each} of its own, and is judged by one")
    if study.tuning:
        seeds = _seeds_text(file, "tuning.seeds", study.tuning.seeds)
        lines.append(f"tuning     seeds {seeds}")
        most = len(tuning(widest(file)))
        if most > len(tuning(file)) and not choices(file):
            lines[-1] += f"; grids may grow at their edges, to {most} tuning runs at most"
    lines += [f"primary    {primary_text(primary, study.baseline)}" for primary in study.primary]
    if 0 < len(file.rates) <= 2 * BESIDE:
        least = 2 * BESIDE + 1
        lines.append(f"warning: lr_sensitivity is judged from {least} rates on; give seven")
    lines.append(f"looks      {looks_line(file)}")
    fault = why_not_registered(file)
    if fault and read_plan(file.name) is None:
        lines.append(f"warning: {fault}")

    rows: list[Row] = []
    for phase in phases:
        time = "unknown" if phase.seconds_left is None else human_seconds(phase.seconds_left)
        counts = (str(phase.runs), str(phase.done), human_count(phase.tokens_left))
        rows.append((phase.phase, phase.arm, *counts, time, human_bytes(phase.disk_bytes)))
    head = ("phase", "arm", "runs", "done", "tokens left", "time left", "disk")
    lines += ["", *table_lines(head, rows), ""]

    left = sum_phases("all", "", phases)
    total = f"{left.runs_left} runs to train, {human_count(left.tokens_left)} tokens"
    if left.seconds_left is None:
        total += "; time unknown: nothing was measured here yet"
    else:
        total += f", about {human_seconds(left.seconds_left)} of training one run after the other, "
        total += "by the nearest measurements here"
        if jobs > 1:
            total += f"; --jobs {jobs} divides the processor among as many runs"
    needed = human_bytes(left.disk_bytes)
    lines += [total, f"disk: {needed} needed at most, {human_bytes(free)} free"]
    if left.disk_bytes > free:
        fix = "lower checkpoint.keep, or set EFFTRAIN_RUNS to another disk"
        lines.append(f"warning: that does not fit; {fix}")
    if study.looks > 1:
        lines.append(
            "It ends at the first look at which every primary is decided, and is cheaper then."
        )
    return lines


def _seeds_text(file: StudyFile, key: str, given: str | None) -> str:
    """Return seeds as they are given, or how many are drawn, or those that were registered."""
    if given:
        return given
    if read_plan(file.name) is None:
        return f"{file.seeds_to_draw[key]} drawn when registered"
    return f"{file.drawn[key]}, drawn"


def primary_text(primary: Primary, baseline: str) -> str:
    """Return what must be shown."""
    question = primary.question
    words, margin = question.title, margin_text(question)
    return {
        "better": f"{words} better than {baseline}'s (one-sided)",
        "different": f"{words} different from {baseline}'s (two-sided)",
        "noninferior": f"{words} not worse than {baseline}'s by {margin} or more (one-sided)",
        "equivalent": f"{words} within {margin} of {baseline}'s (two one-sided tests)",
    }[primary.direction]


def looks_line(file: StudyFile) -> str:
    """Return the rule of the looks."""
    from efftrain_cli.compare.sequential import nominal_levels

    looks, alpha = file.looks, file.study.alpha
    rest = _shown_effect(file)
    if file.comparisons > 1:
        rest = f"; Holm over {file.comparisons} comparisons{rest}"
    if len(looks) == 1:
        return f"one, at level {alpha:g}{rest}"
    # Each direction has its own boundary.
    words = []
    for sides in dict.fromkeys(sides_of(primary.direction) for primary in file.study.primary):
        levels = ", ".join(f"{level:.2g}" for level in nominal_levels(alpha, looks, sides))
        words.append(f"{('one', 'two')[sides - 1]}-sided levels {levels}")
    return (
        f"{len(looks)}, at nominal {' and '.join(words)}, which err together in {alpha:.0%} of "
        f"studies without a difference (group-sequential t){rest}"
    )


def _shown_effect(file: StudyFile) -> str:
    """Return the difference that the last look shows in 80 % of studies, after Holm and looks."""
    n = len(file.seeds)
    one_sd = Estimate(0.0, se=1 / math.sqrt(n), df=n - 1)
    verdict = Verdict(
        file.study.primary[0].question,
        "",
        file.seeds,
        one_sd,
    )
    looks = file.looks_taken(len(file.looks))
    size = min_detectable_effect(verdict, looks, file.comparisons)
    return f"; shows {size:.1f} standard deviations of a pair's difference in 80 % of studies"


def _numbers(values: Sequence[int]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}" if first else last


# --- tuning -----------------------------------------------------------------------------------


def tuning_lines(tuned: Sequence[Tuned]) -> list[str]:
    """Return every setting tried with its losses, what was chosen, and what tuning was worth."""
    tries: dict[str, dict[str, list[Choice]]] = {}
    for arm in tuned:
        for choice in arm.tried:
            setting = " ".join(choice.settings[-len(arm.settings) :])
            tries.setdefault(arm.arm, {}).setdefault(setting, []).append(choice)
    tried = []
    for name, settings in tries.items():
        for setting, blocks in settings.items():
            best = sum(choice.best for choice in blocks)
            mark = "chosen" if best else ""
            if best and len(blocks) > 1:
                mark = f"chosen in {best} of {len(blocks)} blocks"
            losses = [*itertools.chain(*(choice.losses for choice in blocks))]
            tried.append((name, setting, losses, mark))

    columns = best_of_k(tuned)
    rows: list[Row] = []
    for k, lowest in enumerate(itertools.zip_longest(*columns.values()), 1):
        rows.append((str(k), *("-" if loss is None else f"{loss:.4f}" for loss in lowest)))
    head = ("arm", "setting", "mean loss", "by tuning seed", "")
    return [
        "Tuning",
        *settings_table(head, tried, "diverged"),
        "",
        "Lowest mean loss to expect of so many settings drawn at random (Dodge et al. 2019)",
        *table_lines(("settings", *columns), rows),
    ]


# --- verdicts ---------------------------------------------------------------------------------


def verdict_lines(file: StudyFile, state: StudyState, registration: Plan) -> list[str]:
    """Return the answer, then how it was reached."""
    lines = []
    reasons = why_exploratory(state, registration)
    if reasons:
        lines = ["EXPLORATORY: no verdict below is a confirmation, because"]
        lines += [f"  - {reason}" for reason in reasons]
        lines.append("")
    if not state.look:
        done = f"No verdict yet: the first look is at {state.looks[0]} seeds"
        waiting = f"{len(state.pending)} runs are still to end, such as {state.pending[0]}"
        return [*lines, f"{done}, and {waiting}."]
    for verdict in state.verdicts:
        lines.append(sentence(verdict, verdict.arm, file.study.baseline))
        if verdict.differed:
            lines.append(f"  {verdict.differed}.")
    lines += ["", *_verdict_table(file, state.verdicts)]

    taken = f"look {state.look} of {len(state.looks)}"
    if not state.complete:
        lines.append(f"{taken}; the next is at {state.looks[state.look]} seeds")
        lines += _chances(file, state)
    elif state.decided and state.look < len(state.looks):
        lines.append(f"{taken}: the study has ended, everything is decided")
    else:
        lines.append(f"{taken}: the study has ended")
    lines.append(f"looks: {looks_line(file)}")
    lines.append(f"registered {registration.registered}, hash {registration.sha256[:16]}")
    warnings: dict[str, None] = {}
    for arm in state.tuned:
        warnings |= dict.fromkeys(arm.warnings)
    lines += [f"warning: {warning}" for warning in warnings]
    for kind in ("warning", "note"):
        lines += [f"{kind}: {label.text}" for label in state.labels if label.kind == kind]
    return lines


def _chances(file: StudyFile, state: StudyState) -> list[str]:
    """Return how likely a later look shows what is undecided; empty if nothing can be said."""
    chances = []
    for verdict in state.verdicts:
        chance = chance_of_claim(verdict, file.looks_taken(state.look), file.comparisons)
        if chance is not None and verdict.outcome == "undecided":
            chances.append(f"{verdict.arm} {100 * chance:.0f} % in {verdict.question.title}")
    if not chances:
        return []
    text = "chance to show it by the last look, if the difference stays as estimated"
    return [f"{text}: {', '.join(chances)} (shown, decides nothing)"]


def _verdict_table(file: StudyFile, verdicts: Sequence[Verdict]) -> list[str]:
    """Return a row per verdict, and what its numbers are."""
    rows: list[Row] = []
    for verdict in verdicts:
        p = 1.0 if verdict.p_holm is None else verdict.p_holm
        p_text = f"{p:.4f}" if p >= 1e-4 else "<.0001"
        numbers = (interval_text(verdict.estimate), p_text, str(len(verdict.seeds)))
        rows.append((verdict.question.title, verdict.arm, *numbers, verdict.outcome))
    interval = f"difference [{100 * (1 - file.study.alpha):g} %]"
    head = ("measure", "arm", interval, "p", "seeds", "verdict")
    table = table_lines(head, rows)

    words = []
    if any(not verdict.question.axis for verdict in verdicts):
        words.append("arm less baseline, nats per token")
    if any(verdict.estimate.log for verdict in verdicts):
        words.append("baseline / arm, above 1 the arm needs less")
    paid = "p and intervals are adjusted for every look"
    if file.comparisons > 1:
        paid += f", p for {file.comparisons} comparisons too; intervals are not corrected for the "
        paid += "number of comparisons"
    return [*table, f"differences: {'; '.join([*words, paid])}"]


def why_exploratory(state: StudyState, registration: Plan | None) -> list[str]:
    """Return why no verdict is a confirmation; empty if they are."""
    reasons = ["not registered"]
    if registration is not None:
        reasons = registration.exploratory
    return [*reasons, *(label.text for label in state.labels if label.kind == "allowed")]


# --- for programs -----------------------------------------------------------------------------


def as_json(
    file: StudyFile,
    state: StudyState,
    registration: Plan | None,
    curves: Sequence[Curve],
) -> dict[str, Any]:
    """Return plan and verdicts as plain values; null where there is no number."""
    arms = []
    for arm in state.tuned:
        values = {
            "arm": arm.arm,
            "seeds": list(arm.seeds),
            "chosen": list(arm.settings),
            "tried": [{"settings": list(c.settings), "losses": list(c.losses)} for c in arm.tried],
            "expected_best": expected_best(arm),
            "warnings": list(arm.warnings),
        }
        arms.append(values)
    sensitivities = []
    for curve, of_curve in zip(curves, sensitivity.as_json(curves), strict=True):
        sensitivities.append({**of_curve, "optimum": optimum(curve)})
    return {
        "schema_version": 1,
        "study": file.name,
        "question": file.study.question,
        "sha256": file.sha256,
        "registered": registration and registration.registered,
        "exploratory": why_exploratory(state, registration),
        "labels": [{"severity": each.kind, "text": each.text} for each in state.labels],
        "baseline": file.study.baseline,
        "alpha": file.study.alpha,
        "looks": list(state.looks),
        "look": state.look,
        "nominal_levels": list(file.looks_taken(0).levels),
        "complete": state.complete,
        "pending": list(state.pending),
        "tuning": {"rule": BEST_RULE, "arms": arms},
        "verdicts": [verdict_json(file, verdict) for verdict in state.verdicts],
        "sensitivity": sensitivities,
    }


def verdict_json(file: StudyFile, verdict: Verdict) -> dict[str, Any]:
    """Return one verdict as plain values; None where there is no number."""
    question, estimate, size = verdict.question, verdict.estimate, verdict.min_detectable_effect
    return {
        "measure": question.key,
        "direction": question.direction,
        "margin": question.margin,
        "target": question.target,
        "rates": list(file.rates) if question.over_rates else None,
        "arm": verdict.arm,
        "seeds": list(verdict.seeds),
        "estimate": estimate.mean if math.isfinite(estimate.mean) else None,
        "low": estimate.low,
        "high": estimate.high,
        "ratio": estimate.log,
        "p": verdict.p,
        "p_holm": verdict.p_holm,
        "outcome": verdict.outcome,
        "could_see": None if size is None or math.isinf(size) else size,
        "note": note_of(verdict),
        "differed": verdict.differed,
    }
