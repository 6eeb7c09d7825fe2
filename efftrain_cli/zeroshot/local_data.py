"""Read evaluation sets from local files: a .jsonl file per task in a --data-dir, an item per line.

The form of each file is in tasks.toml and in docs/zeroshot.md. Every line is checked before
anything slow is imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from efftrain_cli.foundation.bounds import LINE_BYTES
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.records import first_fault
from efftrain_cli.zeroshot.suites import TASKS

_Index = Annotated[int, Field(ge=0)]
KINDS: dict[str, Any] = {
    "text": str,
    "texts": Annotated[list[str], Field(min_length=1)],
    "choice": _Index,
    "number": _Index,
    "number below 2": Annotated[_Index, Field(lt=2)],
    "number below 3": Annotated[_Index, Field(lt=3)],
}
"""Kind of a field -> its type. A "choice" is an index into the texts that stand before it."""


def local_file(task: str, data_dir: Path | None) -> Path | None:
    """Return the task's file in `data_dir`; None if it has none."""
    name = TASKS[task].file
    if data_dir is None or name is None:
        return None
    path = data_dir / name
    return path if path.is_file() else None


def tasks_in(data_dir: Path) -> list[str]:
    """Return the tasks whose files are in a folder, in the order of `TASKS`; tasks of ours may
    share a file.

    Raises:
        DataError: the folder does not exist, or has no such file.
    """
    if not data_dir.is_dir():
        raise DataError(f"--data-dir {data_dir}: no such folder")
    found = [name for name in TASKS if local_file(name, data_dir) is not None]
    if not found:
        known = ", ".join(sorted({task.file for task in TASKS.values() if task.file}))
        raise DataError(f"--data-dir {data_dir} has none of the files {known}")
    return found


def check_items(path: Path, form: dict[str, str]) -> int:
    """Check every line of a .jsonl file, and return how many items it holds.

    Raises:
        DataError: it holds no item, or a line is not a JSON object of this form; the message names
            file and line.
    """
    fields: dict[str, Any] = {name: (KINDS[kind], ...) for name, kind in form.items()}
    model = create_model("Item", __config__=ConfigDict(strict=True), **fields)
    looks = f"a line looks like {example(form)}"
    count = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES), b""), 1):
                if len(line) == LINE_BYTES:
                    raise DataError(f"{path}:{number}: a line of {LINE_BYTES:,} bytes or more")
                if line.strip():
                    count += 1
                    fault = _fault_of(line, form, model)
                    if fault:
                        raise DataError(f"{path}:{number}: {fault}; {looks}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if not count:
        raise DataError(f"{path} holds no items; {looks}")
    return count


def _fault_of(line: bytes, form: dict[str, str], model: type[BaseModel]) -> str:
    """Return what is wrong with a line, or ""."""
    try:
        item = dict(model.model_validate_json(line.rstrip()))
    except ValidationError as error:
        return first_fault(error)
    texts = ""
    for name, kind in form.items():
        if kind == "texts":
            texts = name
        if kind == "choice" and item[name] >= len(item[texts]):
            return f"{name}: {item[name]} is not an index into {texts!r}, from 0"
    return ""


def example(form: dict[str, str]) -> str:
    """Return a line of this form, as error messages and the documentation show it."""
    values = {"text": "...", "texts": ["...", "..."]}
    return json.dumps({field: values.get(kind, 0) for field, kind in form.items()})
