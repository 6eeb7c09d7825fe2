"""Replace the training seconds of runs by calibrated ones.

They are the sum over a run's steps of the time that a step of its kind and FLOPs took in a
calibration. The run's own clock also measures what else its machine did.
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
"""Most runs that the suggested command names; if there are more, it names one for each recipe."""


def with_calibration(groups: Sequence[Group], calibrations: Sequence[Calibration]) -> list[Group]:
    """Return the groups with the seconds of the newest calibration that fits.

    It has to fit every group with a finished run on the first group's machine. If none does, the
    seconds stay those of the runs' clocks.

    Args:
        calibrations: newest first.
    """
    timed = []
    for group in groups:
        other_machine = why_seconds_differ(runs_of([groups[0], group]))
        if finished_runs(group.runs) and not other_machine:
            timed.append(group)
    finished = finished_runs(runs_of(timed))
    names = [run.name for run in finished]
    if len(names) > NAMED:
        # A group of a tuned study has several recipes: each block chooses its own settings.
        first = {digest_of_recipe(run.recipe): run.name for run in reversed(finished)}
        names = sorted(first.values(), key=names.index)
    labels = {group.label for group in timed}
    fitting = []
    for calibration in calibrations:
        arms = {arm.digest: arm for arm in calibration.arms}
        if all(fits(calibration, arms, run) for run in runs_of(timed)):
            fitting.append(arms)
    timing = Timing(f"efftrain calibrate {' '.join(names)}", of=len(fitting))
    groups = [replace(group, timing=timing) for group in groups]
    if not fitting:
        return groups
    newest = fitting[0]
    return [with_seconds(each, newest) if each.label in labels else each for each in groups]


def fits(calibration: Calibration, arms: Mapping[str, ArmTimes], run: RunNumbers) -> bool:
    """Return whether a calibration timed the run's steps, on its device and with its software."""
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
    """Return a group with calibrated seconds.

    Args:
        arms: timed steps by the digest of their recipe.
    """
    runs = []
    totals = []
    for run in group.runs:
        arm = arms[digest_of_recipe(run.recipe)]
        seconds, *by_block = cumulate_seconds(run, arm)
        runs.append(replace(run, evaluated=run.evaluated | {"seconds": seconds}))
        if run.status == "finished":
            totals.append([block[-1] for block in by_block])
    blocks = np.mean(totals, axis=0).tolist()
    timing = replace(group.timing, blocks=tuple(blocks))
    return replace(group, runs=tuple(runs), timing=timing)


def cumulate_seconds(run: RunNumbers, arm: ArmTimes) -> np.ndarray:
    """Return the seconds up to each evaluation, (1 + blocks, evaluations).

    The first row is by the geometric mean of the blocks, the others by one block each. Seconds of a
    step are interpolated linearly over FLOPs between the timed steps of its kind; beyond these they
    are proportional to FLOPs.
    """
    counts = run.step_counts
    step_seconds = np.empty((1 + len(arm.steps[0].seconds), len(counts["flops"])))
    for kind in np.unique(counts["kind"]):
        timed = sorted((each.flops, each.seconds) for each in arm.steps if each.kind == kind)
        timed_flops = np.array([flops for flops, _ in timed])
        of_blocks = np.array([seconds for _, seconds in timed]).T
        # The geometric mean, as blocks differ by a factor: a slow one is no more than its share.
        mean = np.exp(np.log(of_blocks).mean(0))
        is_kind = counts["kind"] == kind
        flops = counts["flops"][is_kind]
        beyond = flops / np.clip(flops, timed_flops[0], timed_flops[-1])
        for row, seconds in enumerate((mean, *of_blocks)):
            step_seconds[row, is_kind] = np.interp(flops, timed_flops, seconds) * beyond

    ends = np.searchsorted(counts["until"], run.evaluated["step"], side="right")
    flops = _sum_until(counts["flops"] * counts["steps"], ends)
    # Steps that a rewind abandoned, or whose rows are lost, have FLOPs and no row: they took as
    # long as the others.
    all_steps = np.divide(run.evaluated["flops"], flops, out=np.ones_like(flops), where=flops > 0)
    rows = [_sum_until(row * counts["steps"], ends) * all_steps for row in step_seconds]
    return np.array(rows)


def _sum_until(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the sum of the first `end` values, for each of `ends`."""
    return np.append(0.0, np.cumsum(values))[ends]


# --- two groups -----------------------------------------------------------------------------------


def calibration_sd(baseline: Group, method: Group) -> float:
    """Return the standard deviation of the error of log(calibrated ratio), which all seeds share.

    It is the standard error over the blocks, times the quantile of Student's t over the normal one,
    as few blocks estimate their spread badly. 0 without a calibration.
    """
    if not (baseline.blocks and method.blocks):
        return 0.0
    n = len(method.blocks)
    ratios = np.log(method.blocks) - np.log(baseline.blocks)
    level = 1 - ALPHA / 2
    factor = special.stdtrit(n - 1, level) / special.ndtri(level)
    return float(factor * ratios.std(ddof=1) / math.sqrt(n))


def clock_ratio(baseline: Group, method: Group) -> float:
    """Return `mean_ratio` of training seconds by the runs' own clocks, method over baseline."""
    return mean_ratio(baseline, method, lambda run: run.seconds)


def why_seconds_not_judged(baseline: Group, method: Group) -> str:
    """Return why training seconds of two groups are shown and not judged; "" if they are judged."""
    reason = why_seconds_differ([*baseline.runs, *method.runs])
    if reason:
        return reason
    if not (baseline.blocks and method.blocks):
        return f"no calibration of these recipes for their machine; `{method.timing.command}`"
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
    """Return the ratio of two groups' seconds, calibrated and by their own clocks, as text.

    "" without a calibration.
    """
    if not (baseline.blocks and method.blocks):
        return ""
    calibrated = budget_ratio(baseline, method, "seconds")
    error = 100 * math.expm1(calibration_sd(baseline, method))
    clocks = clock_ratio(baseline, method)
    known = method.timing.of
    which = f" by the newest of {known} calibrations" if known > 1 else ""
    return (
        f"calibrated{which}, {method.label} takes {calibrated:.3g}x the seconds of"
        f" {baseline.label} (standard deviation {float(f'{error:.2g}'):g} %);"
        f" by the runs' own clocks {clocks:.3g}x"
    )
