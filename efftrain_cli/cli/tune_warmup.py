"""`efftrain tune-warmup`."""

from __future__ import annotations

import math
from typing import Annotated

from typer import Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.options import (
    Device,
    Devices,
    Overrides,
    PlanOnly,
    Quiet,
    RecipeArgument,
    RecipeOption,
    chosen_recipe,
)
from efftrain_cli.foundation.errors import UsageError

WANTED = "key=value,value, the most wanted first."


@app.command(
    "tune-warmup",
    rich_help_panel="Train",
    examples=(
        "efftrain tune-warmup unstable-slw --plan",
        "efftrain tune-warmup gpt2-117m-slw --budget 10% --plan",
        "efftrain tune-warmup unstable --duration optim.warmup_steps=15,60",
    ),
)
def tune_warmup(
    recipe_argument: RecipeArgument = None,
    recipe_option: RecipeOption = None,
    set_: Overrides = None,
    start: Annotated[
        str | None,
        Option(help=f"Starts: {WANTED}", show_default="seq_len_warmup.start, doubling"),
    ] = None,
    duration: Annotated[
        str | None,
        Option(help=f"Durations: {WANTED}", show_default="seq_len_warmup.steps, 1.4 apart"),
    ] = None,
    seeds: Annotated[
        str | None,
        Option(
            help="Seeds of every setting, 0..2 or 0,3; it must be stable on all.",
            show_default="three",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        Option(min=1, help="Steps of a duration's probe.", show_default="3 learning-rate warmups"),
    ] = None,
    threshold: Annotated[
        float,
        Option(
            min=1,
            help="Unstable: validation perplexity above this many times its best so far.",
        ),
    ] = 1.3,
    budget: Annotated[
        str | None,
        Option(
            help="Most that all probes may train: 10% of a run, or tokens such as 500M.",
            show_default="no limit",
        ),
    ] = None,
    name: Annotated[
        str | None, Option(help="Name of the search's folder.", show_default="RECIPE-tune")
    ] = None,
    plan: PlanOnly = False,
    device: Device = "auto",
    devices: Devices = 1,
    quiet: Quiet = False,
) -> None:
    """Find a warmup by short probes: the shortest stable start, then the longest stable duration.

    The same command continues a search that was stopped; with a larger budget, one that ended.
    """
    from efftrain_cli.recipe.recipe import load_recipe
    from efftrain_cli.trials.trial import parse_seeds

    settings = tuple(set_ or ())
    recipe = chosen_recipe(recipe_argument, recipe_option)
    tokens = load_recipe(recipe, settings).train.tokens
    limit = math.inf if budget is None else parse_budget(budget, tokens)
    chosen = () if seeds is None else parse_seeds(seeds)
    from efftrain_cli.tune_warmup.candidates import TuneConfig
    from efftrain_cli.tune_warmup.tune import tune

    config = TuneConfig(
        recipe=recipe,
        settings=settings,
        start=start,
        duration=duration,
        seeds=chosen,
        steps=steps,
        threshold=threshold,
        budget=limit,
        name=name,
        device=device,
        devices=devices,
    )
    tune(config, plan_only=plan)


def parse_budget(text: str, tokens: int) -> int:
    """Return the tokens in "10%" of a run of `tokens`, or in a count such as "500M".

    Raises:
        UsageError: it is neither.
    """
    from efftrain_cli.foundation.section import parse_count

    try:
        if text.strip().endswith("%"):
            limit = int(float(text.strip()[:-1]) / 100 * tokens)
        else:
            limit = int(parse_count(text))
    except (ValueError, OverflowError):
        limit = 0
    if limit <= 0:
        raise UsageError(
            f"--budget {text!r} is no number of tokens\n"
            "  give a share of a full run, such as 10%, or tokens, such as 500M"
        )
    return limit
