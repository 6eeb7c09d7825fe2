"""`efftrain prepare`."""

from __future__ import annotations

from efftrain_cli.cli.app import app
from efftrain_cli.cli.options import (
    Overrides,
    Quiet,
    RecipeArgument,
    RecipeOption,
    TextOrJson,
    VerifyData,
    chosen_recipe,
)


@app.command(rich_help_panel="Train", examples=("efftrain prepare small --set data.train=my.txt",))
def prepare(
    recipe_argument: RecipeArgument = None,
    recipe_option: RecipeOption = None,
    set_: Overrides = None,
    verify_data: VerifyData = "lazy",
    quiet: Quiet = False,
    format_: TextOrJson = "text",
) -> None:
    """Read a recipe's text, tokenize it and write token shards, once; training finds them in the
    cache."""
    from efftrain_cli.recipe.recipe import load_recipe

    recipe = chosen_recipe(recipe_argument, recipe_option)
    loaded = load_recipe(recipe, list(set_ or []))  # a mistake in it is named at once

    import shlex
    import time

    from rich.console import Console

    from efftrain_cli.data import prepare as preparing
    from efftrain_cli.foundation.console import print_json
    from efftrain_cli.prepare import describe_corpus, print_corpus

    console = Console(stderr=True, highlight=False, quiet=quiet)
    started = time.monotonic()
    limits = preparing.limits_of(loaded)
    corpus = preparing.prepare(loaded.data, limits=limits, console=console)
    if verify_data == "full":
        corpus.verify(full=True)
    about = describe_corpus(loaded, corpus)
    if format_ == "json":
        print_json(about)
        return
    overrides = [word for override in set_ or [] for word in ("--set", override)]
    command = shlex.join(["efftrain", "pretrain", recipe, *overrides, "--plan"])
    print_corpus(about, seconds=time.monotonic() - started, command=command)
