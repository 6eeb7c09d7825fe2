"""`efftrain prepare`: what a recipe's text became, for a reader and for other programs."""

from __future__ import annotations

from typing import Any

from efftrain_cli.data.corpus import Corpus
from efftrain_cli.data.windows import Windows, data_warnings
from efftrain_cli.foundation.console import (
    counted,
    human,
    human_seconds,
    make_console,
    print_labelled,
    say,
)
from efftrain_cli.foundation.errors import DataError, RecipeError
from efftrain_cli.plan.describe import LABEL
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import Recipe


def describe_corpus(recipe: Recipe, corpus: Corpus) -> dict[str, Any]:
    """Return what `efftrain prepare --format json` prints: the corpus' manifest, and what a run of
    the recipe makes of it. Counts of tokens include each document's end of text."""
    seq_len = recipe.model.seq_len
    train = Windows(corpus.train, seq_len, recipe.seed)
    needed = summarize_plan(recipe).windows
    about: dict[str, Any] = {"windows_needed": needed}
    problems = []
    warnings = list(corpus.manifest.notes)
    validation = 0
    try:
        starts = Windows(corpus.valid, seq_len, recipe.seed).validation_starts(recipe.eval.windows)
        validation = len(starts)
    except DataError as error:
        problems.append(str(error))
    try:
        about["windows_per_epoch"] = train.per_epoch
        about["epochs"] = train.epochs(needed)
        about["epochs_of_sources"] = train.epochs_of_sources(needed)
        warnings += data_warnings(train, needed, validation)
        train.check_budget(needed, recipe.data)
    except (DataError, RecipeError) as error:
        problems.append(str(error))
    splits = (corpus.train, corpus.valid)
    return {
        **corpus.manifest.to_json(),
        **about,
        "tokens": [split.tokens for split in splits],
        "disk_bytes": sum(split.path.stat().st_size for split in splits),
        "folder": str(corpus.folder),
        "validation_windows": validation,
        "problems": problems,
        "warnings": warnings,
    }


def print_corpus(about: dict[str, Any], seconds: float, command: str) -> None:
    """Print what a reader needs of `describe_corpus`: text, shards, and what to type next.

    Args:
        seconds: how long reading and tokenizing took.
        command: what to type next.
    """
    train, valid = about["tokens"]
    documents = about["train"]["documents"]
    if about["split"] != "cut":
        documents += about["valid"]["documents"]
    console = make_console()
    lines = [
        f"text    {counted(documents, 'document')}:"
        f" {human(train)} tokens for training, {human(valid)} for validation",
        f"shards  {human(about['disk_bytes'], 'B')} in the cache; {human_seconds(seconds)}",
    ]
    skipped = about["tally"]["skipped"]
    if skipped:
        lines.append(f"rows    {skipped:,} that cannot be read are left out")
    print_labelled(console, lines, LABEL)
    for warning in about["warnings"]:
        say(f"warning: {warning}")
    for problem in about["problems"]:
        say(f"this recipe cannot train on it yet: {problem}")
    if not about["problems"]:
        console.print(f"next    {command}", markup=False, soft_wrap=True)
