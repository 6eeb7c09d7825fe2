"""What stands in the pages of the documentation."""

from __future__ import annotations

import re

from tests.conftest import REPOSITORY


def text_of(page: str) -> str:
    """Return the text of docs/`page`.md."""
    return (REPOSITORY / "docs" / f"{page}.md").read_text(encoding="utf-8")


def blocks_of(page: str, kind: str) -> list[str]:
    """Return the blocks of code of a kind, as "sh"."""
    return re.findall(rf"```{kind}\n(.*?)```", text_of(page), re.DOTALL)


def commands_of(page: str) -> list[str]:
    """Return the lines of all blocks of commands, without comments."""
    lines = "\n".join(blocks_of(page, "sh")).splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.strip()]
