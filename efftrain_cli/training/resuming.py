"""What a resumed run may differ in from its checkpoint, and what must be as it was."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from efftrain_cli.data.corpus import Corpus
from efftrain_cli.data.prepare import corpus_of_key, limits_of, prepare
from efftrain_cli.foundation.console import counted, make_console, say
from efftrain_cli.foundation.errors import CheckpointError, DataError, DiskError, UsageError
from efftrain_cli.foundation.files import free_bytes
from efftrain_cli.foundation.step import Progress
from efftrain_cli.plan.cost import checkpoint_bytes
from efftrain_cli.plan.plan import model_config, plan_step
from efftrain_cli.recipe.recipe import Recipe, load_recipe, recipe_differences
from efftrain_cli.run.directory import checkpoints_of
from efftrain_cli.run.lines import read_lines
from efftrain_cli.run.metrics import last_row
from efftrain_cli.run.origin import (
    NOT_COMPUTED,
    check_text_is_named,
    origin_data,
    read_origin,
)
from efftrain_cli.training import dist

Differences = list[list[Any]]
"""[key, before, now] of what a resumed run differs in."""
SHAPE_KEYS = ("model.", "data.tokenizer", "optim.name", "optim.beta2_tokens")
"""Recipe keys that decide which tensors there are, and their shapes."""


# --- the recipe -----------------------------------------------------------------------------------


def accepted_recipe(
    run: Path,
    written: Recipe,
    recipe: Recipe,
    overrides: Sequence[str],
    override: bool,
) -> tuple[Recipe, Differences]:
    """Return the recipe that a run goes on with, and what it newly differs in from that of its
    checkpoint; otherwise as `check_recipe`."""
    check_text_is_named(run, overrides, f"--resume {run.name}")
    if any(each.partition("=")[0].strip() == "train.tokens" for each in overrides):
        recipe, only_longer = trained_longer(run.name, written, recipe)
        if only_longer:
            return recipe, not_accepted(run, computed_differences(written, recipe))
    return recipe, check_recipe(run, written, recipe, override)


def computed_differences(written: Recipe, recipe: Recipe) -> Differences:
    """Return the keys that differ and change what a run computes, with both values."""
    differences = []
    for key, *values in recipe_differences(written, recipe):
        if not key.startswith(NOT_COMPUTED):
            differences.append([key, *values])
    return differences


def not_accepted(run: Path, differences: Differences) -> Differences:
    """Return the differences that no earlier `--override-resume` accepted."""
    accepted: Differences = []
    # Not those of `read_run`: a difference that was accepted must match to the letter.
    for event in read_lines(run / "events.jsonl"):
        before = event.get("differences")
        if event.get("event") == "override" and isinstance(before, list):
            accepted += before
    return [entry for entry in differences if entry not in accepted]


def check_recipe(run: Path, written: Recipe, recipe: Recipe, override: bool) -> Differences:
    """Compare the recipe that is to continue a run with that of its checkpoint, or, if it has none,
    with the one that it was started with.

    Return the differences that are allowed and were not accepted before.

    Raises:
        CheckpointError: the model or its vocabulary would have another shape.
        UsageError: anything else that a step depends on differs, and `override` is not given.
    """
    differences = computed_differences(written, recipe)
    shapes = [entry for entry in differences if entry[0].startswith(SHAPE_KEYS)]
    if shapes and checkpoints_of(run):
        raise CheckpointError(
            f"run {run.name!r} was trained with another model or optimizer: {described(shapes)}:"
            " a checkpoint only continues with the tensors it has\n"
            "  restore the values, or start a new run"
        )
    # An imported run: its first text is named now, which changes nothing.
    named: Differences = []
    of_text = [entry for entry in differences if entry[0].startswith("data.")]
    if of_text and origin_data(run)["train_hash"] is None:
        named = new_differences(run, of_text, True, "the text is named")
        differences = [entry for entry in differences if entry not in of_text]
    return [*named, *new_differences(run, differences, override, "the recipe has changed")]


def new_differences(run: Path, differences: Differences, override: bool, what: str) -> Differences:
    """Return the differences that were not accepted before, after a warning.

    Raises:
        UsageError: there are any, and `override` is False.
    """
    fresh = not_accepted(run, differences)
    if fresh and not override:
        raise UsageError(
            f"run {run.name!r}: {what} since its checkpoint: {described(fresh)}\n"
            "  give --override-resume to continue anyway"
            " (the difference is recorded), or start a new run"
        )
    if fresh and dist.is_main():
        say(f"warning: continuing although {what}: {described(fresh)}")
    return fresh


def described(differences: Differences) -> str:
    """Describe differences in a line; hashes are cut short."""
    text = ", ".join(f"{key}: {old!r} -> {new!r}" for key, old, new in differences)
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1...", text)


def trained_longer(run: str, written: Recipe, recipe: Recipe) -> tuple[Recipe, bool]:
    """Return the recipe of a run whose budget was raised, and whether nothing else has changed:
    then it needs no --override-resume.

    Its learning-rate schedule ends where it was meant to, unless optim.decay_tokens says otherwise.

    Raises:
        UsageError: the learning rate would be 0 from the schedule's end on.
    """
    before = written.train.tokens
    optim = recipe.optim
    if recipe.train.tokens <= before:
        return recipe, False
    if optim.has_end and optim.decay_steps is None:
        end = optim.decay_tokens or before
        # After a growth the schedule stands at fewer tokens than were trained, and need not have
        # ended.
        if optim.min_lr == 0 and end < recipe.train.tokens and not recipe.stages:
            raise UsageError(
                f"run {run!r}: its learning rate reaches optim.min_lr = 0 at {end:,} tokens,"
                " so training longer would change nothing\n"
                "  set where it ends,"
                f" --set optim.decay_tokens={recipe.train.tokens:_} --override-resume;"
                " the rate then jumps up, and the jump is shown before it happens"
            )
        recipe = replace(recipe, optim=replace(optim, decay_tokens=end))
    longer: dict[str, list[object]] = {
        "train.tokens": [before, recipe.train.tokens],
        "optim.decay_tokens": [None, before],
    }
    differences = computed_differences(written, recipe)
    return recipe, all(longer.get(key) == values for key, *values in differences)


def dropped_in_flight(written: Recipe, recipe: Recipe) -> str:
    """Return why a run cannot use the gradients in flight of its checkpoint; "" if it can."""
    before = written.delayed_gradients
    now = recipe.delayed_gradients
    if before is None:
        return ""
    # How due gradients are used decides nothing of those in flight.
    if now is not None:
        embedding = before.embedding_gradient
        if replace(now, embedding_gradient=embedding, clip=before.clip) == before:
            return ""
    reason = (
        f"[ouroboros] has changed: the gradients in flight, of up to {before.modules - 1} steps"
        " ago, are dropped"
    )
    if now is None:
        return f"{reason}, and training goes on without delay"
    return f"{reason}, and in {now.modules - 1} steps every module has one again"


# --- what is said before it happens ---------------------------------------------------------------


def rate_change(before: float | None, progress: Progress, written: Recipe, recipe: Recipe) -> str:
    """Describe what a changed recipe does to the learning rate, which was `before`; "" if
    nothing."""
    unchanged = (written.optim, written.train) == (recipe.optim, recipe.train)
    if before is None or unchanged or progress.tokens >= recipe.train.tokens:
        return ""
    rate = plan_step(recipe, progress).lr
    change = f"goes on at {rate:.3g}"
    if abs(rate - before) > 0.1 * before:
        change = f"jumps from {before:.3g} to {rate:.3g}"
    return f"lr      {change} with step {progress.step + 1:,}"


def nothing_left(name: str, progress: Progress, recipe: Recipe, until: int | None) -> str:
    """Return why a resumed run has no step to train."""
    if progress.tokens < recipe.train.tokens:
        return (
            f"nothing to train: run {name} is after step {progress.step} already,"
            f" and --steps {until} ends there or before"
        )
    return (
        f"nothing to train: run {name} has used its budget of {recipe.train.tokens:,} tokens,"
        f" after step {progress.step:,}\n"
        "  to train to N tokens in all:"
        f" `efftrain pretrain --resume {name} --set train.tokens=N`"
    )


# --- the beginning, data and disk -----------------------------------------------------------------


def check_beginning(run: Path, from_start: bool) -> None:
    """Check that a run without a checkpoint may begin at step 1.

    Raises:
        CheckpointError: it has trained before and `from_start` is not given.
    """
    step = last_row(run).get("step", 0)
    if step and not from_start:
        raise CheckpointError(
            f"run {run.name} logged {counted(step, 'step')} and saved no checkpoint\n"
            f"  from step 1 again: efftrain pretrain --resume {run.name} --from-start"
        )


def text_of(run: Path, recipe: Recipe) -> Corpus:
    """Return the corpus that a run goes on with: the one that it has trained on, whatever has
    become of its text, unless `recipe` asks for other text, or more of it.

    Raises:
        DataError: the cache lacks it, and the text is not there to prepare it again.
    """
    origin = read_origin(run)
    key = (origin.get("data") or {}).get("corpus")
    before = load_recipe(str(run / "recipe.toml"))
    if key is not None and recipe.data == before.data:
        corpus = corpus_of_key(key, recipe.data)
        # Of a Hub dataset as much is read as the budget and the validation need.
        sizes = [(each.train.tokens, each.eval, each.model.seq_len) for each in (before, recipe)]
        if corpus is not None and (corpus.holds_all or sizes[0] == sizes[1]):
            return corpus
    try:
        return prepare(recipe.data, limits=limits_of(recipe), console=make_console())
    except DataError as error:
        folder = origin.get("folder")
        if folder in (None, str(Path.cwd())):
            raise
        raise DataError(
            f"{error}\n  run {run.name!r} was started in {folder}: give the command there"
        ) from None


def check_data(run: Path, corpus: Corpus, override: bool) -> Differences:
    """Compare the data that is to continue a run with those it was started on, token for token.

    Return the differences that are allowed and were not accepted before.

    Raises:
        CheckpointError: the vocabulary is another.
        UsageError: other tokens, and `override` is not given.
    """
    origin = origin_data(run)
    check_tokenizer(run.name, origin, corpus)
    differences = []
    for key, now in (("train_hash", corpus.train.sha256), ("valid_hash", corpus.valid.sha256)):
        if origin[key] not in (None, now):
            differences.append([f"data: {key}", origin[key], now])
    return new_differences(run, differences, override, "the text has changed")


def check_tokenizer(name: str, origin: Mapping[str, Any], corpus: Corpus) -> None:
    """Check that a corpus has the tokenizer of a run, by the data of its origin.

    Raises:
        CheckpointError: it has another one.
    """
    if (origin["tokenizer_hash"], origin["vocab_size"]) != (
        corpus.tokenizer_sha256,
        corpus.vocab_size,
    ):
        raise CheckpointError(
            f"run {name!r} was trained with another tokenizer ({origin['vocab_size']} tokens,"
            f" {origin['tokenizer_hash'][:12]}...) than data.train and data.tokenizer make now"
            f" ({corpus.vocab_size} tokens, {corpus.tokenizer_sha256[:12]}...):"
            " its weights belong to other tokens\n  restore the text, or start a new run"
        )


def check_disk(folder: Path, recipe: Recipe, vocab_size: int, existing: int = 0) -> None:
    """Check that the kept checkpoints, and the one being written, fit on the disk of `folder`.

    The folder need not exist; the run has `existing` checkpoints already. All are as large as those
    of the last stage.

    Raises:
        DiskError: with bytes needed and free.
    """
    keep = recipe.checkpoint.most
    size = checkpoint_bytes(recipe, model_config(recipe, vocab_size))
    missing = keep + 1 - min(existing, keep)
    needed = missing * size * 11 // 10
    free = free_bytes(folder)
    if free < needed:
        raise DiskError(
            f"{folder}: too little disk space: {missing} more checkpoints of {size:,} bytes,"
            f" and 10 % for rows and logs: {needed:,} bytes needed, {free:,} bytes free\n"
            f"  make room, lower checkpoint.keep (now {recipe.checkpoint.keep}),"
            " or set EFFTRAIN_RUNS to a folder on another disk"
        )
