"""`efftrain eval-zeroshot`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import run_names
from efftrain_cli.cli.options import (
    CheckpointOption,
    Device,
    Devices,
    Quiet,
    TableOrJson,
    share,
)
from efftrain_cli.foundation.console import make_console, print_labelled
from efftrain_cli.training.launch import process_rank


@app.command(
    "eval-zeroshot",
    rich_help_panel="Use a trained model",
    examples=(
        "efftrain eval-zeroshot small-seed1234",
        "efftrain eval-zeroshot small-seed1234 --tasks gpt2,piqa --limit 100",
        "efftrain eval-zeroshot small-seed1234 --tasks blimp,my_task.yaml",
    ),
)
def eval_zeroshot(
    runs: Annotated[
        list[str],
        Argument(
            help="Runs, by name, by the beginning of a name, or by recipe;"
            " or directories that `export` wrote. Each is scored in turn.",
            metavar="RUN",
            autocompletion=run_names,
        ),
    ],
    tasks: Annotated[
        list[str] | None,
        Option(
            help=(
                "Suites (offline, gpt2, slw-11, gpt3) and tasks, separated by commas; repeatable."
                " Default: offline, made from the run's own validation documents; with --data-dir,"
                " every task whose file is there. Any other task, group or YAML file"
                " of the installed harness is scored by the harness's default protocol."
            ),
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
            min=1, help="Tokens per window in wikitext_strided.", show_default="half the context"
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        Option(min=1, help="Tokens per forward pass.", show_default="4096; 65536 on CUDA"),
    ] = None,
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"],
        Option(help="fp32, bf16, or auto: bf16 on CUDA. Logits are always fp32."),
    ] = "auto",
    compile_: Annotated[
        bool, Option("--compile", help="Compile the blocks with torch.compile.")
    ] = False,
    references: Annotated[bool, Option("--references", help="Show published scores too.")] = False,
    device: Device = "auto",
    devices: Devices = 1,
    format_: TableOrJson = "table",
    quiet: Quiet = False,
) -> None:
    """Score a trained model on tasks it was not trained for; scores go to
    runs/RUN/zeroshot.json."""
    # Before PyTorch is imported, which takes seconds.
    from efftrain_cli.run.names import find_run
    from efftrain_cli.zeroshot.results import is_exported

    runs = [run if is_exported(run) else find_run(run).name for run in runs]
    share(device, devices)
    from efftrain_cli.eval_zeroshot import EvalConfig, evaluate_runs
    from efftrain_cli.zeroshot.local_data import tasks_in
    from efftrain_cli.zeroshot.report import result_lines

    names = [name.strip() for name in ",".join(tasks or ()).split(",") if name.strip()]
    if not names:
        names = ["offline"] if data_dir is None else tasks_in(data_dir)
    config = EvalConfig(
        tasks=tuple(names),
        checkpoint=checkpoint,
        data_dir=data_dir,
        limit=limit,
        context_length=context_length,
        stride=stride,
        batch_tokens=batch_tokens,
        dtype=dtype,
        compile=compile_,
        device=device,
    )
    console = make_console(result=True)
    results = []
    problems = []
    for run, entries, problem in evaluate_runs(config, runs):
        results += [{"run": run, **entry} for entry in entries]
        if problem is not None:
            problems.append(problem)
        if format_ == "table" and entries and process_rank() == 0:
            print_labelled(console, result_lines(run, entries, names, references), indent=0)
    if format_ == "json" and process_rank() == 0:
        print(json.dumps(results, indent=1))
    if problems:
        raise type(problems[0])("\n".join(map(str, problems)))
