"""What a comparison says in words: a sentence per recipe, and each answer in the few characters of a table."""

from __future__ import annotations

import math

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.differences import PRIMARY, Difference
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.inference import Estimate, ExactTest


def verdict_sentences(comparison: Comparison) -> list[str]:
    """One sentence per recipe that is compared with the baseline, by its final loss."""
    return [
        _sentence(comparison, group)
        for group in comparison.groups
        if group is not comparison.baseline
    ]


def _sentence(comparison: Comparison, group: Group) -> str:
    base = comparison.baseline
    a, b = (f"{comparison.letter(each)} {each.label}" for each in (base, group))
    difference = comparison.difference(PRIMARY, group.label)
    assert difference is not None
    estimate, reason = difference.estimate, difference.reason
    if reason:
        shown = f" ({_gap(estimate)})" if not math.isnan(estimate.mean) else ""
        return f"{b} against {a}: {reason.replace('pending:', 'the verdict waits:')}{shown}."
    decided = difference.verdict in ("better", "worse")
    claim = f"{b} is {difference.verdict} than {a}" if decided else f"{b} against {a} is undecided"
    if difference.exact is not None:
        return f"{claim}: {_ranks(difference.exact, difference.p_holm, comparison, group)}."
    behind = f"{estimate.n} pairs" if estimate.method.startswith("paired") else estimate.method
    how = f"{_gap(estimate)}, {p_words(difference.p_holm)}, {behind}"
    if decided:
        return f"{claim}: {how}.{_cost(comparison, group)}"
    if difference.verdict == "equivalent":
        return f"{b} is equivalent to {a} within {comparison.margin:g} nats/token: {how}."
    seen = difference.decision.could_see
    could = f" This study could have seen {seen:.2g} nats/token or more." if seen else ""
    return f"{claim}: {how}.{could}"


def _ranks(test: ExactTest, p_holm: float | None, comparison: Comparison, group: Group) -> str:
    counts = [
        f"{sum(run.failed for run in each.runs)} of {len(each.runs)} runs of {comparison.letter(each)} failed"
        for each in (comparison.baseline, group)
    ]
    return (
        f"{', '.join(counts)}; ahead in {100 * test.wins:.0f} % of the pairs of runs ({test.method}, {p_words(p_holm)}, "
        f"at best {p_text(test.smallest_p)} with so many)"
    )


def _gap(estimate: Estimate) -> str:
    """How much better or worse, and the interval in the direction of that word."""
    sign = -1.0 if estimate.mean < 0 else 1.0
    text = f"final loss {'better' if sign < 0 else 'worse'} by {abs(estimate.mean):.4f} nats/token"
    if estimate.low is None or estimate.high is None:
        return text
    low, high = sorted((sign * estimate.low, sign * estimate.high))
    return f"{text}, 95 % {low:.4f} to {high:.4f}"


def _cost(comparison: Comparison, group: Group) -> str:
    """The tokens that go with a verdict on the loss, where they were judged too."""
    for key, words in (
        ("tokens_to_target", "the target loss"),
        ("tokens_to_match", "the worse one's final loss"),
    ):
        found = comparison.difference(key, group.label)
        if (
            found is not None
            and not found.reason
            and found.exact is None
            and found.verdict in ("better", "worse")
        ):
            ratio = found.estimate.mean
            share = f"{ratio:.2f}x fewer" if ratio > 1 else f"{1 / ratio:.2f}x more"
            return f" Tokens to {words}: {share}."
    return ""


def p_words(p: float | None) -> str:
    """ "p = 0.012", "p < 0.0001"."""
    text = p_text(p)
    return f"p {text[0]} {text[1:]}" if text.startswith("<") else f"p = {text}"


def p_text(p: float | None) -> str:
    """A p-value with two digits."""
    if p is None:
        return "-"
    return f"{p:.2g}" if p >= 0.0001 else "<0.0001"


def short_verdict(difference: Difference) -> str:
    """The verdict in one or two words."""
    reason = difference.reason
    for word in ("pending", "not judged", "undecided"):
        if reason.startswith(word):
            return word
    if reason.startswith("settings"):
        return "not judged"
    return "no claim" if reason and reason != "none" else reason or difference.decision.outcome
