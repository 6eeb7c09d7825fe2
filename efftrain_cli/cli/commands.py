"""Every command, each in the module of its name; the order here is the order of `efftrain
--help`."""

from __future__ import annotations

from importlib import import_module

COMMANDS = (
    "recipes", "pretrain", "sample", "race", "runs",
    "compare", "sweep", "study",
    "prepare", "tune-warmup", "grow",
    "eval-zeroshot", "export", "import",
    "bench", "verify-resume", "wandb-sync",
)  # fmt: skip


def register(command: str = "") -> None:
    """Import the module of `command`, which puts itself on `app`; all modules if it names no
    command: for help, completion, and the suggestions after a mistake. Typer reads the signature of
    every registered command, a fifth of `recipes list`'s time."""
    for name in (command,) if command in COMMANDS else COMMANDS:
        import_module("efftrain_cli.cli." + {"import": "import_"}.get(name, name.replace("-", "_")))
