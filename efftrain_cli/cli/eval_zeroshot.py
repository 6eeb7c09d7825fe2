"""`efftrain eval-zeroshot`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import run_names
from efftrain_cli.cli.options import CheckpointOption, Device, Quiet, TableOrJson
from efftrain_cli.training.launch import process_rank


@app.command(
    "eval-zeroshot",
    rich_help_panel="Use",
    examples=(
        "efftrain eval-zeroshot small-seed1234 --tasks gpt2",
        "efftrain eval-zeroshot small-seed1234 --data-dir sets --limit 100",
        "efftrain eval-zeroshot small-seed1234 --tasks blimp,my_task.yaml",
    ),
)
def eval_zeroshot(
    runs: Annotated[
        list[str],
        Argument(
            help="Runs, by name, by the beginning of a name, or by recipe; each scored in turn.",
            metavar="RUN",
            autocompletion=run_names,
        ),
    ],
    tasks: Annotated[
        list[str] | None,
        Option(
            help="Suites (gpt2, slw-11, gpt3), or tasks, groups and YAML files of lm_eval,"
            " separated by commas; repeatable. Default: every task whose file is in --data-dir.",
            show_default=False,
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    data_dir: Annotated[
        Path | None, Option(help="Folder of .jsonl files to use instead of the Hugging Face Hub.")
    ] = None,
    limit: Annotated[
        int | None,
        Option(
            min=1,
            help="Score only the first items of each task; never compared with full scores.",
        ),
    ] = None,
    context_length: Annotated[
        int | None,
        Option(help="Most tokens that the model sees at once.", show_default="as trained"),
    ] = None,
    stride: Annotated[
        int | None,
        Option(
            min=1,
            help="Tokens predicted per window of a whole text (WikiText).",
            show_default="the context length",
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        Option(min=1, help="Tokens per forward pass.", show_default="1024; 65536 on CUDA"),
    ] = None,
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"],
        Option(help="fp32, bf16, or auto: bf16 on CUDA. Logits are always fp32."),
    ] = "auto",
    device: Device = "auto",
    format_: TableOrJson = "table",
    quiet: Quiet = False,
) -> None:
    """Score runs on tasks they were not trained for; scores go to runs/RUN/zeroshot.json."""
    from efftrain_cli.eval_zeroshot import EvalConfig, evaluate_runs, result_lines
    from efftrain_cli.foundation.console import print_folded
    from efftrain_cli.run.names import find_run

    names = [name.strip() for name in ",".join(tasks or ()).split(",") if name.strip()]
    config = EvalConfig(
        tasks=tuple(names),
        checkpoint=checkpoint,
        data_dir=data_dir,
        limit=limit,
        context_length=context_length,
        stride=stride,
        batch_tokens=batch_tokens,
        dtype=dtype,
        device=device,
    )
    named = [find_run(run).name for run in runs]
    results = []
    try:
        for run, entries in evaluate_runs(config, named):
            results += [{"run": run, **entry} for entry in entries]
            if format_ == "table" and entries and process_rank() == 0:
                print_folded("\n".join(result_lines(run, entries, names)), indent=0)
    finally:
        if format_ == "json" and results and process_rank() == 0:
            print(json.dumps(results, indent=1))
