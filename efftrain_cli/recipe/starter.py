"""`efftrain recipes new`: a recipe that says what differs from another. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from efftrain_cli.recipe.draft import is_path, parse_override, read_recipe_file
from efftrain_cli.recipe.recipe import check_draft, methods_among
from efftrain_cli.recipe.toml import toml_lines, toml_value

_TEMPLATE = """\
# {name}: say in one sentence what it is; `efftrain recipes list` shows this line.
#
#   efftrain pretrain {name} --plan               what it costs, before anything is spent
#   efftrain pretrain {name}                      train it
#   efftrain recipes show {name} --describe       explain all keys
#
# Keys that are not here come from the base.
base = {base}
"""
_EXAMPLE = """
# A method is on if its section is present; `efftrain recipes list` shows recipes of each.
# For example:
# [seq_len_warmup]
# start = 32                      # train on short sequences first
# steps = 100                     # until the full length is reached
"""


def starter(name: str, base: str, overrides: Sequence[str], comments: Mapping[str, str]) -> str:
    """Return the text of ./recipes/NAME.toml: `base` with `key=value` overrides.

    Args:
        base: a name, or a path as seen from the working directory.
        comments: dotted key -> a comment to stand after its value.

    Raises:
        RecipeError: `base` is not found, or breaks any rule with the overrides.
    """
    draft = read_recipe_file(base, overrides)
    check_draft(draft)
    values: dict[str, Any] = {}
    for override in overrides:
        section, *keys = parse_override(override)[0].split(".")
        written = draft.values[section]
        if keys and isinstance(written, dict):
            values.setdefault(section, {})[keys[0]] = written[keys[0]]
        else:  # a key of the top level, or a whole list of sections
            values[section] = written
    if is_path(base):
        base = os.path.relpath(base, "recipes")
    text = _TEMPLATE.format(name=name, base=toml_value(base))
    text += "".join(f"{line}\n" for line in toml_lines(values, comments))
    if not methods_among(values):
        text += _EXAMPLE
    return text
