"""Build the object that a draft describes, and report each mistake with the key it is in.

This works for any pydantic dataclass of pydantic dataclasses. Rules that need several sections are
in `rules.py` and in the methods.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from efftrain_cli.foundation.bounds import MISTAKES
from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.errors import Breaches, Problem, RecipeError
from efftrain_cli.foundation.section import field_docstrings
from efftrain_cli.methods.method import Method
from efftrain_cli.recipe.aliases import read_aliases
from efftrain_cli.recipe.draft import Draft, report
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
    result = None
    problems = [*draft.problems, *_unwritable_values(draft, cls)]
    if problems == draft.problems:
        values = _without_removed(draft.values, known_keys(cls))  # type: ignore[arg-type]
        try:
            # As JSON: there, strict types take a list for a tuple and a table for a section.
            result = TypeAdapter(cls).validate_json(json.dumps(values, default=str))
        except ValidationError as error:
            problems += _problems_of(draft, cls, error)
    if result is None or problems:
        raise RecipeError(report(draft.name, problems, kind), problems)
    return result


def _without_removed(value: Any, known: Mapping[str, Key], key: str = "") -> Any:
    """Return a value without the optional keys and sections inside of it that are `false`."""
    if isinstance(value, list):
        return [_without_removed(item, known, key) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, inner in value.items():
        path = f"{key}.{name}".lstrip(".")
        is_optional = path in known and known[path].is_optional
        if inner is not False or not is_optional:
            kept[name] = _without_removed(inner, known, path)
    return kept


def _unwritable_values(draft: Draft, cls: Any) -> Iterator[Problem]:
    """Yield the values that no recipe can hold."""
    for key, value in flatten(draft.values).items():
        rule = _unwritable(value)
        if rule is not None:
            yield _problem(draft, cls, key, rule)


def _unwritable(value: Any) -> str | None:
    if isinstance(value, list):
        return next(filter(None, map(_unwritable, value)), None)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "has a number beyond 64 bits, which no run can use"
    # Bytes of a name that are not UTF-8 reach Python as lone surrogates.
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        pattern = re.sub("[\ud800-\udfff]", "?", value)
        return f'is not UTF-8, as recipes are; a pattern names the same file: "{pattern}"'
    return None


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

    problems: list[Problem] = []
    meant = set()
    for key, alternatives in rules.items():
        rule = " or ".join(dict.fromkeys(alternatives))
        suggestion = None
        # A comparison with all keys takes milliseconds: none for thousands of mistakes.
        if rule == UNKNOWN and len(problems) < MISTAKES:
            suggestion = _nearest_key(key, cls)
            meant.add(suggestion)
            if suggestion is None:
                rule += _keys_beside(key, cls)
        problems.append(_problem(draft, cls, key, rule, suggestion))
    # A key that is missing because it is misspelt is one mistake.
    return [each for each in problems if each.rule != REQUIRED or each.key not in meant]


def _problem(draft: Draft, cls: Any, key: str, rule: str, suggestion: str | None = None) -> Problem:
    """Return a problem with the key's value, place and description."""
    source = draft.origin(key)
    if not source.startswith("--set"):
        # A rule between keys may be broken by the other key that it names.
        named = [draft.places.get(word, "") for word in re.findall(r"\w+\.[\w.]*\w", rule)]
        source = ", ".join([source, *(place for place in named if place.startswith("--set"))])
    described = suggestion or unnumbered(key)
    doc = ""
    if described in known_keys(cls):
        doc = f"{described}: {known_keys(cls)[described].description}"
    value = flatten(draft.values).get(key)
    shown = None
    if value is not None and value != {}:
        shown = _shown(value)
    return Problem(key, rule, shown, source, suggestion, doc)


def _shown(value: Any) -> str:
    try:
        text = toml_value(value)
    except TypeError:
        text = str(value)
    if len(text) > 100:
        text = f"{text[:97]}..."
    return text


# --- suggestions ----------------------------------------------------------------------------------


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


def _nearest_key(key: str, cls: Any) -> str | None:
    """Return the valid key that is most like an unknown one, of its section if possible."""
    section, _, name = unnumbered(key).lower().replace("-", "_").rpartition(".")
    known = known_keys(cls)
    spellings = [pair for pair in aliases_of(cls).items() if pair[1] in known]
    # Of equal spellings the last is kept: our names win over others', and earlier sections.
    spellings += [(meant.rpartition(".")[2], meant) for meant in reversed(known)]
    anywhere = dict(spellings)
    here = {spelling: meant for spelling, meant in spellings if meant.rpartition(".")[0] == section}
    if name in anywhere:
        return here.get(name, anywhere[name])
    for names, cutoff in ((here, 0.6), (anywhere, 0.85)):
        for near in get_close_matches(name, names, n=1, cutoff=cutoff):
            return names[near]
    return None


def _keys_beside(key: str, cls: Any) -> str:
    """Return the names of a section's keys as the end of a message."""
    section = unnumbered(key).rpartition(".")[0]
    names = []
    for known in known_keys(cls):
        around, _, name = known.rpartition(".")
        if around == section:
            names.append(name)
    place = f"[{section}]" if section else "the top level"
    return f"; {place} has {', '.join(names)}"


# --- words ----------------------------------------------------------------------------------------

_WORDS = {
    "unexpected_keyword_argument": UNKNOWN,
    "missing": REQUIRED,
    "dataclass_type": "is a section: write [{key}] with its keys below",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
    "tuple_type": "must be a list in brackets, such as [1, 2]",
    "finite_number": "must be a finite number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "literal_error": "must be one of {expected}",
    "string_too_short": "must not be empty",
    "too_long": "must have {max_length}, not {actual_length}",
    "too_short": "must have at least {min_length}, not {actual_length}",
    "value_error": "{error}",
}
"""pydantic's types of errors in our words."""


def _rule_of(breach: Any, known: Mapping[str, Key]) -> tuple[str, str]:
    """Return the dotted key of a pydantic error, and the rule that it breaks."""
    kind = breach["type"]
    numbers = dict(breach.get("ctx", {}))
    for name, value in numbers.items():
        if isinstance(value, float):
            numbers[name] = f"{value:g}"
        elif name in ("min_length", "max_length"):
            numbers[name] = counted(value, "item")
    key, rest = _split(breach["loc"], known)
    if kind == "unexpected_keyword_argument":
        return ".".join([key, *rest]).lstrip("."), UNKNOWN
    rule = _WORDS.get(kind, breach["msg"]).format(key=key, **numbers)
    if kind == "tuple_type" and known[unnumbered(key)].section is not None:
        rule = f"is a list of sections: write [[{key}]] before the keys of each"
    item = next(filter(str.isdigit, rest), None)
    if item is not None and kind == "missing":
        rule = f"needs {counted(int(item) + 1, 'item')} or more"
    elif item is not None:
        rule = f"item {int(item) + 1} {rule}"
    if kind == "value_error" and key in known and known[key].section is not None:
        # A rule of the whole section: take the first key that it names.
        for word in re.findall(r"\w+", rule):
            if f"{key}.{word}" in known:
                return f"{key}.{word}", rule
    return key, rule


def _split(loc: Sequence[int | str], known: Mapping[str, Key]) -> tuple[str, list[str]]:
    """Split the place of a pydantic error into the dotted key and what is inside of its value: the
    number of an item, an alternative of a type."""
    parts = list(map(str, loc))
    rest: list[str] = []
    while parts:
        key = unnumbered(".".join(parts))
        is_item = parts[-1].isdigit() and key in known and known[key].section is None
        if key in known and not is_item:
            break
        rest.insert(0, parts.pop())
    return ".".join(parts), rest
