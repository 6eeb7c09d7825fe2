"""Races: recipes or commands trained pair by pair until the answer is in.

A race is a study whose file the tool writes. The runs of an arm are named by all that decides what
they compute, so a baseline is trained once for all its races.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from efftrain_cli import __version__
from efftrain_cli.compare.judge import Claim
from efftrain_cli.foundation.environment import planned_device
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.files import make_folder, write_whole
from efftrain_cli.foundation.records import digest_of
from efftrain_cli.recipe.recipe import flat_values, load_recipe
from efftrain_cli.recipe.toml import flatten, toml_value
from efftrain_cli.run.directory import run_path, runs_root
from efftrain_cli.run.reading import computed_values
from efftrain_cli.study.plans import Grid, Plan, PlannedArm, Settings, read_values
from efftrain_cli.trials.command import METRIC, check_command

FIRST_SEED = 100
"""First seed of every race: far from those that people tune with."""
TUNING_SEEDS = (50, 51, 52)
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
    if command:
        check_command(command, len(labels))
    # The last weights of a finished run are enough.
    kept = ("checkpoint.keep=1", *settings)
    arms = []
    values: dict[str, Any] = {
        "claim": asdict(claim),
        "pairs": list(pairs),
        "grid": grid or {},
    }
    for label, name in zip(labels, names, strict=True):
        if command:
            identity: dict[str, Any] = {"command": command, "metric": metric}
            values[label] = identity
        else:
            identity = identity_of(name, settings, device)
            values[label] = read_values(name, settings) | identity["machine"]
        prefix = f"race-{label[:32]}-{digest_of(identity)[:6]}"
        arms.append(
            PlannedArm(
                label,
                command or name,
                prefix,
                () if command else kept,
                grid or {},
            )
        )
    name = f"race-{'-'.join(labels)[:40].rstrip('-')}-{digest_of(values)[:6]}"
    return Plan(
        name=name,
        folder=run_path(name),
        question=f"Is {' or '.join(labels[1:])} better than {labels[0]}?",
        arms=tuple(arms),
        claims=(claim,),
        seeds=tuple(range(FIRST_SEED, FIRST_SEED + pairs[-1])),
        looks=tuple(pairs),
        values=flatten(values),
        give_up=HOPELESS,
        tuning_seeds=TUNING_SEEDS if grid else (),
        command=command,
        metric=metric,
        is_race=True,
    )


def identity_of(
    recipe: str,
    settings: Settings,
    device: str,
) -> dict[str, Any]:
    """Return all that decides what a run of a recipe computes, but for its seed."""
    loaded = load_recipe(recipe, settings)
    texts = {}
    for path in text_files(loaded.data.train) + text_files(loaded.data.valid):
        status = path.stat()
        texts[str(path)] = [status.st_size, status.st_mtime_ns]
    machine = {
        "text files": texts,
        "device": planned_device(device).partition(":")[0],
        "efftrain": __version__,
        "torch": version("torch"),
    }
    return {"recipe": computed_values(flat_values(loaded)), "machine": machine}


def text_files(source: object) -> list[Path]:
    """Return the files that a source of text names."""
    names = source if isinstance(source, list | tuple) else [source]
    paths = [Path(name) for name in names if isinstance(name, str)]
    return [path for path in paths if path.is_file()]


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


def write_study_file(plan: Plan) -> None:
    """Write what the race is as a study file into its folder."""
    claim = plan.claims[0]
    lines = [
        f"question = {toml_value(plan.question)}",
        f"baseline = {toml_value(plan.arms[0].name)}",
        f'seeds = "{plan.seeds[0]}..{plan.seeds[-1]}"',
        f"looks = {toml_value(list(plan.looks))}",
        f"give_up = {plan.give_up}",
    ]
    if plan.command:
        lines.append(f"command = {toml_value(plan.command)}")
        lines.append(f"metric = {toml_value(plan.metric)}")
    lines += [
        "\n[[primary]]",
        f'measure = "{claim.measure}"',
        f'direction = "{claim.direction}"',
        f"margin = {claim.margin}",
    ]
    if plan.tuning_seeds:
        grid = {key: list(values) for key, values in plan.arms[0].grid.items()}
        lines += [
            "\n[tuning]",
            f'seeds = "{plan.tuning_seeds[0]}..{plan.tuning_seeds[-1]}"',
            f"grid = {toml_value(grid)}",
        ]
    for arm in plan.arms:
        lines += ["\n[[arms]]", f"name = {toml_value(arm.name)}"]
        if not plan.command:
            lines.append(f"recipe = {toml_value(arm.recipe)}")
            lines.append(f"set = {toml_value(list(arm.settings))}")
    write_whole(plan.folder / "study.toml", "\n".join(lines) + "\n")
