"""A trained model, loaded from its run for `sample`, `export` and `eval-zeroshot`, and text
generated from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from efftrain_cli.data.tokenizer import Tokenizer, load_tokenizer
from efftrain_cli.foundation.console import listed, say
from efftrain_cli.foundation.errors import (
    CheckpointError,
    DataError,
    NewerFormatError,
    UsageError,
)
from efftrain_cli.foundation.step import Progress
from efftrain_cli.foundation.tensors import read_tensors
from efftrain_cli.model.generate import Sampling, generate
from efftrain_cli.model.gpt import GPT
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.run.directory import checkpoint_step, checkpoints_of, existing_run
from efftrain_cli.run.manifest import read_manifest, verify_checkpoint
from efftrain_cli.run.origin import check_not_orphaned, read_origin
from efftrain_cli.training.build import build_model
from efftrain_cli.training.checkpoint import nonfinite_tensors, read_progress


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A checkpoint's model, and what is needed to use it."""

    run: Path
    checkpoint: Path
    model_sha256: str
    """Of the checkpoint's model.safetensors."""
    recipe: Recipe
    progress: Progress
    model: GPT
    tokenizer: Tokenizer


def load_trained_model(name: str, checkpoint: str | None, device: torch.device) -> TrainedModel:
    """Load the model of run `name`: of the newest valid checkpoint, or of the one asked for by its
    step or name.

    Raises:
        UsageError: there is no such run or checkpoint.
        CheckpointError: the run has no checkpoint yet, or none that is whole, or the weights do not
            fit the recipe.
        DataError: the run's tokenizer is missing or not the one it was trained with.
    """
    run = existing_run(name)
    path = find_checkpoint(run, checkpoint)
    tokenizer = load_run_tokenizer(run)
    recipe = load_recipe(str(path / "recipe.toml"))
    progress = read_progress(path)
    # Weights are fp32 however they were trained: they are used as an ordinary GPT-2, whose products
    # add in fp32.
    model = build_model(recipe, tokenizer.vocab_size, device, progress.stage)
    weights = path / "model.safetensors"
    try:
        model.load_state_dict(read_tensors(weights))
    except RuntimeError as error:
        raise CheckpointError(
            f"{weights} does not fit the recipe beside it and the run's tokenizer: {error}"
        ) from None
    return TrainedModel(
        run=run,
        checkpoint=path,
        model_sha256=read_manifest(path).files["model.safetensors"].sha256,
        recipe=recipe,
        progress=progress,
        model=model.eval(),
        tokenizer=tokenizer,
    )


def find_checkpoint(run: Path, wanted: str | None, needed: frozenset[str] | None = None) -> Path:
    """Find the run's newest checkpoint that is whole, or the one `wanted` names: a step, or
    step-00000100.

    With `needed`, only these of its files must be whole.

    Raises:
        UsageError: no checkpoint is called that; the message lists those there are.
        CheckpointError: there is none yet, or the one asked for (or every one) is damaged.
        NewerFormatError: the newest that is whole was written by a newer efftrain.
    """
    checkpoints = checkpoints_of(run)
    if not checkpoints:
        check_not_orphaned(run)
        raise CheckpointError(
            f"run {run.name!r} has no checkpoint yet: one is written every checkpoint.every"
            " of its recipe and at the end\n"
            f"  wait for it, or if the run has stopped: `efftrain pretrain --resume {run.name}`"
        )
    if wanted is not None:
        steps = [str(checkpoint_step(path)) for path in checkpoints]
        names = zip(checkpoints, steps, strict=True)
        checkpoints = [path for path, step in names if wanted in (path.name, step)]
        if not checkpoints:
            raise UsageError(
                f"--checkpoint {wanted}: run {run.name!r} has checkpoints of steps"
                f" {', '.join(steps)}"
            )
    faults = []
    for path in reversed(checkpoints):
        try:
            check_finite(path, verify_checkpoint(path, needed))
            return path
        except NewerFormatError:
            raise
        except CheckpointError as error:
            if wanted is not None:
                raise
            faults.append(str(error))
            say(f"warning: {error}; trying the one before")
    reasons = "\n  ".join(faults)
    raise CheckpointError(f"no checkpoint of run {run.name!r} is whole:\n  {reasons}")


def check_finite(path: Path, files: frozenset[str]) -> None:
    """Check that weights and moments are finite: an older version saved states that are not."""
    for name in sorted({"model.safetensors", "optimizer.safetensors"} & files):
        if wrong := nonfinite_tensors(read_tensors(path / name)):
            raise CheckpointError(f"{path / name}: NaN or infinity in {listed(wrong)}")


def load_run_tokenizer(run: Path) -> Tokenizer:
    """Load the tokenizer in the run directory.

    Raises:
        DataError: it is missing, or not the one that origin.json says the run was trained with.
    """
    path = run / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path} is missing: without it the model's tokens have no meaning")
    tokenizer = load_tokenizer(path)
    expected = (read_origin(run).get("data") or {}).get("tokenizer_hash")
    if expected is not None and expected != tokenizer.sha256:
        raise DataError(
            f"{path} is not the tokenizer this run was trained with"
            f" (fingerprint {tokenizer.sha256[:12]}, origin.json has {str(expected)[:12]}):"
            " its tokens would mean different text"
        )
    return tokenizer


def generate_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    max_tokens: int,
) -> Iterator[str]:
    """Yield pieces of the text that follows `prompt`, as they become whole characters, to
    end-of-text or max_tokens.

    An empty prompt stands for the beginning of a document. "<|endoftext|>" in a prompt is plain
    text, as in training data.
    """
    from tokenizers.decoders import DecodeStream

    ids = tokenizer.encode([prompt])[0].tolist() or [tokenizer.eot_id]
    # The stream reads the prompt too: a piece's leading space depends on what stands before it.
    stream = DecodeStream(ids=ids, skip_special_tokens=True)
    tokens = generate(model, torch.tensor([ids], device=model.device), sampling)
    for _ in range(max_tokens):
        token = int(next(tokens))
        if token == tokenizer.eot_id:
            return
        piece = stream.step(tokenizer.backend, token)
        if piece is not None:
            yield piece
