"""`efftrain export`: a trained model in transformers' form, with a card that says what it is and how it came about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from efftrain_cli import __version__
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.model.hf import write_hf
from efftrain_cli.recipe.recipe import dump_recipe
from efftrain_cli.run.rows import read_counting, read_origin
from efftrain_cli.training.trained_model import TrainedModel, load_trained_model
from efftrain_cli.zeroshot.results import read_results


def export_run(run: str, checkpoint: str | None, directory: Path) -> TrainedModel:
    """Writes the model of a run's checkpoint, its tokenizer and a model card into a directory that does not exist yet.

    Raises:
        UsageError: there is no such run or checkpoint, or the directory holds files.
        CheckpointError: the run has no checkpoint, or none that is whole.
    """
    trained = load_trained_model(run, checkpoint, torch.device("cpu"))
    try:
        origin = read_origin(trained.run)
    except DataError:
        origin = {}  # the weights are whole, and that is what is asked for
    source = {
        "run": trained.run.name,
        "checkpoint": trained.checkpoint.name,
        "checkpoint_sha256": trained.model_sha256,
        "step": trained.progress.step,
        "tokens": trained.progress.tokens,
        "efftrain": __version__,
        "data": origin.get("data"),
    }
    tokenizer_json = (trained.run / "tokenizer.json").read_text(encoding="utf-8")
    card = model_card(trained, origin)
    write_hf(trained.model, tokenizer_json, trained.tokenizer.eot_id, directory, card=card, exported_from=source)
    return trained


def model_card(trained: TrainedModel, origin: dict[str, Any]) -> str:
    """README.md of an export: what the model is, its recipe, the hashes of its data, and the scores that were measured."""
    shape, progress = trained.model.config, trained.progress
    losses = [
        (row["step"], row["val_loss"])
        for row in read_counting(trained.run, progress.step)
        if isinstance(row.get("val_loss"), float)
    ]
    data = origin.get("data")
    data = data if isinstance(data, dict) else {}
    hashes = [(name, data.get(f"{name}_hash")) for name in ("train", "valid", "tokenizer")]
    scores = [entry for entry in read_results(trained.run) if entry["checkpoint_sha256"] == trained.model_sha256]
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [gpt2, efftrain]",
        "---",
        "",
        f"# {trained.run.name}",
        "",
        f"A GPT-2 of {shape.n_layer} layers x {shape.n_embd}, {shape.n_head} heads, context {shape.seq_len} tokens, vocabulary "
        f"{shape.vocab_size:,}: {trained.model.parameter_count:,} parameters. Step {progress.step:,}, after {progress.tokens:,} tokens of "
        f"training by efftrain {origin.get('efftrain') or __version__}, recipe `{origin.get('recipe') or 'unknown'}`, seed {trained.recipe.seed}.",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("DIRECTORY")',
        'tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")',
        "```",
        "",
        "## Measured",
        "",
    ]
    if losses:
        step, loss = losses[-1]
        lines += [f"Validation loss {loss:.4f} nats per token at step {step:,}, at full length, on the validation text below.", ""]
    if scores:
        lines += ["| task | metric | score | items | protocol |", "|---|---|---:|---:|---|"]
        for entry in scores:
            value = "infinite" if entry["value"] is None else f"{entry['value']:.4g}"
            error = "" if entry["stderr"] is None else f" ± {entry['stderr']:.2g}"
            items = f"{entry['items']:,} of {entry['items_total']:,}"
            lines.append(f"| {entry['task']} | {entry['metric']} | {value}{error} | {items} | {entry['protocol']} |")
        lines.append("")
    if not losses and not scores:
        lines += ["Nothing was measured of this checkpoint.", ""]
    lines += [
        "## Made from",
        "",
        "| | sha256 |",
        "|---|---|",
        *(f"| {name} | `{digest}` |" for name, digest in hashes if digest),
        f"| model.safetensors of the checkpoint | `{trained.model_sha256}` |",
        "",
        "```toml",
        dump_recipe(trained.recipe).strip(),
        "```",
        "",
        "Whoever publishes this model chooses its licence, which may depend on the text it was trained on.",
        "",
    ]
    return "\n".join(lines)

