"""Every command, each in the module of its name; the order here is the order of `efftrain --help`."""

from __future__ import annotations

from importlib import import_module

COMMANDS = (
    "pretrain",
    "bench",
    "tune-warmup",
    "grow",
    "prepare",
    "recipes",
    "sample",
    "export",
    "import",
    "compare",
    "eval-zeroshot",
    "runs",
    "wandb-sync",
    "checkpoint",
    "sweep",
    "verify-resume",
)


def register(command: str = "") -> None:
    """Imports the module of `command`, which puts itself on `app`; all of them where it is none: for help, for completion, and
    for the suggestions after a mistake. Typer reads the signatures of what is registered, a fifth of `recipes list`'s time."""
    for name in (command,) if command in COMMANDS else COMMANDS:
        import_module("efftrain_cli.cli." + {"import": "import_"}.get(name, name.replace("-", "_")))
