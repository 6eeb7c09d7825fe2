"""Standard output: the console, numbers as people read them, and a reader that has gone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, TextIO
from unicodedata import category

from efftrain_cli.foundation.signals import ask_to_stop

if TYPE_CHECKING:
    from rich.console import Console


def human(number: float, unit: str = "") -> str:
    """Format a number with its prefix: 1234567 -> "1.23M", with the unit "B" -> "1.23 MB".

    A count below 10,000 is written out, to four significant digits: 8192 -> "8,192".
    """
    if not unit and abs(number) < 9999.5:
        return f"{number:,.4g}"
    prefix = ""
    for larger in "kMGTPEZ" if unit else "KMBT":
        # What three digits would round up to a thousand is one of the next.
        if abs(number) < 999.5:
            break
        number /= 1000
        prefix = larger
    space = " " if unit else ""
    return f"{number:.3g}{space}{prefix}{unit}"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: (1, "step") -> "1 step", (2000, "step") -> "2,000 steps"."""
    ending = "" if number == 1 else "s"
    return f"{number:,} {noun}{ending}"


def listed(names: Sequence[object], most: int = 4) -> str:
    """Join the first names: (0, 1, 2, 3, 5, 6) -> "0, 1, 2, 3 and 2 more"."""
    text = ", ".join(map(str, names[:most]))
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def human_seconds(seconds: float) -> str:
    """Format seconds: 3725 -> "1 h 02 min"."""
    if 0 < seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    whole = round(seconds)  # 119.9 is 2 minutes, not "1 min 60 s"
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, rest = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {rest:02} min"
    days = whole / 86400
    if days < 3 * 365:
        return f"{days:,.1f} days"
    return f"{days / 365.25:,.0f} years"


Row = tuple[str, ...]
"""Cells of a table."""


def table_lines(header: Row, rows: Sequence[Row], spare: Row = ()) -> list[str]:
    """Format a plain table: columns two spaces apart, numbers to the right. A terminal that is too
    narrow gets it without columns of `spare`, the first ones first."""
    columns = {column[0]: _padded(column) for column in zip(header, *rows, strict=True)}
    for name in spare:
        needed = sum(len(cells[0]) + 2 for cells in columns.values()) - 2
        if sys.stdout.isatty() and needed > shutil.get_terminal_size().columns:
            del columns[name]
    lines = map("  ".join, zip(*columns.values(), strict=True))
    return [line.rstrip() for line in lines]


def _padded(column: Row) -> list[str]:
    """Return the cells of a column at one width, numbers to the right."""
    width = max(map(len, column))
    if all(re.match(r"[-+.\d]|$", cell) for cell in column[1:]):
        return [cell.rjust(width) for cell in column]
    return [cell.ljust(width) for cell in column]


def print_labelled(console: Console, lines: Iterable[str], indent: int) -> None:
    """Print lines with a label of `indent` columns, folded in a terminal below their text."""
    for line in lines:
        console.print(folded(line, indent, console.file), markup=False, soft_wrap=True)


def folded(line: str, indent: int, stream: IO[str] | None) -> str:
    """Break a line at words to the width of the terminal, later lines indented by `indent` columns,
    or as the first.

    The line stays as it is if `stream`, standard output by default, is no terminal: programs read
    lines. A command in backquotes and an interval such as [1.2, 1.3] are not broken.
    """
    if not (stream or sys.stdout).isatty():
        return line
    own = len(line) - len(line.lstrip())
    whole = re.sub(r"`[^`]*`|\[\S+ \S+\]", lambda found: found[0].replace(" ", "\0"), line)
    broken = textwrap.fill(
        whole,
        shutil.get_terminal_size().columns,
        subsequent_indent=" " * max(indent, own),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return broken.replace("\0", " ")


def print_folded(text: str, indent: int = 2, stream: TextIO | None = None) -> None:
    """Print text, each line folded if `stream`, standard output by default, is a terminal."""
    lines = [folded(line, indent, stream) for line in text.split("\n")]
    # At once: messages of several ranks do not mix.
    print("\n".join(lines), file=stream, flush=True)


_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of controls, changes of direction, broken surrogates and line ends."""


def printable(text: object, keep: str = "") -> str:
    """Escape hidden characters, but for those of `keep`, so that foreign text can neither move a
    terminal's cursor nor end a line."""
    shown = []
    for character in str(text):
        if category(character) in _HIDDEN and character not in keep:
            character = character.encode("unicode_escape").decode()
        shown.append(character)
    return "".join(shown)


def print_json(values: object) -> None:
    """Print values as JSON on standard output, for other programs."""
    print(json.dumps(values, indent=1))


def say(text: str) -> None:
    """Print progress or a warning on standard error, away from data; if that cannot be written,
    print nothing."""
    with steady_output():
        print_folded(text, stream=sys.stderr)


_silent = False


def silence() -> None:
    """Print nothing on consoles made from now on, and show no progress (`--quiet`); warnings and
    errors are shown."""
    global _silent
    _silent = True


def silent() -> bool:
    """Return whether `--quiet` was given: no progress is shown."""
    return _silent


def make_console() -> Console:
    """Return standard output for progress, which `--quiet` hides; lines are not folded where it is
    not a terminal."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            """Leave a reader that has gone (`| head`) to the command line; rich itself would call
            it a failure."""
            raise BrokenPipeError

    return Output(soft_wrap=not sys.stdout.isatty(), highlight=False, quiet=_silent)


class _Output(io.FileIO):
    """A descriptor to write to whose faults (a full disk, a terminal that has gone) must not stop
    training."""

    def write(self, data: Any) -> int:
        try:
            # A stream that does not block, and is full, loses the text.
            return super().write(data) or len(data)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and self.fileno() == 1:
                ask_to_stop("a closed output")
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


@contextlib.contextmanager
def steady_output() -> Iterator[None]:
    """Leave standard output and errors that cannot be written unsaid while the block runs. A reader
    that goes away (`| head`) asks training to stop. Streams that are not files (tests, a notebook)
    stay as they are."""
    output = _steady(sys.stdout, 1)
    errors = _steady(sys.stderr, 2)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            yield
        finally:
            for stream in (output, errors):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()


def _steady(stream: TextIO, number: int) -> TextIO:
    """Return a stream that writes to the same descriptor as `stream` and never fails; `stream` if
    it is no file."""
    try:
        if stream.fileno() != number:
            return stream
        raw = _Output(number, "wb", closefd=False)
    except (OSError, ValueError, AttributeError):  # missing, closed, or in memory
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        stream.encoding,
        errors="backslashreplace",
        line_buffering=number == 2 or stream.isatty(),
    )
