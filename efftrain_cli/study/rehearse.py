"""A study at toy size: every phase of it runs in a minute or so, before hours are spent. Its numbers mean nothing.

Models, batches, lengths and schedules shrink to a dozen steps; data is a made text, so nothing is downloaded or
prepared twice; of the seeds and of each grid a few values are left. Methods stay on, and everything that decides their
kind stays as it is.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.methods.staged_growth import StageModel, grown_shape, parse_operator, sizes_of
from efftrain_cli.plan.plan import micro_batch_multiple, shorten_schedules
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, flat_values, load_recipe
from efftrain_cli.recipe.sections import Checkpoint, Data, Eval, Model
from efftrain_cli.recipe.toml import toml_value
from efftrain_cli.run.directory import runs_in
from efftrain_cli.study.file import Arm, StudyFile, Tuning

STEPS = 12
SEQ_LEN = 32
BATCH_SIZE = 4
EMBD_PER_HEAD = 16


@contextmanager
def rehearsal(file: StudyFile, folder: Path, devices: int = 1) -> Iterator[StudyFile]:
    """Empty `folder`, make it the folder of runs inside, and yield the study at toy size for so many devices."""
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
            ends = tuple(dict.fromkeys((values[0], values[-1])))
            if all(_survives(file, arm, key, value, folder) for value in ends):
                grid[key] = ends
        arms.append(
            Arm(name=arm.name, recipe=str(path.absolute()), grid=grid if study.tuning else None)
        )
    looks, seeds = (1, 2) if study.looks == 1 else (2, 4)
    blocks = file.blocks[:seeds]
    tuned = ",".join(str(block.tuning[0]) for block in blocks if block.tuning)
    tuning = None
    if study.tuning:
        tuning = Tuning(seeds=tuned, grid={})
    small = replace(
        study,
        seeds=",".join(map(str, file.seeds[:seeds])),
        looks=looks,
        n_seeds=None,
        blocks=study.blocks and seeds,
        tuning=tuning,
        arms=tuple(arms),
        primary=tuple(
            replace(each, rates=each.rates and (each.rates[0], each.rates[-1]))
            for each in study.primary
        ),
        set=(),
    )
    path = folder / f"{file.name}.toml"
    path.write_text(f"# {file.path} at toy size\n", encoding="utf-8")
    return StudyFile(path, small)


def _survives(
    file: StudyFile,
    arm: Arm,
    key: str,
    value: object,
    folder: Path,
) -> bool:
    """Return whether the toy recipe leaves a tried value as it is."""
    recipe = load_recipe(
        file.recipe_path(arm), (*file.settings_of(arm), f"{key}={toml_value(value)}")
    )
    return flat_values(toy_recipe(recipe, folder)).get(key) == flat_values(recipe).get(key)


def toy_recipe(recipe: Recipe, folder: Path, devices: int = 1) -> Recipe:
    """Return the recipe as a dozen steps of a tiny model on the text of `folder`, for a batch that `devices` can share.

    Raises:
        UsageError: it cannot be made so small.
    """
    seq_len = min(recipe.model.seq_len, SEQ_LEN)
    batch_size = max(BATCH_SIZE, 2 * micro_batch_multiple(recipe, devices))
    shapes = _toy_shapes(recipe)
    last = shapes[-1]
    moved = shorten_schedules(recipe, STEPS // 2, batch_size)
    if stages := moved.get("stages"):
        smaller = [
            StageModel(**sizes_of(shape))  # type: ignore[arg-type]
            for shape in shapes[:-1]
        ]
        moved["stages"] = tuple(
            replace(stage, model=model, rewarmup_steps=min(stage.rewarmup_steps, 2))
            for stage, model in zip(stages, [*smaller, StageModel()], strict=True)
        )
    slw = moved.get("seq_len_warmup")
    if slw is not None and slw.steps is not None:
        moved["seq_len_warmup"] = replace(
            slw, start=min(slw.start, 8), multiple=min(slw.multiple, 8)
        )
    elif slw is not None:
        phases = min(len(slw.lengths), 3)
        lengths = tuple(max(1, seq_len >> (phases - 1 - i)) for i in range(phases))
        until = tuple(2 * (i + 1) for i in range(phases - 1))
        moved["seq_len_warmup"] = replace(
            slw,
            multiple=1,
            lengths=lengths,
            until=until,
        )
    if recipe.ouroboros is not None:
        moved["ouroboros"] = replace(moved["ouroboros"], split=None)
    optim = replace(
        recipe.optim,
        warmup_steps=min(recipe.optim.warmup_steps, 3),
        decay_tokens=None,
        decay_steps=None,
    )
    try:
        return replace(
            recipe,
            model=replace(last, seq_len=seq_len),
            data=Data(
                train=str((folder / "text.txt").absolute()),
                valid=str((folder / "valid.txt").absolute()),
                tokenizer="bpe:300",
                repeat=True,
                allow_overlap=True,
            ),
            optim=optim,
            train=replace(
                recipe.train,
                tokens=STEPS * batch_size * seq_len,
                batch_size=batch_size,
                micro_batch_tokens=batch_size * seq_len,
                dtype="fp32",
                compile="off",
            ),
            eval=Eval(every=4, windows=2),
            checkpoint=Checkpoint(every=1000, keep=1),
            wandb=replace(recipe.wandb, mode="off"),
            **moved,
        )
    except ValueError as error:
        raise UsageError(
            f"a recipe of this study cannot be rehearsed at toy size: {error}"
        ) from None


def _toy_shapes(recipe: Recipe) -> list[Model]:
    """Return tiny shapes of every stage, grown by the recipe's own factors; one shape where there are no stages."""
    if not recipe.stages:
        heads = min(recipe.model.n_head, 2)
        modules = 1 if recipe.ouroboros is None else recipe.ouroboros.modules
        # Every module between the first and the last has a block.
        layers = max(min(recipe.model.n_layer, 2), modules - 2)
        return [_toy_model(recipe.model, layers, heads)]
    shape = _toy_model(recipe.model, 1, 1)
    shapes = []
    for stage in recipe.stages:
        for operator in map(parse_operator, stage.operators):
            if operator.kind not in ("depth", "width"):
                raise UsageError(
                    f"operator {operator.kind} sets a size, which no toy model has: it cannot be rehearsed"
                )
            shape = grown_shape(shape, operator)
        shapes.append(shape)
    return shapes


def _toy_model(model: Model, layers: int, heads: int) -> Model:
    return replace(
        model,
        n_layer=layers,
        n_head=heads,
        n_embd=heads * EMBD_PER_HEAD,
        n_kv_head=None,
        head_dim=None,
        d_ff=None,
    )


def _text(size: int, seed: int) -> str:
    """Return letters with spaces and ends of lines, as many characters."""
    return "".join(random.Random(seed).choices("etaoin shrdlu \n", k=size))
