"""Verdicts in words: a sentence about a recipe and its baseline, and the answer in the few
characters of a table."""

from __future__ import annotations

import math

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.engine import Verdict
from efftrain_cli.compare.formats import format_estimate, format_p
from efftrain_cli.compare.inference import Estimate
from efftrain_cli.compare.measures import PRIMARY, Question, cost_question


def verdict_sentences(comparison: Comparison) -> list[str]:
    """Return sentences about each recipe: its final loss, its tokens if both are decided, and what
    else it changed."""
    cost = cost_question("tokens", comparison.target_loss).key
    base, *arms = [f"{comparison.letter(group)} {group.label}" for group in comparison.groups]
    lines = []
    for arm, group in zip(arms, comparison.groups[1:], strict=True):
        found = comparison.verdict(PRIMARY, group.label)
        spent = comparison.verdict(cost, group.label)
        assert found is not None
        lines.append(sentence(found, arm, base))
        if spent and spent.exact is None and "undecided" not in (found.outcome, spent.outcome):
            lines.append(sentence(spent, arm, base))
        if found.differed:
            lines.append(f"{found.differed}.")
    return lines


def sentence(found: Verdict, arm: str, base: str) -> str:
    """Return a verdict as a sentence: the claim; estimate, p-value, test; how it was reached."""
    question = found.question
    measure = question.title
    facts = []
    if not math.isnan(found.estimate.mean):
        facts.append(f"{interval_text(found.estimate)} {question.unit}".rstrip())
    if found.why:
        return f"{arm} against {base} in {measure}: {'; '.join([note_of(found), *facts])}."

    claim = {
        "noninferior": f"is not worse than {base} in {measure} by {margin_text(question)} or more",
        "equivalent": f"is equivalent to {base} in {measure} within {margin_text(question)}",
        "undecided": f"against {base} is undecided in {measure}",
    }.get(found.outcome, f"is {found.outcome} than {base} in {measure}")
    seen = ""
    if found.opposite:
        word = "beyond the margin" if question.direction == "equivalent" else "worse"
        claim = (
            f"against {base}: {question.direction} is not shown; the test says {word} in {measure}"
        )
    elif found.outcome == "undecided":
        seen = _detectable(found)
    facts.append(p_words(found.p_holm))
    if found.exact is None:
        pairs = f"{found.estimate.n} pairs"
        facts.append(pairs if found.estimate.paired else found.estimate.method)
    parts = filter(None, (", ".join(facts), found.note, seen))
    return f"{arm} {claim}: {'; '.join(parts)}."


def note_of(found: Verdict) -> str:
    """Return why nothing is judged, and how the verdict was reached if not by the estimate."""
    why = found.why.text if found.why else ""
    return "; ".join(filter(None, (why, found.note)))


def short_verdict(found: Verdict) -> str:
    """Return the outcome, or what kind of reason there is for none, in one or two words."""
    return found.why.kind.replace("_", " ") if found.why else found.outcome


def interval_text(estimate: Estimate) -> str:
    """Write the estimate with its interval, a ratio with three decimals."""
    return format_estimate(estimate.mean, estimate.low, estimate.high, estimate.log, decimals=3)


def margin_text(question: Question) -> str:
    """Write a question's margin: nats per token, or the share of a cost."""
    margin = question.margin or 0.0
    return f"{100 * margin:g} %" if question.axis else f"{margin:g} nats/token"


def _detectable(found: Verdict) -> str:
    """Return what such a study shows in 80 % of cases, with the spread's own interval; "" if
    unknown or endless."""
    size = found.min_detectable_effect
    limits = found.min_detectable_range
    if size is None or limits is None or math.isinf(size):
        return ""
    question = found.question
    noun = "a margin" if question.direction in ("noninferior", "equivalent") else "a difference"
    sizes = [f"{each:.2g}" for each in (size, *limits)]
    if question.axis:
        sizes = [f"{1 + each:.2f}x" for each in (size, *limits)]
    shown, least, most = sizes
    words = f"{noun} of {shown} {question.unit}".rstrip()
    return (
        f"such a study shows {words} in 80 % of cases"
        f" ({least} to {most} by the spread's own interval)"
    )


def p_words(p: float | None) -> str:
    """ "p = 0.012", "p < 0.0001"."""
    text = format_p(p)
    return f"p {text[0]} {text[1:]}" if text.startswith("<") else f"p = {text}"
