"""Load tasks of lm-evaluation-harness, with their items from the Hub or from local files.

tasks.toml names the suites, the one metric of each task that counts, and how the harness's own
definition reads a local file. Any other task, group or YAML file is taken as the harness has it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efftrain_cli.foundation.errors import DataError, UsageError, nearest

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task, as far as it is described without the harness."""

    name: str
    metric: str | None = None
    """The metric that counts; None: the harness's first."""
    chance: float | None = None
    """Score of guessing, a fraction."""
    definition: str | None = None
    """The harness's file, inside lm_eval/tasks; None: the harness looks the name up."""
    file: str | None = None
    """Name of its items' file in a --data-dir."""
    local: dict[str, Any] = field(default_factory=dict)
    """Settings of the definition that are replaced for that file."""

    def local_file(self, data_dir: Path | None) -> Path | None:
        """Return the file of the items in a folder; None if they come from the Hub."""
        if data_dir is None or self.file is None:
            return None
        path = data_dir / self.file
        return path.absolute() if path.is_file() else None


_TABLES = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text("utf-8"))
TASKS = {name: TaskSpec(name=name, **values) for name, values in _TABLES["tasks"].items()}
SUITES: dict[str, list[str]] = _TABLES["suites"]
AVERAGED = ("slw-11", "gpt3")
"""Suites with a mean; gpt2 mixes accuracies and perplexities."""


def find_specs(names: Iterable[str], data_dir: Path | None) -> list[TaskSpec]:
    """Return the tasks that names of suites and tasks stand for, each once.

    Without names: every task whose file is in `data_dir`.

    Raises:
        DataError: there is no such folder.
        UsageError: there are neither names nor files.
    """
    if data_dir is not None and not data_dir.is_dir():
        raise DataError(f"--data-dir {data_dir}: no such folder")
    specs: dict[str, TaskSpec] = {}
    for name in names:
        for member in SUITES.get(name, [name]):
            specs[member] = TASKS.get(member) or TaskSpec(name=member)
    if not specs:
        specs = {name: spec for name, spec in TASKS.items() if spec.local_file(data_dir)}
    if not specs:
        raise UsageError(
            "no tasks given\n"
            "  --tasks gpt2 (2 tasks), slw-11 (11) or gpt3 (18), from the Hugging Face Hub\n"
            "  offline: --data-dir DIR; gpt2 needs lambada_openai.jsonl and"
            " wikitext2_test_pages.jsonl"
        )
    return list(specs.values())


def load_tasks(
    spec: TaskSpec,
    data_dir: Path | None,
    scratch: Path,
) -> list[ConfigurableTask]:
    """Return the harness's task objects with their items: several for a group.

    Args:
        scratch: folder for the definition that names a local file.

    Raises:
        UsageError: the harness has no such task.
        DataError: the items cannot be had.
    """
    import lm_eval.tasks

    name = spec.name
    file = spec.local_file(data_dir)
    if spec.definition is not None:
        folder = Path(str(lm_eval.tasks.__file__)).parent
        name = str(folder / spec.definition)
    if file is not None:
        path = scratch / f"{spec.name}.yaml"
        settings = _local_settings(spec, file, scratch)
        settings["include"] = name
        path.write_text(json.dumps(settings))  # JSON is YAML
        name = str(path)
    is_file = Path(name).is_file()
    # The index of the harness's own tasks takes 15 to 20 s.
    manager = lm_eval.tasks.TaskManager(include_defaults=not is_file)
    if not is_file and name not in manager.task_index:
        hint = nearest(name, [*SUITES, *TASKS])
        raise UsageError(
            f"--tasks {name}: lm_eval has no such task, and there is no such file\n"
            f"  {hint or '`lm-eval ls tasks` lists all'}"
        )
    try:
        tasks = list(manager.load([name])["tasks"].values())
    except Exception as error:  # the Hub's libraries raise a dozen classes
        reason = f"{type(error).__name__}: {error}"
        reason = " ".join(reason.split())
        raise DataError(f"{spec.name} cannot be loaded: {reason[:500]}") from error
    for task in tasks:
        task.set_fewshot_seed(1234)
        if spec.definition is not None:
            task.set_config("num_fewshot", 0)
        if file is not None:
            _check_fields(file, task.eval_docs)
    return tasks


def _local_settings(
    spec: TaskSpec,
    file: Path,
    scratch: Path,
) -> dict[str, Any]:
    """Return what replaces the dataset in a definition."""
    settings = {
        "task": spec.name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {"test": str(file)},
            "cache_dir": str(scratch),
        },
        "training_split": None,
        "validation_split": None,
        "fewshot_split": None,
        "test_split": "test",
    }
    if spec.local:
        settings |= {"process_docs": None, **spec.local}
    return settings


def _check_fields(file: Path, items: Iterable[dict[str, Any]]) -> None:
    """Check that every item has every field: a missing one would be scored as "None".

    Raises:
        DataError: one has not.
    """
    for number, item in enumerate(items, 1):
        missing = [name for name, value in item.items() if value is None]
        if missing:
            raise DataError(f"{file}: item {number} has no {', '.join(missing)}\n  add it")


def suite_mean(suite: str, scores: Mapping[str, float | None]) -> float | None:
    """Return the unweighted mean of a suite's metrics; None if a task is missing."""
    values = [scores.get(name) for name in SUITES[suite]]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(known) / len(known)
