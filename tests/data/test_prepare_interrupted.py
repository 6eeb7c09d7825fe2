"""prepare that dies, is killed, runs twice at once, or finds no room: a whole corpus or none."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from efftrain_cli.data.prepare import prepare
from tests.conftest import REPOSITORY, python
from tests.data.book import LINES, data, write_book

SCRIPT = """
import io, sys
from rich.console import Console
from efftrain_cli.recipe.sections import Data
from efftrain_cli.data.prepare import prepare
shown = io.StringIO()
corpus = prepare(Data(train=sys.argv[1], tokenizer="bpe:300"), console=Console(file=shown))
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
steps = 0

def counted(real):
    def step(*args, **kwargs):
        global steps
        steps += 1
        if steps == number:
            os._exit(9)
        return real(*args, **kwargs)
    return step

number, status, hashes = 0, 9, set()
while status:
    # What is finished is removed, so that the next child takes the same steps and dies one later.
    for folder in corpora.glob("?" * 32):
        shutil.rmtree(folder)
    number += 1
    child = os.fork()
    if child == 0:
        # It ends, with no cleaning up, just before its number-th step towards the disk.
        for name in ("fsync", "replace", "rename", "mkdir"):
            setattr(os, name, counted(getattr(os, name)))
        prepare(data)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), status
    for folder in corpora.glob("?" * 32):
        corpus = open_corpus(folder)
        corpus.verify()
        hashes.add(corpus.data_hash)
    left = len(list(corpora.parent.rglob("*.tmp")))
    assert left <= 1, left
print(number, len(hashes))
"""


def test_dying_at_every_step_to_the_disk_leaves_a_whole_corpus_or_none(cache, tmp_path):
    book = write_book(tmp_path)
    book.write_text("".join(LINES[:300]))
    died, corpora = map(int, python(DYING, str(book), EFFTRAIN_CACHE=str(cache)).stdout.split())
    assert died > 10 and corpora == 1
    assert not [path for path in cache.rglob("*") if path.suffix in (".partial", ".tmp")]


KILLED = """
import json, os, signal, sys
from efftrain_cli.data import building
from efftrain_cli.data.prepare import prepare
from efftrain_cli.recipe.sections import Data

building.SHARD_TOKENS = 8000
building.BATCH = 5000
text, folder, *numbers = sys.argv[1:]
if "parquet" in text:
    import datasets  # once, and not in each child
write_record = building.write_record

def prepared(cache, places):
    # In a child, which is killed when it has saved its place so many times.
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.environ["EFFTRAIN_CACHE"] = folder + cache
    left = places

    def written(path, record):
        nonlocal left
        write_record(path, record)
        sides = (record.train, record.valid)
        closed = [shard.sha256[:8] for side in sides for shard in side.shards]
        if closed and path.name == "progress.json":
            print(cache, path.stat().st_size, *closed, flush=True)
            left -= 1
        if left == 0 and places:
            os.kill(os.getpid(), signal.SIGKILL)

    building.write_record = written
    corpus = prepare(Data(**json.loads(text), tokenizer="bpe:300", valid_fraction=0.05))
    corpus.verify()
    print("done", corpus.data_hash, json.dumps(corpus.manifest.to_json()), flush=True)
    os._exit(0)

assert prepared("/whole", 0) == 0
for number in numbers:
    code = prepared("/killed", int(number))
    if code == 0:
        break
    assert code == -signal.SIGKILL, code
else:
    assert prepared("/killed", 0) == 0
"""
"""Prepares in one go, and in several, each killed when it has saved its place so many times."""


def texts_to_kill(folder: Path, kind: str) -> dict[str, Any]:
    """One long text, JSON lines with a bad one, or Parquet files through `datasets`."""
    lines = LINES * 2
    if kind == "txt":
        (folder / "a.txt").write_text("".join(lines))
        (folder / "b.txt").write_text("".join(reversed(lines)))
        return {"train": str(folder / "*.txt")}
    if kind == "jsonl":
        rows = [json.dumps({"text": f"{line}{number}"}) for number, line in enumerate(lines)]
        (folder / "a.jsonl").write_text("\n".join([*rows[:900], "{broken", "", *rows[900:]]))
        (folder / "valid.jsonl").write_text("\n".join(["{}", *rows[::500]]).replace("{}", rows[9]))
        own = {"valid": str(folder / "valid.jsonl"), "allow_overlap": True}
        return {"train": str(folder / "a.jsonl"), "on_bad_document": "skip", **own}
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
    numbers = random.Random(kind).choices("112", k=6)
    lines = python(KILLED, text, str(tmp_path), *numbers).stdout.splitlines()
    done = [line for line in lines if line.startswith("done")]
    assert len(done) == 2 and done[0] == done[1]
    places = [line.split()[1:] for line in lines if line.startswith("/killed")]
    assert len(places) > 6
    shards: set[str] = set()
    for size, *closed in places:
        assert shards < set(closed), "each place has more shards than the one before"
        shards = set(closed)
        assert int(size) < 1500 + 150 * len(shards)
    assert [path.name for path in (tmp_path / "killed").rglob("*.partial")] == []


@pytest.mark.slow
def test_two_processes_make_one_corpus(cache, tmp_path):
    """The second waits, or finds the corpus."""
    book = write_book(tmp_path)
    book.write_text("".join(LINES) * 20)
    processes = [start(book, cache) for _ in range(2)]
    lines = [process.communicate()[0].splitlines()[0].split() for process in processes]
    assert lines[0][0] == lines[1][0]
    assert sorted(line[1] for line in lines) == ["False", "True"]
    assert len(list((cache / "corpora").glob("*/"))) == 1


def test_a_ready_corpus_opens_without_heavy_imports(cache, tmp_path):
    book = write_book(tmp_path)
    prepare(data(book))
    output, errors = start(book, cache).communicate()
    assert output.splitlines()[1] == "[]", errors


def test_a_full_disk_is_named(tmp_path):
    """F15's sibling, on a tmpfs of 300 kB in a namespace of its own."""
    book = write_book(tmp_path)
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
