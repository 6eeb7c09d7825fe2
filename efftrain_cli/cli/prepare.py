"""`efftrain prepare`."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import override_keys, recipe_names


class PrepareFormat(StrEnum):
    """Forms of the report."""

    text = "text"
    json = "json"


class Verification(StrEnum):
    """What of a corpus is compared with its sha256 at once; the rest when it is first read."""

    lazy = "lazy"
    full = "full"


@app.command(
    rich_help_panel="Train",
    examples=(
        "efftrain prepare --recipe small --set data.train=my.txt",
    ),
)
def prepare(
    recipe: Annotated[
        str,
        typer.Option(help="Recipe name or path; `efftrain recipes list` shows all.", autocompletion=recipe_names),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Override a recipe key: --set data.train=books/. Repeatable.", autocompletion=override_keys
        ),
    ] = None,
    verify_data: Annotated[
        Verification, typer.Option("--verify-data", help="full: compare every token with its sha256 now.")
    ] = Verification.lazy,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but warnings and errors.")] = False,
    format_: Annotated[PrepareFormat, typer.Option("--format", help="text, or json for other programs.")] = PrepareFormat.text,
) -> None:
    """Read a recipe's text, tokenize it and write token shards, once; training finds them in the cache."""
    from rich.console import Console

    from efftrain_cli.recipe.recipe import load_recipe

    loaded = load_recipe(recipe, list(set_ or []))  # a mistake in it is named at once
    from efftrain_cli.data.limits import limits_of
    from efftrain_cli.data.progress import prepare_shown
    from efftrain_cli.foundation.console import make_console, silence
    from efftrain_cli.prepare import describe_corpus, print_corpus

    if quiet:
        silence()
    as_json = format_ is PrepareFormat.json
    console = Console(stderr=True, highlight=False, quiet=quiet) if as_json else make_console()
    corpus = prepare_shown(loaded.data, limits=limits_of(loaded), verify=verify_data.value, console=console)
    about = describe_corpus(loaded, corpus)
    if as_json:
        print(json.dumps(about, indent=1))
    else:
        import shlex

        overrides = [word for override in set_ or [] for word in ("--set", override)]
        command = shlex.join(["efftrain", "pretrain", "--recipe", recipe, *overrides])
        print_corpus(console, loaded, about, verified=verify_data is Verification.full, train_command=command)
