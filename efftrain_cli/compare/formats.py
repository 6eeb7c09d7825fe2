"""Numbers and settings as text for people: one function for each kind of value."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from efftrain_cli.foundation.console import (
    human_bytes,
    human_count,
    human_flops,
    human_seconds,
    printable,
)
from efftrain_cli.recipe.toml import flatten

_HASH = re.compile("[0-9a-f]{40,}")


def format_value(value: object) -> str:
    """Write a recipe's value as TOML does; "-" if the key is absent."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if value == {}:
        return "on"
    return printable(value) if isinstance(value, str) else json.dumps(value, default=str)


def origin_values(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return an origin by dotted keys: the command first, as one line; hashes by first digits."""
    values = flatten({"command": None, **origin})
    if isinstance(values["command"], list):
        values["command"] = shlex.join(map(str, values["command"]))
    for key, value in values.items():
        if isinstance(value, str) and _HASH.fullmatch(value):
            values[key] = value[:16]
    return values


def _seconds(value: float) -> str:
    return human_seconds(value) if value >= 120 else f"{value:.4g} s"


_WRITERS: dict[str, Callable[[float], str]] = {
    "nats/token": "{:.4f}".format,
    "bits/byte": "{:.4f}".format,
    "%": "{:.2f}".format,
    "tokens": partial(human_count, digits=4),
    "flops": lambda value: f"{human_flops(value)}s",
    "seconds": _seconds,
    "bytes": human_bytes,
}
"""How numbers of a unit or an axis are written; others have four significant digits."""


def format_number(value: float, unit: str = "", axis: str = "", sd: float | None = None) -> str:
    """Write a number, rounded for reading: 3.2480, 78.46K, 12 min 30 s, 60.22 ± 0.51.

    Args:
        axis: tokens, flops, seconds or bytes, for a number without a unit.
        sd: standard deviation; None or 0: not written.
    """
    write = _WRITERS.get(unit or axis, "{:.4g}".format)
    if sd and unit not in _WRITERS:
        sd = float(f"{sd:.2g}")
    return f"{write(value)} ± {write(sd)}" if sd else write(value)


def format_quantity(value: float, axis: str) -> str:
    """Write tokens, FLOPs or seconds with their unit."""
    return format_number(value, axis=axis) + (" tokens" if axis == "tokens" else "")


def format_estimate(
    mean: float | None,
    low: float | None,
    high: float | None,
    ratio: bool = False,
    decimals: int = 2,
) -> str:
    """Write a difference or a ratio with its interval: -0.1305 [-0.1320, -0.1291], 1.30x [1.29,
    1.30]; "-" for NaN."""
    if mean is None or math.isnan(mean):
        return "-"
    form, times = (f".{decimals}f", "x") if ratio else ("+.4f", "")
    text = f"{mean:{form}}{times}"
    if low is None or high is None:
        return text
    return f"{text} [{low:{form}}, {high:{form}}]"


def format_p(p: float | None) -> str:
    """Write a p-value with two digits."""
    if p is None:
        return "-"
    return f"{p:.2g}" if p >= 0.0001 else "<0.0001"
