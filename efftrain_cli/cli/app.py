"""The Typer application, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import errno
import os
import sys

import typer

from efftrain_cli.foundation.errors import DiskError, EfftrainError, StoppedError

app = typer.Typer(
    name="efftrain",
    help="Train GPT models with training-efficiency methods and compare them honestly.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # locals can hold keys
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def efftrain() -> None:
    """Train GPT models with training-efficiency methods and compare them honestly."""


def run_app() -> None:
    """Runs the command line. A user's mistake prints one message on stderr and no traceback."""
    from efftrain_cli.cli.commands import register

    register(*sys.argv[1:2])
    try:
        app()
    except StoppedError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except EfftrainError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); say nothing, and keep the interpreter from flushing into the void.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: {error.filename or 'a file'}: the disk is full; make room and give the command again", file=sys.stderr)
        raise SystemExit(DiskError.exit_code) from None
