"""Numbers and settings as text for people: one function for each kind of value."""

from __future__ import annotations

import json
import math

from efftrain_cli.foundation.console import human_seconds, printable

DECIMALS = {"nats/token": 4, "bits/byte": 4, "%": 2}
"""Decimals of a unit; numbers of other units have four significant digits."""
_FLOPS = [
    (1000.0**power, 1000.0**power, f" {prefix}FLOPs") for power, prefix in enumerate("kMGTPEZY", 1)
]
_SCALES = {
    "tokens": [(1e4, 1e3, "K"), (1e6, 1e6, "M"), (1e9, 1e9, "B"), (1e12, 1e12, "T")],
    "flops": [(0.0, 1.0, " FLOPs"), *_FLOPS],
    "seconds": [(0.0, 1.0, " s"), (120.0, 60.0, " min"), (7200.0, 3600.0, " h")],
}
"""By axis: from which value on it is divided by what, and the suffix that says so."""


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


def format_number(value: float, unit: str = "", axis: str = "", sd: float | None = None) -> str:
    """Write a number, rounded for reading: 3.2480, 78.46K, 12 min 30 s, (78.46 ± 0.52)K.

    Args:
        unit: decides the decimals, see DECIMALS.
        axis: tokens, flops or seconds, for a number without a unit.
        sd: standard deviation, written with two digits in the scale of `value`; None or 0: not written.
    """
    if axis == "seconds" and not unit and not sd and value >= 120:
        return human_seconds(value)
    divisor = 1.0
    suffix = ""
    fitting = [scale for scale in _SCALES.get(axis, ()) if abs(value) >= scale[0]]
    if fitting and not unit:
        _, divisor, suffix = fitting[-1]
    value /= divisor
    decimals = DECIMALS.get(unit)
    if not sd:
        text = f"{value:.4g}" if decimals is None else f"{value:.{decimals}f}"
        return text + suffix

    sd /= divisor
    if decimals is None:
        digits = 3 - math.floor(math.log10(abs(value))) if value else 0
        decimals = min(6, max(0, digits, 1 - math.floor(math.log10(sd))))
    text = f"{value:.{decimals}f} ± {sd:.{decimals}f}"
    return f"({text}){suffix}" if suffix else text


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
    """Write a difference or a ratio with its interval: -0.1305 [-0.1320, -0.1291], 1.30x [1.29, 1.30]."""
    if mean is None:
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
