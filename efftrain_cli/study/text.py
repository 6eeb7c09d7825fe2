"""What a study prints: its plan, where it stands, what tuning chose, and the verdicts, the answer
first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from efftrain_cli.compare import sensitivity
from efftrain_cli.compare.engine import Verdict, chance_of_claim, min_detectable_effect, sides_of
from efftrain_cli.compare.groups import BEST_RULE
from efftrain_cli.compare.inference import Estimate
from efftrain_cli.compare.sensitivity import BESIDE
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
from efftrain_cli.run.lines import finite
from efftrain_cli.study.blocks import Tried, Tuned
from efftrain_cli.study.file import Primary, StudyFile
from efftrain_cli.study.judge import StudyState
from efftrain_cli.study.phases import best_of_k, expected_best, tuning_trials, widest
from efftrain_cli.study.records import Plan, read_plan
from efftrain_cli.study.registration import why_not_registered
from efftrain_cli.trials.costs import Costs, total_lines, total_of
from efftrain_cli.trials.curves import optimum

# --- the plan ---------------------------------------------------------------------------------


def sum_phases(costs: Costs) -> list[dict[str, Any]]:
    """Sum the costs of runs, as `read_costs` gives them, by phase and arm."""
    parts: dict[tuple[str, str], list[Any]] = {}
    for row in costs:
        parts.setdefault((row["phase"], row["arm"]), []).append(row)
    phases = []
    for (phase, arm), rows in parts.items():
        phases.append({"phase": phase, "arm": arm, **total_of(rows)})
    return phases


def plan_lines(file: StudyFile, costs: Costs, jobs: int) -> list[str]:
    """Return what the study will spend, before anything is; `costs` as `read_costs` gives them."""
    study = file.study
    question = f": {printable(study.question)}" if study.question else ""
    registered = read_plan(file.name)
    fixed = "fixed when the first run starts"
    if registered is not None:
        fixed = f"the registered one is {registered.sha256[:16]}"
    names = [arm.name + " (baseline)" * (arm.name == study.baseline) for arm in study.arms]
    lines = [
        f"study      {file.name}{question}",
        f"hash       {file.sha256[:16]} of its meaning; {fixed}",
        f"arms       {', '.join(names)}",
        f"seeds      {_seeds_text(file, 'seeds', study.seeds)},"
        f" judged after {_numbers(file.looks)} seeds",
    ]
    if study.blocks:
        each = counted(file.seeds_to_draw["tuning.seeds"] // study.blocks, "seed")
        lines.append(f"blocks     each tunes every arm on {each} of its own, and is judged by one")
    if study.tuning:
        seeds = _seeds_text(file, "tuning.seeds", study.tuning.seeds)
        lines.append(f"tuning     seeds {seeds}")
        wide = widest(file)
        most = len(tuning_trials(wide, wide.blocks))
        if most > len(tuning_trials(file, file.blocks)) and not file.tuned:
            lines[-1] += f"; grids may grow at their edges, to {most} tuning runs at most"
    lines += [f"primary    {primary_text(primary, study.baseline)}" for primary in study.primary]
    if 0 < len(file.rates) <= 2 * BESIDE:
        least = 2 * BESIDE + 1
        lines.append(f"warning: lr_sensitivity is judged from {least} rates on; give seven")
    lines.append(f"looks      {looks_line(file)}")
    fault = why_not_registered(file)
    if fault and registered is None:
        lines.append(f"warning: {fault}")

    rows = []
    for phase in sum_phases(costs):
        seconds = phase["seconds_left"]
        time = "unknown" if seconds is None else human_seconds(seconds)
        rows.append(
            (
                phase["phase"],
                phase["arm"],
                str(phase["runs"]),
                str(phase["done"]),
                human_count(phase["tokens_left"]),
                time,
                human_bytes(phase["disk_bytes"]),
            )
        )
    head = ("phase", "arm", "runs", "done", "tokens left", "time left", "disk")
    lines += ["", *table_lines(head, rows, ("tokens left",)), "", *total_lines(costs, jobs)]
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
    words = question.title
    margin = margin_text(question)
    return {
        "better": f"{words} better than {baseline}'s (one-sided)",
        "different": f"{words} different from {baseline}'s (two-sided)",
        "noninferior": f"{words} not worse than {baseline}'s by {margin} or more (one-sided)",
        "equivalent": f"{words} within {margin} of {baseline}'s (two one-sided tests)",
    }[primary.direction]


def looks_line(file: StudyFile) -> str:
    """Return the rule of the looks."""
    from efftrain_cli.compare.sequential import nominal_levels

    looks = file.looks
    alpha = file.study.alpha
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
        f"{len(looks)}, at nominal {' and '.join(words)}, which err together"
        f" in {alpha:.0%} of studies without a difference (group-sequential t){rest}"
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
    blocks: dict[tuple[str, str], list[tuple[Tried, bool]]] = {}
    for arm in tuned:
        for point in arm.tried:
            setting = " ".join(point.settings)
            is_chosen = point.settings == arm.settings
            blocks.setdefault((arm.arm, setting), []).append((point, is_chosen))

    rows: list[Row] = []
    for (name, setting), points in blocks.items():
        losses: list[float | None] = []
        for point, _ in points:
            losses += point.losses
        finished = [loss for loss in losses if loss is not None]
        mean = f"{len(losses) - len(finished)} of {len(losses)} not finished"
        if len(finished) == len(losses):
            mean = f"{sum(finished) / len(finished):.4f}"
        each = " ".join("diverged" if loss is None else f"{loss:.4f}" for loss in losses)
        chosen = sum(is_chosen for _, is_chosen in points)
        mark = "chosen" if chosen else ""
        if chosen and len(points) > 1:
            mark = f"chosen in {chosen} of {len(points)} blocks"
        rows.append((name, setting, mean, each, mark))
    head = ("arm", "setting", "mean loss", "by tuning seed", "")
    lines = ["Tuning", *table_lines(head, rows), f"rule: {BEST_RULE}", ""]

    columns = best_of_k(tuned)
    rows = []
    for k, lowest in enumerate(itertools.zip_longest(*columns.values()), 1):
        rows.append((str(k), *("-" if loss is None else f"{loss:.4f}" for loss in lowest)))
    return [
        *lines,
        "Lowest mean loss to expect of so many settings drawn at random (Dodge et al. 2019)",
        *table_lines(("settings", *columns), rows),
    ]


# --- verdicts ---------------------------------------------------------------------------------


def verdict_lines(state: StudyState, registration: Plan) -> list[str]:
    """Return the answer, then how it was reached."""
    file = state.file
    lines = []
    reasons = why_exploratory(state, registration)
    if reasons:
        lines = ["EXPLORATORY: no verdict below is a confirmation, because"]
        lines += [f"  - {reason}" for reason in reasons]
        lines.append("")
    if not state.look:
        done = f"No verdict yet: the first look is at {file.looks[0]} seeds"
        waiting = f"{counted(len(state.pending), 'run')} still to end, such as {state.pending[0]}"
        return [*lines, f"{done}, with {waiting}."]
    for verdict in state.verdicts:
        lines.append(sentence(verdict, verdict.arm, file.study.baseline))
        if verdict.differed:
            lines.append(f"  {verdict.differed}.")
    lines += ["", *_verdict_table(file, state.verdicts)]

    taken = f"look {state.look} of {len(file.looks)}"
    if not state.complete:
        lines.append(f"{taken}; the next is at {file.looks[state.look]} seeds")
        lines += _chances(state)
    elif state.decided and state.look < len(file.looks):
        lines.append(f"{taken}: the study has ended, everything is decided")
    else:
        lines.append(f"{taken}: the study has ended")
    lines.append(f"looks: {looks_line(file)}")
    lines.append(f"registered {registration.registered}, hash {registration.sha256[:16]}")
    warnings: dict[str, None] = {}
    for arm in file.tuned:
        warnings |= dict.fromkeys(arm.warnings)
    lines += [f"warning: {warning}" for warning in warnings]
    for kind in ("warning", "note"):
        lines += [f"{kind}: {label.text}" for label in state.labels if label.kind == kind]
    return lines


def _chances(state: StudyState) -> list[str]:
    """Return how likely a later look shows what is undecided; empty if nothing can be said."""
    file = state.file
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
    rows = []
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


def as_json(state: StudyState, registration: Plan | None) -> dict[str, Any]:
    """Return plan and verdicts as plain values; null where there is no number."""
    file = state.file
    own = {arm.name: file.settings_of(arm) for arm in file.study.arms}
    arms = []
    for arm in file.tuned:
        tried = []
        for point in arm.tried:
            settings = [*own[arm.arm], *point.settings]
            tried.append({"settings": settings, "losses": point.losses})
        values = {
            "arm": arm.arm,
            "seeds": list(arm.seeds),
            "chosen": list(arm.settings),
            "tried": tried,
            "expected_best": expected_best(arm),
            "warnings": list(arm.warnings),
        }
        arms.append(values)
    sensitivities = []
    for curve, of_curve in zip(state.curves, sensitivity.as_json(state.curves), strict=True):
        sensitivities.append({**of_curve, "optimum": optimum(curve)})
    document: dict[str, Any] = {
        "schema_version": 1,
        "study": file.name,
        "question": file.study.question,
        "sha256": file.sha256,
        "registered": registration and registration.registered,
        "exploratory": why_exploratory(state, registration),
        "labels": [{"severity": each.kind, "text": each.text} for each in state.labels],
        "baseline": file.study.baseline,
        "alpha": file.study.alpha,
        "looks": list(file.looks),
        "look": state.look,
        "nominal_levels": list(file.looks_taken(0).levels),
        "complete": state.complete,
        "pending": list(state.pending),
        "tuning": {"rule": BEST_RULE, "arms": arms},
        "verdicts": verdicts_json(state),
        "sensitivity": sensitivities,
    }
    # A loss that is missing yet counts as infinite.
    return finite(document)


def verdicts_json(state: StudyState) -> list[dict[str, Any]]:
    """Return the verdicts of the last look as plain values."""
    return [verdict_json(state.file, verdict) for verdict in state.verdicts]


def verdict_json(file: StudyFile, verdict: Verdict) -> dict[str, Any]:
    """Return one verdict as plain values; None where there is no number."""
    question = verdict.question
    estimate = verdict.estimate
    size = verdict.min_detectable_effect
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
