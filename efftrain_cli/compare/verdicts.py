"""What a comparison says in words: a sentence per recipe, and each answer in the few characters of a table."""

from __future__ import annotations

import math

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.engine import Verdict
from efftrain_cli.compare.formats import format_p
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.inference import Estimate
from efftrain_cli.compare.measures import PRIMARY, cost_question


def verdict_sentences(comparison: Comparison) -> list[str]:
    """Return a sentence per recipe that is compared with the baseline, by its final loss, and what else it changed."""
    lines = []
    for group in comparison.groups:
        found = comparison.verdict(PRIMARY, group.label)
        if found is not None:
            lines.append(_sentence(comparison, group))
            if found.differed:
                lines.append(f"{found.differed}.")
    return lines


def _sentence(comparison: Comparison, group: Group) -> str:
    base = comparison.baseline
    a, b = (f"{comparison.letter(each)} {each.label}" for each in (base, group))
    found = comparison.verdict(PRIMARY, group.label)
    assert found is not None
    estimate = found.estimate
    why = found.why
    if why is not None:
        text = why.text
        if why.kind == "pending":
            text = text.replace("pending:", "the verdict waits:")
        if not math.isnan(estimate.mean):
            text += f" ({_gap(estimate)})"
        return f"{b} against {a}: {text}."
    claim = f"{b} against {a} is undecided"
    decided = found.outcome in ("better", "worse")
    if decided:
        claim = f"{b} is {found.outcome} than {a}"
    if found.exact is not None:
        return f"{claim}: {found.note}, {p_words(found.p_holm)}."
    behind = f"{estimate.n} pairs" if estimate.paired else estimate.method
    how = f"{_gap(estimate)}, {p_words(found.p_holm)}, {behind}"
    if found.note:
        how += f"; {found.note}"
    if decided:
        return f"{claim}: {how}.{_cost(comparison, group)}"
    if found.outcome == "equivalent":
        return f"{b} is equivalent to {a} within {comparison.margin:g} nats/token: {how}."
    seen = found.min_detectable_effect
    between = found.min_detectable_range
    if not seen or not between:
        return f"{claim}: {how}."
    least, most = between
    return (
        f"{claim}: {how}. This study could have seen {seen:.2g} nats/token or more; {least:.2g} to {most:.2g}, as its "
        "spread is known."
    )


def _gap(estimate: Estimate) -> str:
    """Say how much better or worse the loss is, and the interval in the direction of that word."""
    sign = 1.0
    word = "worse"
    if estimate.mean < 0:
        sign = -1.0
        word = "better"
    text = f"final loss {word} by {abs(estimate.mean):.4f} nats/token"
    if estimate.low is None or estimate.high is None:
        return text
    low, high = sorted((sign * estimate.low, sign * estimate.high))
    return f"{text}, 95 % {low:.4f} to {high:.4f}"


def _cost(comparison: Comparison, group: Group) -> str:
    """Say how the tokens differ; "" if no cost in tokens was shown."""
    words = "the target loss"
    if comparison.target_loss is None:
        words = "the other's final loss, on its own curve"
    asked = cost_question("tokens", comparison.target_loss)
    found = comparison.verdict(asked.key, group.label)
    if not found or found.exact is not None or found.outcome not in ("better", "worse"):
        return ""
    ratio = found.estimate.mean
    share = f"{ratio:.2f}x fewer" if ratio > 1 else f"{1 / ratio:.2f}x more"
    return f" Tokens to {words}: {share}."


def p_words(p: float | None) -> str:
    """ "p = 0.012", "p < 0.0001"."""
    text = format_p(p)
    return f"p {text[0]} {text[1:]}" if text.startswith("<") else f"p = {text}"


_SHORT = {
    "pending": "pending",
    "not_judged": "not judged",
    "settings": "not judged",
    "too_few": "undecided",
    "nothing": "none",
}


def short_verdict(found: Verdict) -> str:
    """Return the verdict in one or two words."""
    if found.why:
        return _SHORT.get(found.why.kind, "no claim")
    return found.outcome
