"""`efftrain recipes list|new|show|diff`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from efftrain_cli.cli import complete
from efftrain_cli.cli.app import Commands, app
from efftrain_cli.cli.options import Overrides, TextOrJson
from efftrain_cli.foundation.console import counted, human, print_folded, print_json, table_lines
from efftrain_cli.foundation.errors import RecipeError, UsageError

if TYPE_CHECKING:
    from efftrain_cli.recipe.recipe import Recipe
    from efftrain_cli.recipe.sizes import Written

recipes = Commands(no_args_is_help=True)
app.add_typer(
    recipes,
    name="recipes",
    help="What runs are made of: list, show, compare and write recipes.",
    rich_help_panel="Start here",
)


RecipeName = Annotated[
    str,
    Argument(
        metavar="RECIPE",
        help="A recipe's name, or the path of a .toml file.",
        autocompletion=complete.recipe_names,
    ),
]


@recipes.command("list", examples=("efftrain recipes list", "efftrain recipes list warmup"))
def list_recipes(
    word: Annotated[
        str, Argument(metavar="[WORD]", help="List those with this word in name or summary.")
    ] = "",
    format: TextOrJson = "text",
) -> None:
    """List every recipe that --recipe finds by name, a line each: those in ./recipes, then those
    that ship with the program.

    After the name stand the parameters, as `pretrain --plan` counts them, and the budget in tokens.
    """
    from efftrain_cli.recipe.draft import recipe_names

    cards = []
    for card in map(summarize_recipe, recipe_names()):
        if word.lower() in f"{card['name']} {card['summary']}".lower():
            cards.append(card)
    if word and not cards:
        raise UsageError(f"no recipe has {word!r} in its name or summary\n  leave it out for all")
    cards.sort(key=lambda card: (not card["own"], card["name"]))
    if format == "json":
        print_json(cards)
        return
    longest = max(len(card["name"]) for card in cards)
    for card in cards:
        numbers = f"{'':5}  {'':5}"
        if card["mistake"] is None:
            numbers = f"{human(card['parameters']):>5}  {human(card['tokens']):>5}"
        whose = "(yours) " if card["own"] else ""
        text = card["mistake"] or card["summary"]
        print(_cut(f"{card['name']:{longest}}  {numbers}  {whose}{text}"))


def _cut(line: str) -> str:
    """Cut a line to the width of the terminal."""
    columns = shutil.get_terminal_size().columns
    if len(line) <= columns or not sys.stdout.isatty():
        return line
    return f"{line[: columns - 1]}…"


@recipes.command(
    "new",
    examples=(
        "efftrain recipes new mine --text my.txt",
        "efftrain recipes new mine --text my.txt --parameters 1M",
        "efftrain recipes new wide --base small --set model.n_embd=256",
    ),
)
def new_recipe(
    name: Annotated[
        str,
        Argument(
            metavar="NAME", help="The new recipe's name; it is written to ./recipes/NAME.toml."
        ),
    ],
    base: Annotated[
        str, Option(help="Recipe to begin with.", autocompletion=complete.recipe_names)
    ] = "small",
    text: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Text or folder to train on. Its size, at most the base's model, decides"
            " --parameters if that is not given.",
        ),
    ] = None,
    parameters: Annotated[
        str | None,
        Option(
            metavar="N",
            help="Most parameters, such as 10M, input tables not counted: decides shape, batch"
            " size, learning rate, warmup and budget.",
        ),
    ] = None,
    tokens_per_parameter: Annotated[
        float, Option(min=0.1, help="Budget of --parameters or --text, in tokens per parameter.")
    ] = 20,
    set_: Overrides = None,
) -> None:
    """Write a recipe that builds on another and has only what differs; an edit of the base changes
    both."""
    from efftrain_cli.foundation.files import write_whole
    from efftrain_cli.recipe.draft import is_path, shown_path
    from efftrain_cli.recipe.recipe import load_recipe
    from efftrain_cli.recipe.starter import starter

    path = Path("recipes") / f"{name}.toml"
    if is_path(name) or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) is None:
        raise UsageError(
            f"{name!r} is not a name of letters, digits, '.', '_' and '-'\n"
            "give one such as mine, and it is written to recipes/mine.toml"
        )
    if path.exists():
        raise UsageError(
            f"{shown_path(path)} exists already and is left as it is\n"
            "  give another name, or edit it"
        )
    overrides = list(set_ or [])
    comments = {}
    if text is not None:
        overrides.append(f"data.train={json.dumps(str(text))}")
    keys = {override.partition("=")[0].strip() for override in overrides}
    if keys & {"data.train", "data.sources"} and not keys & {"data.valid", "data.valid_fraction"}:
        # A hundredth of a small text, the default, is too little to validate on.
        overrides.append("data.valid_fraction=0.05")
        comments["data.valid_fraction"] = "or a text of its own: valid = FILE"
    sizes: list[Written] = []
    if text is not None or parameters is not None:
        sizes = _sizes(load_recipe(base, overrides), text, parameters, tokens_per_parameter)
    if "optim.lr" in keys:
        # The rule's might exceed the rate.
        keys.add("optim.min_lr")
    sizes = [written for written in sizes if written.key not in keys]
    overrides = [*(f"{each.key}={json.dumps(each.value)}" for each in sizes), *overrides]
    comments |= {each.key: each.source for each in sizes}
    content = starter(name, base, overrides, comments)
    path.parent.mkdir(exist_ok=True)
    # A full disk leaves no part of it, which would be in the way of the next try.
    write_whole(path, content)
    print(f'{shown_path(path)}: base "{base}" and {counted(len(overrides), "key")}')
    command = f"pretrain {name} --plan"
    if overrides and not sizes and not any(key.startswith("data") for key in keys):
        command = f"race {base} {name}"
    print(f"next    efftrain {command}")


def _sizes(
    recipe: Recipe, text: Path | None, parameters: str | None, tokens_per_parameter: float
) -> list[Written]:
    """Return what --parameters, or else the size of --text, decides.

    Raises:
        UsageError: the number is not one, the text is missing, or no model is so small.
    """
    from efftrain_cli.foundation.section import parse_count
    from efftrain_cli.recipe.sizes import likely_vocabulary, parameters_for, written_sizes

    vocab_size = likely_vocabulary(recipe.data.tokenizer)
    if parameters is not None:
        try:
            most = parse_count(parameters)
        except ValueError as error:
            raise UsageError(f"--parameters {parameters}: {error}") from None
    else:
        assert text is not None
        if not text.exists():
            raise UsageError(f"--text {text} does not exist\n  name a file or folder")
        files = text.rglob("*") if text.is_dir() else [text]
        text_bytes = sum(file.stat().st_size for file in files if file.is_file())
        most = parameters_for(recipe, vocab_size, text_bytes, tokens_per_parameter)
    return list(written_sizes(recipe, vocab_size, most, tokens_per_parameter))


@recipes.command(
    "show",
    examples=("efftrain recipes show small-slw", "efftrain recipes show quickstart --describe"),
)
def show_recipe(
    recipe: RecipeName,
    set_: Overrides = None,
    describe: Annotated[
        bool, Option("--describe", help="Explain each key instead of naming its origin.")
    ] = False,
    format: TextOrJson = "text",
) -> None:
    """Show a recipe with everything it inherits, as TOML. Each comment says where the value was
    written."""
    from efftrain_cli.recipe.check import known_keys, unnumbered
    from efftrain_cli.recipe.draft import read_recipe_file, shown_path
    from efftrain_cli.recipe.recipe import (
        Recipe,
        check_draft,
        dump_recipe,
        flat_values,
        recipe_values,
    )
    from efftrain_cli.recipe.rules import warnings_of

    draft = read_recipe_file(recipe, set_ or ())
    resolved = check_draft(draft)
    origins = {key: draft.places.get(key, "default") for key in flat_values(resolved)}
    warnings = warnings_of(resolved)
    if format == "json":
        print_json(
            {
                "path": str(draft.path),
                "bases": [str(base) for base in draft.bases],
                "values": recipe_values(resolved),
                "origins": origins,
                "warnings": warnings,
            }
        )
        return
    known = known_keys(Recipe)
    comments = {}
    for key, origin in origins.items():
        if describe:
            # Narrow enough for 80 columns beside the longest key.
            lines = wrap(known[unnumbered(key)].description, 43)
            comments[key] = "\n                # ".join(lines)
        elif origin.startswith("--set "):
            comments[key] = "--set"
        else:
            comments[key] = Path(origin).name
    print(f"# {shown_path(draft.path)}")
    for base in draft.bases:
        print(f"#   based on {shown_path(base)}")
    print(dump_recipe(resolved, comments), end="")
    for warning in warnings:
        print_folded(f"warning: {warning}", stream=sys.stderr)


@recipes.command("diff", examples=("efftrain recipes diff small small-slw",))
def diff_recipes(a: RecipeName, b: RecipeName, format: TextOrJson = "text") -> None:
    """Show the keys in which two recipes differ, inherited ones and defaults included; nothing
    else."""
    from efftrain_cli.recipe.draft import recipe_name
    from efftrain_cli.recipe.recipe import load_recipe, recipe_differences

    differences = recipe_differences(load_recipe(a), load_recipe(b))
    if format == "json":
        print_json([{"key": key, "a": x, "b": y} for key, x, y in differences])
        return
    if not differences:
        print(f"{a} and {b} are the same")
        return
    header = ("key", recipe_name(a), recipe_name(b))
    rows = [(key, _value(x), _value(y)) for key, x, y in differences]
    print("\n".join(table_lines(header, rows)))


def _value(value: Any) -> str:
    from efftrain_cli.recipe.toml import toml_value

    return "not set" if value is None else toml_value(value)


def summarize_recipe(name: str) -> dict[str, Any]:
    """Return the values of a recipe that `recipes list` shows, or its first mistake."""
    from efftrain_cli.model.flops import parameter_count
    from efftrain_cli.recipe.draft import find_recipe, first_comment, shipped_recipes, shown_path
    from efftrain_cli.recipe.recipe import load_recipe
    from efftrain_cli.recipe.sections import config_of
    from efftrain_cli.recipe.sizes import likely_vocabulary

    path = find_recipe(name)
    card: dict[str, Any] = {
        "name": name,
        "path": shown_path(path),
        "own": path.resolve().parent != shipped_recipes(),
        "summary": "",
        "mistake": None,
    }
    try:
        card["summary"] = first_comment(path)
        recipe = load_recipe(name)
    except RecipeError as error:
        mistake = str(error)
        if error.problems:
            mistake = f"{error.problems[0].source}: {error.problems[0].rule}"
        card["mistake"] = mistake.split("\n")[0]
        return card
    vocab_size = likely_vocabulary(recipe.data.tokenizer)
    return card | {
        "tokens": recipe.train.tokens,
        "parameters": parameter_count(config_of(recipe.model, vocab_size)),
    }
