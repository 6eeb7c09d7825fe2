"""Which runs show what another run shows: a comparison counts those that it leaves out, a study
those that were seen before it."""

from __future__ import annotations

import contextlib
import math
import os
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from efftrain_cli.compare.groups import differing_keys
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.records import read_toml_text
from efftrain_cli.recipe.recipe import with_defaults
from efftrain_cli.recipe.schedules import has_end
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.directory import recipes_seen, run_names
from efftrain_cli.run.names import runs_by_recipe

UNSEEN = (
    "eval.",
    "parallel.",
    "train.micro_batch_tokens",
    "train.dtype",
    "train.compile",
    "train.deterministic",
    "train.activation_checkpointing",
)
"""Recipe keys that change how a run is evaluated or rounded, and so nothing that a first look does
not tell."""
PATHS = ("data.train", "data.valid")
"""Recipe keys whose values may be one path, written in several ways."""
ALIKE = 0.05
"""Share by which a number of two recipes may differ if who knows the one's results knows the
other's."""


def is_alike(first: Mapping[str, Any], second: Mapping[str, Any], but: Sequence[str] = ()) -> bool:
    """Return whether who has seen a run of one recipe has seen one of the other; keys `but` may
    differ."""
    for key in differing_keys([{**first}, {**second}], ("seed", *but)):
        # Without a decay, a longer run passes through all that a shorter one does.
        is_longer = key == "train.tokens" and not has_end(first.get("optim.schedule"))
        if key.startswith(UNSEEN) or is_longer:
            continue
        a = first.get(key)
        b = second.get(key)
        if isinstance(a, str) and isinstance(b, str) and key in PATHS:
            alike = os.path.abspath(a) == os.path.abspath(b)
        elif isinstance(a, int | float) and isinstance(b, int | float):
            alike = math.isclose(a, b, rel_tol=ALIKE)
        else:
            alike = False
        if not alike:
            return False
    return True


def count_sisters(chosen: Sequence[Path]) -> dict[str, int]:
    """Return how many runs of the chosen runs' recipes were not chosen, by recipe; recipes with
    none left out.

    They have the recipe's name or its values, in the folder of a chosen run; removed ones count.
    """
    paths = {path.resolve() for path in chosen}
    sisters: Counter[str] = Counter()
    for root in sorted({path.parent for path in paths}):
        recipes = {}
        for name, path in recipes_seen(root).items():
            with contextlib.suppress(DataError, OSError, ValueError):
                recipes[name] = with_defaults(flatten(tomllib.loads(read_toml_text(path))))
        labels: dict[str, str] = {}
        for label, names in runs_by_recipe(run_names(root), root).items():
            labels |= dict.fromkeys(names, label)

        asked: dict[str, list[Mapping[str, Any]]] = {}
        for name, label in labels.items():
            if root / name in paths:
                of_label = asked.setdefault(label, [])
                recipe = recipes.get(name)
                if recipe and not any(is_alike(recipe, other) for other in of_label):
                    of_label.append(recipe)
        for name in {**labels, **recipes}:
            label = labels.get(name, "")
            if label not in asked:
                label = _label_of(recipes.get(name, {}), asked)
            if label and root / name not in paths:
                sisters[label] += 1
    return dict(sisters)


def _label_of(recipe: Mapping[str, Any], asked: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the recipe among those asked for that has these values; "" if none has."""
    for label, recipes in asked.items():
        if any(is_alike(recipe, other) for other in recipes):
            return label
    return ""
