"""Find the runs that a name means: the run itself, a recipe's, or those that begin so. No torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import Any, NamedTuple

from efftrain_cli.foundation.console import listed
from efftrain_cli.foundation.errors import EfftrainError, UsageError
from efftrain_cli.run.directory import (
    checkpoint_path,
    checkpoint_step,
    checkpoints_of,
    existing_run,
    missing_run,
    run_names,
    runs_root,
)
from efftrain_cli.run.origin import read_origin

MEMBERS = "runs.txt"
"""File in the folder of a study, race or sweep: names of its runs, a line each."""


class RunGroup(NamedTuple):
    """The runs of a study, race, sweep or search: they answer to its name."""

    name: str
    kind: str
    """"study", "race", "sweep" or "search"."""
    runs: list[str]
    """Names of its runs; of a search, their paths in the folder of all runs."""


def run_groups() -> list[RunGroup]:
    """Return the studies, races, sweeps and searches in the folder of all runs."""
    existing = {*run_names()}
    groups = []
    for file in sorted(runs_root().glob(f"*/{MEMBERS}")):
        folder = file.parent.name
        name, _, kind = folder.rpartition("-")
        if folder.startswith("race-"):
            name = folder
            kind = "race"
        # Runs that were removed since are none of it.
        runs = [run for run in file.read_text("utf-8").split() if run in existing]
        groups.append(RunGroup(name, kind, runs))
    for probes in sorted(runs_root().glob("*/probes")):
        name = probes.parent.name
        runs = [f"{name}/probes/{run}" for run in run_names(probes)]
        groups.append(RunGroup(name, "search", runs))
    return groups


def find_run(name: str) -> Path:
    """Return the directory of the one run that `name`, as in `runs_named`, or its path means.

    Raises:
        UsageError: there is no such run, or there are several; the message names them, or the
            nearest ones.
        DataError: its origin.json is missing or damaged, or has a format that this version does not
            read.
    """
    path = Path(name)
    if path.absolute().parent == runs_root().absolute():
        name = path.name
    matches = runs_named([name])[name]
    if len(matches) > 1:
        # Those with the fewest settings in their name first.
        matches.sort(key=len)
        runs = f"{len(matches)} runs: {listed(matches, 8)}"
        raise UsageError(f"{name!r} means {runs}\n  name one of them")
    return existing_run(matches[0] if matches else name)


def find_branch_point(text: str) -> Path:
    """Return the checkpoint that `RUN@STEP` names.

    Raises:
        UsageError: there is no such run, or it has no checkpoint of that step.
    """
    name, sign, step = text.rpartition("@")
    if not sign or not step.isdecimal():
        raise UsageError(f"--from {text!r} is no run and step\n  write small-seed1@400")
    run = find_run(name)
    path = checkpoint_path(run, int(step))
    checkpoints = checkpoints_of(run)
    if path not in checkpoints:
        steps = [str(checkpoint_step(each)) for each in checkpoints]
        raise UsageError(
            f"run {run.name} has no checkpoint of step {step}, only of {listed(steps) or 'none'}\n"
            "  name one of these; checkpoint.at keeps the steps that it lists"
        )
    return path


def select_runs(names: Sequence[str]) -> list[Path]:
    """Return the directories of all runs that `names` mean, as `runs_named`, each once; a name may
    be the path of any run directory.

    Raises:
        UsageError: a name means nothing.
    """
    selected: dict[Path, None] = {}
    for name, runs in runs_named(names).items():
        paths = [runs_root() / run for run in runs]
        if not paths and (Path(name) / "recipe.toml").is_file():
            paths = [Path(name)]
        if not paths:
            raise missing_run(name)
        selected |= dict.fromkeys(paths)
    return list(selected)


def runs_named(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the runs that each name means.

    It means the run of this name, else those of the recipe, study, race, sweep or search of this
    name, else those that match it as a glob, else those whose names begin so.
    """
    existing = run_names()
    by_owner = {} if set(names) <= set(existing) else runs_by_owner(existing)
    named = {}
    for name in names:
        owner = name.removesuffix(".toml")
        if name in existing:
            named[name] = [name]
        elif owner in by_owner:
            named[name] = by_owner[owner]
        else:
            is_pattern = has_magic(name) or not name
            named[name] = fnmatch.filter(existing, name if is_pattern else f"{name}*")
    return named


def runs_by_owner(names: Sequence[str]) -> dict[str, list[str]]:
    """Map recipes to those of the runs `names` that a person trained by them, and studies, races,
    sweeps and searches to their runs."""
    groups = run_groups()
    owned = {run for group in groups for run in group.runs}
    by_owner: dict[str, list[str]] = {}
    for name in names:
        if name not in owned:
            try:
                origin = read_origin(runs_root() / name)
            except (EfftrainError, OSError):
                origin = {}
            owner = origin.get("study") or recipe_name(origin, name)
            by_owner.setdefault(owner, []).append(name)
    return by_owner | {group.name: group.runs for group in groups}


def recipe_name(origin: Mapping[str, Any], run: str) -> str:
    """Return the name of a run's recipe: as the command line gave it, or the stem of a recipe file.

    A run without one, and a grown or imported run, whose model is not its recipe's, has its own
    name without the seed.
    """
    name = origin.get("recipe")
    if origin.get("grown_from") or origin.get("imported") or not name:
        return re.sub(r"-seed\d+(-\d+)?$", "", run)
    return Path(name).stem if name.endswith(".toml") else name
