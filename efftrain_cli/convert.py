"""Make a run of a GPT-2, Llama or Qwen3 of transformers, to evaluate, sample, grow or continue
(`efftrain import`)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from efftrain_cli.data.tokenizer import Tokenizer, load_tokenizer
from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.errors import CheckpointError, UsageError
from efftrain_cli.model.hf import read_hf, read_hf_config
from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from efftrain_cli.recipe.sections import model_overrides
from efftrain_cli.run.directory import run_path, taken
from efftrain_cli.training.build import state_of
from efftrain_cli.training.checkpoint import create_run
from efftrain_cli.training.origin import software_origin


def import_hf(
    directory: Path,
    name: str,
    recipe_name: str = "small",
    overrides: Sequence[str] = (),
    *,
    source: str = "",
    text_is_meant: bool = False,
) -> Path:
    """Create run `name`, with the directory's weights as checkpoint 0; return its directory.

    The model's shape and the tokenizer are the directory's; how it would be trained on (data,
    optimizer, budget) is the recipe's. The optimizer's moments begin at 0: the format has none.

    Args:
        source: what names it in the run; default: the directory.
        text_is_meant: the recipe's text is what the user wants to train on. Where it is not, and no
            override names one, training on asks for it.

    Raises:
        UsageError: the run exists already, or an override would change the model's shape or
            tokenizer.
        CheckpointError: the directory holds no model that efftrain can compute.
        DataError: its tokenizer is missing, or has no end-of-text token.
    """
    if run_path(name).exists():
        raise taken(name)
    if load_recipe(recipe_name).stages:
        raise UsageError(
            f"recipe {recipe_name} has stages, which say how large the model is\n"
            "  choose one without"
        )
    source = source or str(directory)
    for override in overrides:
        if override.startswith(("model.", "data.tokenizer", "stages")):
            raise UsageError(
                f"--set {override}: model and tokenizer come from {directory}\n  leave it out"
            )
    tokenizer = load_tokenizer(directory)
    names_text = text_is_meant or any(
        override.startswith(("data.train", "data.sources")) for override in overrides
    )
    rows = read_hf_config(directory).vocab_size
    if tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens,"
            f" the embedding only {rows} rows: they do not belong together"
        )
    multiple = 64
    if tokenizer.vocab_size < rows:
        # Rows beyond the tokenizer's are padding to us; the matrix keeps its size, whatever that is
        # a multiple of.
        multiple = rows
        say(
            f"warning: {rows - tokenizer.vocab_size} of the embedding's {rows} rows are not tokens"
            " of the tokenizer; they are kept as padding and get no probability"
        )
    model = read_hf(directory, vocab_multiple=multiple)
    target = (run_path(name) / "tokenizer.json").absolute()
    shape_overrides = [*model_overrides(model.config), f"model.vocab_multiple={multiple}"]
    recipe = load_recipe(
        recipe_name, [*overrides, *shape_overrides, f"data.tokenizer={json.dumps(str(target))}"]
    )
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer_path = Path(scratch) / "tokenizer.json"
        tokenizer.save(tokenizer_path)
        return create_run(
            name,
            state_of(recipe, model, model.device),
            dump_recipe(recipe),
            _origin(source, names_text, recipe_name, tokenizer),
            tokenizer_path,
            events={
                "import": {"directory": Path(source).name, "parameters": model.parameter_count}
            },
        )


def _origin(
    source: str, names_text: bool, recipe_name: str, tokenizer: Tokenizer
) -> dict[str, object]:
    """Return where the run comes from. It has seen no data yet, so their hashes are null."""
    return {
        **software_origin(recipe_name),
        "imported": {
            "directory": Path(source).name,
            "source": source,
            "names_text": names_text,
        },
        "data": {
            "train_hash": None,
            "valid_hash": None,
            "tokenizer_hash": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "eot_id": tokenizer.eot_id,
        },
    }
