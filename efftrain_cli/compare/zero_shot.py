"""Zero-shot scores side by side, paired per item where the items' scores were kept.

Only results of the same task, protocol and limit stand in one row, and only checkpoints of equal
tokens are judged. Over seeds the scores are compared by t as losses are; two single checkpoints are
compared item by item: an item both get right or both get wrong says nothing about their difference.
Either way Holm's correction goes over everything that is tested so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from efftrain_cli.compare import inference
from efftrain_cli.compare.comparability import not_judged
from efftrain_cli.compare.formats import format_number
from efftrain_cli.compare.groups import Group, runs_of
from efftrain_cli.compare.inference import Estimate
from efftrain_cli.compare.measures import Question
from efftrain_cli.compare.reading import RunNumbers, ZeroShot
from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.why import Why

SAME_TOKENS = 0.001
"""Checkpoints whose tokens differ by more than this share are not compared."""
LOWER_IS_BETTER = ("perplexity", "bits_per_byte", "loss")
"""A metric with one of these in its name is better when lower; all others when higher."""


Results = Mapping[int, ZeroShot]
"""By seed, without the seeds whose run has no such result."""


def score_questions(groups: Sequence[Group]) -> list[Question]:
    """Ask a question for every task, protocol, limit and metric that any run has."""
    keys: set[tuple[str, ...]] = set()
    for run in runs_of(groups):
        keys.update(result.key for result in run.zero_shot)
    questions = []
    for task, protocol, limit, metric in sorted(keys):
        limited = f", first {limit}" if limit else ""
        name = "/".join((task, protocol, limit, metric))
        question = Question(
            name,
            f"{task} ({protocol}{limited}), {metric}",
            "",
            "Zero-shot",
            partial(_read_score, name),
            tested="score",
            higher=not any(word in metric for word in LOWER_IS_BETTER),
        )
        questions.append(question)
    return questions


def find_result(name: str, run: RunNumbers) -> ZeroShot | None:
    """Return the result of that name of the run's latest checkpoint; of several the one evaluated
    last."""
    results = [result for result in run.zero_shot if "/".join(result.key) == name]
    return max(reversed(results), key=lambda result: result.tokens or 0.0, default=None)


def find_results(name: str, group: Group) -> dict[int, ZeroShot]:
    """Return the result of that name by seed, without the seeds that have none."""
    results = {run.seed: find_result(name, run) for run in group.runs}
    return {seed: result for seed, result in results.items() if result is not None}


def _read_score(name: str, run: RunNumbers) -> float | None:
    result = find_result(name, run)
    return None if result is None else result.score


def why_no_score(groups: Sequence[Group], sides: Sequence[Results]) -> Why | None:
    """Return why the scores of these sides do not speak for their recipes; None if they do.

    Other runs failed, are still to finish or to be evaluated, or the checkpoints are not of equal
    tokens.
    """
    missing = []
    for group, side in zip(groups, sides, strict=True):
        missing += [run for run in group.runs if run.seed not in side]
    failed = sum(run.failed for run in missing)
    if failed:
        return not_judged(f"{counted(failed, 'failed run')} without a score")
    if missing:
        return Why("pending", f"pending: {counted(len(missing), 'run')} without a score")
    return not_judged(_other_tokens(sides))


def _other_tokens(sides: Sequence[Results]) -> str:
    """Return what keeps the checkpoints from being compared; "" if their tokens are equal."""
    tokens = []
    for result in chain.from_iterable(side.values() for side in sides):
        if result.tokens is None:
            return "the tokens of a checkpoint are unknown"
        tokens.append(result.tokens)
    if not tokens or max(tokens) <= (1 + SAME_TOKENS) * min(tokens):
        return ""
    least = format_number(min(tokens), axis="tokens")
    most = format_number(max(tokens), axis="tokens")
    return f"checkpoints after different tokens ({least} to {most})"


def compare_items(sides: Sequence[Results]) -> tuple[Estimate | None, float | None]:
    """Return the mean difference of two checkpoints' scores on the same items, and its p-value.

    The interval is over items: it says how sure the difference of these two checkpoints is, and
    nothing about other seeds. If items are right or wrong, p is McNemar's. (None, None) without one
    pair of checkpoints of one seed whose items were kept.
    """
    before, after = sides
    if len(before) != 1 or before.keys() != after.keys():
        return None, None
    (first,) = before.values()
    (second,) = after.values()
    differences = []
    for item in sorted(first.items.keys() & second.items.keys()):
        differences.append(second.items[item] - first.items[item])
    if not differences:
        return None, None
    over = replace(inference.paired_t(differences), method="paired over items")
    if set(differences) <= {-1.0, 0.0, 1.0}:
        return over, inference.mcnemar(differences.count(-1.0), differences.count(1.0))
    return over, over.p
