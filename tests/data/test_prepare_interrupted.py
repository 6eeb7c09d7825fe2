"""prepare that dies, is killed, runs twice at once, or finds no room: a whole corpus or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from efftrain_cli.data.prepare import prepare
from efftrain_cli.foundation.errors import UsageError
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
    for path in corpora.parent.glob("hashes/*.json"):
        path.unlink()
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


@pytest.mark.slow
def test_a_killed_prepare_leaves_nothing_torn(cache, book):
    """SIGKILL at five moments of the work, then a start that must end with the right corpus and no
    leftovers."""
    book.write_text("".join(LINES) * 20)
    begin = time.monotonic()
    whole = start(book, cache / "reference")
    expected = whole.communicate()[0].splitlines()[0].split()[0]
    seconds = time.monotonic() - begin
    for moment in range(5):
        process = start(book, cache / "killed")
        time.sleep(seconds * (0.3 + 0.14 * moment))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for folder in (cache / "killed" / "corpora").glob("*/"):
            if folder.suffix != ".partial":
                assert (folder / "manifest.json").exists()
    last = start(book, cache / "killed")
    output, errors = last.communicate()
    assert output.split()[0] == expected, errors
    left = sorted(
        path.name
        for path in (cache / "killed").rglob("*")
        if "partial" in path.name or "tmp" in path.name
    )
    assert left == []


@pytest.mark.slow
def test_two_processes_make_one_corpus(cache, book):
    book.write_text("".join(LINES) * 20)
    processes = [start(book, cache) for _ in range(2)]
    lines = []
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        lines.append(output.splitlines()[0].split())
    assert len({line[0] for line in lines}) == 1
    assert sum(line[1] == "True" for line in lines) == 1  # the other waited, or found the corpus
    assert len(list((cache / "corpora").glob("*/"))) == 1


def test_a_ready_corpus_opens_without_heavy_imports(cache, book):
    prepare(data(book, tokenizer="bpe:600"))
    output, errors = start(book, cache).communicate()
    assert output.splitlines()[1] == "[]", errors


def test_a_ready_corpus_opens_quickly(cache, book):
    prepare(data(book))
    seconds = []
    for _ in range(5):
        begin = time.process_time()
        prepare(data(book))
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.15


def test_a_full_disk_says_how_much_is_missing(tmp_path, book):
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
    assert "DiskError" in errors and "bytes needed" in errors and "EFFTRAIN_CACHE" in errors, errors


def test_a_cache_that_cannot_be_written_is_named(tmp_path, book, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "file" / "cache"))
    os.utime(book, (1e9, 1e9))
    with pytest.raises(UsageError, match=r"cannot be written: .*\nset EFFTRAIN_CACHE"):
        prepare(data(book))
