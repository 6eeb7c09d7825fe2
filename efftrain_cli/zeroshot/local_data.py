"""Read evaluation sets from local files: one .jsonl file per task in a --data-dir, one item per line.

The form of each file is in tasks.toml and in docs/zeroshot.md. Every line is checked before anything slow is imported.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.bounds import LINE_BYTES
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.zeroshot.suites import TASKS


def local_file(task: str, data_dir: Path | None) -> Path | None:
    """Return the task's file in `data_dir`; None if it has none."""
    name = TASKS[task].file
    if data_dir is None or name is None:
        return None
    path = data_dir / name
    return path if path.is_file() else None


def tasks_in(data_dir: Path) -> list[str]:
    """Return the tasks whose files are in a folder, in the order of `TASKS`; tasks of ours may share a file.

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


def read_items(path: Path, form: dict[str, str]) -> list[dict[str, Any]]:
    """Read every item of a .jsonl file.

    Raises:
        DataError: it holds no item, or a line is not a JSON object of this form; the message names file and line.
    """
    items = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES), b""), 1):
                if len(line) == LINE_BYTES:
                    raise DataError(f"{path}:{number}: a line of {LINE_BYTES:,} bytes or more")
                if line.strip():
                    items.append(_item(line, form, f"{path}:{number}"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if not items:
        raise DataError(f"{path} holds no items; a line looks like {example(form)}")
    return items


def _item(line: bytes, form: dict[str, str], where: str) -> dict[str, Any]:
    try:
        item = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or too deep
        raise DataError(f"{where}: not JSON that can be read: {error}") from None
    if not isinstance(item, dict):
        raise DataError(
            f"{where}: a {type(item).__name__}, not an object; a line looks like {example(form)}"
        )
    texts = next((field for field, kind in form.items() if kind == "texts"), "")
    for field, kind in form.items():
        if field not in item:
            raise DataError(
                f"{where}: no field {field!r} (it has {', '.join(item) or 'none'}); a line looks like {example(form)}"
            )
        value = item[field]
        below = math.inf
        if kind == "text":
            rule = "a text"
        elif kind == "texts":
            rule = "a list of one text or more"
        elif kind == "choice":
            rule = f"an index into {texts!r}, from 0"
            below = len(item[texts])
        elif kind == "number":
            rule = "a whole number from 0"
        else:
            below = int(kind.removeprefix("number below "))
            rule = f"a whole number from 0 to {below - 1}"
        if kind == "text":
            right = isinstance(value, str)
        elif kind == "texts":
            right = isinstance(value, list) and {type(text) for text in value} == {str}
        else:
            right = type(value) is int and 0 <= value < below
        if not right:
            shown = json.dumps(value, ensure_ascii=False)
            raise DataError(f"{where}: {field} = {shown[:60]} is not {rule}")
    return item


def example(form: dict[str, str]) -> str:
    """Return a line of this form, as error messages and the documentation show it."""
    values = {"text": "...", "texts": ["...", "..."]}
    return json.dumps({field: values.get(kind, 0) for field, kind in form.items()})
