"""The Typer application, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from efftrain_cli.foundation.console import print_folded, printable
from efftrain_cli.foundation.environment import check_environment
from efftrain_cli.foundation.errors import EfftrainError, StoppedError, UsageError
from efftrain_cli.foundation.files import disk_error
from efftrain_cli.training.launch import process_rank, refuse_several


def _shortened(parameters: list[Any]) -> list[Any]:
    """Show no type for a switch."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _shortened(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            UsageError: an option of other trainers, or a recipe key; the message names ours.
        """
        own = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        if "--set" in own:
            for position, argument in enumerate(args):
                option, _, value = argument.partition("=")
                if option.startswith("--") and option not in own:
                    _refuse_foreign_option(option, value or "".join(args[position + 1 :][:1]))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        for parameter in self.params:
            if ctx.params.get(parameter.name) == "" != parameter.default:
                raise UsageError(
                    f"{parameter.opts[0].removesuffix('_argument')} is empty\n"
                    "give it a value, or leave it out"
                )
        return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; plainly in a narrow terminal, where Rich's table cuts names short."""
        if shutil.get_terminal_size().columns < 72:
            self.rich_markup_mode = None
            self.epilog = f"\b\n{self.epilog or ''}"  # \b: click keeps these lines as they are
        super().format_help(ctx, formatter)


def _refuse_foreign_option(option: str, value: str) -> None:
    from efftrain_cli.recipe.check import read_aliases

    advice = read_aliases("options").get(option)
    key = option[2:].replace("-", "_")
    if "." in key:
        from efftrain_cli.recipe.check import known_keys, unnumbered
        from efftrain_cli.recipe.recipe import Recipe

        if unnumbered(key) in known_keys(Recipe):
            advice = f"use --set {key}=VALUE"
    if advice is not None:
        if value and not value.startswith("-"):
            advice = advice.replace("VALUE", shlex.quote(value))
        raise UsageError(f"no option {option}\n  {advice}")


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _shortened(super().get_params(ctx))


class Commands(typer.Typer):
    """A group of commands, each with examples at the end of its help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, **options)

    def command(
        self, name: str | None = None, *, examples: Sequence[str] = (), **options: Any
    ) -> Callable[[Any], Any]:
        """Register a command.

        Args:
            examples: command lines that work as they stand; at most 76 columns each, so that no
                terminal breaks them.
        """
        epilog = None
        if examples:
            epilog = "\n".join(["Examples:", *(f"  {example}" for example in examples)])

        def register(function: Any) -> Any:
            # Paragraphs of a docstring are broken at the width of the code, not of the terminal.
            # PYTHONOPTIMIZE=2 leaves no docstring.
            paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
            text = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
            return command(name, cls=_Command, epilog=epilog, help=text, **options)(function)

        command = super().command
        return register


app = Commands(
    name="efftrain",
    invoke_without_command=True,
    pretty_exceptions_show_locals=False,  # locals can hold keys
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from efftrain_cli import __version__

    try:
        torch = version("torch")  # from the package's own record: importing PyTorch takes seconds
    except PackageNotFoundError:
        torch = "missing"
    print(f"efftrain {__version__} (torch {torch}, Python {platform.python_version()})")
    raise typer.Exit


_EPILOG = (
    "Each command's --help ends with examples.\n\n"
    "Exit codes: 0 done; 1 a defect, with a traceback, or a process of several"
    " that ended or has other weights; 2 usage or recipe; 3 data or checkpoint; 4 diverged; 5 out"
    " of memory; 6 disk; 7 in use; 10, 11 --fail-if; 75 stopped and resumable; 130 second Ctrl-C."
)


FIRST_LOOK = """\
Train GPT models; find out which training-efficiency method is worth it.

Start here
  recipes   write one for your text: recipes new mine --text my.txt
  pretrain  train it; --plan says what it costs
  sample    write text with it
  race      is B better than A? trains until the answer is in
  runs      list, show, verify, remove runs

Judge       compare  sweep  study
Train       prepare  tune-warmup  grow
Use         eval-zeroshot  export  import
Machine     bench  verify-resume  wandb-sync

Examples: efftrain COMMAND --help"""
"""What `efftrain` prints alone."""


@app.callback(epilog=_EPILOG)
def efftrain(
    ctx: typer.Context,
    version: Annotated[
        bool,
        Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Train GPT models; find out which training-efficiency method is worth it."""
    if ctx.invoked_subcommand is None:
        print(FIRST_LOOK)


def run_app() -> None:
    """Run the command line. A user's mistake prints one message on stderr and no traceback."""
    from efftrain_cli.cli.commands import register

    register(*sys.argv[1:2])
    rank = 0  # of several processes; not known before the environment is checked
    try:
        check_environment()
        rank = process_rank()
        _check_place()
        refuse_several("".join(sys.argv[1:2]))
        app()
    except EfftrainError as error:
        if rank == 0:
            _say(str(error) if isinstance(error, StoppedError) else f"error: {error}")
        elif not isinstance(error, UsageError):
            _say(f"error: rank {rank}: {error}")  # of the others, rank 0 prints its own
        raise SystemExit(error.exit_code) from None
    except (BrokenPipeError, SystemExit) as ended:
        # Typer turns a broken pipe into exit code 1.
        if not isinstance(ended, BrokenPipeError) and not isinstance(
            ended.__context__, BrokenPipeError
        ):
            raise
        # The reader of our output has gone (`| head`); say nothing, and keep the interpreter from
        # flushing into the void.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:
        if error.errno is None:  # a library's, not the system's
            raise
        refused: EfftrainError = disk_error(error)
        if "usable temporary" in str(error):
            refused = UsageError(f"{error.strerror}: set TMPDIR")
        _say(f"error: {refused}")
        raise SystemExit(refused.exit_code) from None


def _check_place() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "the working directory was deleted\n"
            "  change to one that exists and give the command again"
        ) from None


def _say(text: str) -> None:
    """Print a message on standard error, or nothing if nothing can be written. Control characters
    in it are escaped."""
    with contextlib.suppress(OSError, ValueError):
        # What follows the first line of an error, such as its fix, is set in.
        if text.startswith("error: "):
            text = re.sub(r"\n(?=\S)", "\n  ", text)
        lines = map(printable, text.split("\n"))
        print_folded("\n".join(lines), stream=sys.stderr)
