"""Branches: new runs that begin with the whole state of another run's checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from efftrain_cli.data.corpus import Corpus
from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.files import sha256_of
from efftrain_cli.foundation.step import Progress
from efftrain_cli.recipe.recipe import Recipe, dump_recipe
from efftrain_cli.run.directory import RunDirectory, checkpoint_path, checkpoint_step
from efftrain_cli.run.manifest import MANIFEST, read_manifest, write_manifest
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.origin import origin_data
from efftrain_cli.training import dist
from efftrain_cli.training.loading import load, read_progress, written_recipe
from efftrain_cli.training.resuming import (
    computed_differences,
    described,
    dropped_in_flight,
    rate_change,
)
from efftrain_cli.training.state import TrainState

KEPT = ("model.", "optim.name", "optim.beta2_tokens", "seed", "stages", "staged_growth")
"""Recipe keys that a branch has of its parent."""
IN_FLIGHT = "method.safetensors"


@dataclass(frozen=True)
class Branch:
    """A checkpoint to begin with, and the recipe that goes on from it."""

    checkpoint: Path
    recipe: Recipe

    @property
    def parent(self) -> Path:
        """Directory of the run that branches off."""
        return self.checkpoint.parent.parent

    @property
    def step(self) -> int:
        """Finished steps of the checkpoint."""
        return checkpoint_step(self.checkpoint)

    @property
    def progress(self) -> Progress:
        """How far the parent had come."""
        return read_progress(self.checkpoint)

    @property
    def drops(self) -> str:
        """Why the gradients in flight are dropped; "" if they are not."""
        return dropped_in_flight(written_recipe(self.checkpoint), self.recipe)

    def check(self) -> None:
        """Check that the recipe can go on from the checkpoint.

        Raises:
            UsageError: it has other tensors or another seed, or its budget is spent already.
        """
        differences = computed_differences(written_recipe(self.checkpoint), self.recipe)
        kept = [entry for entry in differences if entry[0].startswith(KEPT)]
        if kept:
            raise UsageError(
                f"a branch of {self.parent.name} cannot have another {described(kept)}\n"
                "  restore the values, or start a new run"
            )
        tokens = self.progress.tokens
        if tokens >= self.recipe.train.tokens:
            raise UsageError(
                f"{self.parent.name}@{self.step} has trained {tokens:,} tokens, and"
                f" train.tokens = {self.recipe.train.tokens:,} ends there or before\n"
                "  branch off earlier, or raise train.tokens"
            )

    def begin(self, state: TrainState, corpus: Corpus) -> None:
        """Load the checkpoint into `state`, on all ranks.

        Raises:
            UsageError: the corpus has another tokenizer.
            CheckpointError: the checkpoint is damaged.
        """
        if origin_data(self.parent)["tokenizer_hash"] != corpus.tokenizer_sha256:
            tokenizer = self.parent / "tokenizer.json"
            raise UsageError(
                f"a branch of {self.parent.name} cannot have another tokenizer:"
                " its weights belong to other tokens\n"
                f"  take the parent's: --set data.tokenizer={tokenizer}"
            )
        written = load(self.checkpoint, state, self.recipe)
        if self.drops:
            state.in_flight.clear()
        if not dist.is_main():
            return
        for row in latest_rows(self.parent, self.step)[-1:]:
            change = rate_change(row.get("lr"), state.progress, written, self.recipe)
            if change:
                say(change)
        if self.drops:
            say(f"warning: {self.drops}")

    @property
    def origin(self) -> dict[str, object]:
        """What origin.json says of it."""
        digest = sha256_of(self.checkpoint / MANIFEST)
        return {"branch": {"parent": self.parent.name, "step": self.step, "sha256": digest}}

    def copy_into(self, run: RunDirectory) -> None:
        """Copy the parent's rows up to the step, and the checkpoint with the branch's recipe."""
        run.log(latest_rows(self.parent, self.step))
        files = read_manifest(self.checkpoint).files
        if self.drops:
            files.pop(IN_FLIGHT, None)
        target = checkpoint_path(run.path, self.step)
        target.mkdir(parents=True)
        for name in files:
            shutil.copyfile(self.checkpoint / name, target / name)
        recipe = target / "recipe.toml"
        recipe.write_text(dump_recipe(self.recipe), encoding="utf-8")
        hashes = {name: file.sha256 for name, file in files.items()}
        write_manifest(target, {**hashes, recipe.name: sha256_of(recipe)})
