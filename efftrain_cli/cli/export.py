"""`efftrain export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import run_names


class ExportFormat(StrEnum):
    """Forms of an exported model."""

    hf = "hf"


@app.command(
    rich_help_panel="Use a trained model",
    examples=(
        "efftrain export small-seed1234 --out my-model",
    ),
)
def export(
    run: Annotated[str, typer.Argument(help="A run, by name, by the beginning of its name, or by its recipe.", autocompletion=run_names)],
    format_: Annotated[
        ExportFormat, typer.Option("--format", help="hf: a directory that transformers' AutoModelForCausalLM loads.")
    ] = ExportFormat.hf,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write; it must not hold files yet.", show_default="RUN-hf")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint, by step or name.", show_default="the newest")
    ] = None,
) -> None:
    """Write a trained model, with its tokenizer, in a form that other programs load."""
    from efftrain_cli.run.names import find_run

    run = find_run(run)  # before PyTorch is imported, which takes seconds
    from efftrain_cli.export import export_run

    directory = out or Path(f"{run}-hf")
    trained = export_run(run, checkpoint, directory)
    print(f"{directory}: step {trained.progress.step} of run {run}")
    print(f'  AutoModelForCausalLM.from_pretrained("{directory}"), AutoTokenizer.from_pretrained("{directory}")')
