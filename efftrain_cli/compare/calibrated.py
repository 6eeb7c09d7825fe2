"""Training seconds by calibrated steps: the sum, over a run's steps, of the time that a step of its
kind and FLOPs took in a calibration. A run's own clock also measures what else its machine did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy import special

from efftrain_cli.compare.comparability import why_seconds_differ
from efftrain_cli.compare.groups import Group, Timing, finished_runs, runs_of
from efftrain_cli.compare.inference import ALPHA
from efftrain_cli.compare.measures import budget_ratio, is_same_budget, mean_ratio
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.run.calibrations import ArmTimes, Calibration, digest_of_recipe

NAMED = 12
"""Most runs that a command names; of more, one for each recipe."""


def with_calibration(groups: Sequence[Group], calibrations: Sequence[Calibration]) -> list[Group]:
    """Return the groups with seconds of the newest calibration that holds all that one could hold.

    Those are the groups with a finished run on the first group's machine. Else seconds stay those
    of the runs' clocks.

    Args:
        calibrations: newest first.
    """
    alike = []
    for group in groups:
        if finished_runs(group.runs) and not why_seconds_differ(runs_of([groups[0], group])):
            alike.append(group)
    finished = finished_runs(runs_of(alike))
    names = [run.name for run in finished]
    if len(names) > NAMED:
        # Blocks of a study tune recipes of their own within one group.
        first = {digest_of_recipe(run.recipe): run.name for run in reversed(finished)}
        names = sorted(first.values(), key=names.index)
    timing = Timing(f"efftrain calibrate {' '.join(names)}")
    groups = [replace(group, timing=timing) for group in groups]
    labels = {group.label for group in alike}
    for calibration in calibrations:
        arms = {arm.digest: arm for arm in calibration.arms}
        if all(fits(calibration, arms, run) for run in runs_of(alike)):
            return [with_seconds(each, arms) if each.label in labels else each for each in groups]
    return groups


def fits(calibration: Calibration, arms: Mapping[str, ArmTimes], run: RunNumbers) -> bool:
    """Return whether the steps of a run's recipe were timed where and as the run was trained."""
    arm = arms.get(digest_of_recipe(run.recipe))
    if arm is None:
        return False
    conditions: dict[str, object] = {
        "device": calibration.device,
        "torch": calibration.torch,
        "dtype": arm.dtype,
    }
    if calibration.device_kind == "cpu":
        conditions["threads"] = calibration.threads
    kinds = {step.kind for step in arm.steps}
    is_same = all(run.origin.get(key) == value for key, value in conditions.items())
    return is_same and kinds.issuperset(run.step_counts["kind"].tolist())


def with_seconds(group: Group, arms: Mapping[str, ArmTimes]) -> Group:
    """Return a group whose runs' seconds are those of their recipes' timed steps, by digest."""
    assert group.timing is not None
    runs = []
    totals = []
    for run in group.runs:
        seconds, *by_block = cumulate_seconds(run, arms[digest_of_recipe(run.recipe)])
        runs.append(replace(run, evaluated=run.evaluated | {"seconds": seconds}))
        if run.status == "finished":
            totals.append([block[-1] for block in by_block])
    blocks = tuple(np.mean(totals, axis=0).tolist())
    return replace(group, runs=tuple(runs), timing=replace(group.timing, blocks=blocks))


def cumulate_seconds(run: RunNumbers, arm: ArmTimes) -> np.ndarray:
    """Return the seconds up to each evaluation, (1 + blocks, evaluations): first by the mean block,
    then by each.

    A step between two timed ones of its kind takes what the straight line over FLOPs says; beyond
    them it takes seconds in proportion.
    """
    counts = run.step_counts
    spent = np.empty((1 + len(arm.steps[0].seconds), len(counts["flops"])))
    for kind in np.unique(counts["kind"]):
        timed = sorted((each.flops, each.seconds) for each in arm.steps if each.kind == kind)
        x = np.array([flops for flops, _ in timed])
        of_blocks = np.array([seconds for _, seconds in timed]).T
        # The geometric mean, as blocks differ by a factor: a slow one is no more than its share.
        mean = np.exp(np.log(of_blocks).mean(0))
        places = counts["kind"] == kind
        flops = counts["flops"][places]
        beyond = flops / np.clip(flops, x[0], x[-1])
        for row, seconds in enumerate((mean, *of_blocks)):
            spent[row, places] = np.interp(flops, x, seconds) * beyond

    ends = np.searchsorted(counts["until"], run.evaluated["step"], side="right")
    flops = _cumulate(counts["flops"] * counts["steps"], ends)
    # Steps that a rewind abandoned, or whose rows are lost, have FLOPs and no row: they took as
    # long as the others.
    all_steps = np.divide(run.evaluated["flops"], flops, out=np.ones_like(flops), where=flops > 0)
    return np.array([_cumulate(row * counts["steps"], ends) * all_steps for row in spent])


def _cumulate(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the sums of the first `ends` values."""
    return np.append(0.0, np.cumsum(values))[ends]


# --- two groups -----------------------------------------------------------------------------------


def calibration_sd(baseline: Group, method: Group) -> float:
    """Return the standard deviation of the logarithm of two groups' calibrated ratio, which all
    seeds share.

    It is the blocks' standard error, times Student's t over the normal quantile: few blocks say
    little of their spread. 0 without a calibration.
    """
    if not (baseline.blocks and method.blocks):
        return 0.0
    n = len(method.blocks)
    ratios = np.log(method.blocks) - np.log(baseline.blocks)
    factor = special.stdtrit(n - 1, 1 - ALPHA / 2) / special.ndtri(1 - ALPHA / 2)
    return float(factor * ratios.std(ddof=1) / math.sqrt(n))


def clock_ratio(baseline: Group, method: Group) -> float:
    """Return the method's training seconds over the baseline's by the finished runs' own clocks, as
    `mean_ratio`."""
    return mean_ratio(baseline, method, lambda run: run.seconds)


def why_seconds_not_judged(baseline: Group, method: Group) -> str:
    """Return why training seconds of two groups are shown and not judged; "" if they are judged."""
    reason = why_seconds_differ([*baseline.runs, *method.runs])
    if reason:
        return reason
    if not (baseline.blocks and method.blocks):
        command = method.timing.command if method.timing else "efftrain calibrate"
        return f"no calibration of these recipes for their machine; {command}"
    clocks = clock_ratio(baseline, method)
    calibrated = budget_ratio(baseline, method, "seconds")
    if math.isnan(clocks):
        return "the training seconds of a run are unknown"
    if is_same_budget(clocks / calibrated):
        return ""
    return (
        f"{method.label} took {clocks:.3g}x the seconds of {baseline.label} by the runs' own clocks"
        f" and {calibrated:.3g}x by calibrated steps, more than 2 % apart"
    )


def describe_seconds(baseline: Group, method: Group) -> str:
    """Return what calibrated seconds of two groups are, and their own clocks beside them; ""
    without a calibration."""
    if not (baseline.blocks and method.blocks):
        return ""
    calibrated = budget_ratio(baseline, method, "seconds")
    error = 100 * math.expm1(calibration_sd(baseline, method))
    clocks = clock_ratio(baseline, method)
    return (
        f"calibrated, {method.label} takes {calibrated:.3g}x the seconds of {baseline.label}"
        f" (standard deviation {error:.2g} %); by the runs' own clocks {clocks:.3g}x"
    )
