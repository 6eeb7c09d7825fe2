"""Which run a name means: the run itself, a recipe's only run, or the only one that begins so. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.errors import EfftrainError, UsageError, nearest
from efftrain_cli.run.directory import run_names, run_path, runs_root
from efftrain_cli.run.origin import read_origin


def find_run(name: str) -> str:
    """Return the name of the run that `name` means: a run's name or its directory's path, a
    recipe's name if one run was trained by it, or the beginning of one run's name. If a run and a
    recipe share a name, the run is meant.

    Raises:
        UsageError: there is no such run, or there are several; the message names them, or the nearest ones.
    """
    existing = run_names()
    if name in existing:
        return name
    path = Path(name)
    if path.name in existing and path.absolute() == (runs_root() / path.name).absolute():
        return path.name
    by_recipe = runs_by_recipe(existing)
    what, matches = f"recipe {name!r} has", by_recipe.get(name.removesuffix(".toml"), [])
    if not matches:
        what, matches = (
            f"{name!r} is the beginning of",
            [run for run in existing if name and run.startswith(name)],
        )
    if len(matches) == 1:
        run_path(matches[0])  # a link is refused
        return matches[0]
    if matches:
        # Runs of studies are named last, and those with the fewest settings in their name first.
        studies = [folder.name.removesuffix("study") for folder in runs_root().glob("*-study")]
        matches.sort(key=lambda run: (any(map(run.startswith, studies)), len(run)))
        listed = ", ".join(matches[:8]) + (" ..." if len(matches) > 8 else "")
        raise UsageError(f"{what} {len(matches)} runs: {listed}\n  name one of them")
    run_path(name)  # a name that no run can have is said to be one
    hint = nearest(name, [*existing, *by_recipe]) or "`efftrain runs list` shows all"
    raise UsageError(f"there is no run {name!r} in {runs_root()}; {hint}")


def runs_by_recipe(names: Sequence[str]) -> dict[str, list[str]]:
    """Map recipe names to those of the runs `names` that were trained by them, in order of their
    seeds."""
    by_recipe: dict[str, list[str]] = {}
    for name in names:
        try:
            origin = read_origin(runs_root() / name)
        except EfftrainError:
            origin = {}
        by_recipe.setdefault(recipe_name(origin, name), []).append(name)
    return {recipe: sorted(runs, key=_by_number) for recipe, runs in by_recipe.items()}


def recipe_name(origin: Mapping[str, Any], run: str) -> str:
    """Return the name of a run's recipe: as the command line gave it, or the stem of a recipe file.

    A run without one, and a grown run, whose recipe is not its parent's, has its own name without the seed.
    """
    name = origin.get("recipe")
    if origin.get("grown_from") or not name:
        return re.sub(r"-seed\d+(-\d+)?$", "", run)
    return Path(name).stem if name.endswith(".toml") else name


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a key that orders seed10 after seed9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
