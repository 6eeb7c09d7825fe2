"""Write values as TOML that reads back to what was written, and nested tables as dotted keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any


def toml_value(value: Any) -> str:
    """Format one value as TOML. Reading it back gives an equal value of the same type.

    Raises:
        TypeError: TOML has no form for it (None among them).
    """
    return str(_toml_item(value).as_string())


def _toml_item(value: Any) -> Any:
    import tomlkit  # only where something is written: reading a recipe takes milliseconds

    if type(value) is int and abs(value) >= 10_000:
        return tomlkit.value(f"{value:_}")
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend(map(_toml_item, value))
        return array
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        table.update({name: _toml_item(inner) for name, inner in value.items()})
        return table
    return tomlkit.item(value)


def _toml_key(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    return toml_value(name)


def _is_tables(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(item, Mapping) for item in value)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as dotted keys: {"optim.lr": 6e-4, ...}. Lists of tables are numbered
    from 0: "stages.0.lr". A table without keys stays {}: a section that is present is on."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if _is_tables(value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{key}.") or {key: {}}
        else:
            flat[key] = value
    return flat


def toml_lines(
    values: Mapping[str, Any], comments: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the lines of a TOML document: plain keys first, then a [section] per table and a
    [[section]] per array of tables.

    Args:
        comments: dotted key -> a comment to stand after its value.
    """
    comments = comments or {}

    def body(table: Mapping[str, Any], prefix: str) -> list[str]:
        lines = {}
        for name, value in table.items():
            lines[f"{prefix}{name}"] = f"{_toml_key(name)} = {toml_value(value)}"
        commented = comments.keys() & lines.keys()
        width = max((len(lines[key]) for key in commented), default=0)
        for key in commented:
            lines[key] = f"{lines[key]:<{width}}  # {comments[key]}"
        return list(lines.values())

    plain = {}
    sections = []
    for name, value in values.items():
        header = _toml_key(name)
        if isinstance(value, Mapping):
            sections += ["", f"[{header}]", *body(value, f"{name}.")]
        elif _is_tables(value):
            for index, item in enumerate(value):
                sections += ["", f"[[{header}]]", *body(item, f"{name}.{index}.")]
        else:
            plain[name] = value
    yield from body(plain, "")
    yield from sections
