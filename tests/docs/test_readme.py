"""What README and docs tell people to type: commands and options exist, links lead somewhere, and
the tour works."""

from __future__ import annotations

import re
import shlex
from itertools import chain
from pathlib import Path

import pytest
import typer

from efftrain_cli.cli.app import app
from tests.conftest import REPOSITORY

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
_BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(efftrain [^`]+)`")


def command_lines(page: Path) -> list[list[str]]:
    """The arguments after `efftrain` of every command on a page, comments cut off."""
    text = page.read_text(encoding="utf-8")
    lines = [
        line for block in _BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()
    ]
    lines += [line.replace("\n", " ") for line in _INLINE.findall(text)]
    found = []
    for line in lines:
        words = shlex.split(line.replace("…", "...").strip().removeprefix("$ "), comments=True)
        while words and "=" in words[0]:  # settings of the environment
            words.pop(0)
        if words and words[0].rsplit("/", 1)[-1] == "efftrain":
            found.append(words[1:])
    return found


def test_every_command_and_option_exists():
    group = typer.main.get_command(app)
    for words in chain.from_iterable(map(command_lines, PAGES)):
        command = group
        rest = list(words)
        while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
            assert rest[0] in command.commands, words
            command = command.commands[rest.pop(0)]
        known = {"--help", "-h", "--install-completion", "--show-completion"}
        for parameter in command.params:
            known |= {*parameter.opts, *parameter.secondary_opts}
        for word in rest:
            if word.startswith("-") and not re.fullmatch(r"-\d.*", word):
                assert word.split("=")[0] in known, words


def test_every_link_leads_somewhere():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target, place in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
            if "://" in target:
                continue
            other = page.parent / target if target else page
            assert other.exists(), f"{page.name} links to {target}"
            assert not place or place in places_of(other), f"{page.name} links to {target}#{place}"


def places_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow
def test_the_tour_works_as_printed(efftrain):
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    tour = text.split("## A run, from beginning to end")[1].split("```sh\n")[1].split("```")[0]
    commands = [shlex.split(line, comments=True)[1:] for line in tour.splitlines()]
    assert len(commands) >= 6
    for words in commands:
        # The tour's run takes minutes; a few steps say the same.
        if words[0] == "pretrain" and "--resume" in words:
            words += ["--steps", "4"]
        elif words[0] == "pretrain" and "--plan" not in words:
            words += ["--steps", "2", "--set", "eval.windows=2"]
        efftrain(*words, timeout=300)
