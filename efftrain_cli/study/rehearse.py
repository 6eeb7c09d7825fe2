"""A study at toy size: every phase of it runs in a minute or so, before hours are spent. Its
numbers mean nothing.

Widths, batches, lengths and schedules shrink to a dozen steps; data is a made text, so nothing is
downloaded or prepared twice; of the seeds and of each grid of learning rates a few values are left,
other grids are left out. Methods stay on, and everything that decides their kind stays as it is.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.recipe.recipe import Recipe, dump_recipe
from efftrain_cli.recipe.sections import Data
from efftrain_cli.run.directory import runs_in
from efftrain_cli.study.file import Arm, StudyFile, Tuning
from efftrain_cli.study.phases import LEARNING_RATES

STEPS = 12
SEQ_LEN = 32
SHORTEST = 8
"""Sequences that are longer become no shorter than this."""
HEAD_DIM = 16


@contextmanager
def rehearsal(file: StudyFile, folder: Path, devices: int = 1) -> Iterator[StudyFile]:
    """Empty `folder`, make it the folder of runs inside, and yield the study at toy size for so
    many devices."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(_text(60_000, 1), encoding="utf-8")
    (folder / "valid.txt").write_text(_text(6_000, 2), encoding="utf-8")
    small = toy_study(file, folder, devices)
    with runs_in(folder):
        yield small


def toy_study(file: StudyFile, folder: Path, devices: int = 1) -> StudyFile:
    """Write the study with toy recipes into `folder`, and return it."""
    study = file.study
    arms = []
    recipes = folder / "recipes"  # an arm may have the study's name
    recipes.mkdir(parents=True, exist_ok=True)
    for arm in study.arms:
        path = recipes / f"{arm.name}.toml"
        toy = toy_recipe(file.recipe_of(arm), folder, devices)
        path.write_text(dump_recipe(toy), encoding="utf-8")
        grid = {}
        for key, values in file.grid_of(arm).items():
            if key in LEARNING_RATES:
                grid[key] = tuple(dict.fromkeys((values[0], values[-1])))
        arms.append(Arm(name=arm.name, recipe=str(path.absolute()), grid=grid))
    looks, seeds = (1, 2) if study.looks == 1 else (2, 4)
    blocks = file.blocks[:seeds]
    tuned = ",".join(str(block.tuning[0]) for block in blocks if block.tuning)
    primaries = []
    for primary in study.primary:
        ends = primary.rates and (primary.rates[0], primary.rates[-1])
        primaries.append(replace(primary, rates=ends))
    small = replace(
        study,
        seeds=",".join(map(str, file.seeds[:seeds])),
        looks=looks,
        n_seeds=None,
        blocks=study.blocks and seeds,
        tuning=study.tuning and Tuning(seeds=tuned, grid={}),
        arms=tuple(arms),
        primary=tuple(primaries),
        set=(),
    )
    path = folder / f"{file.name}.toml"
    path.write_text(f"# {file.path} at toy size\n", encoding="utf-8")
    return StudyFile(path, small)


def toy_recipe(recipe: Recipe, folder: Path, devices: int = 1) -> Recipe:
    """Return the recipe as a dozen steps of a tiny model on the text of `folder`, for a batch that
    `devices` can share.

    Raises:
        UsageError: it cannot be made so small.
    """
    # PyTorch's import takes seconds, and a plan needs none of this.
    from efftrain_cli.verify_resume import cut_recipe

    seq_len = min(recipe.model.seq_len, SEQ_LEN)

    def narrow(model: Any) -> Any:
        """Return [model], or a stage's changes of it, with the same depth and heads."""
        width = model.n_head and HEAD_DIM * model.n_head
        return replace(model, n_embd=width, head_dim=None, d_ff=None)

    def shorten(length: int) -> int:
        return max(min(length, SHORTEST), length * seq_len // recipe.model.seq_len)

    stages = []
    for stage in recipe.stages:
        warmup = min(stage.rewarmup_steps, 2)
        stages.append(replace(stage, model=narrow(stage.model), rewarmup_steps=warmup))
    slw = recipe.seq_len_warmup
    if slw is not None:
        slw = replace(
            slw,
            start=shorten(slw.start),
            multiple=shorten(slw.multiple),
            lengths=tuple(map(shorten, slw.lengths)),
        )
    try:
        small = replace(
            recipe,
            model=replace(narrow(recipe.model), seq_len=seq_len),
            stages=tuple(stages),
            seq_len_warmup=slw,
            data=Data(
                train=str((folder / "text.txt").absolute()),
                valid=str((folder / "valid.txt").absolute()),
                tokenizer="bpe:300",
                allow_overlap=True,
            ),
            optim=replace(
                recipe.optim,
                warmup_steps=min(recipe.optim.warmup_steps, 3),
                decay_tokens=None,
                decay_steps=None,
            ),
        )
        cut = cut_recipe(small, STEPS // 2, devices)
        tokens = STEPS * cut.train.batch_size * seq_len
        train = replace(cut.train, tokens=tokens, dtype="fp32", compile="off")
        return replace(cut, train=train)
    except ValueError as error:
        raise UsageError(
            f"a recipe of this study cannot be rehearsed at toy size: {error}"
        ) from None


def _text(size: int, seed: int) -> str:
    """Return letters with spaces and ends of lines, as many characters."""
    return "".join(random.Random(seed).choices("etaoin shrdlu \n", k=size))
