"""Build the object that a draft describes, and report each mistake with the key it is in.

This works for any pydantic dataclass of pydantic dataclasses. Rules that need several sections are
in `rules.py` and in the methods.
"""

from __future__ import annotations

import json
import re
import tomllib
from copy import deepcopy
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from efftrain_cli.foundation.errors import Breaches, Problem
from efftrain_cli.foundation.section import field_docstrings
from efftrain_cli.methods.method import Method
from efftrain_cli.recipe.draft import MISTAKES, Draft, table_of
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
        if own or self.section is None:
            return own or ""
        paragraph, _, _ = self.section.__doc__.partition("\n\n")
        return " ".join(paragraph.split())


Keys = dict[str, Key]


@cache
def known_keys(cls: Any) -> Keys:
    """Map every dotted key and section of a class to what it is; a [[section]] has no number."""
    keys: Keys = {}
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


def validated(draft: Draft, cls: type[T]) -> T:
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
        items = value if isinstance(value, list) else [value]
        for rule in filter(None, map(_unwritable, items)):
            raise draft.error([_problem(draft, key, rule)])
    problems = list(draft.problems)
    try:
        # As JSON: there, strict types take a list for a tuple and a table for a section.
        text = json.dumps(values, default=str)
        result = TypeAdapter(cls).validate_json(text)
    except ValidationError as error:
        rules = _explained(_rules_of(error, known), cls)
        for key, rule in rules.items():
            problems.append(_problem(draft, key, rule))
    if problems:
        raise draft.error(problems)
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


def _problem(draft: Draft, key: str, rule: str) -> Problem:
    """Return a problem with the key's value and place."""
    sources = [draft.origin(key)]
    # A rule between keys may be broken by an override of another key that it names.
    for name in re.findall(r"\w+\.[\w.]*\w", rule):
        place = draft.places.get(name, "")
        if place.startswith("--set") and place not in sources:
            sources.append(place)
    value = flatten(draft.values).get(key)
    shown = None
    if value not in (None, {}):
        shown = toml_value(value)
    return Problem(key, rule, shown, ", ".join(sources))


Rules = dict[str, str]
"""Dotted key -> the rule that it breaks."""
UNKNOWN = "unknown key"
REQUIRED = "is required"


def _rules_of(error: ValidationError, known: Keys) -> Rules:
    """Return the rules that pydantic finds broken."""
    rules: Rules = {}
    for breach in error.errors(include_url=False):
        broken = [_rule_of(breach, known)]
        cause = breach.get("ctx", {}).get("error")
        if isinstance(cause, Breaches):
            broken = list(cause.breaches)
        for key, rule in broken:
            before = rules.setdefault(key, rule)
            if rule not in before:  # an alternative of a type
                rules[key] = f"{before} or {rule}"
    return rules


def _explained(rules: Rules, cls: Any) -> Rules:
    """Say what each unknown key may mean. A required key that is misspelt is one mistake."""
    unknown = [key for key, rule in rules.items() if rule == UNKNOWN]
    # A comparison with all keys takes milliseconds: none for thousands of mistakes.
    meant = {key: _nearest_key(key, cls) for key in unknown[:MISTAKES]}
    explained: Rules = {}
    for key, rule in rules.items():
        if meant.get(key):
            rule += f"; did you mean {meant[key]}?"
        elif rule == UNKNOWN:
            section = _section_of(key)
            names = []
            for known, about in known_keys(cls).items():
                if _section_of(known) == section:
                    names.append(about.name)
            place = f"[{section}]" if section else "the top level"
            rule += f"; {place} has {', '.join(names)}"
        if rule != REQUIRED or key not in meant.values():
            explained[key] = rule
    return explained


# --- suggestions ----------------------------------------------------------------------------------


def read_aliases(table: str) -> dict[str, Any]:
    """Return what other programs and papers call ours: "keys" or "options" of aliases.toml."""
    path = Path(__file__).with_name("aliases.toml")
    return tomllib.loads(path.read_text("utf-8"))[table]


@cache
def _names(cls: Any) -> list[tuple[str, str]]:
    """List (name, dotted key) of all keys, then of what other programs call them."""
    names = [(about.name, key) for key, about in known_keys(cls).items()]
    aliases = read_aliases("keys")
    for section, method in methods_in(cls).items():
        for key, others in method.aliases.items():
            aliases[f"{section}.{key}".rstrip(".")] = others.split()
    for key, others in aliases.items():
        if key in known_keys(cls):
            names += [(other, key) for other in others]
    return names


def _section_of(key: str) -> str:
    return unnumbered(key).rpartition(".")[0]


def _nearest_key(key: str, cls: Any) -> str | None:
    """Return the valid key that is most like an unknown one, of its section if possible."""
    typed = unnumbered(key).lower().replace("-", "_")
    section, _, name = typed.rpartition(".")
    matcher = SequenceMatcher(b=name)
    nearest = None
    highest = 0.85
    for other, known in _names(cls):
        matcher.set_seq1(other)
        bonus = 0.25 if _section_of(known) == section else 0.0
        likeness = bonus + matcher.quick_ratio()  # an upper bound
        if likeness > highest:
            likeness = bonus + matcher.ratio()
        if likeness > highest:
            highest = likeness
            nearest = known
    return nearest


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


def _rule_of(breach: Any, known: Keys) -> tuple[str, str]:
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
