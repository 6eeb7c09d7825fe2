"""Zero-shot scores side by side, paired per item where the items' scores were kept.

Only results of the same task, protocol and limit stand in one row, and only checkpoints of equal tokens are judged.
Over seeds the scores are compared by t as losses are; two single checkpoints are compared item by item: an item both
get right or both get wrong says nothing about their difference. Either way Holm's correction goes over everything that
is tested so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from efftrain_cli.compare import inference
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.inference import ALPHA, Estimate
from efftrain_cli.compare.measures import human
from efftrain_cli.compare.reading import RunNumbers, ZeroShot

SAME_TOKENS = 0.001
"""Checkpoints whose tokens differ by more than this share are not compared."""
LOWER_IS_BETTER = ("perplexity", "bits_per_byte", "loss")
"""A metric with one of these in its name is better when lower; all others when higher."""


@dataclass(frozen=True)
class ZeroShotDifference:
    """A group against the baseline in one row."""

    label: str
    over_items: Estimate | None
    """Mean difference per item of two single checkpoints; None where there are several seeds or items were not kept."""
    mcnemar_p: float | None
    """Exact uncorrected p-value of paired right and wrong answers; only of one pair of checkpoints, scored 0 and 1."""
    over_seeds: Estimate
    """Difference of the mean scores over seeds."""
    p_holm: float | None
    """Of `over_seeds`, adjusted over all tasks, metrics and recipes."""
    verdict: str
    label_of_tokens: str = ""
    """Where --allow has checkpoints of different or unknown tokens judged: what the verdict says of it."""


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


def compare_zero_shot(
    groups: Sequence[Group], base: Group, allow: bool = False, withheld: str = ""
) -> list[ZeroShotRow]:
    """A row for every task, protocol, limit and metric that any run has.

    Args:
        allow: judge checkpoints of different or unknown tokens anyway, labelled.
        withheld: why nothing is judged; "" where it is.
    """
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
            group.label: [_result(run, (task, protocol, limit), metric) for run in group.runs]
            for group in groups
        }
        scores = {
            label: tuple(None if result is None else result.metrics[metric] for result in results)
            for label, results in found.items()
        }
        differences = tuple(
            _difference(metric, base, found[base.label], group, found[group.label], allow, withheld)
            for group in groups
            if group is not base
        )
        rows.append(ZeroShotRow(task, protocol, limit, metric, scores, differences))
    return _corrected(rows)


def _corrected(rows: Sequence[ZeroShotRow]) -> list[ZeroShotRow]:
    """The rows with their verdicts, after Holm's correction over what was tested by seeds, and over that by items."""
    judged = [
        (i, j, d)
        for i, row in enumerate(rows)
        for j, d in enumerate(row.differences)
        if not d.verdict
    ]
    by_seeds = [(i, j, d.over_seeds.p) for i, j, d in judged if d.over_seeds.p is not None]
    by_items = [
        (i, j, p) for i, j, d in judged if d.over_seeds.p is None and (p := _items_p(d)) is not None
    ]
    seeds, items = (
        {
            (i, j): p
            for (i, j, _), p in zip(family, inference.holm([p for *_, p in family]), strict=True)
        }
        for family in (by_seeds, by_items)
    )
    found = []
    for i, row in enumerate(rows):
        differences = []
        for j, d in enumerate(row.differences):
            if (i, j) in seeds:
                p = seeds[i, j]
                d = replace(
                    d, p_holm=p, verdict=_verdict(row.metric, d.over_seeds, p) + d.label_of_tokens
                )
            elif not d.verdict:
                d = replace(
                    d, verdict=_without_seeds(d.over_seeds, items.get((i, j))) + d.label_of_tokens
                )
            differences.append(d)
        found.append(replace(row, differences=tuple(differences)))
    return found


def _items_p(difference: ZeroShotDifference) -> float | None:
    if difference.mcnemar_p is not None:
        return difference.mcnemar_p
    return difference.over_items.p if difference.over_items else None


def _result(run: RunNumbers, key: tuple[str, str, str], metric: str) -> ZeroShot | None:
    """The run's newest result of that key: the last in its file."""
    return next(
        (
            found
            for found in reversed(run.zero_shot)
            if found.key == key and metric in found.metrics
        ),
        None,
    )


def _difference(
    metric: str,
    base: Group,
    before: Sequence[ZeroShot | None],
    group: Group,
    after: Sequence[ZeroShot | None],
    allow: bool,
    withheld: str,
) -> ZeroShotDifference:
    """A difference whose verdict is still to come ("") where it may be judged."""
    a = {
        seed: result for seed, result in zip(base.seeds, before, strict=True) if result is not None
    }
    b = {
        seed: result for seed, result in zip(group.seeds, after, strict=True) if result is not None
    }
    scores = [{seed: result.metrics[metric] for seed, result in side.items()} for side in (a, b)]
    over_seeds = inference.difference_of_means(scores[0], scores[1])
    if not a or not b:
        return ZeroShotDifference(group.label, None, None, over_seeds, None, "missing: no claim")
    tokens = _tokens(*a.values(), *b.values())
    reason = withheld or _why_missing(
        [*zip(base.runs, before, strict=True), *zip(group.runs, after, strict=True)]
    )
    if not reason and tokens and not allow:
        reason = f"not judged: {tokens}"
    if reason:
        return ZeroShotDifference(
            group.label, None, None, Estimate(over_seeds.mean, reason=reason), None, reason
        )
    over_items, p = None, None
    if len(a) == len(b) == 1 and a.keys() == b.keys():
        ((_, first),), ((_, second),) = a.items(), b.items()
        items = _item_differences(first, second, metric)
        means = [items[item] for item in sorted(items)]
        if means:
            over_items = _over_items(means)
            if set(means) <= {-1.0, 0.0, 1.0}:
                p = inference.mcnemar(means.count(-1.0), means.count(1.0))
    return ZeroShotDifference(
        group.label, over_items, p, over_seeds, None, "", f" (but {tokens})" if tokens else ""
    )


def _tokens(*results: ZeroShot) -> str:
    """What keeps the checkpoints from being compared; "" where their tokens are equal."""
    tokens = [result.tokens for result in results if result.tokens is not None]
    if len(tokens) < len(results):
        return "the tokens of a checkpoint are unknown"
    if max(tokens) > (1 + SAME_TOKENS) * min(tokens):
        return f"checkpoints after different tokens ({human(min(tokens))} to {human(max(tokens))})"
    return ""


def _why_missing(results: Sequence[tuple[RunNumbers, ZeroShot | None]]) -> str:
    """Why the scores that are there do not speak for their recipes: the others' runs failed, or are still to finish."""
    missing = [run for run, result in results if result is None]
    if failed := sum(run.failed for run in missing):
        return f"not judged: {failed} failed {'runs have' if failed > 1 else 'run has'} no score"
    if pending := sum(run.pending for run in missing):
        return f"pending: {pending} unfinished {'runs have' if pending > 1 else 'run has'} no score"
    return ""


def _item_differences(first: ZeroShot, second: ZeroShot, metric: str) -> dict[str, float]:
    a, b = first.items.get(metric, {}), second.items.get(metric, {})
    return {item: b[item] - a[item] for item in a if item in b}


def _without_seeds(over_seeds: Estimate, p: float | None) -> str:
    """The verdict where seeds carry no test, by the items' corrected p-value."""
    if p is None:
        return over_seeds.reason
    differ = (
        "these two checkpoints differ"
        if p < ALPHA
        else "these two checkpoints do not differ clearly"
    )
    return f"one seed: no claim; on its items {differ} (p = {p:.2g})"


def _verdict(metric: str, over_seeds: Estimate, p: float) -> str:
    if p >= ALPHA:
        return "undecided"
    lower = any(word in metric for word in LOWER_IS_BETTER)
    return "better" if (over_seeds.mean < 0) == lower else "worse"


def _over_items(differences: Sequence[float]) -> Estimate:
    """Mean difference of two checkpoints' scores on the same items, with the interval over items.

    It says how sure the difference of these two checkpoints is; it says nothing about other seeds.
    """
    estimate = inference.paired_t(differences)
    reason = estimate.reason.replace("one seed", "one item").replace(
        "between seeds", "between items"
    )
    return replace(estimate, method="paired over items", reason=reason)
