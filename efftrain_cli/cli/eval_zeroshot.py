"""`efftrain eval-zeroshot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import run_names
from efftrain_cli.cli.options import (
    CheckpointOption,
    Device,
    Devices,
    NoProgress,
    TableOrJson,
    share,
)
from efftrain_cli.foundation.console import Row, table_lines
from efftrain_cli.foundation.errors import EfftrainError, LostProcessError
from efftrain_cli.training.launch import is_one_of_several

if TYPE_CHECKING:
    from rich.console import Console


def suite_and_task_names(incomplete: str) -> list[tuple[str, str]]:
    """List suites, then tasks, for the shell."""
    from efftrain_cli.zeroshot.suites import SUITES, TASKS

    named = [(name, "suite: " + " ".join(tasks)) for name, tasks in SUITES.items()]
    named += [(name, task.about) for name, task in TASKS.items()]
    return [(name, about) for name, about in named if name.startswith(incomplete)]


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
            help="Runs, by name, by the beginning of a name, or by recipe; or directories that `export` wrote. Each is scored in turn.",
            metavar="RUN...",
            autocompletion=run_names,
        ),
    ],
    tasks: Annotated[
        list[str] | None,
        Option(
            help="Suites (offline, gpt2, slw-11, gpt3) and tasks, separated by commas; repeatable. Default: offline, made "
            "from the run's own validation documents; with --data-dir, every task whose file is there. Any other task, group or "
            "YAML file of the installed harness is scored by the harness's default protocol.",
            autocompletion=suite_and_task_names,
            show_default=False,
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    data_dir: Annotated[
        Path | None, Option(help="Folder of .jsonl files to use instead of the Hugging Face Hub.")
    ] = None,
    limit: Annotated[
        int | None,
        Option(help="Score only the first items of each task; never compared with full scores."),
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
        str, Option(help="fp32, bf16, or auto: bf16 on CUDA. Logits are always fp32.")
    ] = "auto",
    compile_: Annotated[
        bool, Option("--compile", help="Compile the blocks with torch.compile.")
    ] = False,
    references: Annotated[bool, Option("--references", help="Show published scores too.")] = False,
    device: Device = "auto",
    devices: Devices = 1,
    format_: TableOrJson = "table",
    quiet: NoProgress = False,
) -> None:
    """Score a trained model on tasks it was not trained for; scores go to runs/RUN/zeroshot.json."""
    import json
    from contextlib import ExitStack
    from dataclasses import replace

    from efftrain_cli.foundation.console import silence
    from efftrain_cli.run.names import find_run

    # Before PyTorch is imported, which takes seconds.
    runs = [run if (Path(run) / "config.json").is_file() else find_run(run) for run in runs]
    share(device, devices)
    from efftrain_cli.eval_zeroshot import EvalConfig, TaskError, evaluate_run
    from efftrain_cli.zeroshot.local_data import tasks_in

    names = [name.strip() for value in tasks or () for name in value.split(",") if name.strip()]
    if not names:
        names = ["offline"] if data_dir is None else tasks_in(data_dir)
    config = EvalConfig(
        run="",
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
    found: dict[str, list[dict[str, Any]]] = {}
    problems: list[EfftrainError] = []
    with ExitStack() as stack:
        ranks = None
        if is_one_of_several():
            from efftrain_cli.training.joining import joined

            ranks = stack.enter_context(joined())
        speaks = ranks is None or ranks.rank == 0
        if not speaks:
            silence()
        for run in runs:
            entries = found.setdefault(run, [])
            try:
                for entry in evaluate_run(replace(config, run=run), ranks):
                    entries.append(entry)
                    if format_ == "table" and not quiet and speaks:
                        _say(entry)
            except LostProcessError:
                raise
            except EfftrainError as error:  # what has been scored is shown, and the other runs are scored, all the same
                # Processes that have not failed alike would not meet in the next run.
                if (not entries and len(runs) == 1) or (
                    ranks is not None and not isinstance(error, TaskError)
                ):
                    raise
                problems.append(error if len(runs) == 1 else type(error)(f"{run}: {error}"))
            if format_ == "table" and entries and speaks:
                _print_run(run, entries, names, references)
    if format_ == "json" and speaks:
        print(
            json.dumps(
                [{"run": run, **entry} for run, entries in found.items() for entry in entries],
                indent=1,
            )
        )
    if problems:
        raise type(problems[0])("\n".join(map(str, problems)))


def _print_run(run: str, entries: list[dict[str, Any]], names: list[str], references: bool) -> None:
    from efftrain_cli.foundation.console import make_console
    from efftrain_cli.run.directory import run_path

    console = make_console(result=True)
    _print_scores(console, run, entries)
    _print_means(console, names, entries)
    if references:
        _print_references(console, entries)
    elif any(entry["lm_eval"] and entry["limit"] is None for entry in entries):
        console.print("\n--references shows published scores, each with its protocol")
    folder = Path(run) if (Path(run) / "config.json").is_file() else run_path(run)
    console.print(f"written to {folder / 'zeroshot.json'}", markup=False)


def _say(entry: dict[str, Any]) -> None:
    import sys

    print(f"{entry['task']}: {entry['items']:,} items in {entry['seconds']:.1f} s", file=sys.stderr)


def _number(metric: str, value: float | None) -> str:
    if value is None:
        return "infinite"
    return (
        f"{value:.4g}"
        if "perplexity" in metric or metric.startswith("bits")
        else f"{100 * value:.2f} %"
    )


def _print_table(console: Console, header: Row, rows: Sequence[Row]) -> None:
    """Print plain lines: in a narrow terminal a table of Rich's would cut numbers short."""
    console.print("\n".join(table_lines(header, rows)), markup=False)


def _print_scores(console: Console, run: str, entries: list[dict[str, Any]]) -> None:
    first = entries[0]
    title = (
        f"{run}, step {first['step']}, context {first['context_length']} tokens, {first['dtype']}"
    )
    limit = next((entry["limit"] for entry in entries if entry["limit"] is not None), None)
    if limit is not None:
        title += (
            f"\nfirst {limit} items only where a task has more: not comparable with full scores"
        )
    rows = []
    for entry in entries:
        for metric, found in sorted(
            entry["metrics"].items(), key=lambda item: item[0] != entry["metric"]
        ):
            own = metric == entry["metric"]
            guess = f"{100 * entry['chance']:.0f} %" if own and entry["chance"] else ""
            error = (
                ""
                if found["stderr"] is None
                else _number(metric, found["stderr"]).removesuffix(" %")
            )
            some = "" if entry["items"] == entry["items_total"] else f"/{entry['items_total']}"
            about = (entry["task"], f"{entry['items']}{some}", str(entry["truncated"] or ""))
            task, items, cut = about if own else ("", "", "")
            rows.append((task, metric, _number(metric, found["value"]), error, guess, items, cut))
    console.print(title, markup=False)
    _print_table(console, ("task", "metric", "score", "± s.e.", "chance", "items", "cut"), rows)
    if any(entry["truncated"] for entry in entries):
        console.print(
            "cut: requests whose context was longer than the model's and lost its beginning"
        )
    for entry in entries:
        if left_out := entry["left_out"]:
            shown = ", ".join(left_out[:5]) + ", ..." * (len(left_out) > 5)
            why = "left out, as an answer alone is longer than the context"
            console.print(f"{entry['task']}: {len(left_out)} {why}: {shown}", markup=False)
    console.print()
    for entry in entries:
        console.print(f"{entry['task']:<18}  {entry['protocol']}", markup=False)


def _print_means(console: Console, wanted: list[str], entries: list[dict[str, Any]]) -> None:
    from efftrain_cli.zeroshot.suites import AVERAGED, suite_mean

    scores = {entry["task"]: entry["value"] for entry in entries if entry["value"] is not None}
    for suite in AVERAGED:
        if suite in wanted:
            try:
                limited = any(entry["limit"] is not None for entry in entries)
                note = " of first items only: not comparable with full scores" if limited else ""
                console.print(
                    f"{suite}: unweighted mean {100 * suite_mean(suite, scores):.2f} %{note}"
                )
            except ValueError as error:
                console.print(str(error), markup=False)


def _print_references(console: Console, entries: list[dict[str, Any]]) -> None:
    from efftrain_cli.zeroshot.references import read_references

    entries = [entry for entry in entries if entry["limit"] is None]
    if not entries:
        console.print(
            "\nno published scores: they are of whole tasks, and these are of the first items only"
        )
        return
    rows: list[Row] = []
    sources: dict[str, int] = {}
    for entry in entries:
        for reference in read_references():
            if reference.task != entry["task"]:
                continue
            number = sources.setdefault(
                f"{reference.protocol}: {reference.source}", len(sources) + 1
            )
            score = _number(reference.metric, reference.value)
            rows.append((reference.model, reference.task, reference.metric, score, f"({number})"))
    if not sources:
        return
    console.print(
        "\npublished scores; none was measured here, and they compare only where protocols agree"
    )
    _print_table(console, ("model", "task", "metric", "score", "measured by"), rows)
    for source, number in sources.items():
        console.print(f"({number}) {source}", markup=False)
