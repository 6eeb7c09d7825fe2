"""What README and docs tell people to type: commands and options exist, links lead somewhere, and
the tour works."""

from __future__ import annotations

import re
import shlex
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


def test_the_pages_have_commands_to_check():
    assert sum(len(command_lines(page)) for page in PAGES) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_and_option_exists(page):
    group = typer.main.get_command(app)
    for words in command_lines(page):
        command = group
        rest = list(words)
        while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
            assert rest[0] in command.commands, (
                f"{page.name}: efftrain {' '.join(words)}: no command {rest[0]!r}"
            )
            command = command.commands[rest.pop(0)]
        known = {
            name
            for parameter in command.params
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        known |= {"--help", "-h", "--install-completion", "--show-completion"}
        for word in rest:
            if word.startswith("-") and not re.fullmatch(r"-\d.*", word):
                option = word.split("=")[0]
                assert option in known, (
                    f"{page.name}: efftrain {' '.join(words)}: no option {option}"
                )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_leads_somewhere(page):
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
    ran = 0
    for line in tour.splitlines():
        words = shlex.split(line, comments=True)[1:]
        trains = words[0] == "pretrain" and "--plan" not in words
        if trains:  # the tour's run takes minutes; three steps say the same
            words += ["--steps", "4" if "--resume" in words else "2", "--set", "eval.windows=2"][
                : 2 if "--resume" in words else 4
            ]
        efftrain(*words, timeout=300)
        ran += 1
    assert ran >= 6
