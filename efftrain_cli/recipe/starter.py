"""`efftrain recipes new`: a commented recipe to begin with, for one's own text. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from efftrain_cli.recipe.draft import parse_override, read_recipe_file
from efftrain_cli.recipe.recipe import check_draft, flat_values
from efftrain_cli.recipe.toml import toml_value

_PLACE = re.compile(r"\{([\w.]+)\}")
"""A place for a value in the template."""
_TEMPLATE = """\
# {name}: say in one sentence what it is; `efftrain recipes list` shows this line.
#
#   efftrain pretrain --recipe {name} --plan      what it costs, before anything is spent
#   efftrain pretrain --recipe {name}             train it
#   efftrain recipes show {name} --describe       explain all keys
#
# Keys that are not here come from the base.
base = {base}

[data]
train = {data.train}
# A file, folder or glob of .txt, .jsonl, .json.gz or .parquet,
# or a Hugging Face dataset "owner/name".
valid_fraction = {data.valid_fraction}
# Share of the text held out for validation. For a validation text of your own:
# valid = "held-out.txt"
tokenizer = {data.tokenizer}
# "bpe:N" trains a tokenizer of N tokens on this text; "gpt2" is GPT-2's, of 50,257.
repeat = {data.repeat}
# true: a text smaller than the budget is read several times.
# Many passes overfit; watch the validation loss.

[model]
n_layer = {model.n_layer}
n_head = {model.n_head}
n_embd = {model.n_embd}
seq_len = {model.seq_len}
# Blocks, attention heads, width and context in tokens.
# Without embeddings a model has 12 n_layer n_embd^2 parameters.

[optim]
lr = {optim.lr}
min_lr = {optim.min_lr}
warmup_steps = {optim.warmup_steps}
# The peak that the learning rate climbs to, and where it falls to by the end.
# Larger models need a lower peak.

[train]
tokens = {train.tokens}
batch_size = {train.batch_size}
# The budget; 20 tokens a parameter is a common choice. Sequences of one optimizer step.

[eval]
every = {eval.every}
# Steps between two validations. To see text while it trains: sample = "Once upon a time"
"""
_METHODS = """
# A method is on if its section is present; `efftrain recipes list` shows recipes of each.
# For example:
# [seq_len_warmup]
# start = 32                      # train on short sequences first
# steps = 100                     # until the full length is reached
"""


def starter(
    name: str,
    base: str,
    overrides: Sequence[str],
    comments: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the text of a recipe `name`: `base` with `key=value` overrides, all written out.

    Args:
        comments: dotted key -> a comment to stand after its value; `overrides` has the key.

    Raises:
        RecipeError: `base` is not found, or breaks any rule with the overrides.
    """
    import tomlkit

    draft = read_recipe_file(base, overrides)
    values = {**flat_values(check_draft(draft)), "base": base}
    text = _TEMPLATE.replace("{name}", name)
    if "data.train" not in values:
        text = text.replace("train = {data.train}\n", "")
    filled = _PLACE.sub(lambda place: toml_value(values[place[1]]), text)
    document = tomlkit.parse(filled)
    for override in overrides:
        key = parse_override(override)[0]
        if key not in _PLACE.findall(text):
            _copy(draft.values, document, key.split("."))
    for key, comment in comments.items():
        section, _, inner = key.partition(".")
        table: Any = document[section]
        table.item(inner).comment(comment)
    return re.sub(r"\n+(?=\[)", "\n\n", tomlkit.dumps(document)) + _METHODS


def _copy(source: dict[str, Any], target: dict[str, Any], path: Sequence[str]) -> None:
    """Copy the value at `path`; of a list of sections, the whole list."""
    name, *rest = path
    value = source[name]
    if rest and isinstance(value, dict):
        _copy(value, target.setdefault(name, {}), rest)
    else:
        target[name] = value
