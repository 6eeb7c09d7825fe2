"""Trains every value of [model] and [optim] on two ranks, as copies and as shares, and alone, and writes the losses:
`every_value_run.py OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training.joining import joined
from efftrain_cli.training.ranks import ALONE, Ranks
from efftrain_cli.training.strategy import choose_strategy
from efftrain_cli.training.trainer import train
from tests.laws.every_value import OF_TRAINING, overrides_of
from tests.laws.ring_run import SharedTokens
from tests.tiny import fresh


def losses_of(recipe: Recipe, ranks: Ranks) -> list[float]:
    """Return the losses of three steps."""
    data, state = SharedTokens(recipe.model.seq_len), fresh(recipe)
    val = torch.stack([data.window(10**6)])
    devices = choose_strategy(recipe, state, ranks, state.model.device)
    records = list(train(state, recipe, data, val, 3, devices))  # type: ignore[arg-type]
    devices.after_stop(state)
    return [float(record.result.scalars["loss"]) for record in records if record.result]


def main(out: str) -> None:
    torch.set_num_threads(1)
    with joined() as ranks:
        found = {}
        for value in OF_TRAINING:
            rows: dict[str, object] = {
                "alone": losses_of(load_recipe("small", overrides_of(value)), ALONE)
            }
            for strategy in ("replicate", "shard"):
                section = f'parallel={{strategy = "{strategy}"}}'
                try:
                    recipe = load_recipe("small", [*overrides_of(value), section])
                except RecipeError:
                    rows[strategy] = "refused"
                    continue
                rows[strategy] = losses_of(recipe, ranks)
            found[value] = rows
        if ranks.rank == 0:
            Path(out).write_text(json.dumps(found))


main(*sys.argv[1:])
