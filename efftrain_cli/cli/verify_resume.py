"""`efftrain verify-resume`."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.options import (
    Device,
    Devices,
    Overrides,
    RecipeArgument,
    RecipeOption,
    chosen_recipe,
)
from efftrain_cli.training.launch import check_devices


@app.command(
    rich_help_panel="Machine",
    examples=(
        "efftrain verify-resume small",
        "efftrain verify-resume small-slw --steps 8",
    ),
)
def verify_resume(
    recipe_argument: RecipeArgument = None,
    recipe_option: RecipeOption = None,
    set_: Overrides = None,
    device: Device = "auto",
    devices: Devices = 1,
    steps: Annotated[int, Option(min=1, help="Steps before the stop, and as many after it.")] = 4,
    quiet: Annotated[
        bool, Option("--quiet", "-q", help="Print nothing but errors: the exit code is the result.")
    ] = False,
) -> None:
    """Prove on this machine that a stopped and continued run equals an uninterrupted one, bit for
    bit.

    The recipe is shortened to two micro-batches a step.
    """
    from efftrain_cli.recipe.recipe import load_recipe

    recipe = chosen_recipe(recipe_argument, recipe_option)
    loaded = load_recipe(recipe, set_ or [])  # before PyTorch is imported, which takes seconds
    check_devices(device, devices)
    from efftrain_cli.foundation.console import print_folded
    from efftrain_cli.verify_resume import verify_resume as verify

    for line in verify(loaded, device=device, half=steps, devices=devices):
        if not quiet:
            print_folded(line, indent=0)
