"""What `--help` and `--version` say: types only where they say something, examples that exist, and
answers without PyTorch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from typing import Any, get_args, get_type_hints
from unittest.mock import Mock

import pytest
import typer

from efftrain_cli import __version__
from efftrain_cli.cli.app import FIRST_LOOK, app
from efftrain_cli.cli.commands import COMMANDS
from efftrain_cli.foundation.errors import EfftrainError
from tests.conftest import cli
from tests.terminal import on_terminal

ROOT: Any = typer.main.get_command(app)


def commands(group: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words begin with, and the words after it."""
    command, rest = ROOT, list(words)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    return command, rest


def known_options(words: list[str]) -> set[str]:
    """The options of the command that these words begin with."""
    options = set()
    for parameter in command_of(words)[0].params:
        options.update(parameter.opts)
    return options


def help_of(*path: str, columns: int = 80) -> str:
    environment = {"COLUMNS": str(columns), "TERM": "dumb"}
    return cli(*path, "--help", prog_name="efftrain", env=environment).output


def examples_of(shown: str) -> list[str]:
    """The command lines at the end of a help."""
    return [line.strip() for line in shown.split("Examples:")[1].splitlines() if line.strip()]


def choices_of(hint: Any) -> list[str]:
    """Return the words of a Literal, or of one within an Optional."""
    words: list[str] = []
    for argument in get_args(hint):
        words += [argument] if isinstance(argument, str) else choices_of(argument)
    return words


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_help_names_options_and_choices_and_ends_with_examples(path, columns):
    shown = help_of(*path, columns=columns)
    assert not re.search(r"\u2026|bool>|\.\.\.}\.\.\.", shown)
    command, _ = command_of(list(path))
    for parameter in command.params:
        for name in parameter.opts if parameter.param_type_name == "option" else ():
            assert name in shown
    for hint in get_type_hints(command.callback).values():
        for choice in choices_of(hint):
            assert re.search(rf"\b{choice}\b", shown), choice
    examples = examples_of(shown)
    assert examples, "give @app.command(..., examples=(...))"
    for example in examples:
        assert example.startswith("efftrain "), f"broken over lines: {example!r}"
        words = shlex.split(example)[1:]
        assert tuple(words[: len(path)]) == path
        options = {word for word in words if word.startswith("-")}
        assert options <= known_options(words), example


def test_help_fits_a_narrow_terminal(tmp_path):
    shown = on_terminal(tmp_path, 60, "pretrain", "--help")
    assert "--override-resume  " in shown
    before_examples = shown.split("Examples:")[0].splitlines()
    assert [line for line in before_examples if len(line) > 60] == []


def test_help_names_the_exit_codes_of_all_errors():
    shown = " ".join(help_of().split())
    for kind in EfftrainError.__subclasses__():
        assert f" {kind.exit_code} " in shown, kind


def test_the_first_look_has_every_command_in_its_panel():
    """`efftrain` alone, in 20 lines of 80 columns, and --help, in the same groups."""
    shown = cli("").output
    assert shown == FIRST_LOOK + "\n"
    assert len(shown.splitlines()) <= 20 and max(map(len, shown.splitlines())) <= 80
    group = shown.split("Start here")[1].split("\n\n")[0]
    found = []
    for line in help_of().split("Start here ─")[1].splitlines():
        if title := re.match(r"╭─ (\w+) ─", line):
            group = shown.split(f"\n{title[1]} ")[1].splitlines()[0]
        elif name := re.match(r"│ ([a-z][a-z-]+) ", line):
            found.append(name[1])
            assert name[1] in group.split(), line
    assert sorted(found) == sorted(COMMANDS)


def test_version_names_the_program_pytorch_and_python(monkeypatch):
    shown = rf"efftrain {re.escape(__version__)} \(torch (\S+), Python 3\.\d+\.\d+\)\n"
    found = re.fullmatch(shown, cli("--version").output)
    assert found is not None and found[1][0].isdigit()
    monkeypatch.setattr("importlib.metadata.version", Mock(side_effect=PackageNotFoundError))
    found = re.fullmatch(shown, cli("--version").output)
    assert found is not None and found[1] == "missing"
