"""A text of each kind becomes a trained model in one command, and the run continues after a
kill."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.launch import made_text

KILL = """
import os, signal
from efftrain_cli.data.windows import Windows
batch = Windows.batch

def killed_batch(self, plan, *rest):
    if plan.step == 15:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(self, plan, *rest)

Windows.batch = killed_batch
"""
"""Kills the process before step 15; the last checkpoint is of step 10."""


def write_text(folder: Path, kind: str) -> str:
    """Write a text of 200 documents; return what names it."""
    text = made_text()
    documents = [text[at : at + 1000] for at in range(0, 200_000, 1000)]
    if kind == "folder of Markdown":
        (folder / "notes").mkdir()
        for number in range(20):
            page = "\n\n".join(documents[10 * number : 10 * number + 10])
            (folder / "notes" / f"{number}.md").write_text(page)
        return "notes"
    if kind == "JSON lines":
        lines = "".join(json.dumps({"text": each}) + "\n" for each in documents)
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        return "a.jsonl.gz"
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), folder / "a.parquet")
    return "a.parquet"


@pytest.mark.parametrize("kind", ["folder of Markdown", "JSON lines", "Parquet"])
def test_a_text_becomes_a_model_in_one_command(lab, kind):
    recipe = lab.recipe()
    text = (
        "--set",
        f"data.train={write_text(lab.folder, kind)}",
        "--set",
        "data.valid_fraction=0.1",
    )
    killed = lab.call(
        "pretrain", *lab.words(recipe=recipe)[1:], *text, inject=KILL, code=-signal.SIGKILL
    )
    assert lab.checkpoints("r")[-1] == "step-00000010", killed.said()
    resumed = lab.resume("r")
    assert resumed.code == 0 and "result " in resumed.output
    assert lab.last_step("r") == 20
