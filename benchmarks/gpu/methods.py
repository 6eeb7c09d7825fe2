"""What layer dropping saves, what SimiGrad's measurement costs, and how long a growth keeps
training waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import torch

from benchmarks.gpu.measuring import (
    Bench,
    Figure,
    Part,
    figure,
    rate_figure,
    rates,
    recipe_for,
    training,
    wait_for,
)
from efftrain_cli.methods.progressive_layer_drop import ProgressiveLayerDrop
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.compiling import compile_seconds
from efftrain_cli.training.loop import train
from efftrain_cli.training.stages import grow_stage


def layer_dropping(bench: Bench) -> Iterator[Figure]:
    """Against all blocks, both with compiled blocks."""
    dense = recipe_for(bench, micro_batches=4)
    dropping = replace(dense, progressive_layer_drop=ProgressiveLayerDrop(theta=0.5, steps=0))
    blocks = mock.patch("efftrain_cli.training.objective.compiles_blocks", lambda *_: True)
    steps = 4 if bench.smoke else 40
    measured = []
    for name, recipe, patch in (
        ("all blocks", dense, blocks),
        ("layer dropping, theta 0.5", dropping, nullcontext()),
    ):
        with patch:
            run = training(bench, recipe)
            run.rows(3 if recipe is dense else 8)  # every shape of every pattern
            rows = run.rows(steps)
            measured.append(
                [
                    sum(float(str(row[column])) for row in rows) / steps
                    for column in ("seconds", "flops")
                ]
            )
            yield figure(f"117M by blocks, {name}", 1000 * measured[-1][0], "ms a step")
    (dense_time, dense_flops), (time_, flops) = measured
    saved = 1 - flops / dense_flops
    yield figure(
        "layer dropping saves", 1 - time_ / dense_time, "of the time", f"{saved:.1%} of the FLOPs"
    )


def simigrad(bench: Bench) -> Iterator[Figure]:
    """Measuring every step, and never: the same batch, graph and kernels."""
    dense = recipe_for(bench, micro_batches=4)
    size = dense.train.batch_size

    def measuring(interval: int) -> Recipe:
        bounds = SimiGrad(
            target=0.5, min_batch_size=size, max_batch_size=size, quantum=size, interval=interval
        )
        return replace(dense, simigrad=bounds)

    measured = {}
    for name, recipe in (("never", measuring(10**9)), ("every step", measuring(1))):
        rate = rates(bench, training(bench, recipe))
        measured[name] = float(str(rate["seconds_per_step"]))
        yield rate_figure(f"117M, SimiGrad measuring {name}", rate)
    yield figure(
        "SimiGrad's measurement costs", measured["every step"] / measured["never"] - 1, "of a step"
    )


def growth(bench: Bench) -> Iterator[Figure]:
    """From half the layers to all of them: the growth itself, and the first step after it."""
    recipe = recipe_for(
        bench, "small-staged-depth" if bench.smoke else "gpt2-117m-staged-depth", shrink=False
    )
    run = training(bench, recipe)
    run.rows(3)
    windows = run.windows.validation(1)
    wait_for(bench.device)
    start = time.perf_counter()
    grow_stage(run.state, recipe, windows, torch.tensor(torch.nan))
    wait_for(bench.device)
    grown = time.perf_counter() - start
    compiling = compile_seconds()
    # `train` stops where a stage ends; its caller goes on with the grown state.
    stepping = train(run.state, recipe, run.windows, windows)
    start = time.perf_counter()
    next(stepping)
    wait_for(bench.device)
    first = time.perf_counter() - start
    yield figure(
        "growth's stall",
        grown + first,
        "s",
        f"{grown:.2f} s to grow, {compile_seconds() - compiling:.1f} s of compilation",
    )


PARTS = (
    Part("layer dropping", layer_dropping, 80),
    Part("SimiGrad", simigrad, 70),
    Part("growth", growth, 50),
)
