"""Hash and counts of the quickstart's corpus: the standard library, under the recorded Python."""

from __future__ import annotations

import os
import platform
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from efftrain_cli.recipe.recipe import load_recipe
from tests.recorded.sources import identity


def record() -> dict[str, Any]:
    """Return data_hash, tokens and documents, and the version of Python that they belong to."""
    with TemporaryDirectory() as name, patch.dict(os.environ, EFFTRAIN_CACHE=name):
        return {"python": platform.python_version(), **identity(load_recipe("quickstart"))}
