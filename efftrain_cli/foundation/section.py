"""Configure the dataclasses of recipe sections, and define the value types that TOML lacks.

A section is a frozen dataclass that is at once the recipe's table, the method's list of
hyperparameters and the Python object that computes with them. Nothing here imports torch or numpy,
so recipes load in milliseconds.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from inspect import getsource
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import ArgsKwargs

SECTION = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Unknown keys are errors, nothing is silently converted, numbers are finite."""


@cache
def field_docstrings(cls: type) -> dict[str, str]:
    """Map the fields of a dataclass, its bases' too, to the docstrings below them.

    pydantic's `use_attribute_docstrings` reads the source of every section at import, which takes
    a fifth of `efftrain recipes list`; few commands show descriptions.
    """
    docstrings = {}
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        definition = ast.parse(dedent(getsource(base))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for field, below in pairwise(definition.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docstrings[name] = " ".join(text.split())
    return docstrings


def with_implied(given: Any, key: str, value: str, implied: Mapping[str, Any]) -> Any:
    """Return what a section is built from, with the values that `key = value` implies for the keys
    that are not given. For validators with mode "before".

    Args:
        given: a table of JSON, or the arguments of the class.
    """
    table = given
    if isinstance(given, ArgsKwargs):
        table = given.kwargs or {}
    if not isinstance(table, dict):
        return given
    if table.get(key) == value:
        table = {**implied, **table}
    return ArgsKwargs((), table)


Blocks = Annotated[int, Field(ge=1, le=1 << 10)]
"""Transformer blocks."""
Heads = Annotated[int, Field(ge=1, le=1 << 10)]
"""Attention heads."""
Channels = Annotated[int, Field(ge=1, le=1 << 17)]
"""Channels or hidden units."""

_SUFFIX = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(
    r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)\s*([KMBT]?)\s*", re.IGNORECASE
)


def parse_count(value: Any) -> Any:
    """Parse a count written 300_000_000, "300M", "0.3B" or 3e8 as an int.

    A value that is neither text nor a float is returned as it is: pydantic then checks its type.

    Raises:
        ValueError: the number is not whole.
    """
    exact: Any = value
    if isinstance(value, str):
        match = _COUNT.fullmatch(value)
        if match is None:
            raise ValueError("write a count as 300_000_000, '300M', '0.3B' or 3e8")
        number, suffix = match.groups()
        # Decimal, not float: "0.3B" must be 300000000 exactly.
        from decimal import Decimal

        exact = Decimal(number.replace("_", "")) * _SUFFIX[suffix.upper()]
    elif not isinstance(value, float):
        return value
    if 2**63 <= exact < math.inf:
        raise ValueError(f"{value!r} is beyond 64 bits")
    # The remainder of infinity is NaN, which is true.
    if exact % 1:
        raise ValueError(f"{value!r} is not a whole number")
    return int(exact)


_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|sec|min|h)\s*")
_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}


def parse_duration(value: str) -> float:
    """Return the seconds in a duration such as "30s", "10min" or "1.5h".

    Raises:
        ValueError: it is not such a duration.
    """
    match = _DURATION.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not a duration; write '30s', '10min' or '1h'")
    return float(match[1]) * _SECONDS[match[2]]


def check_every(value: Any) -> Any:
    """Check an interval, in steps or as a duration, and return it unchanged."""
    if isinstance(value, str) and parse_duration(value) <= 0:
        raise ValueError("a duration is longer than 0s")
    if isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise ValueError("an interval is at least 1 step")
    return value


Count = Annotated[int, BeforeValidator(parse_count), Field(ge=1)]
"""A number of tokens or sequences, at least 1; accepts 300_000_000, "300M" and 3e8."""

Text = Annotated[str, Field(min_length=1)]
"""Text that is not empty."""

Every = Annotated[int | str, BeforeValidator(check_every)]
"""An interval: steps (int) or a duration ("10min")."""
