"""docs/zeroshot.md: its commands run, and its table of files is what the program reads."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from efftrain_cli.zeroshot.tasks import SUITES, TASKS
from tests.conftest import cli
from tests.docs.pages import text_of
from tests.trained_run import make_run

PAGE = text_of("zeroshot")


@pytest.mark.slow
def test_commands_run(tmp_path):
    pytest.importorskip("lm_eval")
    from tests.zeroshot.test_harness import MADE

    make_run(tmp_path, "my-run")
    (tmp_path / "sets").mkdir()
    for name in ("lambada_openai.jsonl", "wikitext2_test_pages.jsonl", "piqa.jsonl"):
        lines = "".join(f"{item}\n" for item in map(json.dumps, MADE[name]))
        (tmp_path / "sets" / name).write_text(lines)
    block, *_ = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.partition("#")[0].strip() for line in block.splitlines()]
    assert len(lines) == 4
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "efftrain"
        assert cli(*arguments).stdout.strip()


def test_the_files_are_as_the_page_says():
    """The fields of the made sets, which the harness reads in its own tests."""
    pytest.importorskip("lm_eval")
    from tests.zeroshot.test_harness import MADE

    rows = re.findall(r"^\| ([\w, .]+\.jsonl) \| `(\{.*?\})`", PAGE, re.MULTILINE)
    said = {file.strip(): json.loads(line) for files, line in rows for file in files.split(",")}
    assert said.keys() == {spec.file for spec in TASKS.values()}
    for file, items in MADE.items():
        assert said[file].keys() == items[0].keys()


def test_every_task_and_suite_is_on_the_page():
    for name in [*TASKS, *SUITES]:
        assert name in PAGE, name
