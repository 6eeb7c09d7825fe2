"""Every command, by importing its module."""

from __future__ import annotations
