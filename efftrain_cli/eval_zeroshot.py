"""Score runs on zero-shot tasks, and write the scores into their folders
(`efftrain eval-zeroshot`)."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from efftrain_cli import __version__
from efftrain_cli.data.hub import hub_off, hub_unreachable
from efftrain_cli.foundation.console import (
    counted,
    human_seconds,
    listed,
    say,
    silence,
    table_lines,
)
from efftrain_cli.foundation.errors import DataError, EfftrainError, UsageError
from efftrain_cli.foundation.files import sha256_of
from efftrain_cli.foundation.records import utc_now
from efftrain_cli.run.lines import finite
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.zeroshot.results import SCHEMA_VERSION, Result, save_result
from efftrain_cli.zeroshot.tasks import AVERAGED, TaskSpec, find_specs, load_tasks, suite_mean

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

    from efftrain_cli.training.loading import TrainedModel
    from efftrain_cli.zeroshot.model import HarnessModel
    from efftrain_cli.zeroshot.score import TaskScore

LoadedTask = tuple[TaskSpec, "ConfigurableTask"]


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Tasks and settings of an evaluation."""

    tasks: tuple[str, ...] = ()
    """Names of suites and tasks; empty: every task whose file is in `data_dir`."""
    checkpoint: str | None = None
    """Step or name of a checkpoint; None: the newest valid one."""
    data_dir: Path | None = None
    limit: int | None = None
    """Items of each task, from the first. Such scores are kept apart from full ones."""
    context_length: int | None = None
    """Tokens; None: the longest that the model was trained on."""
    stride: int | None = None
    """Tokens predicted by each later window of a whole text; None: disjoint windows."""
    batch_tokens: int | None = None
    """Tokens per forward pass; None: 1024 on a CPU and 65,536 on CUDA."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type that the blocks compute in; auto: bf16 on CUDA. The head is fp32 always."""
    device: str = "auto"


def evaluate_runs(config: EvalConfig, runs: Sequence[str]) -> Iterator[tuple[str, list[Result]]]:
    """Evaluate runs one after the other; write each score, and yield each run with its entries.

    With torchrun each process calls it, and rank 0 writes.

    Raises:
        UsageError: there is no task, run or checkpoint of that name; nothing was scored.
        DataError: items are missing, and nothing was scored; or, after all runs have been scored,
            some tasks could not be.
    """
    specs = find_specs(config.tasks, config.data_dir)
    _require_harness()
    from efftrain_cli.training import dist

    problems: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="efftrain-eval-") as scratch,
        ExitStack() as stack,
        dist.joined(),
    ):
        if not dist.is_main():
            silence()
        asks_hub = any(spec.local_file(config.data_dir) is None for spec in specs)
        if not asks_hub or hub_unreachable():
            stack.enter_context(hub_off())
        with redirect_stdout(sys.stderr):  # the harness prints
            tasks = _load_all(specs, config.data_dir, Path(scratch))
        for run in runs:
            try:
                entries = list(_evaluate_run(run, tasks, config, problems))
            except EfftrainError as error:
                if dist.world_size() > 1 or len(runs) == 1:
                    raise
                problems.append(f"{run}: {error}")
                continue
            yield run, entries
    if problems:
        raise DataError("some tasks could not be scored:\n  " + "\n  ".join(problems))


def _require_harness() -> None:
    """Silence the harness's remarks, before its import.

    Raises:
        UsageError: it is not installed.
    """
    if find_spec("lm_eval") is None:
        raise UsageError(
            "eval-zeroshot needs lm_eval\n"
            "  in the folder of efftrain's source: `pip install '.[eval]'`"
        )
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def _load_all(specs: Sequence[TaskSpec], data_dir: Path | None, scratch: Path) -> list[LoadedTask]:
    """Load every task.

    Raises:
        UsageError: the harness has no task of that name.
        DataError: items are missing; all tasks are named.
    """
    tasks: list[LoadedTask] = []
    problems = []
    files = []
    for spec in specs:
        try:
            tasks += [(spec, task) for task in load_tasks(spec, data_dir, scratch)]
        except DataError as error:
            problems.append(str(error))
            if spec.file is not None:
                files.append(spec.file)
    if not problems:
        return tasks
    fix = "connect to the Hugging Face Hub"
    if files:
        fix += f", or give --data-dir, a folder with {', '.join(files)}"
    raise DataError("\n".join(problems) + f"\n  {fix}")


def _evaluate_run(
    run: str,
    tasks: Sequence[LoadedTask],
    config: EvalConfig,
    problems: list[str],
) -> Iterator[Result]:
    """Score a run on every task; add what fails to `problems`."""
    from efftrain_cli.training import dist
    from efftrain_cli.zeroshot.score import score_task

    trained, model = _load_model(run, config)
    for spec, task in tasks:
        started = time.monotonic()
        try:
            with redirect_stdout(sys.stderr):
                score = score_task(task, model, config.limit)
        except Exception as error:  # a definition may be anyone's code
            if dist.world_size() > 1:
                raise  # the other ranks wait for this one's answers
            problems.append(f"{run}: {task.task_name}: {type(error).__name__}: {error}")
            continue
        seconds = time.monotonic() - started
        entry = _entry(spec, task, score, trained, model, config)
        entry["seconds"] = seconds
        if dist.is_main():
            save_result(trained.run, entry, finite(score.items))
            say(f"{entry['task']}: {counted(entry['items'], 'item')} in {human_seconds(seconds)}")
        yield entry


def _load_model(run: str, config: EvalConfig) -> tuple[TrainedModel, HarnessModel]:
    """Load a run as the harness's model.

    Raises:
        UsageError: a context longer than the model's, or a stride longer than the context.
    """
    from efftrain_cli.training import dist
    from efftrain_cli.training.loading import load_trained_model
    from efftrain_cli.training.session import choose_device
    from efftrain_cli.zeroshot.model import HarnessModel

    device = choose_device(config.device)
    trained = load_trained_model(run, config.checkpoint, device)
    dist.check_alike({"efftrain": __version__, "checkpoint": trained.model_sha256})
    positions = trained.model.config.seq_len
    length = config.context_length
    if length is None:
        length = trained_length(trained)
        if length < positions and dist.is_main():
            say(
                f"warning: {run} was trained on sequences of at most {length}"
                f" of its {positions} positions; evaluating with {length}"
            )
    if not 2 <= length <= positions:
        raise UsageError(
            f"--context-length {length}: the model of run {run!r} has {positions} positions\n"
            f"  give 2 to {positions}"
        )
    if config.stride is not None and config.stride > length:
        raise UsageError(
            f"--stride {config.stride} is longer than the context\n"
            f"  give at most its {length} tokens"
        )
    on_cuda = device.type == "cuda"
    model = HarnessModel(
        model=trained.model,
        tokenizer=trained.tokenizer,
        context_length=length,
        stride=config.stride,
        batch_tokens=config.batch_tokens or (65_536 if on_cuda else 1_024),
        bf16=config.dtype == "bf16" or (config.dtype == "auto" and on_cuda),
    )
    return trained, model


def trained_length(trained: TrainedModel) -> int:
    """Return the longest sequence that the model was trained on, in tokens.

    Under a warmup that had not ended it is shorter than the model's positions: later embeddings are
    untrained.
    """
    positions = trained.model.config.seq_len
    if "length" not in trained.recipe.varies:
        return positions
    rows = latest_rows(trained.run, trained.progress.step)
    lengths = [row["seq_len"] for row in rows if row.get("seq_len")]
    return min(max(lengths, default=positions), positions)


def _entry(
    spec: TaskSpec,
    task: ConfigurableTask,
    score: TaskScore,
    trained: TrainedModel,
    model: HarnessModel,
    config: EvalConfig,
) -> Result:
    """Return the entry of zeroshot.json for one task."""
    file = spec.local_file(config.data_dir)
    shots = task.config.num_fewshot or 0
    protocol = f"lm-eval {task.task_name} v{task.VERSION} {shots}-shot"
    if file is not None:
        protocol += f" of {file.name}"
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        protocol += f" window {model.context_length} stride {model.stride or model.context_length}"
    if score.unscored:
        protocol += f" without {counted(len(score.unscored), 'item')}"
    metric = spec.metric or next(iter(score.metrics))
    scored = len({item["doc_id"] for item in score.items})
    limit = config.limit
    if scored + len(score.unscored) == score.total:
        limit = None  # it left nothing out
    entry: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "checkpoint_sha256": trained.model_sha256,
        "task": task.task_name,
        "protocol": protocol,
        "limit": limit,
        "checkpoint": trained.checkpoint.name,
        "step": trained.progress.step,
        "tokens": trained.progress.tokens,
        "metric": metric,
        **score.metrics[metric],
        "metrics": score.metrics,
        "chance": spec.chance,
        "items": scored,
        "items_total": score.total,
        "truncated": model.truncated,
        "unscored": score.unscored,
        "boundary_mismatches": model.boundary_mismatches,
        "context_length": model.context_length,
        "dtype": "bf16" if model.bf16 else "fp32",
        "source": "harness" if file is None else file.name,
        "data_sha256": None if file is None else sha256_of(file),
        "lm_eval": version("lm_eval"),
        "efftrain": __version__,
        "date": utc_now(),
    }
    return finite(entry)


def result_lines(run: str, entries: Sequence[Result], names: Sequence[str]) -> Iterator[str]:
    """Describe the entries of one run's evaluation.

    Args:
        names: suites and tasks as they were asked for.
    """
    first = entries[0]
    yield f"{run}, step {first['step']:,}, context {first['context_length']:,}, {first['dtype']}"
    rows = []
    for entry in entries:
        chance = "" if entry["chance"] is None else f"{entry['chance']:.2g}"
        score = (_number(entry["value"]), _number(entry["stderr"]), chance)
        items = f"{entry['items']:,}"
        if entry["items"] < entry["items_total"]:
            items += f"/{entry['items_total']:,}"
        rows.append((entry["task"], entry["metric"], *score, items))
    scores = {entry["task"]: entry["value"] for entry in entries}
    for suite in AVERAGED:
        mean = suite_mean(suite, scores)
        if suite in names and mean is not None:
            rows.append((f"mean of {suite}", "", _number(mean), "", "", ""))
    yield from table_lines(("task", "metric", "score", "± s.e.", "chance", "items"), rows)
    for entry in entries:
        if entry["unscored"]:
            why = "an answer has no tokens, or more than the context"
            numbers = listed(entry["unscored"])
            yield f"{entry['task']}: items {numbers} were not scored: {why}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if value <= 1 else f"{value:.4g}"
