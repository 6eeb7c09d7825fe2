"""The runs of a sweep, race or study: every recipe with every seed and setting, and their states.

Seeds are the outer loop, so that pairs of runs that can be compared are complete as early as
possible.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from efftrain_cli.data.prepare import limits_of, prepare
from efftrain_cli.foundation.errors import RecipeError, UsageError
from efftrain_cli.foundation.records import text_digest
from efftrain_cli.recipe.draft import parse_override
from efftrain_cli.recipe.recipe import Recipe, flat_values, load_recipe
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.directory import run_path
from efftrain_cli.run.metrics import last_row, to_float
from efftrain_cli.run.origin import NOT_COMPUTED, ORIGIN, origin_data
from efftrain_cli.run.small_files import read_recipe_values
from efftrain_cli.run.status import ENDED, status_of

if TYPE_CHECKING:
    from efftrain_cli.run.reading import Run

RUNS = 10_000
"""Most runs of a sweep or study; each has a folder."""
VALUE = re.compile(
    r"""(?:"[^"]*"|'[^']*'|\[(?:[^][]|\[[^]]*\])*\]|\{[^}]*\}|[^,])+""",
)
"""One of several values separated by commas; commas in brackets and quotes belong to it."""
VALIDATED_ON = (
    "model.seq_len",
    "eval.windows",
    "data.tokenizer",
    "data.text_field",
    "the validation text",
)
"""What decides what a recipe is validated on."""


class Trunk(NamedTuple):
    """A checkpoint that a run begins with."""

    run: str
    step: int
    tokens: int


@dataclass(frozen=True)
class Trial:
    """One run to train."""

    recipe: str
    """As --recipe names it; of a foreign arm a command."""
    settings: tuple[str, ...]
    """`key=value` overrides besides the seed."""
    seed: int
    name: str
    """Of its run directory."""
    until: int | None = None
    """Step that a probe is trained to; None: to the end of the budget."""
    threshold: float | None = None
    """Fluctuation of the validation perplexity above which a probe ends as diverged."""
    arm: str = ""
    """Label that the run gets; "" for its recipe's name."""
    trunk: Trunk | None = None
    """What it begins with; None: random weights."""

    @property
    def begun(self) -> int:
        """Tokens that its trunk has trained."""
        return self.trunk.tokens if self.trunk is not None else 0


class Runner(Protocol):
    """What trains trials: here, by a command, or as a job array."""

    def train(self, trials: Sequence[Trial], title: str = "") -> list[Run]:
        """Train what is not trained yet; return the run of each trial, in their order.

        Args:
            title: what these runs are, said first if any is to train.

        Raises:
            StoppedError: a signal came, or a job array must train first; the same call continues.
            EfftrainError: a run ended without a result.
        """


def parse_seeds(text: str, option: str = "--seeds") -> tuple[int, ...]:
    """Parse numbers written "0..4" (both ends included), "1,3,5", "7" or a mixture.

    Raises:
        UsageError: it is not one of these, or names a number twice.
    """
    name = f"{option} {text[:40]!r}"
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,19})\s*(?:\.\.\s*(\d{1,19})\s*)?", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise UsageError(f"{name}: write 0..4 (both included), 1,3,5 or 7")
        first = int(match[1])
        last = int(match[2] or match[1])
        check_number_of_runs(len(seeds) + last - first + 1)
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"{name} names a number twice\n  leave one out")
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


def parse_settings(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parse `key=value,value` into values by key; commas inside brackets and quotes belong to a
    value.

    Raises:
        UsageError: one is not of that form, or a key or a value comes twice.
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        key = key.strip()
        parts = VALUE.findall(values)
        is_whole = ",".join(parts) == values
        parts = [part.strip() for part in parts]
        if not (key and parts and all(parts) and is_whole):
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
                f"  use {'--seeds' if key == 'seed' else 'a recipe with that base'}"
            )
        if key.startswith(NOT_COMPUTED) and len(parts) > 1:
            raise UsageError(
                f"--set {text!r}: {key} does not change the result\n  give it one value"
            )
        if key in found:
            raise UsageError(f"--set {key} is given twice\n  give {key}=value,value")
        found[key] = parts
    return found


def grid(
    recipes: Sequence[str],
    seeds: Sequence[int],
    settings: Mapping[str, Sequence[str]],
    prefix: str | None = None,
) -> list[Trial]:
    """List the runs of a sweep, in order.

    Args:
        settings: recipe key -> values, as TOML.

    Raises:
        UsageError: a recipe comes twice, or two recipes share a name.
    """
    names = [Path(recipe).name.removesuffix(".toml") for recipe in recipes]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UsageError(
            f"recipe {', '.join(sorted(twice))} is given twice: runs are named after it\n"
            "  name each once"
        )
    check_number_of_runs(len(recipes) * len(seeds) * math.prod(map(len, settings.values())))
    trials = []
    named = zip(recipes, names, strict=True)
    for seed, (recipe, name), point in itertools.product(seeds, named, points_of(settings)):
        # What changes nothing of the result is not part of the name either.
        words = [setting_word(text) for text in point if not text.startswith(NOT_COMPUTED)]
        run = run_name([*filter(None, (prefix, name)), *words, f"seed{seed}"], point)
        trials.append(Trial(recipe, point, seed, run, arm=name))
    return trials


def points_of(grid: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Return every combination of the values of a grid, as overrides."""
    axes = []
    for key, values in grid.items():
        axes.append([f"{key}={value}" for value in values])
    return list(itertools.product(*axes))


def setting_word(setting: str) -> str:
    """Write an override as it stands in a run's name: optim.lr=1e-3 -> lr1e-3.

    A value with characters that no name may have is distinguished from similar ones by its hash.
    """
    key, _, value = setting.partition("=")
    plain = value.strip("\"'")
    word = re.sub(r"[^A-Za-z0-9._-]", "", plain)
    if word != plain:
        word += f"-{text_digest(value)[:4]}"
    return key.rpartition(".")[2].replace("_", "-") + word


def run_name(words: Sequence[str], overrides: Sequence[str]) -> str:
    """Name a run by words whose last is its seed; too long a name is cut and distinguished by a
    hash of its words and overrides.

    Raises:
        UsageError: it is not a valid run name.
    """
    name = "-".join(words)
    if len(name) > 64:
        digest = text_digest(json.dumps([*words[:-1], *overrides]))[:8]
        name = f"{words[0][: 60 - len(digest) - len(words[-1])]}-{digest}-{words[-1]}"
    run_path(name)
    return name


def recipe_of(trial: Trial) -> Recipe:
    """Resolve the recipe of a trial.

    Raises:
        RecipeError: it breaks a rule.
    """
    return load_recipe(trial.recipe, [*trial.settings, f"seed={trial.seed}"])


# --- before anything is trained -------------------------------------------------------------------


def check_trials(trials: Sequence[Trial]) -> dict[str, str]:
    """Check trials before any is trained; return the state of each by name (`state_of`).

    Raises:
        UsageError: two have one name, a name is another run's, or losses could not be compared.
        DataError: the text of a run is gone.
    """
    check_names(trials)
    check_comparable(trials)
    check_texts(trials)
    return {trial.name: state_of(trial) for trial in trials}


def check_names(trials: Sequence[Trial]) -> None:
    """Check that each run has a name of its own.

    Raises:
        UsageError: two have one name.
    """
    by_name: dict[str, Trial] = {}
    for trial in trials:
        other = by_name.setdefault(trial.name, trial)
        if other != trial:
            raise UsageError(
                f"{' '.join(other.settings)} and {' '.join(trial.settings)} give two runs the"
                f" name {trial.name}\n  rename one of the values"
            )


def check_comparable(trials: Sequence[Trial]) -> None:
    """Check that the runs of a sweep can be compared.

    Raises:
        UsageError: the recipes would be validated on different text, windows or tokens.
    """
    # A trial of each recipe and setting: its seed decides none of these values.
    distinct = {(trial.recipe, trial.settings): trial for trial in trials}
    arms: dict[str, dict[str, list[str]]] = {key: {} for key in VALIDATED_ON}
    for trial in distinct.values():
        values = flat_values(recipe_of(trial))
        # Without a validation text of its own, validation is cut from the training text.
        cut = f"{values.get('data.valid_fraction')} of {values.get('data.train')}"
        values["the validation text"] = values.get("data.valid") or cut
        for key, by_value in arms.items():
            same = by_value.setdefault(str(values.get(key)), [])
            same.append(" ".join((trial.recipe, *trial.settings)))
    problems = []
    for key, by_value in arms.items():
        if len(by_value) > 1:
            each = (f"{value} in {', '.join(names)}" for value, names in by_value.items())
            problems.append(f"  - {key}: {'; '.join(each)}\n")
    if problems:
        raise UsageError(
            "these recipes would be validated on different text,"
            f" so their losses could not be compared:\n{''.join(problems)}"
            "  make them equal, for example with --set for all of them"
        )


def check_texts(trials: Sequence[Trial]) -> None:
    """Check that new runs would train on the tokens of the earlier runs of the same text.

    Raises:
        UsageError: the text has changed in between.
        DataError: it is gone.
    """
    earlier = {}
    new = {}
    for trial in trials:
        recipe = recipe_of(trial)
        text = (repr(recipe.data), recipe.train.tokens, recipe.eval.windows, recipe.model.seq_len)
        path = run_path(trial.name)
        if not (path / ORIGIN).is_file():
            new[text] = recipe
        elif origin_data(path).get("corpus") is not None:
            earlier[text] = path
    for text in earlier.keys() & new.keys():
        trained = origin_data(earlier[text])
        corpus = prepare(new[text].data, limits=limits_of(new[text]))
        hashes = (corpus.train.sha256, corpus.valid.sha256)
        if hashes != (trained["train_hash"], trained["valid_hash"]):
            raise UsageError(
                f"the text has changed since run {earlier[text].name!r} was trained: new runs could"
                " not be compared with it\n"
                "  restore the text, or take another name: --name, for a study another file name"
            )


def state_of(trial: Trial) -> str:
    """Return the state of a trial: "new", "running", "finished", "diverged" or "unfinished".

    Raises:
        UsageError: its run directory exists and holds another recipe.
    """
    path = run_path(trial.name)
    if not (path / "recipe.toml").is_file():
        return "new"
    check_same_recipe(path, trial)
    last = last_row(path)
    status = status_of(path, last)
    step, loss = (to_float(last.get(key)) for key in ("step", "val_loss"))
    if status == "stopped" and not math.isnan(loss) and step >= (trial.until or math.inf):
        return "finished"
    return status if status in ("running", *ENDED) else "unfinished"


def check_same_recipe(path: Path, trial: Trial) -> None:
    """Check that a run was trained by the recipe of a trial: a name alone does not say it.

    Raises:
        UsageError: by another one.
    """
    try:
        # Read as this version reads it: a key that an older version did not know has its default.
        trained = flat_values(load_recipe(str(path / "recipe.toml")))
    except RecipeError:
        trained = flatten(read_recipe_values(path))
    wanted = flat_values(recipe_of(trial))
    differing = []
    for key in wanted | trained:
        same = wanted.get(key) == trained.get(key)
        if not same and not key.startswith(NOT_COMPUTED):
            differing.append(key)
    if differing:
        raise UsageError(
            f"run {trial.name!r} exists with another recipe ({', '.join(differing)} differ)\n"
            f"  remove the run (efftrain runs rm {trial.name}), or take another name: --name, for a"
            " study another file name"
        )


def last_lines(output: str) -> str:
    """Return the last five lines of a program's output, set in."""
    lines = output.strip().splitlines()[-5:]
    return "\n".join(f"    {line}" for line in lines) or "    (nothing)"
