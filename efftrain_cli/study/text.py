"""What a study or race prints besides its comparison: its plan, its state, and each look."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from efftrain_cli.compare.inference import POWER, TWO_SIDED, detectable, shares
from efftrain_cli.compare.judge import Claim
from efftrain_cli.foundation.console import counted, listed
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.records import read_record
from efftrain_cli.run.directory import runs_root
from efftrain_cli.run.metrics import last_row
from efftrain_cli.run.status import ENDED
from efftrain_cli.study.plans import UNEQUAL, Plan
from efftrain_cli.study.registration import Registration, changed_keys
from efftrain_cli.study.sizes import ladder_lines
from efftrain_cli.study.tuning import Tuned, tune, tuning_trials
from efftrain_cli.trials.costs import costs_of, disk_lines
from efftrain_cli.trials.runner import TrialRunner
from efftrain_cli.trials.trial import Trial, state_of

SIZES = (0.8, 1.2, 2.0)
"""Differences whose pairs a plan tells, in standard deviations of a pair's difference."""


def plan_lines(plan: Plan) -> list[str]:
    """Return what a plan needs and could see.

    Raises:
        UsageError: the plan cannot be judged.
    """
    check_judgeable(plan)
    study = plan.study
    tuning = list(tuning_trials(plan))
    pairs = plan.looks[-1]
    last = plan.trials(pairs)
    runs = f"{len(last)} to judge ({counted(pairs, 'pair')})"
    if tuning:
        seeds = counted(len(study.tuning_seeds), "seed")
        runs = f"{len(tuning)} to tune ({seeds}), {runs}"
    if len(plan.looks) > 1:
        runs += f"; looks at {', '.join(map(str, plan.looks))} pairs"
    lines = [study.question] if study.question else []
    lines.append(f"runs    {runs}")
    if not study.command:
        costs = costs_of([*tuning, *last], plan.is_race)
        lines += [f"costs   {costs}", *disk_lines(costs)]
    base, *others = plan.names
    sizes = [arm.size for arm in plan.of(base) if arm.size is not None]
    if sizes:
        lines += ladder_lines(sizes, [*tuning, *last], pairs)
    for claim in study.primary:
        lines.append(
            f"judged  {', '.join(others)} against {base}: {claim_text(claim)},"
            f" at {100 * study.alpha:g} %"
        )
    lines.append(
        f"shows   in {100 * POWER:.0f} % of cases {visible(plan):.2g} standard deviations"
        " of a pair's difference"
    )
    if plan.is_race:
        needed = [f"{size:g} sd: {pairs_needed(size)}" for size in SIZES]
        lines.append(f"pairs   for a true difference of {', '.join(needed)}")
    return lines


def claim_text(claim: Claim) -> str:
    """Return a claim in words: "final_loss noninferior by 0.04"."""
    text = f"{claim.measure} {claim.direction}"
    if claim.margin:
        text += f" by {claim.margin:g}"
    if claim.target is not None:
        text += f" {claim.target:g}"
    return text


def visible(plan: Plan) -> float:
    """Return the difference that the last look shows with POWER, in standard deviations."""
    claims = plan.study.primary
    others = len(plan.names) - 1
    level = plan.study.alpha * shares(plan.looks)[-1] / (len(claims) * others)
    is_two_sided = any(claim.direction in TWO_SIDED for claim in claims)
    return shown_by(plan.looks[-1], level / 2 if is_two_sided else level)


def shown_by(pairs: int, level: float) -> float:
    """Return the difference that a one-sided test shows with POWER, in standard deviations."""
    return detectable(pairs**-0.5, pairs - 1, level)


def check_judgeable(plan: Plan) -> None:
    """Check that a plan can come to a verdict at all.

    Raises:
        UsageError: no arm can be judged.
    """
    if not any(map(plan.is_judged, plan.names[1:])):
        raise UsageError(
            f"study {plan.name} cannot be judged: every arm is {UNEQUAL}\n"
            "  give all arms grids of equally many settings"
        )


def status_lines(plan: Plan) -> list[str]:
    """Return the state of a study: its registration, its runs, and what its looks said."""
    path = plan.folder / "plan.json"
    if not path.exists():
        return [f"{plan.name}  not begun"]
    registration = read_record(path, Registration)
    changed = changed_keys(registration, plan.values)
    state = f"changed since: {listed(changed)}" if changed else "unchanged"
    lines = [f"{plan.name}  registered {registration.registered}, {state}"]
    tuning = list(tuning_trials(plan))
    is_tuned = all(state_of(trial) in ENDED for trial in tuning)
    # Nothing is left to train.
    tuned = tune(plan, TrialRunner(plan.folder)) if is_tuned else Tuned()
    if tuning:
        chosen = []
        for arm, point in tuned.points.items():
            values = [setting.partition("=")[2] for setting in point]
            chosen.append(" ".join([arm, *values]))
        parts = [f"tuning  {progress_text(tuning)}", ", ".join(chosen)]
        lines.append(": ".join(filter(None, parts)))
    if is_tuned and not plan.study.command:
        judged = plan.trials(plan.looks[-1], tuned.points)
        lines.append(f"judging {progress_text(judged)}")
    for pairs, look in zip(plan.looks, registration.looks, strict=False):
        for row in look:
            what = f"{row['arm']} {row['verdict'] or 'not judged'} in {row['title']}"
            lines.append(f"look    {pairs} pairs: {what}")
    return lines


def progress_text(trials: Sequence[Trial]) -> str:
    """Return how many runs have ended, and where those under way are."""
    states = {trial.name: state_of(trial) for trial in trials}
    ended = sum(state in ENDED for state in states.values())
    text = f"{ended} of {counted(len(trials), 'run')}"
    running = [name for name, state in states.items() if state == "running"]
    if running:
        places = []
        for name in running:
            step = last_row(runs_root() / name).get("step") or 0
            places.append(f"{name} at step {step:,.0f}")
        text += f"; {listed(places)}"
    return text


def race_line(plan: Plan) -> str:
    """Return at how many pairs a race looks, and how many runs these are."""
    *first, last = map(str, plan.looks)
    pairs = f"{', '.join(first)}, then {last}" if first else last
    arms = len(plan.arms)
    text = f"{pairs} pairs: {arms * plan.looks[0]} to {arms * plan.looks[-1]} runs"
    tuning = tuning_trials(plan)
    return f"{text} after {counted(len(tuning), 'run')} of tuning" if tuning else text


def pairs_needed(size: float) -> int:
    """Return the pairs that show a true difference of `size` standard deviations with POWER.

    This is for one look at 5 %, two-sided; a race with several looks needs about a tenth more.
    """
    return next(pairs for pairs in itertools.count(2) if shown_by(pairs, 0.025) <= size)
