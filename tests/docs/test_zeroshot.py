"""docs/zeroshot.md: its commands run, and its table of files is what the program reads."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from efftrain_cli.zeroshot.local_data import example
from efftrain_cli.zeroshot.suites import SUITES, TASKS
from tests.conftest import cli
from tests.docs.pages import text_of
from tests.trained_run import make_run

PAGE = text_of("zeroshot")


@pytest.mark.slow
def test_commands_run(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    from tests.zeroshot.test_harness import MADE

    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "my-run")
    (tmp_path / "sets").mkdir()
    for name in ("lambada_openai.jsonl", "wikitext2_test_pages.jsonl", "piqa.jsonl"):
        lines = "".join(f"{item}\n" for item in map(json.dumps, MADE[name]))
        (tmp_path / "sets" / name).write_text(lines)
    block, *_ = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.partition("#")[0].strip() for line in block.splitlines()]
    assert len(lines) == 6
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "efftrain"
        assert cli(*arguments).stdout.strip()


def test_the_files_are_as_the_page_says():
    rows = re.findall(r"^\| ([\w, .]+\.jsonl) \| `(\{.*?\})`", PAGE, re.MULTILINE)
    said = {file.strip(): line for files, line in rows for file in files.split(",")}
    assert said == {task.file: example(task.form) for task in TASKS.values() if task.form}


def test_every_task_and_suite_is_on_the_page():
    for name in [*TASKS, *SUITES]:
        assert name in PAGE, name
