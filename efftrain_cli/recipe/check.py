"""Check a recipe's tables against its dataclasses, and report each mistake with the key it is in.

This works for any pydantic dataclass of pydantic dataclasses. Rules that need several sections are
in `rules.py` and in the methods.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args

from pydantic import ValidationError

from efftrain_cli.foundation.bounds import MISTAKES
from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.errors import Problem
from efftrain_cli.methods.method import Method
from efftrain_cli.recipe.aliases import read_aliases
from efftrain_cli.recipe.draft import Draft
from efftrain_cli.recipe.toml import toml_value


@cache
def inner_class(annotation: Any) -> Any:
    """Return the pydantic dataclass inside `X`, `X | None` or `tuple[X, ...]`; None for a plain
    value."""
    if hasattr(annotation, "__pydantic_fields__"):
        return annotation
    for part in get_args(annotation):
        inner = inner_class(part)
        if inner is not None:
            return inner
    return None


def is_many(annotation: Any) -> bool:
    """Return whether the annotation is `tuple[...]` or `tuple[...] | None`."""
    return getattr(annotation, "__origin__", None) is tuple or any(
        is_many(part) for part in get_args(annotation)
    )


def may_be_absent(annotation: Any) -> bool:
    """Return whether a recipe may lack the field: it may be None, or it is a list of sections."""
    return type(None) in get_args(annotation) or (
        is_many(annotation) and inner_class(annotation) is not None
    )


@cache
def methods_in(cls: Any) -> dict[str, type[Method]]:
    """Return the sections of a recipe class that are methods, by name."""
    methods = {}
    for name, info in cls.__pydantic_fields__.items():
        section = inner_class(info.annotation)
        if section is not None and issubclass(section, Method):
            methods[name] = section
    return methods


@cache
def aliases_of(cls: Any) -> dict[str, str]:
    """Map the names that other programs and papers have for keys and sections to our key."""
    aliases: dict[str, str] = {}
    for key, names in read_aliases("keys").items():
        aliases |= dict.fromkeys(names, key)
    for name, method in methods_in(cls).items():
        for key, names in method.aliases.items():
            aliases |= dict.fromkeys(names.split(), f"{name}.{key}".rstrip("."))
    return aliases


def summary(cls: Any) -> str:
    """Return the first paragraph of a class's docstring, on one line."""
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


@cache
def known_keys(cls: Any, prefix: str = "") -> dict[str, str]:
    """Map every dotted key and section of a recipe class to its description.

    Keys of a [[section]] are without a number.
    """
    keys: dict[str, str] = {}
    for name, info in cls.__pydantic_fields__.items():
        section = inner_class(info.annotation)
        keys[f"{prefix}{name}"] = info.description or ""
        if section is not None:
            keys[f"{prefix}{name}"] = info.description or summary(section)
            keys.update(known_keys(section, f"{prefix}{name}."))
    return keys


def unnumbered(key: str) -> str:
    """Remove the numbers of a dotted key: `stages.0.lr` -> `stages.lr`."""
    return re.sub(r"\.\d+(?=\.|$)", "", key)


def _incomplete(cls: Any, valid: dict[str, Any], wrong: Collection[str]) -> Any:
    """Return a section without the fields in `wrong`, which raise AttributeError when read.

    `problems` raises it too: the rules of a method need a section without mistakes.
    """
    fields = cls.__pydantic_fields__
    known = {
        name: info.get_default(call_default_factory=True)
        for name, info in fields.items()
        if name not in wrong
    }

    class Incomplete(cls):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if (name in fields or name == "problems") and name not in vars(self):
                raise AttributeError(name)
            return super().__getattribute__(name)

    section: Any = object.__new__(Incomplete)
    vars(section).update(known | valid)
    return section


class Check:
    """The mistakes of a draft, and its valid values."""

    def __init__(self, draft: Draft, cls: Any) -> None:
        self.draft = draft
        self.cls = cls
        self.problems = list(draft.problems)
        self._incomplete: dict[str, Any] = {}
        """Key -> section with mistakes, as `_incomplete` makes it."""
        self.known = known_keys(cls)
        self.sections = frozenset(key.rpartition(".")[0] for key in self.known)
        self._missing: list[str] = []
        self._meant: set[str] = set()
        """Keys that a misspelt one was meant to be: they are not reported as missing."""

        self.valid, self._wrong = self._section(cls, draft.values, "")
        """Name -> valid value, with sections as objects; and the names of the other fields."""
        for key in self._missing:
            if not {key, key.rpartition(".")[0]} & self._meant:
                self.add(key, "is required")

    def known_part(self) -> Any:
        """Return the draft as its class; wrong fields raise AttributeError when read."""
        return _incomplete(self.cls, self._incomplete | self.valid, self._wrong)

    def add(self, key: str, rule: str, value: Any = None, suggestion: str | None = None) -> None:
        """Add a problem, with the key's origin and description."""
        described = suggestion or unnumbered(key)
        doc = " ".join(self.known.get(described, "").split())
        if doc:
            doc = f"{described}: {doc}"
        shown = None
        if value is not None:
            shown = _shown(value)
        problem = Problem(
            key=key,
            rule=rule,
            value=shown,
            source=self.draft.origin(key),
            suggestion=suggestion,
            doc=doc,
        )
        self.problems.append(problem)

    def _section(
        self,
        cls: Any,
        table: Mapping[str, Any],
        prefix: str,
    ) -> tuple[dict[str, Any], set[str]]:
        """Check a table against a dataclass; return valid fields and the names of wrong ones."""
        fields = cls.__pydantic_fields__
        arguments: dict[str, Any] = {}
        wrong: set[str] = set()
        for name, value in table.items():
            if name not in fields:
                self._unknown(f"{prefix}{name}", value)
        for name, info in fields.items():
            inner = inner_class(info.annotation)
            if name not in table:
                if inner is None or not info.is_required():
                    continue
                # Report each required key of a missing section.
                value = {}
            else:
                value = table[name]
            if value is False and may_be_absent(info.annotation):
                # `section = false` removes an inherited section.
                continue
            if inner is None:
                if rule := _unwritable(value):
                    self.add(f"{prefix}{name}", rule, value)
                    wrong.add(name)
                    continue
                arguments[name] = _tuples(value)
            elif is_many(info.annotation):
                arguments[name] = self._many(inner, value, f"{prefix}{name}")
            else:
                arguments[name] = self._one(inner, value, f"{prefix}{name}")
            if arguments[name] is None:
                del arguments[name]
                wrong.add(name)
        for name, rule in self._breaches(cls, arguments):
            if name in wrong:
                # Its own check has reported it.
                continue
            wrong.add(name)
            if rule is None:
                self._missing.append(f"{prefix}{name}")
            else:
                self.add(f"{prefix}{name}".rstrip("."), rule, arguments.get(name))
        return {name: value for name, value in arguments.items() if name not in wrong}, wrong

    def _one(self, cls: Any, value: Any, key: str) -> Any:
        """Return a section, built from its table; None if a field of it is wrong."""
        if not isinstance(value, Mapping):
            rule = f"is a section: write [{key}] with its keys below"
            if value is True:
                rule += f", or {key} = false to do without"
            self.add(key, rule, value)
            return None
        valid, wrong = self._section(cls, value, f"{key}.")
        if not wrong:
            return cls(**valid)
        self._incomplete[key] = _incomplete(cls, valid, wrong)
        return None

    def _many(self, cls: Any, value: Any, key: str) -> tuple[Any, ...] | None:
        """Return the sections of a list of tables; None if a field of one is wrong."""
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            self.add(key, f"is a list of sections: write [[{key}]] before the keys of each", value)
            return None
        built = [self._one(cls, item, f"{key}.{index}") for index, item in enumerate(value)]
        if None in built:
            return None
        return tuple(built)

    def _unknown(self, key: str, value: Any) -> None:
        """Report an unknown key, with the nearest valid one or the keys of its section."""
        first = value[0] if isinstance(value, list) and value else value
        is_table = isinstance(first, Mapping)
        rule = "unknown key"
        if is_table:
            rule = "unknown section"
            value = None
        if len(self.problems) >= MISTAKES:
            # Comparing a key with all others takes milliseconds: do not do that for thousands.
            self.add(key, rule)
            return
        suggestion = self._nearest_key(key, is_table)
        if suggestion is None:
            section = key.rpartition(".")[0]
            names = []
            for known in self.known:
                known_section, _, name = known.rpartition(".")
                if known_section == unnumbered(section):
                    names.append(name)
            place = "the top level"
            if section:
                place = f"[{section}]"
            rule += f"; {place} has {', '.join(names)}"
        else:
            self._meant.add(suggestion)
        self.add(key, rule, value, suggestion)

    def _nearest_key(self, key: str, is_table: bool) -> str | None:
        """Return the valid dotted key that is most like an unknown one; None if none is.

        Names that other programs have for our keys are compared too.

        Args:
            is_table: whether the key names a section.
        """
        section, _, name = unnumbered(key).lower().replace("-", "_").rpartition(".")
        spellings = [(known.rpartition(".")[2], known) for known in self.known]
        spellings += aliases_of(self.cls).items()
        here: dict[str, str] = {}
        anywhere: dict[str, str] = {}
        for spelling, meant in spellings:
            if meant not in self.known or (is_table and meant not in self.sections):
                continue
            anywhere.setdefault(spelling, meant)
            if meant.rpartition(".")[0] == section:
                here.setdefault(spelling, meant)

        if name in anywhere:
            return here.get(name, anywhere[name])
        for names, cutoff in ((here, 0.6), (anywhere, 0.85)):
            near = get_close_matches(name, names, n=1, cutoff=cutoff)
            if near:
                return names[near[0]]
        return None

    def _breaches(self, cls: Any, arguments: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
        """Yield (field, rule) for each mistake that pydantic finds.

        The rule is None if the field is missing; the field is "" for the section as a whole.
        """
        try:
            cls(**arguments)
            return
        except ValidationError as error:
            breaches = error.errors(include_url=False)
        rules: dict[str, list[str]] = {}
        for breach in breaches:
            path = [str(part) for part in breach["loc"]]
            if not path and cls is self.cls:
                # `load_recipe` reports rules between sections, with their keys.
                continue
            if path and breach["type"] == "missing" and len(path) == 1:
                yield path[0], None
                continue
            # A validator of the whole section names no field: take the first that its message has.
            words = path or re.findall(r"\w+", str(breach["msg"]))
            field = next((word for word in words if path or word in cls.__pydantic_fields__), "")
            # A union has one breach per alternative.
            rules.setdefault(field, []).append(rule_of(breach, path))
        for name, alternatives in rules.items():
            yield name, " or ".join(dict.fromkeys(alternatives))


def _unwritable(value: Any) -> str | None:
    """Return why no recipe can hold a value; None if one can."""
    if isinstance(value, list):
        return next(filter(None, map(_unwritable, value)), None)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "has a number beyond 64 bits, which no run can use"
    # Bytes of a name that are not UTF-8 reach Python as lone surrogates.
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        pattern = "".join("?" if "\ud800" <= letter <= "\udfff" else letter for letter in value)
        return f'is not UTF-8, as recipes are; a pattern names the same file: "{pattern}"'
    return None


def _tuples(value: Any) -> Any:
    """Return a value of TOML with its lists as tuples."""
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    if isinstance(value, dict):
        return {key: _tuples(each) for key, each in value.items()}
    return value


def _shown(value: Any) -> str:
    try:
        text = toml_value(value)
    except TypeError:
        text = str(value)
    if len(text) > 100:
        text = f"{text[:97]}..."
    return text


_TYPES = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
    "tuple_type": "must be a list in brackets, such as [1, 2]",
    "missing": "is required",
    "finite_number": "must be a finite number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "literal_error": "must be one of {expected}",
    "string_too_short": "must not be empty",
    "too_long": "must have {max_length}, not {actual_length}",
    "too_short": "must have at least {min_length}, not {actual_length}",
}


def rule_of(breach: Any, path: list[str]) -> str:
    """Return a pydantic error in words such as "must be at least 1".

    Args:
        path: keys, and numbers of items in lists.
    """
    kind = breach["type"]
    context = breach.get("ctx", {})
    item = next((part for part in path[1:] if part.isdigit()), None)
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing" and item is not None:
        return f"needs {counted(int(item) + 1, 'item')} or more"
    rule = str(breach["msg"])
    if kind in _TYPES:
        numbers = dict(context)
        for name, value in context.items():
            if isinstance(value, float):
                numbers[name] = f"{value:g}"
            elif name in ("min_length", "max_length"):
                numbers[name] = counted(value, "item")
        rule = _TYPES[kind].format(**numbers)
    if item is not None:
        rule = f"item {int(item) + 1} {rule}"
    return rule
