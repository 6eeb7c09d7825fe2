"""The runs of a sweep or study: every recipe with every seed and setting, their states, and each
recipe's best setting.

Seeds are the outer loop, so that pairs of runs that can be compared are complete as early as
possible.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from efftrain_cli.foundation.bounds import RUNS
from efftrain_cli.foundation.errors import RecipeError, UsageError
from efftrain_cli.foundation.records import text_digest
from efftrain_cli.run.directory import run_path
from efftrain_cli.run.small_files import NOT_COMPUTED

if TYPE_CHECKING:
    from efftrain_cli.compare.reading import RunNumbers
    from efftrain_cli.recipe.recipe import Recipe

ENDED = ("finished", "diverged")
"""States of a run that is not trained any more: a run that diverges is a result."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    recipe: str
    """As --recipe names it."""
    settings: tuple[str, ...]
    """`key=value` overrides besides the seed."""
    seed: int
    name: str
    """Of its run directory."""
    until: int | None = None
    """Step that a probe is trained to; None: to the end of the budget."""
    threshold: float | None = None
    """Fluctuation of the validation perplexity above which a probe ends as diverged."""


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse seeds written "0..4" (both ends included), "1,3,5", "7" or a mixture.

    Raises:
        UsageError: it is not one of these, or names a seed twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,19})\s*(?:\.\.\s*(\d{1,19})\s*)?", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise UsageError(f"--seeds {text[:40]!r}: write 0..4 (both included), 1,3,5 or 7")
        first = int(match[1])
        last = int(match[2] or match[1])
        check_number_of_runs(len(seeds) + last - first + 1)
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {text[:40]!r} names a seed twice\n  leave one out")
    return tuple(seeds)


def check_number_of_runs(runs: int) -> None:
    """Refuse more than RUNS before any list of them is made.

    Raises:
        UsageError: there are more.
    """
    if runs > RUNS:
        raise UsageError(
            f"{runs:,} runs are more than the {RUNS:,} that one sweep or study may have\n"
            "give fewer seeds or fewer values"
        )


def parse_settings(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Parse `key=value,value` into a key and its values; commas inside brackets and quotes belong
    to a value.

    Raises:
        UsageError: one is not of that form, or a key or a value comes twice.
    """
    from efftrain_cli.recipe.draft import parse_override

    found = {}
    for text in texts:
        key, sign, values = text.partition("=")
        key = key.strip()
        parts = _split(values)
        if not sign or not key or not all(parts):
            raise UsageError(
                f"--set {text!r} names no key and value\n"
                "  give key=value or key=value,value, for example optim.lr=1e-3,2e-3"
            )
        distinct = {str(parse_override(f"value={part}")) for part in parts}
        if len(distinct) < len(parts):
            raise UsageError(f"--set {text!r} gives a value twice\n  leave one of them out")
        if key in ("seed", "base"):
            raise UsageError(
                f"--set {text!r}: {key} has its own option\n"
                f"  use {'--seeds' if key == 'seed' else '--recipe'}"
            )
        if key.startswith(NOT_COMPUTED) and len(parts) > 1:
            raise UsageError(
                f"--set {text!r}: {key} does not change the result\n  give it one value"
            )
        if key in found:
            raise UsageError(f"--set {key} is given twice\n  give {key}=value,value")
        found[key] = parts
    return list(found.items())


def _split(values: str) -> list[str]:
    parts = [""]
    depth = 0
    quote = ""
    for character in values:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and not quote and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def grid(
    recipes: Sequence[str],
    seeds: Sequence[int],
    settings: Sequence[tuple[str, list[str]]],
    prefix: str | None = None,
) -> list[Trial]:
    """List the runs of a sweep, in order.

    Raises:
        UsageError: a recipe comes twice, or two recipes share a name.
    """
    if not recipes:
        raise UsageError("give at least one --recipe")
    names = [Path(recipe).name.removesuffix(".toml") for recipe in recipes]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UsageError(
            f"--recipe {', '.join(sorted(twice))} is given twice; runs are named after their recipe"
        )
    check_number_of_runs(
        len(recipes) * len(seeds) * math.prod(len(values) for _, values in settings)
    )
    trials = []
    points = points_of(settings)
    named = zip(recipes, names, strict=True)
    for seed, (recipe, name), point in itertools.product(seeds, named, points):
        words = [prefix, name]
        for key, value in point:
            # What changes nothing of the result is not part of the name either.
            if not key.startswith(NOT_COMPUTED):
                words.append(setting_word(key, value))
        overrides = tuple(f"{key}={value}" for key, value in point)
        run = run_name([*filter(None, words), f"seed{seed}"], overrides)
        trials.append(Trial(recipe, overrides, seed, run))
    return trials


def points_of(grid: Iterable[tuple[str, Iterable[str]]]) -> list[tuple[tuple[str, str], ...]]:
    """Return every combination of the values of a grid, as pairs of key and value."""
    pairs = []
    for key, values in grid:
        pairs.append([(key, value) for value in values])
    return list(itertools.product(*pairs))


def setting_word(key: str, value: str) -> str:
    """Write a setting as it stands in a run's name: optim.lr=1e-3 -> lr1e-3."""
    return key.rsplit(".", 1)[-1].replace("_", "-") + re.sub(r"[^A-Za-z0-9.-]", "", value)


def run_name(words: Sequence[str], overrides: Sequence[str]) -> str:
    """Name a run by words whose last is its seed; too long a name is cut and distinguished by a
    hash of the overrides.

    Raises:
        UsageError: it is not a valid run name.
    """
    name = "-".join(words)
    if len(name) > 64:
        digest = text_digest(json.dumps(overrides))[:8]
        name = f"{words[0][: 60 - len(digest) - len(words[-1])]}-{digest}-{words[-1]}"
    run_path(name)
    return name


def recipe_of(trial: Trial) -> Recipe:
    """Resolve the recipe of a trial.

    Raises:
        RecipeError: it breaks a rule.
    """
    from efftrain_cli.recipe.recipe import load_recipe

    return load_recipe(trial.recipe, [*trial.settings, f"seed={trial.seed}"])


VALIDATED_ON = ("model.seq_len", "eval.windows", "data.tokenizer", "data.text_field")
"""Recipe keys that decide, beside the text, what a recipe is validated on."""


def check_comparable(trials: Sequence[Trial]) -> None:
    """Check that the runs of a sweep can be compared, before any is trained.

    Raises:
        UsageError: the recipes would be validated on different text, windows or tokens.
    """
    from efftrain_cli.recipe.recipe import flat_values

    # A trial of each recipe and setting: its seed decides none of these values.
    distinct = {(trial.recipe, trial.settings): trial for trial in trials}
    decided: dict[str, dict[str, list[str]]] = {}
    for trial in distinct.values():
        values = flat_values(recipe_of(trial))
        deciding = {key: values.get(key) for key in VALIDATED_ON}
        # Without a validation text of its own, validation is cut from the training text.
        cut = f"{values.get('data.valid_fraction')} of {values.get('data.train')}"
        deciding["the validation text"] = values.get("data.valid") or cut
        for key, value in deciding.items():
            arms = decided.setdefault(key, {}).setdefault(str(value), [])
            arms.append(" ".join((trial.recipe, *trial.settings)))
    problems = []
    for key, values in decided.items():
        if len(values) > 1:
            each = (f"{value} in {', '.join(arms)}" for value, arms in values.items())
            problems.append(f"  - {key}: {'; '.join(each)}")
    if problems:
        raise UsageError(
            "these recipes would be validated on different text,"
            " so their losses could not be compared:\n"
            + "\n".join(problems)
            + "\nMake them equal, for example with --set for all of them,"
            " or use --allow to train and label them"
        )


def state_of(trial: Trial) -> str:
    """Return the state of a trial: "new", "running", "finished", "diverged" or "unfinished".

    Raises:
        UsageError: its run directory exists and holds another recipe.
    """
    from efftrain_cli.compare.reading import status_of
    from efftrain_cli.run.metrics import read_metrics
    from efftrain_cli.run.small_files import read_run

    path = _run_of(trial)
    if path is None:
        return "new"
    run = read_run(path)
    rows = read_metrics(path, ("step", "tokens", "nonfinite", "val_loss"))
    status = status_of(run, rows)
    if status == "stopped" and trial.until is not None:
        columns = rows.columns
        if columns["step"][-1] >= trial.until and math.isfinite(columns["val_loss"][-1]):
            return "finished"
    return status if status in ("running", *ENDED) else "unfinished"


def read_trial(trial: Trial) -> RunNumbers | None:
    """Read a trial's run; None if it has no row yet.

    Raises:
        UsageError: its run directory exists and holds another recipe.
        DataError: it cannot be read.
    """
    from efftrain_cli.compare.reading import read_numbers

    path = _run_of(trial)
    if path is None or not (path / "metrics.jsonl").is_file():
        return None
    return read_numbers(path)


def _run_of(trial: Trial) -> Path | None:
    """Return the directory of a trial's run, None if there is none: a name alone does not say what
    was trained."""
    from efftrain_cli.compare.groups import differing_keys
    from efftrain_cli.recipe.recipe import flat_values, load_recipe
    from efftrain_cli.recipe.toml import flatten
    from efftrain_cli.run.small_files import read_recipe_values

    path = run_path(trial.name)
    if not (path / "recipe.toml").is_file():
        return None
    try:
        # Read as this version reads it: a key that an older version did not know has its default.
        trained = flat_values(load_recipe(str(path / "recipe.toml")))
    except RecipeError:
        trained = flatten(read_recipe_values(path))
    differing = differing_keys([flat_values(recipe_of(trial)), trained], but=())
    if differing:
        raise UsageError(
            f"run {trial.name!r} exists with another recipe ({', '.join(differing)} differ)\n"
            f"remove the run (efftrain runs rm {trial.name}), or take another name:"
            " --name for a sweep, another file name for a study"
        )
    return path


@dataclass(frozen=True)
class Choice:
    """One recipe with one setting, over its seeds."""

    recipe: str
    settings: tuple[str, ...]
    names: tuple[str, ...]
    """Its runs."""
    losses: tuple[float | None, ...]
    """Final validation loss by seed, nats per token; None where a run did not finish."""
    best: bool
    """The recipe's best setting at its budget: the lowest mean final loss among those that finished
    with every seed."""
