"""Arguments and options that several commands share."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Exit, Option

from efftrain_cli.cli.complete import override_keys, recipe_names, run_names
from efftrain_cli.foundation.console import silence
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.training.launch import check_devices, launch, needs_launch


def share(device: str, devices: int) -> None:
    """Start a process for each device if several share the work, and end with their exit code.

    Such a process has the same command line, and goes on.
    """
    check_devices(device, devices)
    if needs_launch(devices):
        raise Exit(launch(devices, sys.argv[1:]))


RecipeArgument = Annotated[
    str | None,
    Argument(
        metavar="RECIPE",
        help="Recipe name or path; `efftrain recipes list` shows all.",
        autocompletion=recipe_names,
    ),
]
RecipeOption = Annotated[
    str | None, Option("--recipe", help="The same.", autocompletion=recipe_names)
]


def chosen_recipe(argument: str | None, option: str | None) -> str:
    """Return the recipe that a command was given, as its argument or by --recipe.

    Raises:
        UsageError: there is none, or two.
    """
    if argument is not None and option is not None:
        raise UsageError(f"two recipes: {argument} and --recipe {option}\n  leave one of them out")
    recipe = argument if option is None else option
    if recipe is None:
        raise UsageError("no recipe\n  give one; `efftrain recipes list` shows all")
    return recipe


Overrides = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a recipe key: --set optim.lr=3e-4. Repeatable.",
        autocompletion=override_keys,
    ),
]
RunArgument = Annotated[
    str,
    Argument(
        metavar="RUN",
        help="A run, by name, by the beginning of its name, or by its recipe.",
        autocompletion=run_names,
    ),
]
Seed = Annotated[int | None, Option(help="Seed instead of the recipe's.")]
CheckpointOption = Annotated[
    str | None, Option(help="Checkpoint, by step or name.", show_default="the newest")
]


def _checked_device(name: str) -> str:
    """Check a device's name before PyTorch is imported."""
    if "," not in name and not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", name):
        raise UsageError(f"there is no device {name!r}\n  give auto, cpu, cuda or cuda:N")
    return name


Device = Annotated[str, Option(callback=_checked_device, help="auto, cpu, cuda or cuda:N.")]
Devices = Annotated[
    int,
    Option(
        min=1,
        help="Devices of this machine for each training, benchmark or evaluation:"
        " CUDA devices, or CPU processes.",
    ),
]


def _silenced(quiet: bool) -> bool:
    if quiet:
        silence()
    return quiet


Quiet = Annotated[
    bool,
    Option(
        "--quiet",
        "-q",
        callback=_silenced,
        help="Hide progress and summaries; print tables, warnings and errors.",
    ),
]
Jobs = Annotated[
    int,
    Option(min=1, help="Runs at once; they share the processor's threads, or the GPUs in turn."),
]
PlanOnly = Annotated[
    bool, Option("--plan", help="Print what would be trained and what it costs; train nothing.")
]
Array = Annotated[
    bool,
    Option(
        "--array",
        help="Train nothing here: write a Slurm job array of the runs"
        " that are next, --jobs at once.",
    ),
]


def checked_loss(value: float | None) -> float | None:
    if value is not None and not 0.01 <= value <= 100:
        raise UsageError(
            f"--target-loss {value:g} is no loss of a language model, in nats per token\n"
            "  give a number from 0.01 to 100, such as 3.5"
        )
    return value


TargetLoss = Annotated[
    float | None,
    Option(
        callback=checked_loss,
        help="Loss to reach, nats per token, beside the worse final loss of each pair of runs.",
    ),
]
Baseline = Annotated[
    str | None,
    Option(
        help=(
            "Recipe, run or glob of one recipe's runs to compare with; without it, the first recipe"
            " without a method."
        )
    ),
]
CompareFormat = Annotated[
    Literal["table", "markdown", "csv", "json", "latex", "html"],
    Option("--format", metavar="FORM", help="table, markdown, csv, json, latex or html."),
]
Output = Annotated[
    Path | None,
    Option(
        "--output",
        "-o",
        help="File for the comparison instead of standard output.",
    ),
]
Plot = Annotated[bool, Option("--plot", help="Draw the loss curves in the terminal too.")]
TableOrJson = Annotated[
    Literal["table", "json"], Option("--format", help="A table, or JSON for other programs.")
]
VerifyData = Annotated[
    Literal["lazy", "full"],
    Option(
        help="full: compare every token with its sha256; lazy: those that may have changed since."
    ),
]
TextOrJson = Annotated[
    Literal["text", "json"], Option("--format", help="text, or json for other programs.")
]
