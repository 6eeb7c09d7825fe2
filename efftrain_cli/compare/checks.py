"""What decides whether losses compare, and what else their reader must know."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from efftrain_cli.compare.arms import Arm, Pairs, method_sections
from efftrain_cli.foundation.console import human, listed
from efftrain_cli.run.reading import OPENING, Run, differing_keys

REFUSED = {
    "data.valid_hash": "validation text",
    "data.tokenizer_hash": "tokenizer",
    "data.valid_windows": "number of validation windows",
    "data.seq_len": "length of a validation window",
}
"""Conditions without which losses do not compare."""
NAMED = (
    "device",
    "threads",
    "dtype",
    "torch",
    "efftrain",
    "git_commit",
    "world_size",
    "jobs",
    "data.train_hash",
)
"""Conditions whose differences are named."""
CHANGES = {
    "tokens": "trained on {} instead of {} tokens",
    "updates": "made {} instead of {} updates",
    "warmup tokens": "warmed up over {} instead of {} tokens",
    "peak rate": "peaked at a rate of {} instead of {}",
}
"""Number of a run that a method may change beside its own settings -> words."""
DIFFERS = 1.02
"""Ratio from which on two such numbers count as different."""


def find_refusals(runs: Sequence[Run]) -> list[str]:
    """Return why losses of these runs must not be compared."""
    refusals = []
    for key, title in REFUSED.items():
        names = names_by_value(runs, key)
        if len(names) > 1 or "None" in names:
            refusals.append(f"{title} differs or is unknown: {split_text(names)}")
    begun: dict[tuple[float, ...], Run] = {}
    for run in runs:
        opening = run.opening or tuple(run.curve.val_loss[:OPENING])
        other = begun.setdefault(opening, run)
        if len(opening) == OPENING and other.seed != run.seed:
            refusals.append(f"{run.name} began with the losses of {other.name}: one is a copy")
    return refusals


def find_unshared(pairs: Sequence[Pairs]) -> list[str]:
    """Return a caveat that names the runs without a partner in any pair of arms."""
    kept: set[str] = set()
    unshared: dict[str, None] = {}
    for each in pairs:
        kept |= {run.name for run in each.runs}
        unshared |= dict.fromkeys(each.unshared)
    names = [name for name in unshared if name not in kept]
    verb = "has" if len(names) == 1 else "have"
    return [f"{listed(names)} {verb} no partner: left out"] if names else []


def find_caveats(runs: Sequence[Run]) -> list[str]:
    """Return what else may explain a difference."""
    caveats = []
    for key in NAMED:
        names = names_by_value(runs, key)
        if len(names) > 1:
            caveats.append(f"different {key}: {split_text(names)}")
    notes: dict[str, list[str]] = {}
    for run in runs:
        for note in run.notes:
            notes.setdefault(note, []).append(run.name)
    for note, names_of_runs in notes.items():
        if len(names_of_runs) < len(runs):
            note = f"{listed(names_of_runs)}: {note}"
        caveats.append(note)
    return caveats


def names_by_value(runs: Sequence[Run], key: str) -> dict[str, list[str]]:
    """Return the values of a condition, each with the names of its runs.

    Runs of a table have no conditions: their caveat says so.
    """
    names: dict[str, list[str]] = {}
    for run in runs:
        if run.conditions:
            value = str(run.conditions.get(key))
            names.setdefault(value, []).append(run.name)
    return names


def split_text(names: dict[str, list[str]]) -> str:
    """Return values and their runs as text; of a long value its beginning."""
    return "; ".join(f"{value:.12} in {listed(runs)}" for value, runs in names.items())


def describe_changes(base: Arm, arm: Arm) -> str:
    """Return what a method changed beside its own settings, as a sentence; "" if nothing."""
    parts = []
    for title, words in CHANGES.items():
        before = mean_fact(base, title)
        after = mean_fact(arm, title)
        if max(before, after) > DIFFERS * min(before, after):
            parts.append(words.format(human(after), human(before)))
    return f"{arm.label} {' and '.join(parts)}." if parts else ""


def describe_differences(arms: Sequence[Arm], varied: Collection[str]) -> list[str]:
    """Return a sentence per arm about settings outside the methods' own sections that differ.

    Two arms without a method's section differ in what is asked about: there is none about them.

    Args:
        arms: the baseline first.
        varied: keys that were varied on purpose, such as those of a tuning grid.
    """
    sentences = []
    base = arms[0]
    for arm in arms[1:]:
        keys = differing_keys([base.first.settings, arm.first.settings])
        methods = {*method_sections(keys), "stages"}
        other = [key for key in keys if key.partition(".")[0] not in methods]
        texts = []
        for key in other:
            if key not in varied:
                before, after = (each.first.settings.get(key, "-") for each in (base, arm))
                texts.append(f"{key} {before} | {after}")
        subject = "They differ"
        if len(arms) > 2:
            subject = f"{arm.label} differs from {base.label}"
        if texts and len(other) < len(keys):
            sentences.append(f"{subject} in more than the method: {', '.join(texts)}")
    return sentences


def mean_fact(arm: Arm, title: str) -> float:
    """Return the mean of a further number over the finished runs; NaN if it is unknown."""
    values = []
    for run in arm.runs:
        if run.status == "finished":
            values.append(run.facts.get(title, math.nan))
    return float(np.mean(values)) if values else math.nan
