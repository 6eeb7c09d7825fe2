"""`efftrain prepare`: what a recipe's text became, for a reader and for other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from efftrain_cli.data.corpus import Corpus
from efftrain_cli.data.windows import Windows, data_warnings
from efftrain_cli.foundation.console import counted, human, print_labelled
from efftrain_cli.foundation.errors import DataError, RecipeError
from efftrain_cli.plan.preview import summarize_plan

if TYPE_CHECKING:
    from rich.console import Console

    from efftrain_cli.recipe.recipe import Recipe

_SPLIT_WORDS = {
    "given": "text of its own",
    "cut": "the end of each file",
    "held out": "whole documents, chosen by their content's hash",
}


def describe_corpus(recipe: Recipe, corpus: Corpus) -> dict[str, Any]:
    """Return what `efftrain prepare --format json` prints. Counts of tokens include each document's
    end of text."""
    manifest = corpus.manifest
    seq_len = recipe.model.seq_len
    train = Windows(corpus.train, seq_len, recipe.seed)
    plan = summarize_plan(recipe)
    problems = []
    warnings = list(corpus.notes)
    epochs = None
    validation = 0
    try:
        epochs = train.epochs(plan.windows)
        train.check_budget(plan.windows, recipe.data)
    except (DataError, RecipeError) as error:
        problems.append(str(error))
    try:
        validation = len(
            Windows(corpus.valid, seq_len, recipe.seed).validation_starts(recipe.eval.windows)
        )
    except DataError as error:
        problems.append(str(error))
    if epochs is not None:
        warnings += data_warnings(train, plan.windows, validation)
    sides = {
        side: {
            "sources": manifest["sources"][side],
            **{key: manifest[side][key] for key in ("documents", "bytes", "tokens")},
            "shards": len(manifest[side]["shards"]),
        }
        for side in ("train", "valid")
    }
    return {
        **sides,
        "split": manifest["split"],
        "tokenizer": recipe.data.tokenizer,
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "vocab_size": corpus.vocab_size,
        "eot_id": corpus.eot_id,
        "bytes_per_token": corpus.bytes_per_token,
        "overlap": manifest["overlap"],
        "skipped": manifest["skipped"],
        "empty": manifest["empty"],
        "windows_per_epoch": train.per_epoch if epochs is not None else 0,
        "windows_needed": plan.windows,
        "epochs": epochs,
        "mix": [
            {
                "path": part.name,
                "weight": part.weight,
                "tokens": part.tokens,
                "epochs": train.epochs_of_sources(plan.windows).get(part.name),
            }
            for part in (corpus.train.parts if epochs is not None else ())
        ],
        "limits": manifest.get("limits"),
        "validation_windows": validation,
        "problems": problems,
        "warnings": warnings,
        "data_hash": corpus.data_hash,
        "folder": str(corpus.folder),
    }


def print_corpus(
    console: Console, recipe: Recipe, about: dict[str, Any], *, train_command: str
) -> None:
    """Print `describe_corpus` for a reader; `train_command` is what to type next."""
    train = about["train"]
    valid = about["valid"]
    wanted = recipe.eval.windows
    fewer = (
        f", {wanted} were asked for: the text is short"
        if 0 < about["validation_windows"] < wanted
        else ""
    )
    lines = [
        f"text        {_named(recipe.data.named_text, train['sources'])}",
        f"training    {_counted(train)}",
        f"validation  {_counted(valid)}; {_SPLIT_WORDS[about['split']]}",
        (
            f"tokenizer   {about['tokenizer']}: vocabulary {about['vocab_size']:,},"
            f" end of text {about['eot_id']},"
            f" {about['bytes_per_token']:.2f} bytes per token of the validation text"
        ),
        f"overlap     {counted(about['overlap'], 'document')} both trained and validated on",
        f"windows     {about['windows_per_epoch']:,} of {recipe.model.seq_len:,} tokens an epoch;"
        f" validation on {about['validation_windows']:,}{fewer}",
    ]
    if recipe.data.valid is not None:
        lines.insert(
            1, f"            validation: {_named(_joined(recipe.data.valid), valid['sources'])}"
        )
    if about["empty"] or about["skipped"]:
        lines.append(
            f"rows        {about['empty']:,} without text and {about['skipped']:,} that cannot be"
            " read are left out"
        )
    if about["epochs"] is not None:
        most = " of the source read most often" if about["mix"] else ""
        lines.append(
            f"budget      {about['windows_needed']:,} windows: {about['epochs']:.2f} epochs{most}"
        )
    total = sum(part["weight"] for part in about["mix"])
    for part in about["mix"]:
        lines.append(
            f"            {part['weight'] / total:>6.1%} {part['path']}:"
            f" {part['tokens']:,} tokens, {part['epochs']:.2f} epochs"
        )
    if about["limits"] and about["limits"]["train"]:
        lines.append(
            f"limit       {about['limits']['train']:,} training tokens,"
            " and the document that reaches them is the last; data.max_tokens sets it"
        )
    lines.append(f"shards      {about['folder']}")
    print_labelled(console, lines, indent=12)
    for warning in about["warnings"]:
        console.print(f"warning: {warning}", markup=False)
    for problem in about["problems"]:
        console.print(f"\nThis recipe cannot train on it yet: {problem}", markup=False)
    if not about["problems"]:
        console.print(f"\nnext\n  {train_command}", markup=False, soft_wrap=True)


def _joined(spec: str | tuple[str, ...]) -> str:
    return spec if isinstance(spec, str) else ", ".join(spec)


def _counted(side: dict[str, Any]) -> str:
    return (
        f"{counted(side['documents'], 'document')}, {human(side['bytes'], 'B')},"
        f" {side['tokens']:,} tokens"
    )


def _named(text: str, sources: list[str]) -> str:
    """Return the text as the recipe names it, with the number of its files."""
    if text == "stdlib":
        return sources[0]
    return text if len(sources) == 1 else f"{text} ({len(sources)} files)"
