"""`efftrain export`: a trained model in transformers' form, with a card that says what it is and
how it came about."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from efftrain_cli import __version__
from efftrain_cli.model.hf import check_empty, hf_config, write_hf
from efftrain_cli.recipe.recipe import dump_recipe
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.names import recipe_name
from efftrain_cli.run.origin import read_origin
from efftrain_cli.run.stability import validation_curve
from efftrain_cli.training.loading import TrainedModel, load_trained_model
from efftrain_cli.zeroshot.results import read_results

_ABSOLUTE = re.compile(r'"(?:/|[A-Za-z]:)[^"\n]*[/\\]([^"/\\\n]+)"')
"""A string that is an absolute path, and its last part."""


def export_run(run: str, checkpoint: str | None, directory: Path) -> TrainedModel:
    """Write the model of a run's checkpoint, its tokenizer and a model card into a directory that
    does not exist yet.

    Raises:
        UsageError: there is no such run or checkpoint, or the directory holds files.
        CheckpointError: the run has no checkpoint, or none that is whole.
    """
    check_empty(directory)
    trained = load_trained_model(run, checkpoint, torch.device("cpu"))
    origin = read_origin(trained.run)
    source = {
        "run": trained.run.name,
        "checkpoint": trained.checkpoint.name,
        "checkpoint_sha256": trained.model_sha256,
        "step": trained.progress.step,
        "tokens": trained.progress.tokens,
        "efftrain": __version__,
        "data": origin.get("data"),
    }
    tokenizer_json = (trained.run / "tokenizer.json").read_text("utf-8")
    others = {
        "README.md": model_card(trained, origin),
        "efftrain.json": json.dumps(source, indent=2),
    }
    write_hf(trained.model, tokenizer_json, trained.tokenizer.eot_id, directory, others)
    return trained


def model_card(trained: TrainedModel, origin: dict[str, Any]) -> str:
    """Return README.md of an export: what the model is, its recipe, the hashes of its data, and the
    scores that were measured."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    rows = latest_rows(trained.run, trained.progress.step)
    results = read_results(trained.run)
    scores = [each for each in results if each["checkpoint_sha256"] == trained.model_sha256]
    environment = Environment(
        loader=PackageLoader("efftrain_cli"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("model_card.md").render(
        trained=trained,
        family=hf_config(trained.model.config, trained.tokenizer.eot_id).model_type,
        efftrain=origin.get("efftrain") or __version__,
        recipe_name=recipe_name(origin, trained.run.name),
        losses=validation_curve(rows),
        scores=scores,
        data=origin.get("data") or {},
        # Where files lay on this machine concerns nobody else.
        recipe=_ABSOLUTE.sub(r'"\1"', dump_recipe(trained.recipe)).strip(),
    )
