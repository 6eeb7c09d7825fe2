"""Every command, by importing its module."""

from __future__ import annotations

from efftrain_cli.cli import recipes  # noqa: F401
