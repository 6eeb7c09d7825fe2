"""Zero-shot scores side by side, paired per item where the items' scores were kept.

Only results of the same task, protocol and limit stand in one row. Two checkpoints answer the same items, so their
accuracies are compared item by item: an item both get right or both get wrong says nothing about the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from efftrain_cli.compare import statistics
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.reading import RunNumbers, ZeroShot
from efftrain_cli.compare.statistics import Estimate


@dataclass(frozen=True)
class ZeroShotDifference:
    """A group against the baseline in one row."""

    label: str
    over_items: Estimate | None
    """Mean difference per item, averaged over the paired seeds; None where items were not kept."""
    mcnemar_p: float | None
    """Exact p-value of the paired right and wrong answers; only for one pair of checkpoints and scores of 0 and 1."""
    over_seeds: Estimate
    """Mean difference of the scores over the paired seeds."""
    verdict: str


@dataclass(frozen=True)
class ZeroShotRow:
    """One task, protocol, limit and metric."""

    task: str
    protocol: str
    limit: str
    metric: str
    scores: dict[str, tuple[float | None, ...]]
    """By group label, one per seed; None where the run has no such result."""
    differences: tuple[ZeroShotDifference, ...]


def compare_zero_shot(groups: Sequence[Group], base: Group) -> list[ZeroShotRow]:
    """A row for every task, protocol, limit and metric that any run has."""
    keys = dict.fromkeys(
        (*result.key, metric)
        for group in groups
        for run in group.runs
        for result in run.zero_shot
        for metric in result.metrics
    )
    rows = []
    for task, protocol, limit, metric in sorted(keys):
        found = {
            group.label: [_result(run, (task, protocol, limit), metric) for run in group.runs] for group in groups
        }
        rows.append(
            ZeroShotRow(
                task,
                protocol,
                limit,
                metric,
                {
                    label: tuple(None if result is None else result.metrics[metric] for result in results)
                    for label, results in found.items()
                },
                tuple(
                    _difference(metric, base, found[base.label], group, found[group.label])
                    for group in groups
                    if group is not base
                ),
            )
        )
    return rows


def _result(run: RunNumbers, key: tuple[str, str, str], metric: str) -> ZeroShot | None:
    """The run's newest result of that key: the last in its file."""
    for result in reversed(run.zero_shot):
        if result.key == key and metric in result.metrics:
            return result
    return None


def _difference(
    metric: str,
    base: Group,
    before: Sequence[ZeroShot | None],
    group: Group,
    after: Sequence[ZeroShot | None],
) -> ZeroShotDifference:
    a, b = dict(zip(base.seeds, before, strict=True)), dict(zip(group.seeds, after, strict=True))
    pairs = [
        (first, second)
        for seed in sorted(a.keys() & b.keys())
        if (first := a[seed]) is not None and (second := b[seed]) is not None
    ]
    over_seeds = statistics.paired_t([second.metrics[metric] - first.metrics[metric] for first, second in pairs])
    per_pair = [_item_differences(first, second, metric) for first, second in pairs]
    over_items, p = None, None
    if per_pair and all(per_pair):
        items = set.intersection(*(set(differences) for differences in per_pair))
        means = [float(np.mean([differences[item] for differences in per_pair])) for item in sorted(items)]
        over_items = statistics.item_differences(means)
        if len(per_pair) == 1 and set(means) <= {-1.0, 0.0, 1.0}:
            p = statistics.mcnemar(means.count(-1.0), means.count(1.0))
    return ZeroShotDifference(group.label, over_items, p, over_seeds, _verdict(over_seeds, over_items, p))


def _item_differences(first: ZeroShot, second: ZeroShot, metric: str) -> dict[str, float]:
    a, b = first.items.get(metric, {}), second.items.get(metric, {})
    return {item: b[item] - a[item] for item in a if item in b}


def _verdict(over_seeds: Estimate, over_items: Estimate | None, mcnemar_p: float | None) -> str:
    if over_seeds.n == 0:
        return "no shared seed: no claim"
    if over_seeds.n == 1:
        p = mcnemar_p if mcnemar_p is not None else (over_items.p if over_items else None)
        if p is None:
            return over_seeds.reason
        differ = "these two checkpoints differ" if p < statistics.ALPHA else "these two checkpoints do not differ clearly"
        return f"one seed: no claim; on its items {differ} (p = {p:.2g})"
    if over_seeds.p is None:
        return over_seeds.reason
    if over_seeds.p >= statistics.ALPHA:
        return "no difference shown"
    return "higher" if over_seeds.mean > 0 else "lower"
