"""`efftrain tune-warmup`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import PurePath
from typing import Annotated

import typer

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import recipe_names
from efftrain_cli.foundation.errors import UsageError


class SearchFormat(StrEnum):
    """Forms of a printed plan."""

    text = "text"
    json = "json"


@app.command(
    "tune-warmup",
    rich_help_panel="Train",
    examples=(
        "efftrain tune-warmup --recipe small-slw --plan",
        "efftrain tune-warmup --recipe small-slw",
    ),
)
def tune_warmup(
    recipe: Annotated[
        str,
        typer.Option(
            help="Recipe name or path. Tunes its sequence length or batch size warmup; where it has neither, a sequence length warmup.",
            autocompletion=recipe_names,
        ),
    ],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a recipe key: --set optim.lr=3e-4. Repeatable.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the search's directory in runs/; default RECIPE-tune.")] = None,
    seed: Annotated[int | None, typer.Option(help="The recipe's seed.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    multiples: Annotated[
        int, typer.Option(help="Length of each probe of the duration, in learning-rate warmups.")
    ] = 3,
    threshold: Annotated[
        float, typer.Option(help="Unstable: validation perplexity above this many times its best so far.")
    ] = 1.3,
    max_share: Annotated[
        float, typer.Option(help="Share of the token budget that the longest warmup tried may take.")
    ] = 0.66,
    eval_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between validations; default a tenth of the learning-rate warmup, or eval.every if less."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the search and what it can cost; train nothing.")] = False,
    format_: Annotated[
        SearchFormat | None, typer.Option("--format", help="With --plan: text, or json for other programs.", show_default="text")
    ] = None,
) -> None:
    """Find a warmup by short probes: the shortest stable start, then the longest stable duration.

    A search that was stopped or killed goes on when the same command is given again.
    """
    from efftrain_cli.recipe.recipe import load_recipe
    from efftrain_cli.tune_warmup.search import Search

    overrides = list(set_ or [])
    if seed is not None:
        overrides.append(f"seed={seed}")
    search = Search(
        recipe=load_recipe(recipe, overrides),
        multiples=multiples,
        threshold=threshold,
        max_share=max_share,
        eval_every=eval_every,
    )
    if format_ is not None and not plan:
        raise UsageError(f"--format {format_.value} is the form of a printed plan: add --plan, or leave it out")
    if format_ is SearchFormat.json:
        import json

        from efftrain_cli.tune_warmup.screen import plan_values

        print(json.dumps(plan_values(search), indent=1))
        return
    if plan:
        from efftrain_cli.foundation.console import make_console
        from efftrain_cli.tune_warmup.screen import show_plan

        show_plan(make_console(), search)
        return
    from efftrain_cli.tune_warmup.tune import tune

    tune(search, recipe_name=PurePath(recipe).name.removesuffix(".toml"), name=name, device=device)
