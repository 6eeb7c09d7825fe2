"""prepare: one corpus for one text, whole or not there, and refused where it would mislead (F34, F35, F38)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from efftrain_cli.data.corpus import Corpus
from efftrain_cli.data.prepare import prepare
from efftrain_cli.data.tokenizer import load_tokenizer
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.recipe.sections import Data
from tests.conftest import REPOSITORY

LINES = [f"{i}: the quick brown fox number {i * i} jumps over {i % 7} lazy dogs\n" for i in range(2000)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("EFFTRAIN_CACHE", str(folder))
    return folder


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("".join(LINES))
    return path


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    return path


def data(train: Path | tuple[str, ...], **keys: object) -> Data:
    return Data(**{"train": str(train) if isinstance(train, Path) else train, "tokenizer": "bpe:300", **keys})


def split_texts(corpus: Corpus) -> tuple[list[str], list[str]]:
    """The documents of both sides, decoded."""
    tokenizer = load_tokenizer(corpus.tokenizer_path)
    sides = []
    for shards in (corpus.train, corpus.valid):
        ids = shards.read([0], shards.tokens)[0].tolist()
        assert ids[-1] == corpus.eot_id
        documents: list[list[int]] = [[]]
        for token in ids[:-1]:
            if token == corpus.eot_id:
                documents.append([])
            else:
                documents[-1].append(token)
        sides.append([tokenizer.decode(document) for document in documents])
    return sides[0], sides[1]


def test_one_text_file_gives_its_end_to_validation(cache: Path, book: Path) -> None:
    corpus = prepare(data(book, valid_fraction=0.1))
    (train,), (valid,) = split_texts(corpus)
    assert train + valid == "".join(LINES)
    assert train.endswith("\n") and abs(len(valid) / len(train + valid) - 0.1) < 0.002
    assert corpus.vocab_size == 300 and corpus.eot_id == 0
    assert corpus.bytes_per_token == len(valid.encode()) / corpus.valid.tokens


def test_few_text_files_are_cut_and_many_are_held_out(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(19):
        (folder / f"{number:02}.txt").write_text("".join(LINES[number * 20 : number * 20 + 20]))
    train, valid = split_texts(prepare(data(folder, valid_fraction=0.1)))
    assert (len(train), len(valid)) == (19, 19)
    assert all(a + b == "".join(LINES[n * 20 : n * 20 + 20]) for n, (a, b) in enumerate(zip(train, valid, strict=True)))
    (folder / "19.txt").write_text("".join(LINES[380:400]))
    train, valid = split_texts(prepare(data(folder, valid_fraction=0.1)))
    assert (len(train), len(valid)) == (18, 2)
    assert sorted(train + valid) == sorted("".join(LINES[n * 20 : n * 20 + 20]) for n in range(20))


def test_held_out_documents_do_not_depend_on_their_place(cache: Path, stories: Path, tmp_path: Path) -> None:
    train, valid = split_texts(prepare(data(stories)))
    assert len(valid) == 20 and len(train) == 1980
    reversed_stories = tmp_path / "reversed.jsonl"
    reversed_stories.write_text("".join(reversed(stories.read_text().splitlines(keepends=True))))
    train_reversed, valid_reversed = split_texts(prepare(data(reversed_stories)))
    assert valid_reversed == valid[::-1] and train_reversed == train[::-1]


def test_copies_of_a_document_stay_on_one_side(cache: Path, stories: Path) -> None:
    stories.write_text(stories.read_text() * 3)
    train, valid = split_texts(prepare(data(stories)))
    assert not set(train) & set(valid)
    assert len(train) + len(valid) == 6000 and len(valid) == 60


def test_text_that_spells_the_end_of_text_does_not_end_it(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [f"row {i} <|endoftext|> more {i}" for i in range(100)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    train, valid = split_texts(prepare(data(path)))
    assert sorted(train + valid) == sorted(rows)


def test_two_recipes_share_a_corpus_wherever_its_text_lies(cache: Path, book: Path, tmp_path: Path) -> None:
    first = prepare(data(book))
    copy = tmp_path / "elsewhere" / "other name.txt"
    copy.parent.mkdir()
    shutil.copy(book, copy)
    second = prepare(data(copy, repeat=True, text_field="unused"))
    assert (second.folder, second.data_hash) == (first.folder, first.data_hash)
    copy.write_text(copy.read_text().replace("fox", "cat", 1))
    third = prepare(data(copy))
    assert third.folder != first.folder and third.data_hash != first.data_hash
    assert prepare(data(book, valid_fraction=0.02)).data_hash != first.data_hash
    assert prepare(data(book, tokenizer="bpe:301")).data_hash != first.data_hash
    from_jsonl = tmp_path / "book.jsonl"
    from_jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in split_texts(first)[0]))
    valid = tmp_path / "valid.txt"
    valid.write_text(split_texts(first)[1][0])
    assert prepare(data(from_jsonl, valid=str(valid))).data_hash == first.data_hash  # the same tokens by another way


def test_a_changed_file_is_seen_although_its_size_is_the_same(cache: Path, book: Path) -> None:
    os.utime(book, (1e9, 1e9))
    first = prepare(data(book))
    assert list((cache / "hashes").iterdir())  # settled, so its hash is remembered
    book.write_text(book.read_text().replace("fox", "cat", 1))
    assert prepare(data(book)).folder != first.folder
    os.utime(book, (1e9, 2e9))
    assert prepare(data(book)).folder != first.folder


def test_overlap_is_refused_unless_allowed(cache: Path, stories: Path, tmp_path: Path) -> None:
    """F38"""
    valid = tmp_path / "valid.jsonl"
    valid.write_text("".join(json.dumps({"text": line}) + "\n" for line in ["new\n", *LINES[3:10]]))
    with pytest.raises(DataError) as refused:
        prepare(data(stories, valid=str(valid)))
    said = str(refused.value)
    assert said.startswith("7 training documents are word for word in the validation text")
    assert f"{stories}:4 = {valid}:2" in said and "data.allow_overlap = true" in said
    assert not list((cache / "corpora").glob("*/"))  # refused before anything was made
    corpus = prepare(data(stories, valid=str(valid), allow_overlap=True))
    assert corpus.manifest["overlap"] == 7 and len(split_texts(corpus)[1]) == 8
    with pytest.raises(DataError, match="word for word"):
        prepare(data(stories, valid=str(valid)))  # the cache has it, this recipe still refuses it


def test_skipped_documents_are_counted_and_refused_by_others(cache: Path, stories: Path) -> None:
    stories.write_text(stories.read_text() + "{\n")
    corpus = prepare(data(stories, on_bad_document="skip"))
    assert corpus.manifest["skipped"] == 1 and corpus.train.documents + corpus.valid.documents == 2000
    with pytest.raises(DataError, match=r"1 documents cannot be read: .*stories\.jsonl:2001:.*on_bad_document"):
        prepare(data(stories))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty"),
        ('{"text": "one"}\n', "no text is left for training"),
        ('{"text": ""}\n', "no text is left for training"),
    ],
)
def test_too_little_text(cache: Path, tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=said):
        prepare(data(path))
    line = tmp_path / "line.txt"
    line.write_text("no second line")
    with pytest.raises(DataError, match=r"no text is left for validation.*data\.valid"):
        prepare(data(line))


def test_bad_settings_cost_nothing(cache: Path, book: Path) -> None:
    for bad in (data(book, tokenizer="bpe:3"), data(book, tokenizer="no/such"), data(("no.txt",))):
        with pytest.raises(DataError):
            prepare(bad)
    assert not cache.exists()


# Damage and other people's files
# ---------------------------------------------------------------------------------------


def test_damage_is_refused_with_exit_3(cache: Path, book: Path) -> None:
    """F34: each file of a corpus flipped, cut short and removed; with full verification nothing passes."""
    folder = prepare(data(book)).folder
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == ["manifest.json", "tokenizer.json", "train-00000.bin", "valid-00000.bin"]
    for path in files:
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for damaged in (bytes(flipped), content[:-1], b""):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=r"efftrain prepare") as refused:
                prepare(data(book), verify="full")
            assert str(path) in str(refused.value) and refused.value.exit_code == 3
        if path.name != "manifest.json":
            path.unlink()
            with pytest.raises(DataError, match=path.name):
                prepare(data(book))
        path.write_bytes(content)
    prepare(data(book), verify="full")


def test_a_flipped_token_is_seen_at_first_use(cache: Path, book: Path) -> None:
    corpus = prepare(data(book))
    path = corpus.folder / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    corpus = prepare(data(book))  # size and header are right
    with pytest.raises(DataError, match=r"train-00000\.bin: its tokens are not those that were written"):
        corpus.train.read([0], 4)
    corpus.valid.read([0], 4)


def test_shards_of_another_corpus_or_tokenizer_are_refused(cache: Path, book: Path, tmp_path: Path) -> None:
    """F34, F35: sound files in the wrong place."""
    corpus = prepare(data(book))
    other_tokenizer = prepare(data(book, tokenizer="bpe:301"))
    other_text = tmp_path / "b.txt"
    other_text.write_text("".join(LINES[:1000]))
    train = corpus.folder / "train-00000.bin"
    content = train.read_bytes()
    shutil.copy(other_tokenizer.folder / "train-00000.bin", train)
    with pytest.raises(DataError, match=r"made with another tokenizer .* 301 tokens") as refused:
        prepare(data(book))
    assert refused.value.exit_code == 3
    shutil.copy(corpus.folder / "valid-00000.bin", train)
    with pytest.raises(DataError, match="not the one that belongs here"):
        prepare(data(book))
    train.write_bytes(content)
    shutil.copy(other_tokenizer.tokenizer_path, corpus.tokenizer_path)
    with pytest.raises(DataError, match=r"tokenizer\.json: missing or changed"):
        prepare(data(book))


# Other processes
# -------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from efftrain_cli.recipe.sections import Data
from efftrain_cli.data.prepare import prepare
said = []
corpus = prepare(Data(train=sys.argv[1], tokenizer="bpe:600"), report=lambda what, done, total: said.append(what))
print(corpus.data_hash, "waiting" in " ".join(said), "tokenized" in " ".join(said))
print([name for name in ("torch", "datasets", "pandas", "wandb", "transformers", "pyarrow", "tokenizers") if name in sys.modules])
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
    # In a child: the process ends, with no cleaning up, just before its number-th step towards the disk.
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
    for path in corpora.parent.glob("[ht]*/*.json"):
        path.unlink()
    for folder in corpora.glob("*/"):
        if folder.suffix != ".partial":
            shutil.rmtree(folder)
print(number, len(hashes))
"""


def test_dying_at_every_step_to_the_disk_leaves_a_whole_corpus_or_none(cache: Path, book: Path) -> None:
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
def test_a_killed_prepare_leaves_nothing_torn(cache: Path, book: Path) -> None:
    """SIGKILL at five moments of the work, then a start that must end with the right corpus and no leftovers."""
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
    left = sorted(path.name for path in (cache / "killed").rglob("*") if "partial" in path.name or "tmp" in path.name)
    assert left == []


@pytest.mark.slow
def test_two_processes_make_one_corpus(cache: Path, book: Path) -> None:
    book.write_text("".join(LINES) * 20)
    processes = [start(book, cache) for _ in range(2)]
    lines = []
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        lines.append(output.splitlines()[0].split())
    assert len({line[0] for line in lines}) == 1
    assert sum(line[2] == "True" for line in lines) == 1  # only one of them tokenized
    assert len(list((cache / "corpora").glob("*/"))) == 1


def test_a_ready_corpus_opens_without_heavy_imports(cache: Path, book: Path) -> None:
    prepare(data(book, tokenizer="bpe:600"))
    output, errors = start(book, cache).communicate()
    assert output.splitlines()[1] == "[]", errors


def test_a_ready_corpus_opens_quickly(cache: Path, book: Path) -> None:
    prepare(data(book))
    seconds = []
    for _ in range(5):
        begin = time.process_time()
        prepare(data(book))
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.15


def test_a_full_disk_says_how_much_is_missing(tmp_path: Path, book: Path) -> None:
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


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "file" / "cache"))
    os.utime(book, (1e9, 1e9))
    with pytest.raises(DataError, match=r"cannot be written.*EFFTRAIN_CACHE"):
        prepare(data(book))


@pytest.mark.slow
def test_the_novels_with_gpt2s_own_tokens(cache: Path, shared_data: Path) -> None:
    """23 and 3 books; 3.59 and 0.30 million tokens, as counted when the folder was put together."""
    books = shared_data / "classic_books"
    corpus = prepare(
        Data(train=str(books / "train"), valid=str(books / "valid"), tokenizer=str(shared_data / "gpt2_tokenizer"))
    )
    assert (corpus.train.documents, corpus.valid.documents) == (23, 3)
    assert round((corpus.train.tokens - 23) / 1e6, 2) == 3.59
    assert round((corpus.valid.tokens - 3) / 1e6, 2) == 0.30
    assert (corpus.vocab_size, corpus.eot_id, corpus.manifest["overlap"]) == (50257, 50256, 0)
    corpus.verify()
