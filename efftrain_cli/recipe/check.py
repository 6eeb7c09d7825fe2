"""Build the object that a draft describes, and report each mistake with the key it is in.

This works for any pydantic dataclass of pydantic dataclasses. Rules that need several sections are
in `rules.py` and in the methods.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from efftrain_cli.foundation.errors import Breaches, Problem
from efftrain_cli.foundation.section import field_docstrings
from efftrain_cli.methods.method import Method
from efftrain_cli.recipe.draft import MISTAKES, Draft, recipe_error, table_of
from efftrain_cli.recipe.toml import flatten, toml_value

T = TypeVar("T")


class Key(NamedTuple):
    """A key or section that a file may have."""

    name: str
    owner: type
    """Class that has it as a field."""
    section: Any
    """Class of the section; None for a key."""
    is_optional: bool
    """Whether a file may take it away with `key = false`."""

    @property
    def description(self) -> str:
        """The field's docstring, or else the first paragraph of its section's."""
        own = field_docstrings(self.owner).get(self.name)
        paragraph = (self.section.__doc__ or "").partition("\n\n")[0] if self.section else ""
        return own or " ".join(paragraph.split())


@cache
def known_keys(cls: Any) -> dict[str, Key]:
    """Map every dotted key and section of a class to what it is; a [[section]] has no number."""
    keys: dict[str, Key] = {}
    for name, info in cls.__pydantic_fields__.items():
        section = _section_class(info.annotation)
        is_optional = type(None) in get_args(info.annotation) or info.default == ()
        keys[name] = Key(name, cls, section, is_optional)
        if section is not None:
            for inner, key in known_keys(section).items():
                keys[f"{name}.{inner}"] = key
    return keys


def _section_class(annotation: Any) -> Any:
    """Return the pydantic dataclass inside `X`, `X | None` or `tuple[X, ...]`; None for a plain
    value."""
    if hasattr(annotation, "__pydantic_fields__"):
        return annotation
    return next(filter(None, map(_section_class, get_args(annotation))), None)


@cache
def methods_in(cls: Any) -> dict[str, type[Method]]:
    """Return the sections of a recipe class that are methods, by name."""
    methods = {}
    for name, key in known_keys(cls).items():
        if key.section is not None and issubclass(key.section, Method):
            methods[name] = key.section
    return methods


def unnumbered(key: str) -> str:
    """Remove the numbers of a dotted key: `stages.0.lr` -> `stages.lr`."""
    return re.sub(r"\.\d+(?=\.|$)", "", key)


def validated(draft: Draft, cls: type[T], kind: str = "recipe") -> T:
    """Return the object that a draft describes.

    Raises:
        RecipeError: the draft breaks rules. The message lists each wrong key, or if all keys are
            right, each breach of the rules between them.
    """
    known = known_keys(cls)  # type: ignore[arg-type]
    values = deepcopy(draft.values)
    for key, value in flatten(values).items():
        about = known.get(unnumbered(key))
        if value is False and about is not None and about.is_optional:
            table, name = table_of(values, key)
            table.pop(name, None)
        for item in value if isinstance(value, list) else [value]:
            if rule := _unwritable(item):
                raise recipe_error(draft.name, [_problem(draft, key, rule)], kind)
    problems = list(draft.problems)
    try:
        # As JSON: there, strict types take a list for a tuple and a table for a section.
        result = TypeAdapter(cls).validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        problems += _problems_of(draft, cls, error)
    if problems:
        raise recipe_error(draft.name, problems, kind)
    return result


def _unwritable(value: Any) -> str:
    """Return why no recipe can hold a value; "" if one can."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "has a number beyond 64 bits, which no run can use"
    if isinstance(value, str):
        # Bytes of a name that are not UTF-8 reach Python as lone surrogates.
        pattern = re.sub("[\ud800-\udfff]", "?", value)
        if pattern != value:
            return f'is not UTF-8, as recipes are; a pattern names the same file: "{pattern}"'
    return ""


UNKNOWN = "unknown key"
REQUIRED = "is required"


def _problems_of(draft: Draft, cls: Any, error: ValidationError) -> list[Problem]:
    """Return what pydantic found, one problem for each key."""
    rules: dict[str, list[str]] = {}
    for breach in error.errors(include_url=False):
        cause = breach.get("ctx", {}).get("error")
        found = [_rule_of(breach, known_keys(cls))]
        if isinstance(cause, Breaches):
            found = list(cause.breaches)
        for key, rule in found:
            rules.setdefault(key, []).append(rule)
    unknown = [key for key, alternatives in rules.items() if UNKNOWN in alternatives]
    # A comparison with all keys takes milliseconds: none for thousands of mistakes.
    meant = {key: _nearest_key(key, cls) for key in unknown[:MISTAKES]}
    problems = []
    for key, alternatives in rules.items():
        rule = " or ".join(dict.fromkeys(alternatives))
        if rule == UNKNOWN and meant.get(key):
            rule += f"; did you mean {meant[key]}?"
        elif rule == UNKNOWN:
            section = unnumbered(key).rpartition(".")[0]
            place = f"[{section}]" if section else "the top level"
            names = [known.rpartition(".")[2] for known in _keys_in(section, cls)]
            rule += f"; {place} has {', '.join(names)}"
        # A key that is missing because it is misspelt is one mistake.
        if rule != REQUIRED or key not in meant.values():
            problems.append(_problem(draft, key, rule))
    return problems


def _problem(draft: Draft, key: str, rule: str) -> Problem:
    """Return a problem with the key's value and place."""
    # A rule between keys may be broken by an override of another key that it names.
    named = [draft.places.get(name, "") for name in re.findall(r"\w+\.[\w.]*\w", rule)]
    overrides = [place for place in named if place.startswith("--set")]
    value = flatten(draft.values).get(key)
    return Problem(
        key=key,
        rule=rule,
        value=None if value in (None, {}) else toml_value(value)[:100],
        source=", ".join(dict.fromkeys([draft.origin(key), *overrides])),
    )


# --- suggestions ----------------------------------------------------------------------------------


def read_aliases(table: str) -> dict[str, Any]:
    """Return what other programs and papers call ours: "keys" or "options" of aliases.toml."""
    return tomllib.loads(Path(__file__).with_name("aliases.toml").read_text("utf-8"))[table]


def _keys_in(section: str | None, cls: Any) -> list[str]:
    """List the dotted keys of a section, "" for the top level; of all with None."""
    keys = []
    for key in known_keys(cls):
        around, _, _ = key.rpartition(".")
        if section in (None, around):
            keys.append(key)
    return keys


@cache
def _names_in(section: str | None, cls: Any) -> dict[str, str]:
    """Map the names of a section's keys, ours and those of other programs, to our dotted key."""
    names: dict[str, str] = {}
    for key, others in read_aliases("keys").items():
        names |= dict.fromkeys(others, key)
    for name, method in methods_in(cls).items():
        for key, others in method.aliases.items():
            names |= dict.fromkeys(others.split(), f"{name}.{key}".rstrip("."))
    # Of equal names the last is kept: ours win over others', and earlier sections.
    keys = _keys_in(section, cls)
    for key in reversed(keys):
        names[key.rpartition(".")[2]] = key
    return {name: key for name, key in names.items() if key in keys}


def _nearest_key(key: str, cls: Any) -> str | None:
    """Return the valid key that is most like an unknown one, of its section if possible."""
    section, _, name = unnumbered(key).lower().replace("-", "_").rpartition(".")
    here = _names_in(section, cls)
    anywhere = _names_in(None, cls)
    for names, cutoff in ((here, 1.0), (anywhere, 1.0), (here, 0.6), (anywhere, 0.85)):
        for near in get_close_matches(name, names, n=1, cutoff=cutoff):
            return names[near]
    return None


# --- words ----------------------------------------------------------------------------------------

_WORDS = {
    "unexpected_keyword_argument": UNKNOWN,
    "missing": REQUIRED,
    "dataclass_type": "is a section: write [{key}] with its keys below",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list in brackets, such as [1, 2]",
    "literal_error": "must be one of {expected}",
    "value_error": "{error}",
}
"""pydantic's types of errors in our words, where its own do not fit."""
_PHRASES = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    " after validation": "",
}
"""Phrases of pydantic's in our words."""


def _rule_of(breach: Any, known: Mapping[str, Key]) -> tuple[str, str]:
    """Return the dotted key of a pydantic error, and the rule that it breaks."""
    kind = breach["type"]
    key = ""
    item = None
    for part in breach["loc"]:
        longer = f"{key}.{part}".lstrip(".")
        about = known.get(unnumbered(longer))
        if isinstance(part, int) and (about is None or about.section is None):
            item = part
        elif about is not None or kind == "unexpected_keyword_argument":
            key = longer  # other parts are alternatives of a type
    rule = re.sub(r"^\w+ should", "must", breach["msg"])
    for words, ours in _PHRASES.items():
        rule = rule.replace(words, ours)
    if kind in _WORDS:
        rule = _WORDS[kind].format(key=key, **breach.get("ctx", {}))
    if kind == "tuple_type" and known[unnumbered(key)].section is not None:
        rule = f"is a list of sections: write [[{key}]] before the keys of each"
    if item is not None and kind == "missing":
        rule = f"needs {item + 1} items or more"
    elif item is not None:
        rule = f"item {item + 1} {rule}"
    if kind == "value_error" and key in known and known[key].section is not None:
        # A rule of the whole section: take the first key that it names.
        for word in re.findall(r"\w+", rule):
            if f"{key}.{word}" in known:
                return f"{key}.{word}", rule
    return key, rule
