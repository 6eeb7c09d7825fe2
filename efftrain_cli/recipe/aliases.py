"""What other programs and papers call our recipe keys and options: aliases.toml, read only after a
mistake."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read_aliases(table: str) -> dict[str, Any]:
    """Return a table of aliases.toml, "keys" or "options"."""
    text = Path(__file__).with_name("aliases.toml").read_text("utf-8")
    return tomllib.loads(text)[table]
