"""prepare that dies, is killed, runs twice at once, or finds no room: a whole corpus or none."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from efftrain_cli.data.prepare import prepare
from tests.conftest import REPOSITORY
from tests.data.conftest import LINES, data

SCRIPT = """
import io, sys
from rich.console import Console
from efftrain_cli.recipe.sections import Data
from efftrain_cli.data.prepare import prepare
shown = io.StringIO()
corpus = prepare(Data(train=sys.argv[1], tokenizer="bpe:600"), console=Console(file=shown))
print(corpus.data_hash, "training a tokenizer" in shown.getvalue())
heavy = ("torch", "datasets", "pandas", "wandb", "transformers", "pyarrow", "tokenizers")
print([name for name in heavy if name in sys.modules])
"""


def start(book: Path, cache: Path, *before: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", SCRIPT, str(book)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "EFFTRAIN_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


DYING = """
import os, shutil, sys
from pathlib import Path
from efftrain_cli.recipe.sections import Data
from efftrain_cli.data.corpus import open_corpus
from efftrain_cli.data.prepare import prepare
data = Data(train=sys.argv[1], tokenizer="bpe:300")
corpora = Path(os.environ["EFFTRAIN_CACHE"]) / "corpora"

def dies_at(number):
    # In a child: the process ends, with no cleaning up, just before its number-th step towards
    # the disk.
    steps = [0]
    def counted(real):
        def step(*args, **kwargs):
            steps[0] += 1
            if steps[0] == number:
                os._exit(9)
            return real(*args, **kwargs)
        return step
    for name in ("fsync", "replace", "rename", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    prepare(data)
    os._exit(0)

number, hashes = 0, set()
while True:
    number += 1
    child = os.fork()
    if child == 0:
        dies_at(number)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for folder in corpora.glob("*/"):
        if folder.suffix != ".partial":
            corpus = open_corpus(folder)
            corpus.verify()
            hashes.add(corpus.data_hash)
    if status == 0:
        break
    assert status == 9, status
    left = len(list(corpora.parent.rglob("*.tmp")))
    assert left <= 1, left
    # What is finished is removed, so that the next child takes the same steps and dies one later.
    for folder in corpora.glob("*/"):
        if folder.suffix != ".partial":
            shutil.rmtree(folder)
print(number, len(hashes))
"""


def test_dying_at_every_step_to_the_disk_leaves_a_whole_corpus_or_none(cache, book):
    os.utime(book, (1e9, 1e9))
    result = subprocess.run(
        [sys.executable, "-c", DYING, str(book)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "EFFTRAIN_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    died, corpora = map(int, result.stdout.split())
    assert died > 10 and corpora == 1
    left = sorted(path.name for path in cache.rglob("*") if path.suffix in (".partial", ".tmp"))
    assert left == []


KILLED = """
import json, random, signal, sys
from pathlib import Path
from efftrain_cli.data import building
from efftrain_cli.data.prepare import Limits, prepare
from efftrain_cli.recipe.sections import Data

building.SHARD_TOKENS = 8000
building.BATCH = 5000
after = int(sys.argv[2])
write_record = building.write_record

def written(path, record):
    global after
    write_record(path, record)
    if path.name != "progress.json":
        return
    closed = [shard.sha256[:8] for each in (record.train, record.valid) for shard in each.shards]
    if not closed:
        return
    print(path.stat().st_size, *closed, flush=True)
    after -= 1
    if after == 0:
        os.kill(os.getpid(), signal.SIGKILL)

import os
building.write_record = written
text = json.loads(sys.argv[1])
corpus = prepare(Data(**text, tokenizer="bpe:300", valid_fraction=0.05))
corpus.verify()
print(corpus.data_hash, json.dumps(corpus.manifest.to_json()))
"""
"""Prepares, and is killed when it has saved its place so many times."""


def texts_to_kill(folder: Path, kind: str) -> dict[str, Any]:
    """One long text, JSON lines with a bad one, or Parquet files through `datasets`."""
    lines = LINES * 4
    if kind == "txt":
        (folder / "a.txt").write_text("".join(lines))
        (folder / "b.txt").write_text("".join(reversed(lines)))
        return {"train": str(folder / "*.txt")}
    if kind == "jsonl":
        rows = [json.dumps({"text": f"{line}{number}"}) for number, line in enumerate(lines)]
        (folder / "a.jsonl").write_text("\n".join([*rows[:900], "{broken", "", *rows[900:]]))
        return {"train": str(folder / "a.jsonl"), "on_bad_document": "skip"}
    for number in range(3):
        table = pyarrow.table({"text": [f"{line}{number}" for line in LINES]})
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=300)
    return {"train": str(folder / "*.parquet")}


@pytest.mark.parametrize(
    "kind",
    [
        "jsonl",
        pytest.param("txt", marks=pytest.mark.slow),
        pytest.param("parquet", marks=pytest.mark.slow),
    ],
)
def test_a_killed_prepare_continues(tmp_path, kind):
    """SIGKILL behind six places at random: the corpus is that of one go, no shard that was closed
    is written again, and the place takes some hundred bytes besides them."""
    text = json.dumps(texts_to_kill(tmp_path, kind))
    rng = random.Random(kind)

    def run(cache: str, after: int) -> tuple[int, list[list[str]]]:
        done = subprocess.run(
            [sys.executable, "-c", KILLED, text, str(after)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "EFFTRAIN_CACHE": cache},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode, [line.split(maxsplit=1) for line in done.stdout.splitlines()]

    code, lines = run(str(tmp_path / "whole"), 0)
    assert code == 0 and len(lines) > 10
    expected = lines[-1]

    killed = str(tmp_path / "killed")
    shards: set[str] = set()
    for _ in range(6):
        code, lines = run(killed, rng.choice((1, 1, 2)))
        if code == 0:
            break
        for size, closed in lines:
            assert shards < set(closed.split()), "each place has more shards than the one before"
            shards = set(closed.split())
            assert int(size) < 1500 + 150 * len(shards)
    else:
        code, lines = run(killed, 0)
    assert code == 0 and lines[-1] == expected
    left = [path.name for path in Path(killed).rglob("*") if ".partial" in path.name]
    assert left == []


@pytest.mark.slow
def test_two_processes_make_one_corpus(cache, book):
    """The second waits, or finds the corpus."""
    book.write_text("".join(LINES) * 20)
    processes = [start(book, cache) for _ in range(2)]
    lines = [process.communicate()[0].splitlines()[0].split() for process in processes]
    assert lines[0][0] == lines[1][0]
    assert sorted(line[1] for line in lines) == ["False", "True"]
    assert len(list((cache / "corpora").glob("*/"))) == 1


def test_a_ready_corpus_opens_without_heavy_imports(cache, book):
    prepare(data(book, tokenizer="bpe:600"))
    output, errors = start(book, cache).communicate()
    assert output.splitlines()[1] == "[]", errors


def test_a_full_disk_is_named(tmp_path, book):
    """F15's sibling, on a tmpfs of 300 kB in a namespace of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no user namespaces here")
    book.write_text("".join(LINES) * 10)
    mount = f"mount -t tmpfs -o size=300k tmpfs '{disk}' && exec \"$@\""
    process = start(book, disk / "cache", "unshare", "-rm", "sh", "-c", mount, "sh")
    errors = process.communicate()[1]
    assert "OSError: [Errno 28]" in errors and ".partial" in errors, errors
