"""`efftrain export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.options import CheckpointOption, RunArgument


@app.command(
    rich_help_panel="Use",
    examples=("efftrain export small-seed1234 --out my-model",),
)
def export(
    run: RunArgument,
    out: Annotated[
        Path | None,
        Option(help="Directory to write to; it must not hold any files.", show_default="RUN-hf"),
    ] = None,
    checkpoint: CheckpointOption = None,
) -> None:
    """Write a trained model, with its tokenizer, as transformers stores it."""
    from efftrain_cli.run.names import find_run

    run = find_run(run).name  # before PyTorch is imported, which takes seconds
    from efftrain_cli.export import export_run

    directory = out or Path(f"{run}-hf")
    trained = export_run(run, checkpoint, directory)
    print(f"{directory}: step {trained.progress.step} of run {run}")
    print(f'  AutoModelForCausalLM.from_pretrained("{directory}")')
    print(f'  AutoTokenizer.from_pretrained("{directory}")')
