"""Check that the losses of runs are comparable, and list everything else that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from efftrain_cli.compare.formats import format_value
from efftrain_cli.compare.groups import Group, differing_keys, finished_runs, runs_of
from efftrain_cli.compare.picture import letter
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.foundation.console import human_count, listed
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.why import Why
from efftrain_cli.recipe.toml import flatten

INCOMPARABLE = Why("not_judged", "not judged: these losses are not comparable")


def not_judged(reason: str) -> Why | None:
    """Return the reason as a `Why`; None if it is ""."""
    return Why("not_judged", f"not judged: {reason}") if reason else None


SIGNS = {"allowed": "NOT COMPARABLE", "warning": "warning", "note": "note"}
"""Kind of a label -> the word before its text, gravest first."""
_REFUSED = {
    "the validation text": "valid_hash",
    "the tokenizer": "tokenizer_hash",
    "the number of validation windows": "valid_windows",
    "the length of a validation window": "seq_len",
}
"""Condition of comparable losses -> its key in the origin's data."""
SHARED_SECTIONS = ("model.", "data.", "optim.", "train.", "eval.")
"""Sections that methods do not change: if they differ, they may explain a difference in results."""
FIRST_LOSSES = 3
"""Number of training losses, from the first, that no two seeds share by chance."""


_CONDITIONS = {
    "device": ("device", None),
    "number of threads": ("threads", None),
    "compute type": ("dtype", None),
    "torch version": ("torch", None),
    "efftrain version": ("efftrain", None),
    "efftrain commit": ("git_commit", None),
    "number of devices": ("world_size", 1),
    "number of runs side by side (--jobs)": ("jobs", 1),
}
"""Condition of a run beside its recipe -> (key in the origin, value if the key is missing)."""


def check(groups: Sequence[Group], allow: bool = False) -> list[Why]:
    """Return the labels of a comparison: everything that its reader must know.

    Their kinds are "allowed" (losses are not comparable, and shown because of --allow), "warning"
    (it may explain a difference in results) and "note".

    Raises:
        UsageError: validation sets or tokenizers differ, or cannot be shown to be equal, and
            `allow` is False.
    """
    runs = runs_of(groups)
    refusals = _refusals(runs)
    if refusals and not allow:
        faults = "".join(f"  - {text}\n" for text in refusals)
        raise UsageError(
            f"these runs cannot be compared fairly:\n{faults}"
            "  leave out one side of each line, or pass --allow to show all, labelled"
        )
    warnings = _origin_warnings(runs) + _recipe_warnings(groups) + _parent_warnings(groups)
    labels = [Why("allowed", text) for text in refusals]
    labels += [Why("warning", text) for text in warnings]
    for run in runs:
        for mark in run.marks:
            kind = "note" if mark.kind == "resumed" else "warning"
            labels.append(Why(kind, f"{run.name}: {mark.text}"))
    for first, second in combinations(groups, 2):
        if not differing_keys([first.recipe, second.recipe]):
            text = f"{first.label} and {second.label} are one recipe: none of its keys differs"
            labels.append(Why("note", text))
    return labels


DIFFERS = 1.02
"""Factor from which on updates, warmups and rates of two recipes count as different."""
_PER_UPDATE = "took {} instead of {} tokens per update"
_CHANGES: dict[str, Callable[[RunNumbers], float]] = {
    "made {} instead of {} updates": lambda run: run.step,
    _PER_UPDATE: lambda run: run.tokens / run.step,
    "warmed up over {} instead of {} tokens": lambda run: run.warmup_tokens,
    "peaked at a rate of {} instead of {}": lambda run: run.peak_lr,
}
"""Words for a further difference of a method -> its value for a run."""


def describe_differences(baseline: Group, method: Group) -> str:
    """Return as text how the method's updates, warmup and peak rate differ from the baseline's.

    They are means over finished runs; "" if none of them differs.
    """
    sides = [finished_runs(group.runs) for group in (baseline, method)]
    for runs in sides:
        if not runs or any(run.step < 1 or run.peak_lr <= 0 for run in runs):
            return ""

    def means(value: Callable[[RunNumbers], float]) -> tuple[float, float]:
        before, after = (sum(map(value, runs)) / len(runs) for runs in sides)
        return before, after

    parts = []
    is_longer = _differ(*means(lambda run: run.tokens))
    for words, value in _CHANGES.items():
        before, after = means(value)
        # At equal tokens the number of updates implies the tokens per update.
        if _differ(before, after) and (is_longer or words != _PER_UPDATE):
            parts.append(words.format(human_count(after), human_count(before)))
    if not parts:
        return ""
    *first, last = parts
    listed = " and ".join(filter(None, (", ".join(first), last)))
    return f"{method.label} {listed}"


def _differ(a: float, b: float) -> bool:
    return max(a, b) > DIFFERS * min(a, b)


def why_flops_not_judged(runs: Sequence[RunNumbers]) -> str:
    """Return why the FLOPs of these runs must not be judged; "" if they may."""
    lacking = [run.name for run in runs if run.flops_lack_optimizer]
    if lacking:
        return (
            f"{listed(lacking)}: begun before the FLOPs"
            " of Muon's Newton-Schulz iterations were counted"
        )
    return ""


def _refusals(runs: Sequence[RunNumbers]) -> list[str]:
    found = []
    for title, key in _REFUSED.items():
        names = _names_by_value(runs, f"data.{key}")
        unknown = names.get("None")
        if unknown:
            found.append(f"{title} of {listed(unknown)} is unknown (origin.json does not say)")
        elif len(names) > 1:
            found.append(f"{title} differs: {_split(names)}")
    by_losses: dict[bytes, RunNumbers] = {}
    for run in runs:
        if "loss" not in run.series:
            continue
        losses = run.series["loss"].values
        # The first rows of a grown run are its parent's, whatever its seed.
        if run.grown_at < 0:
            losses = losses[:FIRST_LOSSES]
        first = by_losses.setdefault(losses.tobytes(), run)
        if first.seed != run.seed:
            pair = f"{first.name} and {run.name}"
            found.append(f"{pair} are one run under two seeds: they began with equal losses")
    return found


def _origin_warnings(runs: Sequence[RunNumbers]) -> list[str]:
    found = []
    # Some recipes train on the source of the standard library, which depends on the Python version.
    texts = {"Python version": ("python", None), "training text": ("data.train_hash", None)}
    for title, (key, usual) in (_CONDITIONS | texts).items():
        relevant = list(runs)
        if key == "threads":
            # The number of threads matters only for runs on the CPU.
            relevant = [run for run in runs if run.origin.get("device_kind") == "cpu"]
        names = _names_by_value(relevant, key, usual)
        if len(names) > 1:
            found.append(f"different {title}: {_split(names)}")
    return found


def _recipe_warnings(groups: Sequence[Group]) -> list[str]:
    found = []
    named = {group.label: group.recipe for group in groups}
    # A setting's name is long: its letter is in every table.
    if " " in "".join(named):
        named = {letter(i): group.recipe for i, group in enumerate(groups)}
    recipes = list(named.values())
    has_moments = any(map(_takes_moments, recipes))
    for key in differing_keys(recipes):
        # The standardization loss is computed within each micro-batch.
        is_cut = has_moments and key == "train.micro_batch_tokens"
        if not is_cut and not key.startswith(SHARED_SECTIONS):
            continue
        values = [f"{name} {format_value(recipe.get(key))}" for name, recipe in named.items()]
        text = f"different {key}: {', '.join(values)}"
        if is_cut:
            text += "; the standardization loss takes its moments over micro-batches"
        found.append(text)
    return found


def _parent_warnings(groups: Sequence[Group]) -> list[str]:
    """Name runs of a recipe whose seeds share their first weights: they differ less than others."""
    found = []
    for group in groups:
        names: dict[str, list[str]] = {}
        for run in group.runs:
            parent = run.origin.get("grown_from") or run.origin.get("imported")
            if isinstance(parent, dict):
                first = parent.get("run") or parent.get("directory")
                names.setdefault(str(first), []).append(run.name)
        for parent, begun in names.items():
            if len(begun) > 1:
                found.append(
                    f"{listed(begun)} began with the weights of {parent}: intervals and p hold"
                    " for these weights only"
                )
    return found


def _takes_moments(recipe: Mapping[str, object]) -> bool:
    """Return whether a term of the loss depends on how a step is cut into micro-batches."""
    return bool(recipe.get("standardization_loss.weight"))


def _names_by_value(
    runs: Sequence[RunNumbers], key: str, usual: object = None
) -> dict[str, list[str]]:
    """Return value -> names of the runs whose origins have it under a dotted key."""
    names: dict[str, list[str]] = {}
    for run in runs:
        value = flatten(run.origin).get(key, usual)
        names.setdefault(str(value), []).append(run.name)
    return names


def _split(values: dict[str, list[str]]) -> str:
    return "; ".join(f"{_short(value)} in {listed(names)}" for value, names in values.items())


def _short(value: str) -> str:
    """Return the first digits of a hash; any other value as it is."""
    return value[:12] if len(value) >= 40 and " " not in value else value
