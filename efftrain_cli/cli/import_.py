"""`efftrain import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import override_keys, recipe_names


@app.command(
    "import",
    rich_help_panel="Use a trained model",
    examples=(
        "efftrain import ./gpt2 --name gpt2 --set data.train=my.txt",
    ),
)
def import_(
    directory: Annotated[Path, typer.Argument(help="GPT-2 in transformers' form: config.json, model.safetensors, tokenizer.")],
    name: Annotated[str | None, typer.Option(help="Run name.", show_default="the directory's")] = None,
    recipe: Annotated[
        str, typer.Option(help="Recipe to continue training with; the model's shape comes from the directory.", autocompletion=recipe_names)
    ] = "small",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a recipe key. Repeatable.", autocompletion=override_keys),
    ] = None,
) -> None:
    """Make a run of a GPT-2 that transformers saved: to evaluate, sample, grow or continue."""
    from efftrain_cli.foundation.errors import UsageError
    from efftrain_cli.recipe.file import find_recipe

    find_recipe(recipe)  # before PyTorch is imported, which takes seconds
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory; name one that transformers' save_pretrained wrote")
    from efftrain_cli.convert import import_hf

    path = import_hf(directory, name or directory.resolve().name, recipe, tuple(set_ or ()))
    print(f"{path}: training settings are those of recipe {recipe}")
    print(f"  efftrain eval-zeroshot {path.name}")
    print(f"  efftrain pretrain --resume {path.name}")
