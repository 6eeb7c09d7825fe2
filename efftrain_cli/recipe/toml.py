"""Write values as TOML that reads back to what was written, and nested tables as dotted keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Table = Mapping[str, Any]
"""Values by name, some of them tables or lists of tables."""


def toml_value(value: Any) -> str:
    """Format one value as TOML. Reading it back gives an equal value of the same type; the keys of
    a table are plain names."""
    if isinstance(value, str):
        # A text of JSON is one of TOML, which also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:_}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(_assignment(*pair) for pair in value.items())}}}"
    return str(value)


def _assignment(name: str, value: Any) -> str:
    return f"{name} = {toml_value(value)}"


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and {*map(type, value)} == {dict}


def flatten(values: Table, prefix: str = "") -> dict[str, Any]:
    """Return nested tables as dotted keys: {"optim.lr": 6e-4, ...}. Lists of tables are numbered
    from 0: "stages.0.lr". A table without keys stays {}: a section that is present is on."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if _is_tables(value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def toml_lines(values: Table, comments: Mapping[str, str] = {}) -> Iterator[str]:
    """Yield the lines of a TOML document: plain keys first, then a [section] per table and a
    [[section]] per array of tables.

    Args:
        comments: dotted key -> a comment to stand after its value.
    """
    plain = {}
    sections = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            sections += ["", f"[{name}]", *_body(value, f"{name}.", comments)]
        elif _is_tables(value):
            for index, item in enumerate(value):
                sections += ["", f"[[{name}]]", *_body(item, f"{name}.{index}.", comments)]
        else:
            plain[name] = value
    yield from _body(plain, "", comments)
    yield from sections


def _body(table: Table, prefix: str, comments: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a table's keys, comments below each other."""
    lines = {}
    for name, value in table.items():
        lines[f"{prefix}{name}"] = _assignment(name, value)
    widths = [len(line) for key, line in lines.items() if key in comments]
    width = max(widths, default=0)
    for key, line in lines.items():
        if key in comments:
            line = f"{line:<{width}}  # {comments[key]}"
        yield line
