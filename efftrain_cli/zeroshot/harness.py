"""Run tasks as lm-evaluation-harness defines them, with items from the Hub or from local files.

A local file replaces the dataset of the harness's own definition, which is included unchanged;
`Task.local` says what is read differently because the file's fields are. Built-in definitions are
loaded by path: the harness's own search for names takes 15 to 20 s.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efftrain_cli.data.hub import hub_unreachable
from efftrain_cli.foundation.console import counted, say
from efftrain_cli.foundation.errors import DataError, UsageError
from efftrain_cli.zeroshot import squad_metrics
from efftrain_cli.zeroshot.local_data import check_items, example, local_file
from efftrain_cli.zeroshot.suites import SUITES, TASKS, Task
from efftrain_cli.zeroshot.task_score import (
    TaskScore,
    mean_and_error,
    perplexity_and_error,
    without,
)

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

    from efftrain_cli.zeroshot.language_model import LanguageModel


def require_extra() -> None:
    """Check that the harness is installed, without importing it.

    Raises:
        UsageError: it is not; the message says how to install it.
    """
    missing = [name for name in ("lm_eval", "transformers") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"zero-shot tasks need {' and '.join(missing)}; `--tasks offline` needs neither\n"
            "  in the folder of efftrain's source: `pip install '.[eval]'`"
        )


def require_data(tasks: Iterable[str], data_dir: Path | None, *, and_others: bool = False) -> bool:
    """Check that every task's items are available: in a local file, on the Hub, or in its cache.

    Import nothing slow; ask the Hub once, for a second at most. Local files are checked to the last
    line.

    Args:
        and_others: tasks of the harness are asked for too, whose data is unknown here.

    Returns:
        Whether the Hub has to be asked for items.

    Raises:
        DataError: sets are missing, all of which are named, or a local file is damaged.
    """
    if data_dir is not None and not data_dir.is_dir():
        raise DataError(f"--data-dir {data_dir}: no such folder")
    wanted = list(dict.fromkeys(TASKS[name].items_of or name for name in tasks))
    remote = []
    for name in wanted:
        path = local_file(name, data_dir)
        if path is None:
            remote.append(TASKS[name])
        else:
            check_items(path, TASKS[name].form)
    if not remote and not and_others:
        return False
    reason = hub_unreachable()
    if not reason:
        return True
    missing = [task for task in remote if not _in_hub_cache(str(task.hub))]
    if missing:
        where = "there is no --data-dir"
        if data_dir is not None:
            where = f"their files are not in {data_dir}"
        lines = [
            f"  {task.name}: {task.hub} of the Hub, or {task.file} in --data-dir"
            for task in missing
        ]
        raise DataError(
            f"{counted(len(missing), 'evaluation set')} missing: {where},"
            f" and the Hugging Face Hub cannot be asked: {reason}.\n"
            + "\n".join(lines)
            + "\nConnect, or give --data-dir, a folder of files with a JSON object a line"
            f" (one of {missing[0].file} looks like {example(missing[0].form)}),"
            " or use `--tasks offline`, which needs no data"
        )
    return False


def _in_hub_cache(hub: str) -> bool:
    """Return whether `datasets` has this dataset in its own cache, by the name of its folder."""
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets")
    return (cache / hub.replace("/", "___")).is_dir()


def load_task(task: Task, data_dir: Path | None, scratch: Path) -> ConfigurableTask:
    """Load the harness's task object with its items, zero-shot.

    Args:
        scratch: a temporary folder, for the definition that names the local file and for the
            library's copy of it.

    Raises:
        UsageError: the installed harness lacks the task.
        DataError: the Hub does not give the items.
    """
    import lm_eval.tasks

    assert task.definition is not None
    definition = Path(str(lm_eval.tasks.__file__)).parent / task.definition
    if not definition.is_file():
        raise UsageError(
            f"task {task.name}: lm_eval {harness_version()} has no {task.definition};"
            " efftrain is tested with lm_eval 0.4.13"
        )
    if task.name == "record":
        squad_metrics.stand_in()
    path = local_file(task.name, data_dir)
    spec = definition
    if path is not None:
        settings = {
            "include": str(definition.resolve()),
            "task": task.name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {"test": str(path.absolute())},
                "cache_dir": str(scratch / "datasets"),
            },
            "training_split": None,
            "validation_split": None,
            "fewshot_split": None,
            "test_split": "test",
        }
        if task.local:
            settings |= {"process_docs": None, **task.local}
        spec = scratch / f"{task.name}.yaml"
        spec.write_text(json.dumps(settings, indent=1))  # JSON is YAML
    try:
        loaded = lm_eval.tasks.TaskManager(include_defaults=False).load([str(spec)])["tasks"]
    except Exception as error:  # the Hub's libraries raise a dozen classes
        if path is not None:
            raise
        raise DataError(
            f"task {task.name}: {task.hub} cannot be loaded from the Hugging Face Hub"
            f" ({type(error).__name__}: {error}); give --data-dir with {task.file}"
        ) from error
    harness_task = loaded[task.name]
    harness_task.set_config("num_fewshot", 0)
    harness_task.set_fewshot_seed(1234)
    return harness_task


def evaluate_task(
    task: Task,
    language_model: LanguageModel,
    data_dir: Path | None,
    limit: int | None,
    scratch: Path,
) -> TaskScore:
    """Score one of the harness's tasks by the harness's own evaluator."""
    harness_task = load_task(task, data_dir, scratch)
    protocol = f"lm-eval {task.name} v{harness_task.VERSION}"
    if local_file(task.name, data_dir) is not None and not task.same_as_hub:
        protocol += " local"
    if task.name == "wikitext":  # the only one whose score depends on the window
        protocol += f" window {language_model.max_length}"
    return _run(task.name, task.metrics, harness_task, language_model, limit, protocol)


def _run(
    name: str,
    metrics: Sequence[str],
    harness_task: ConfigurableTask,
    language_model: LanguageModel,
    limit: int | None,
    protocol: str,
) -> TaskScore:
    """Score a task; without `metrics`, by every number that the harness gives."""
    results, left_out = _evaluate_fitting(name, harness_task, language_model, limit)
    values = {}
    for key, value in results["results"][name].items():
        if isinstance(value, (int, float)):
            values[key.split(",")[0]] = float(value)
    if not metrics:
        metrics = [
            metric for metric in values if metric != "sample_len" and not metric.endswith("_stderr")
        ]
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    stderr = {}
    for metric in metrics:
        shares = [sample.get(metric) for sample in samples]
        stderr[metric] = _standard_error(name, metric, shares, values[metric])
    kept_keys = ("doc_id", "doc_hash", *metrics)
    return TaskScore(
        values={metric: values[metric] for metric in metrics},
        stderr=stderr,
        items=[{key: sample.get(key) for key in kept_keys} for sample in samples],
        scored=len(samples),
        total=len(harness_task.eval_docs),
        protocol=protocol + without(len(left_out), language_model.max_length),
        requests=language_model.requests,
        truncated=language_model.truncated,
        boundary_mismatches=language_model.boundary_mismatches,
        left_out=tuple(f"item {number}" for number in sorted(left_out)),
        files=local_files(harness_task),
    )


def local_files(harness_task: ConfigurableTask) -> tuple[Path, ...]:
    """Return the local files and folders that a task's definition names as its data."""
    config = harness_task.config
    named = (config.dataset_kwargs or {}).get("data_files") or config.dataset_path or []
    groups = list(named.values()) if isinstance(named, dict) else [named]
    names: list[str] = []
    for group in groups:
        names += [group] if isinstance(group, str) else group
    return tuple(path for path in map(Path, names) if path.exists())


def _evaluate_fitting(
    name: str, harness_task: ConfigurableTask, language_model: LanguageModel, limit: int | None
) -> tuple[dict[str, Any], set[int]]:
    """Return the harness's results, and the items left out: those with an answer too long for the
    context.

    Raises:
        DataError: no item fits.
    """
    import lm_eval

    from efftrain_cli.zeroshot.language_model import DoesNotFitError

    left_out: set[int] = set()
    while True:
        language_model.begin(name)
        numbers = range(len(harness_task.eval_docs))[:limit]
        kept = [number for number in numbers if number not in left_out]
        if not kept:
            raise DataError(
                f"none of {len(left_out)} items"
                f" fits a context of {language_model.max_length} tokens"
            )
        try:
            # Its bootstrap takes most of a minute for one standard error that has a closed form.
            results = lm_eval.evaluate(
                lm=language_model,
                task_dict={"tasks": {name: harness_task}},
                limit=None if left_out else limit,
                samples={name: kept} if left_out else None,
                bootstrap_iters=0,
                log_samples=True,
            )
        except DoesNotFitError as error:  # before anything was scored
            left_out |= error.items
        else:
            return results, left_out


def _standard_error(task: str, metric: str, shares: list[Any], value: float) -> float | None:
    """Return the standard error of a metric from the items' shares in it; None if there is no
    closed form."""
    if metric == "perplexity":
        return perplexity_and_error(shares)[1]
    # A ratio of sums over documents, or another sum: the harness has no error either.
    if task == "wikitext" or not all(isinstance(share, (int, float)) for share in shares):
        return None
    mean, spread = mean_and_error([float(share) for share in shares])
    return spread if math.isclose(mean, value, rel_tol=1e-6, abs_tol=1e-9) else None


def foreign_tasks(names: Iterable[str]) -> list[str]:
    """Return the task names that are not ours but the harness's: names in its definitions, and YAML
    files.

    Raises:
        UsageError: a YAML file does not exist.
    """
    foreign = []
    for name in dict.fromkeys(names):
        if name in TASKS or name in SUITES:
            continue
        if name.endswith((".yaml", ".yml")):
            if not Path(name).is_file():
                raise UsageError(f"--tasks {name}: no such file (looked in {Path.cwd()})")
            foreign.append(name)
        elif _is_defined(name):
            foreign.append(name)
    return foreign


def _is_defined(name: str) -> bool:
    """Return whether a definition of the installed harness holds this name. Its own search takes 15
    to 20 s."""
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        return False
    word = re.compile(rb"(?<![\w-])" + re.escape(name.encode()) + rb"(?![\w-])")
    definitions = (Path(spec.origin).parent / "tasks").rglob("*.yaml")
    return any(word.search(path.read_bytes()) for path in definitions)


def evaluate_foreign(
    name: str, language_model: LanguageModel, limit: int | None, scratch: Path
) -> list[tuple[Task, TaskScore]]:
    """Score a task, group or tag of the harness, or a YAML file, exactly as it is defined; the
    protocol says so.

    Raises:
        UsageError: the harness has nothing of that name.
        DataError: the items cannot be had.
    """
    import lm_eval.tasks

    is_file = name.endswith((".yaml", ".yml"))
    if not is_file:
        say(f"{name}: looking it up among the tasks of lm_eval {harness_version()} ...")
    manager = lm_eval.tasks.TaskManager(include_defaults=not is_file)
    if not is_file and name not in manager.task_index:
        raise UsageError(
            f"lm_eval {harness_version()} has no task {name!r}\n  `lm-eval ls tasks` lists all"
        )
    try:
        loaded = manager.load([str(Path(name).resolve()) if is_file else name])["tasks"]
    except Exception as error:  # the Hub's libraries raise a dozen classes
        raise DataError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    scored = []
    for member, harness_task in loaded.items():
        harness_task.set_fewshot_seed(1234)
        shots = harness_task.config.num_fewshot or 0
        protocol = (
            f"harness's default protocol: lm-eval {member} v{harness_task.VERSION} {shots}-shot"
        )
        score = _run(member, (), harness_task, language_model, limit, protocol)
        if not score.values:
            raise DataError(f"{member} gives no number")
        metrics = list(score.values)
        scored.append((Task(name=member, metric=metrics[0], metrics=metrics), score))
    return scored


def harness_version() -> str:
    """Return the installed version of lm_eval."""
    return metadata.version("lm_eval")
