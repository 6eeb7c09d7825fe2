"""Races: recipes or commands trained pair by pair until the answer is in.

A race is a study whose file the tool writes. The runs of an arm are named by all that decides what
they compute, so a baseline is trained once for all its races.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from efftrain_cli import __version__
from efftrain_cli.compare.judge import Claim
from efftrain_cli.data.sources import find_sources
from efftrain_cli.foundation.environment import planned_device
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.files import make_folder
from efftrain_cli.foundation.records import digest_of
from efftrain_cli.recipe.recipe import flat_values, load_recipe
from efftrain_cli.recipe.toml import flatten, toml_lines
from efftrain_cli.run.directory import runs_root
from efftrain_cli.run.reading import computed_values
from efftrain_cli.study.file import Grid, Study, StudyArm, Tuning
from efftrain_cli.study.plans import Plan, Settings, plan_of
from efftrain_cli.trials.command import METRIC
from efftrain_cli.trials.trial import run_name

FIRST_SEED = 100
"""First seed of every race: far from those that people tune with."""
TUNING_SEEDS = "50..52"
"""Seeds that a race tunes its arms on."""
HOPELESS = 0.5
"""`Plan.give_up` of a race: it costs no power, and saves a fifth of the runs of a tie."""


def race_plan(
    names: Sequence[str],
    claim: Claim,
    pairs: Sequence[int],
    settings: Settings = (),
    *,
    grid: Grid | None = None,
    command: str = "",
    metric: str = METRIC,
    maximize: bool = False,
    device: str = "auto",
) -> Plan:
    """Return the plan of a race, whose baseline is the first arm.

    Args:
        names: recipes; with `command`, names of the arms.
        grid: what every arm is tuned over first.
        command: trains an arm, with places for {seed} and {arm}.

    Raises:
        UsageError: fewer than two arms, two of one name, or pairs that do not rise.
        RecipeError: a recipe breaks its rules.
    """
    labels = [Path(name).name.removesuffix(".toml") for name in names]
    if len({*labels}) < max(2, len(labels)):
        raise UsageError(
            f"a race needs two arms or more, each once: {', '.join(labels)}\n"
            "  name the baseline first"
        )
    if list(pairs) != sorted({*pairs}) or pairs[0] < 2:
        raise UsageError(
            f"--pairs {pairs}: numbers must rise and begin at 2 or more\n  write 3,5,8"
        )
    # One checkpoint at a time: a finished run keeps its last weights.
    changes = () if command else ("checkpoint.keep=1", *settings)
    arms = []
    for label, name in zip(labels, names, strict=True):
        recipe = str(Path(name).absolute()) if name.endswith(".toml") else name
        arms.append(StudyArm(name=label, recipe="" if command else recipe, set=changes))
    study = Study(
        question=f"Is {' or '.join(labels[1:])} better than {labels[0]}?",
        baseline=labels[0],
        arms=tuple(arms),
        primary=(claim,),
        seeds=f"{FIRST_SEED}..{FIRST_SEED + pairs[-1] - 1}",
        looks=tuple(pairs),
        give_up=HOPELESS,
        tuning=Tuning(seeds=TUNING_SEEDS, grid=grid) if grid else None,
        command=command,
        metric=metric,
        maximize=maximize,
    )
    plan = plan_of(study, "race")
    values = dict(plan.values)
    named = []
    for arm in plan.arms:
        identity: dict[str, Any] = {"command": command, "metric": metric}
        if not command:
            identity = identity_of(arm.recipe, settings, device)
            values |= flatten({f"machine of {arm.name}": identity["machine"]})
        prefix = run_name([f"race-{arm.name}", digest_of(identity)[:6]], ())
        named.append(replace(arm, prefix=prefix))
    title = "-".join(["race", *labels])
    return Plan(
        run_name([title, digest_of(values)[:6]], ()),
        study,
        tuple(named),
        values,
        is_race=True,
    )


def file_of(study: Study) -> str:
    """Return a study as its file."""
    return "\n".join(toml_lines(without_blanks(asdict(study)))) + "\n"


def without_blanks(value: Any) -> Any:
    """Return values without those that a study file leaves out: None, False, "" and empty lists.

    A recipe's key, which a grid has, is quoted: its dots are part of it.
    """
    if isinstance(value, dict):
        kept = {}
        for key, inner in value.items():
            if inner not in (None, False, "", ()):
                kept[f'"{key}"' if "." in key else key] = without_blanks(inner)
        return kept
    if isinstance(value, tuple):
        return [without_blanks(inner) for inner in value]
    return value


def identity_of(
    recipe: str,
    settings: Settings,
    device: str,
) -> dict[str, Any]:
    """Return all that decides what a run of a recipe computes, but for its seed.

    Raises:
        DataError: its text is not there.
    """
    loaded = load_recipe(recipe, settings)
    machine = {
        "text": digest_of(find_sources(loaded.data).sources),
        "device": planned_device(device).partition(":")[0],
        "efftrain": __version__,
        "torch": version("torch"),
    }
    return {"recipe": computed_values(flat_values(loaded)), "machine": machine}


def count_race(plan: Plan) -> int:
    """Return the number of this race among all against its baseline, from 1; count it if new.

    Every race counts that was ever begun, whatever came of it: each was a chance of a false
    verdict. The list lies beside the baseline's runs.
    """
    path = runs_root() / f"{plan.arms[0].prefix}.races"
    make_folder(path.parent)
    names = path.read_text("utf-8").split() if path.exists() else []
    if plan.name not in names:
        # One write: lines of races that begin at once do not mix.
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{plan.name}\n")
        names = path.read_text("utf-8").split()
    return names.index(plan.name) + 1
