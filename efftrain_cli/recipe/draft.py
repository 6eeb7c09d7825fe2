"""Find recipes' files, and read their TOML with inheritance and overrides into a draft.

What a recipe means is `recipe.py`'s; a draft keeps for every key where its value was written, so
that a message can point there.

A file may name another with `base = "name"`; its own keys win. `key = false` takes an inherited
optional key or section away, in a file (`parallel = false`) and on the command line (`--set
parallel=false`).
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.environment import expanded
from efftrain_cli.foundation.errors import Problem, RecipeError, nearest
from efftrain_cli.recipe.toml import flatten, toml_value

_PACKAGE = Path(__file__).resolve().parent.parent
Values = dict[str, Any]
"""Nested tables as TOML gives them."""
Places = dict[str, str]
"""Dotted key or section -> where it was written: "file:line", or "--set key=value"."""
MISTAKES = 100
"""Mistakes of a recipe that are listed; more are counted."""


@dataclass
class Draft:
    """A recipe as written, merged but not yet checked."""

    name: str
    path: Path
    kind: str = "recipe"
    """What messages call it: "recipe" or "study"."""
    bases: list[Path] = field(default_factory=list)
    """Files that it inherits from, nearest first."""
    values: Values = field(default_factory=dict)
    places: Places = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    """Mistakes of overrides."""

    def origin(self, key: str) -> str:
        """Return where `key` was written, or the table around it, or the file."""
        table = _enclosing(key, self.places)
        return self.places.get(table, shown_path(self.path))

    def add(self, values: Values, places: Places) -> None:
        """Lay the values of a file or an override over these.

        Args:
            places: of its keys; a key without one, of a table in one line, stands where its table
                does.
        """
        _merge(self.values, values)
        for key in flatten(values):
            self.places[key] = places[_enclosing(key, places)]
        self.places |= places

    def error(self, problems: Sequence[Problem]) -> RecipeError:
        """Return the error that lists every problem."""
        mistakes = counted(len(problems), "mistake")
        lines = [f"{self.kind} {self.name!r} has {mistakes}; nothing was run"]
        for problem in problems[:MISTAKES]:
            parts = [part[:100] for part in (problem.key, problem.value) if part]
            rule = problem.rule.replace("\n", "\n    ")
            lines.append(f"  {' = '.join(parts)}   ({problem.source})")
            lines.append(f"    {rule}")
        if len(problems) > MISTAKES:
            lines.append(f"  and {len(problems) - MISTAKES:,} more")
        return RecipeError("\n".join(lines), problems)


def shown_path(path: Path) -> str:
    """Return the path as a user would type it: relative to the working directory where it lies
    below it."""
    here = Path.cwd()
    path = path.absolute()
    if path.is_relative_to(here):
        path = path.relative_to(here)
    return str(path)


# --- finding --------------------------------------------------------------------------------------


def shipped_recipes() -> Path:
    """Return the folder of the recipes that ship with the program."""
    in_wheel = _PACKAGE / "recipes"
    if in_wheel.is_dir():
        return in_wheel
    return _PACKAGE.parent / "recipes"


def recipe_folders() -> list[Path]:
    """List the folders that a recipe's name is looked up in: ./recipes, then the recipes that ship
    with the program."""
    return [Path("recipes"), shipped_recipes()]


def recipe_names() -> list[str]:
    """List the names of every recipe that --recipe finds, sorted."""
    names = set()
    for folder in recipe_folders():
        names |= {path.stem for path in folder.glob("*.toml")}
    return sorted(names)


def is_path(name_or_path: str) -> bool:
    """Return whether --recipe's value is a path, not a name: it has a folder or ends in .toml."""
    return "/" in name_or_path or name_or_path.endswith(".toml")


def recipe_name(name_or_path: str) -> str:
    """Return what runs of the recipe are called after: its name, its file's, or for a run's
    recipe.toml the run's."""
    if not is_path(name_or_path):
        return name_or_path
    path = Path(name_or_path)
    if path.name == "recipe.toml":
        return path.absolute().parent.name
    return path.stem


def find_recipe(name_or_path: str, beside: Path | None = None) -> Path:
    """Find the file of a recipe: a path, or a name in ./recipes, then among the recipes that ship
    with the program.

    Args:
        beside: the file whose `base` this is; its own folder is searched first, and the file itself
            is found last, so that ./recipes/small.toml may build on the shipped `small`.

    Raises:
        RecipeError: there is none; the message names the nearest one.
    """
    folders = recipe_folders()
    if beside is not None:
        folders.insert(0, beside.parent)
    candidates = [folder / f"{name_or_path}.toml" for folder in folders]
    if is_path(name_or_path):
        path = expanded(name_or_path, "write the path without ~")
        candidates = [path if beside is None else beside.parent / path]
    files = [path for path in candidates if path.is_file()]
    if beside is not None:
        files.sort(key=beside.samefile)
    if files:
        return files[0]
    hint = nearest(name_or_path, recipe_names(), most=1) or "`efftrain recipes list` shows all"
    inside = Path(name_or_path) / "recipe.toml"
    if inside.is_file():
        hint = f"did you mean {inside}?"
    elif Path(name_or_path).is_file():
        hint = f"to train on it as text: --recipe small --set data.train={name_or_path}"
    places = dict.fromkeys(map(shown_path, candidates))
    looked = " and ".join(places)
    raise RecipeError(f"there is no recipe {name_or_path!r}: looked for {looked}\n  {hint}")


def first_comment(path: Path) -> str:
    """Return the first line of a recipe's file if it is a comment: what the recipe is."""
    line = _text(path).split("\n")[0]
    return line.lstrip("# ") if line.startswith("#") else ""


# --- reading --------------------------------------------------------------------------------------


def read_recipe_file(name_or_path: str, overrides: Sequence[str] = ()) -> Draft:
    """Read a recipe with everything it inherits, then the overrides. Mistakes of overrides are
    collected in the draft.

    Raises:
        RecipeError: there is no such recipe or base, a file is not TOML, or the bases form a loop.
    """
    path = find_recipe(name_or_path)
    draft = Draft(recipe_name(name_or_path), path)
    layers = []
    while True:
        values, places = _read_layer(path, draft)
        layers.append((values, places))
        if "base" not in values:
            break
        base = values.pop("base")
        try:
            path = _find_base(base, [draft.path, *draft.bases])
        except RecipeError as error:
            written = toml_value(base)
            problem = Problem("base", str(error), written, places["base"])
            raise draft.error([problem]) from None
        draft.bases.append(path)
    for values, places in reversed(layers):
        draft.add(values, places)
    for override in overrides:
        apply_override(draft, override)
    return draft


def _find_base(base: object, chain: list[Path]) -> Path:
    """Return the file that `base` names in the last file of a chain of recipes.

    Raises:
        RecipeError: there is none, or it is in the chain already.
    """
    if not isinstance(base, str) or not base:
        raise RecipeError("must be the name or path of one recipe, in quotes")
    found = find_recipe(base, beside=chain[-1])
    if any(found.samefile(path) for path in chain):
        names = [path.stem for path in (*chain, found)]
        raise RecipeError(f"bases form a loop: {' -> '.join(names)}")
    return found


def read_toml_file(path: Path) -> Draft:
    """Read a study's TOML file, which inherits nothing.

    Raises:
        RecipeError: there is no such file, or it is not TOML.
    """
    draft = Draft(path.stem, path, "study")
    draft.add(*_read_layer(path, draft))
    return draft


LARGEST = 1 << 20
"""Bytes of a file that may be a recipe."""
_TOML_HINT = (
    'text has quotes, as in "300M"; numbers have digits on both sides of the dot;'
    " true and false are lower case; `key = false` takes a key away"
)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise RecipeError(
                f"{shown_path(path)} is not a recipe: it has {path.stat().st_size:,} bytes\n"
                "  a recipe is a TOML file (`efftrain recipes new NAME` writes one);"
                f" text to train on is given by --set data.train={shown_path(path)}"
            )
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{shown_path(path)} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise RecipeError(f"{shown_path(path)}: {error.strerror}") from None


def _read_layer(path: Path, draft: Draft) -> tuple[Values, Places]:
    """Return the values of a file of a draft, and where its keys and headers stand.

    Raises:
        RecipeError: a line is not TOML. Nothing can be said of the rest before it is.
    """
    text = _text(path)
    file = shown_path(path)
    try:
        return tomllib.loads(text), _places_in(text, file)
    except tomllib.TOMLDecodeError as error:
        rule, _, where = str(error).partition(" (at ")
        lines = text.rstrip().split("\n")
        number = len(lines)
        if line_number := re.match(r"line (\d+)", where):
            number = min(int(line_number[1]), number)
        problem = Problem(
            key="",
            rule=f"not TOML: {rule[:1].lower()}{rule[1:]}; {_TOML_HINT}",
            value=lines[number - 1].strip(),
            source=f"{file}:{number}",
        )
        raise draft.error([problem]) from None


_HEADER = re.compile(r"\s*(\[\[?)\s*([\w.-]+)\s*\]")
_KEY = re.compile(r"\s*([\w.-]+)\s*=")


def _places_in(text: str, file: str) -> Places:
    """Map dotted keys to "file:line", for keys and headers that begin a line, and "" to the file;
    the n-th [[table]] is `table.n`, from 0."""
    places = {"": file}
    counts: Counter[str] = Counter()
    section = ""
    for number, line in enumerate(text.split("\n"), 1):
        if header := _HEADER.match(line):
            section = header[2]
            if header[1] == "[[":
                places.setdefault(section, f"{file}:{number}")
                section = f"{section}.{counts[section]}"
                counts[header[2]] += 1
            places[section] = f"{file}:{number}"
        elif key := _KEY.match(line):
            places[f"{section}.{key[1]}".lstrip(".")] = f"{file}:{number}"
    return places


def _enclosing(key: str, places: Places) -> str:
    """Return `key`, or the innermost table around it that has a place, or ""."""
    while key and key not in places:
        key = key.rpartition(".")[0]
    return key


def _merge(into: Values, table: Values) -> None:
    """Lay `table` over `into`: tables are merged; everything else, arrays of tables included, is
    replaced."""
    for name, value in table.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def parse_override(override: str) -> tuple[str, Any]:
    """Split `key=value`: the value is TOML, and what is not TOML is a string.

    Raises:
        ValueError: there is no key, or no `=`.
    """
    key, equals, written = override.partition("=")
    key = key.strip()
    written = written.strip()
    if not equals or not all(key.split(".")):
        raise ValueError("an override is written key=value, for example optim.lr=3e-4")
    with suppress(tomllib.TOMLDecodeError):
        parsed = tomllib.loads(f"value = {written}")
        if len(parsed) == 1:
            return key, parsed["value"]
    return key, written


def apply_override(draft: Draft, override: str) -> None:
    """Write `key=value` into a draft, or its mistake."""
    source = f"--set {override}"
    key = ""
    try:
        key, value = parse_override(override)
        if key == "base":
            raise ValueError("only a file has a base; choose the recipe with --recipe")
        table, name = table_of(draft.values, key)
    except ValueError as error:
        draft.problems.append(Problem(key, str(error), source=source))
        return
    _merge(table, {name: value})
    keys = flatten({key: value})
    draft.places |= dict.fromkeys([key, *keys], source)
    section, _, _ = key.rpartition(".")
    draft.places.setdefault(section or key, source)


def table_of(values: Values, key: str) -> tuple[Values, str]:
    """Return the table that a dotted key is in, made if it is missing, and the name in it.

    Raises:
        ValueError: the key leads into a list of values, or to an item that a list does not have.
    """
    *sections, name = key.split(".")
    table: Any = values
    for section in sections:
        if isinstance(table, dict):
            if not isinstance(table.get(section), dict | list):
                table[section] = {}
            table = table[section]
        elif isinstance(table, list):
            if section not in map(str, range(len(table))):
                raise ValueError(f"there are {len(table)} of them, numbered from 0")
            table = table[int(section)]
    if not isinstance(table, dict):
        raise ValueError(
            "is one list: set it whole, as in optim.betas=[0.9, 0.95];"
            " of a list of sections, name one, as in stages.0.lr"
        )
    return table, name
