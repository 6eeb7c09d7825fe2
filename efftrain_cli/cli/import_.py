"""`efftrain import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import recipe_names
from efftrain_cli.cli.options import Overrides


@app.command(
    "import",
    rich_help_panel="Use",
    examples=(
        "efftrain import ./gpt2 --name gpt2 --set data.train=my.txt",
        "efftrain import openai-community/gpt2",
    ),
)
def import_(
    directory: Annotated[
        str,
        Argument(
            help=(
                "GPT-2, Llama or Qwen3 in transformers' form:"
                " a folder with config.json, model.safetensors and tokenizer,"
                " or a model of the Hugging Face Hub, such as openai-community/gpt2."
            ),
            metavar="DIRECTORY|OWNER/NAME",
        ),
    ],
    name: Annotated[str | None, Option(help="Run name.", show_default="the directory's")] = None,
    recipe: Annotated[
        str | None,
        Option(
            help="Recipe to continue training with; the model's shape comes from the directory.",
            autocompletion=recipe_names,
            show_default="small",
        ),
    ] = None,
    set_: Overrides = None,
) -> None:
    """Make a run from a GPT-2, Llama or Qwen3 saved by transformers, to evaluate, sample, grow or
    continue it."""
    from efftrain_cli.data.hub import model_folder
    from efftrain_cli.recipe.draft import find_recipe

    base = recipe or "small"
    find_recipe(base)  # before PyTorch is imported, which takes seconds
    folder = model_folder(directory)
    from efftrain_cli.convert import import_hf

    path = import_hf(
        folder,
        name or Path(directory).resolve().name.partition("@")[0],
        base,
        set_ or (),
        source=directory,
        text_is_meant=recipe is not None,
    )
    print(f"{path}: training settings are those of recipe {base}")
    print(f"  efftrain eval-zeroshot {path.name}")
    print(f"  efftrain pretrain --resume {path.name}")
