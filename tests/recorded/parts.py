"""The parts that are kept as files; how a part is recorded, written and compared."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent


class Part(NamedTuple):
    """A module of this folder with `record() -> dict`."""

    name: str
    slow: bool = False
    """Whether its test belongs to the slow ones."""

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.name}.json"

    def record(self) -> dict[str, Any]:
        """Return what the code answers now, as its file would hold it."""
        values = import_module(f"tests.recorded.{self.name}").record()
        return json.loads(json.dumps(values))

    def write(self) -> None:
        text = json.dumps(self.record(), indent=1, sort_keys=True, ensure_ascii=False)
        self.file.write_text(text + "\n", encoding="utf-8")

    def compare(self) -> list[str]:
        """Return a line for each value that differs from the file's."""
        recorded = json.loads(self.file.read_text(encoding="utf-8"))
        return list(differences(recorded, self.record(), self.name))


PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part("comparisons"),
        Part("faults", slow=True),
        Part("huggingface"),
        Part("library", slow=True),
        Part("published"),
        Part("recipes"),
        Part("searches"),
        Part("sources"),
        Part("switches"),
        Part("zeroshot", slow=True),
    )
}


def differences(recorded: Any, now: Any, place: str) -> Iterator[str]:
    """Yield "place: recorded -> now" for each JSON value that differs.

    Floats are compared to 1e-6 of their size or 1e-9, all else exactly. An object with a key
    "python" is compared only under that version of Python.
    """
    if isinstance(recorded, dict) and isinstance(now, dict):
        if recorded.get("python", platform.python_version()) != platform.python_version():
            return
        for key in sorted(recorded.keys() | now.keys()):
            inner = f"{place}.{key}"
            if key not in now:
                yield f"{inner}: {json.dumps(recorded[key])} -> missing"
            elif key not in recorded:
                yield f"{inner}: not recorded -> {json.dumps(now[key])}"
            else:
                yield from differences(recorded[key], now[key], inner)
    elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        for index, (before, after) in enumerate(zip(recorded, now, strict=True)):
            yield from differences(before, after, f"{place}[{index}]")
    elif isinstance(recorded, float) and isinstance(now, float):
        both_nan = math.isnan(recorded) and math.isnan(now)
        if not both_nan and not math.isclose(recorded, now, rel_tol=1e-6, abs_tol=1e-9):
            yield f"{place}: {recorded} -> {now}"
    elif type(recorded) is not type(now) or recorded != now:
        yield f"{place}: {json.dumps(recorded)} -> {json.dumps(now)}"
