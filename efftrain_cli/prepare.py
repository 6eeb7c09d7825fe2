"""`efftrain prepare`: what a recipe's text became, for a reader and for other programs."""

from __future__ import annotations

from typing import Any

from efftrain_cli.data.corpus import Corpus, TokenShards
from efftrain_cli.data.windows import Windows, data_warnings
from efftrain_cli.foundation.console import (
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
    """Return what `efftrain prepare --format json` prints. Counts of tokens include each document's
    end of text."""
    manifest = corpus.manifest
    seq_len = recipe.model.seq_len
    train = Windows(corpus.train, seq_len, recipe.seed)
    needed = summarize_plan(recipe).windows
    problems = []
    warnings = list(manifest.notes)
    epochs = None
    validation = 0
    try:
        epochs = train.epochs(needed)
        train.check_budget(needed, recipe.data)
    except (DataError, RecipeError) as error:
        problems.append(str(error))
    try:
        starts = Windows(corpus.valid, seq_len, recipe.seed).validation_starts(recipe.eval.windows)
        validation = len(starts)
    except DataError as error:
        problems.append(str(error))
    mix = []
    if epochs is not None:
        warnings += data_warnings(train, needed, validation)
        by_source = train.epochs_of_sources(needed)
        for part in corpus.train.parts:
            each = by_source[part.name]
            mix.append(
                {"path": part.name, "weight": part.weight, "tokens": part.tokens, "epochs": each}
            )
    splits = (corpus.train, corpus.valid)
    return {
        "train": _side(corpus.train, manifest.sources["train"]),
        "valid": _side(corpus.valid, manifest.sources["valid"]),
        "split": manifest.split,
        "tokenizer": recipe.data.tokenizer,
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "vocab_size": corpus.vocab_size,
        "eot_id": corpus.eot_id,
        "bytes_per_token": corpus.bytes_per_token,
        **{key: manifest.tally[key] for key in ("overlap", "skipped", "empty")},
        "windows_per_epoch": train.per_epoch if epochs is not None else 0,
        "windows_needed": needed,
        "epochs": epochs,
        "mix": mix,
        "limits": manifest.limits,
        "validation_windows": validation,
        "problems": problems,
        "warnings": warnings,
        "disk_bytes": sum(split.path.stat().st_size for split in splits),
        "data_hash": corpus.data_hash,
        "folder": str(corpus.folder),
    }


def _side(shards: TokenShards, sources: list[str]) -> dict[str, Any]:
    return {
        "sources": sources,
        "documents": shards.split.documents,
        "bytes": shards.split.bytes,
        "tokens": shards.tokens,
        "shards": len(shards.split.shards),
    }


def print_corpus(about: dict[str, Any], *, seconds: float, command: str) -> None:
    """Print what a reader needs of `describe_corpus`: text, shards, and what to type next.

    Args:
        seconds: how long reading and tokenizing took.
        command: what to type next.
    """
    train = about["train"]
    valid = about["valid"]
    documents = train["documents"]
    if about["split"] != "cut":
        documents += valid["documents"]
    console = make_console()
    lines = [
        f"text    {human(documents)} {'document' if documents == 1 else 'documents'}:"
        f" {human(train['tokens'])} tokens for training, {human(valid['tokens'])} for validation",
        f"shards  {human(about['disk_bytes'], 'B')} in the cache; {human_seconds(seconds)}",
    ]
    if about["skipped"]:
        lines.append(f"rows    {about['skipped']:,} that cannot be read are left out")
    print_labelled(console, lines, LABEL)
    for warning in about["warnings"]:
        say(f"warning: {warning}")
    for problem in about["problems"]:
        say(f"this recipe cannot train on it yet: {problem}")
    if not about["problems"]:
        console.print(f"next    {command}", markup=False, soft_wrap=True)
