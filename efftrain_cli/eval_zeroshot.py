"""Score a run's checkpoint on zero-shot tasks, and write the scores into the run's folder
(`efftrain eval-zeroshot`).

Cheap checks come first: torch and lm_eval are imported after names, data and run are checked.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from efftrain_cli import __version__
from efftrain_cli.data.hub import hub_off
from efftrain_cli.foundation.console import counted, human_seconds, say, silence, silent
from efftrain_cli.foundation.errors import DataError, EfftrainError, LostProcessError, UsageError
from efftrain_cli.foundation.files import sha256_of
from efftrain_cli.foundation.records import utc_now
from efftrain_cli.run.directory import existing_run
from efftrain_cli.run.lines import finite
from efftrain_cli.run.origin import imported_without_text, read_origin
from efftrain_cli.training.launch import is_one_of_several
from efftrain_cli.zeroshot.harness import (
    evaluate_foreign,
    evaluate_task,
    foreign_tasks,
    harness_version,
    load_task,
    local_files,
    require_data,
    require_extra,
)
from efftrain_cli.zeroshot.results import SCHEMA_VERSION, Result, is_exported, save_result
from efftrain_cli.zeroshot.suites import SUITES, TASKS, Task, task_names

if TYPE_CHECKING:
    from efftrain_cli.training.ranks import Ranks
    from efftrain_cli.training.trained_model import TrainedModel
    from efftrain_cli.zeroshot.language_model import LanguageModel
    from efftrain_cli.zeroshot.score import Evaluator
    from efftrain_cli.zeroshot.task_score import TaskScore


class TaskError(DataError):
    """Some tasks could not be scored; on several devices, the same ones on each."""


OFFLINE = frozenset(SUITES["offline"])
"""Tasks made from the run's validation documents."""
OFFLINE_TOKENS = 100_000
"""First validation tokens, which the offline suite is made from."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Tasks and settings of an evaluation."""

    tasks: tuple[str, ...] = ("offline",)
    """Names of tasks and suites."""
    checkpoint: str | None = None
    """Step or name of a checkpoint; None is the newest valid one."""
    data_dir: Path | None = None
    limit: int | None = None
    """Items of each task, from the first. Such scores are kept apart from full ones."""
    context_length: int | None = None
    """Tokens; None is the longest that the model was trained on."""
    stride: int | None = None
    """Tokens predicted per window in wikitext_strided; None is half the context length."""
    batch_tokens: int | None = None
    """Tokens per forward pass; None is 4096 on a CPU and 65,536 on CUDA."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type that the blocks compute in; auto: bf16 on CUDA, else fp32. The head is fp32 always."""
    compile: bool = False
    device: str = "auto"


def evaluate_runs(
    config: EvalConfig, runs: Sequence[str]
) -> Iterator[tuple[str, list[Result], EfftrainError | None]]:
    """Evaluate several runs, one after the other, on all processes that were started for it.

    Yield each run with its entries, and the error that it ended with: the other runs are scored all
    the same.

    Raises:
        EfftrainError: as `evaluate_run`, if nothing was scored, or if processes may have failed
            differently.
    """
    with ExitStack() as stack:
        ranks = None
        if is_one_of_several():
            from efftrain_cli.training.joining import joined

            ranks = stack.enter_context(joined())
            if ranks.rank:
                silence()
        for run in runs:
            entries = []
            problem = None
            try:
                for entry in evaluate_run(run, config, ranks):
                    entries.append(entry)
                    if not silent():
                        say(
                            f"{entry['task']}: {counted(entry['items'], 'item')}"
                            f" in {human_seconds(entry['seconds'])}"
                        )
            except LostProcessError:
                raise
            except EfftrainError as error:
                # Ranks that failed differently would hang in the next run's collectives; a
                # TaskError is alike on all.
                if ranks is not None and not isinstance(error, TaskError):
                    raise
                if len(runs) == 1 and not entries:
                    raise
                problem = error if len(runs) == 1 else type(error)(f"{run}: {error}")
            yield run, entries, problem


def evaluate_run(run: str, config: EvalConfig, ranks: Ranks | None = None) -> Iterator[Result]:
    """Evaluate task by task; write each score to the run's folder and yield its zeroshot.json row.

    Of several ranks all call it; rank 0 alone writes.

    Raises:
        UsageError: an unknown task, run or checkpoint; the harness is not installed; a context
            longer than the model's.
        DataError: evaluation sets are missing or damaged.
        TaskError: after all tasks have been tried, some could not be scored.
        CheckpointError: the run has no checkpoint, or no valid one.
    """
    names, asks_hub = _check_tasks(run, config)

    from efftrain_cli.training.ranks import ALONE
    from efftrain_cli.zeroshot import own_tasks

    ranks = ranks or ALONE
    trained = _load_model(run, config, ranks)
    evaluator = build_evaluator(trained, config, ranks)
    stride = config.stride or max(1, evaluator.context_length // 2)
    if stride > evaluator.context_length:
        raise UsageError(
            f"--stride {stride} is longer than the context\n"
            f"  give at most its {evaluator.context_length} tokens"
        )
    documents = []
    if not OFFLINE.isdisjoint(names):
        documents = validation_documents(trained)
    language_model: LanguageModel | None = None

    failed = []
    with (
        tempfile.TemporaryDirectory(prefix="efftrain-eval-") as scratch,
        Path(os.devnull).open("w") as nowhere,
        ExitStack() as stack,
    ):
        if not OFFLINE.issuperset(names):
            from efftrain_cli.zeroshot.language_model import LanguageModel

            language_model = LanguageModel(evaluator, trained.tokenizer)
            if not asks_hub:
                stack.enter_context(hub_off())
        for name in names:
            started = time.monotonic()
            try:
                # The harness prints.
                with (
                    redirect_stdout(sys.stderr if ranks.rank == 0 else nowhere),
                    evaluator.distributed.task(name),
                ):
                    if name in OFFLINE:
                        measure = own_tasks.OFFLINE[name]
                        result = measure(evaluator, trained.tokenizer, documents, config.limit)
                        scored = [(TASKS[name], result)]
                    else:
                        assert language_model is not None
                        scored = _score_by_harness(
                            name, language_model, config, stride, Path(scratch)
                        )
            except LostProcessError:
                raise
            except Exception as error:
                # A task's items or definition may be anyone's: the other tasks are scored all the
                # same.
                what = str(error)
                if not isinstance(error, EfftrainError):
                    what = f"{type(error).__name__}: {error}"
                failed.append(f"{name}: {' '.join(what.split())[:500]}")
                continue
            seconds = (time.monotonic() - started) / len(scored)
            for task, score in scored:
                entry = entry_of(task, score, trained, evaluator, config, seconds)
                if ranks.rank == 0:
                    save_result(trained.run, entry, finite(score.items))
                yield entry
    if failed:
        raise TaskError(
            f"{len(failed)} of {len(names)} tasks could not be scored:\n  " + "\n  ".join(failed)
        )


def _check_tasks(name: str, config: EvalConfig) -> tuple[list[str], bool]:
    """Return the names of all tasks, the harness's own last, and whether the Hub has to be asked
    for items.

    Check that the data of all tasks can be had.
    """
    foreign = foreign_tasks(config.tasks)
    names = task_names([task for task in config.tasks if task not in foreign])
    run = None if is_exported(name) else existing_run(name)
    harness_names = [task for task in names if task not in OFFLINE]
    if len(harness_names) < len(names):
        if run is None:
            raise UsageError(
                f"{name} is an exported directory, and offline tasks are made from a run's"
                " validation documents\n  name others with --tasks (`--tasks gpt2`, or --data-dir)"
            )
        if imported_without_text(run):
            raise UsageError(
                f"run {name!r} was imported without text,"
                " so it has no validation documents to make offline tasks from\n"
                "  name other tasks with --tasks (`--tasks gpt2`, or --data-dir),"
                " or train the run on a text first"
            )
    asks_hub = False
    if harness_names or foreign:
        require_extra()
        asks_hub = require_data(harness_names, config.data_dir, and_others=bool(foreign))
        _quieten()
    return [*names, *foreign], asks_hub


def _load_model(run: str, config: EvalConfig, ranks: Ranks) -> TrainedModel:
    """Load the model to evaluate; check that it is the same on all ranks."""
    import torch

    from efftrain_cli.training.session import choose_device
    from efftrain_cli.training.trained_model import load_exported, load_trained_model

    try:
        device = choose_device(config.device, ranks)
        if is_exported(run):
            trained = load_exported(Path(run), device)
        else:
            trained = load_trained_model(run, config.checkpoint, device)
    except EfftrainError as error:
        # Only rank 0 prints. Loading may fail on another rank alone, so all ranks compare how it
        # ended.
        ranks.check_alike({"loading": str(error)})
        raise
    # The same exchange as in the handler above: a rank that failed waits in it.
    ranks.check_alike({"loading": "done"})
    ranks.check_alike(
        {
            "efftrain": __version__,
            "torch": torch.__version__,
            "device": trained.model.device.type,
            "checkpoint": f"{trained.checkpoint.name} {trained.model_sha256}",
            "tokenizer": trained.tokenizer.sha256,
        }
    )
    return trained


def build_evaluator(trained: TrainedModel, config: EvalConfig, ranks: Ranks) -> Evaluator:
    """Build the evaluator of a trained model.

    Raises:
        UsageError: a setting is impossible.
    """
    import torch

    from efftrain_cli.zeroshot.distributed import DistributedEval
    from efftrain_cli.zeroshot.score import Evaluator

    model = trained.model
    on_cuda = model.device.type == "cuda"
    positions = model.config.seq_len
    length = config.context_length
    if length is None:
        length = trained_length(trained)
    if not 2 <= length <= positions:
        raise UsageError(
            f"--context-length {length}: the model"
            f" of run {trained.run.name!r} has {positions} positions\n  give 2 to {positions}"
        )
    if length < positions and config.context_length is None and ranks.rank == 0:
        say(
            f"warning: up to step {trained.progress.step} this run"
            f" has trained on sequences of at most {length} of its {positions} positions;"
            f" evaluating with {length}, because the others' embeddings are untrained"
        )
    return Evaluator(
        model=model,
        context_length=length,
        batch_tokens=config.batch_tokens or (65_536 if on_cuda else 4_096),
        bf16=config.dtype == "bf16" or (config.dtype == "auto" and on_cuda),
        compiled_hidden=torch.compile(model.hidden, dynamic=True) if config.compile else None,
        distributed=DistributedEval(ranks),
    )


def trained_length(trained: TrainedModel) -> int:
    """Return the longest sequence that the model was trained on, in tokens.

    Under a warmup that had not ended it is shorter than the model's positions: later embeddings are
    untrained.
    """
    positions = trained.model.config.seq_len
    if "length" not in trained.recipe.varies or not (trained.run / "metrics.jsonl").exists():
        return positions
    import numpy as np

    from efftrain_cli.run.metrics import read_metrics

    columns = read_metrics(trained.run, ("step", "seq_len")).columns
    longest = int(
        np.nanmax(columns["seq_len"][columns["step"] <= trained.progress.step], initial=0)
    )
    return min(longest, positions) or positions


def validation_documents(trained: TrainedModel) -> list[str]:
    """Return the run's own validation documents, up to `OFFLINE_TOKENS` tokens of text.

    Raises:
        DataError: the data is missing, or gives another tokenizer or validation text than when the
            run was trained.
    """
    import numpy as np

    from efftrain_cli.data.prepare import limits_of, prepare

    corpus = prepare(trained.recipe.data, limits=limits_of(trained.recipe))
    recorded = read_origin(trained.run).get("data") or {}
    other = ""
    if corpus.tokenizer_sha256 != trained.tokenizer.sha256:
        other = "tokenizer"
    elif recorded.get("valid_hash") not in (None, corpus.valid.sha256):
        other = "validation text"
    if other:
        raise DataError(
            f"the data of run {trained.run.name!r} now gives another {other} than the run has;"
            " its validation documents are not those it was trained beside\n"
            "  restore the text, or name tasks with --tasks and --data-dir instead"
        )
    tokens = corpus.valid.read([0], min(OFFLINE_TOKENS, corpus.valid.tokens))[0]
    parts = np.split(tokens, np.flatnonzero(tokens == corpus.eot_id))
    documents = [part[part != corpus.eot_id].tolist() for part in parts]
    texts = [trained.tokenizer.decode(ids) for ids in documents if ids]
    if not texts:
        raise DataError(
            f"run {trained.run.name!r} has no validation documents to make the offline suite from"
        )
    return texts


def entry_of(
    task: Task,
    score: TaskScore,
    trained: TrainedModel,
    evaluator: Evaluator,
    config: EvalConfig,
    seconds: float,
) -> Result:
    """Return the entry of zeroshot.json for one task."""
    import torch

    metrics = {}
    for name in task.metrics:
        stderr = score.stderr.get(name)
        metrics[name] = finite({"value": score.values[name], "stderr": stderr})
    device = evaluator.device
    source = ", ".join(path.name for path in score.files) or "hub"
    if task.name in OFFLINE:
        source = "run"
    data_sha256 = None
    if len(score.files) == 1 and score.files[0].is_file():
        data_sha256 = sha256_of(score.files[0])
    return {
        "schema_version": SCHEMA_VERSION,
        "checkpoint_sha256": trained.model_sha256,
        "task": task.name,
        "protocol": score.protocol,
        # A limit that leaves nothing out is none: the score is of the whole task.
        "limit": None if score.scored + len(score.left_out) == score.total else config.limit,
        "checkpoint": trained.checkpoint.name,
        "step": trained.progress.step,
        "tokens": trained.progress.tokens,
        "metric": task.metric,
        **metrics[task.metric],
        "metrics": metrics,
        "chance": task.chance,
        "items": score.scored,
        "items_total": score.total,
        "requests": score.requests,
        "truncated": score.truncated,
        "left_out": list(score.left_out),
        "boundary_mismatches": score.boundary_mismatches,
        "context_length": evaluator.context_length,
        "dtype": "bf16" if evaluator.bf16 else "fp32",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "source": source,
        "data_sha256": data_sha256,
        "tokenizer_sha256": trained.tokenizer.sha256,
        "lm_eval": None if task.name in OFFLINE else harness_version(),
        "torch": torch.__version__,
        "efftrain": __version__,
        "date": utc_now(),
        "seconds": round(seconds, 3),
    }


def _score_by_harness(
    name: str, language_model: LanguageModel, config: EvalConfig, stride: int, scratch: Path
) -> list[tuple[Task, TaskScore]]:
    """Score a task whose items the harness gives; a name of its own may stand for several tasks."""
    from efftrain_cli.zeroshot.own_tasks import lambada_last_token, wikitext_strided

    if name not in TASKS:
        return evaluate_foreign(name, language_model, config.limit, scratch)
    task = TASKS[name]
    if task.items_of is None:
        score = evaluate_task(task, language_model, config.data_dir, config.limit, scratch)
        return [(task, score)]
    source = load_task(TASKS[task.items_of], config.data_dir, scratch)
    evaluator = language_model.evaluator
    tokenizer = language_model.text
    if name == "lambada_last_token":
        texts = [document["text"] for document in source.eval_docs]
        score = lambada_last_token(evaluator, tokenizer, texts, config.limit)
    else:
        pages = [(page["page"], source.doc_to_target(page)) for page in source.eval_docs]
        score = wikitext_strided(evaluator, tokenizer, pages, config.limit, stride)
    return [(task, replace(score, files=local_files(source)))]


def _quieten() -> None:
    """Silence the harness's own bars and remarks; to be called before its import."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
