"""prepare: one corpus for one text, whole or not there, and refused where it would mislead (F34,
F35, F38)."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from efftrain_cli.data import building, tokenizer
from efftrain_cli.data.corpus import Corpus
from efftrain_cli.data.prepare import prepare
from efftrain_cli.data.split import choose
from efftrain_cli.data.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.recipe.sections import Data
from tests.conftest import python
from tests.data.book import LINES, data, write_book, write_texts


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """1,000 rows."""
    path = tmp_path / "stories.jsonl"
    write_texts(path, LINES[:1000])
    return path


def split_texts(corpus: Corpus) -> tuple[list[str], list[str]]:
    """The documents of both sides, decoded."""
    decode = load_tokenizer(corpus.tokenizer_path).decode
    sides = []
    for shards in (corpus.train, corpus.valid):
        *documents, rest = decode(shards.ids.tolist()).split(END_OF_TEXT)
        assert rest == ""
        sides.append(documents)
    return sides[0], sides[1]


def test_one_text_file_gives_its_end_to_validation(cache, tmp_path):
    book = write_book(tmp_path)
    corpus = prepare(data(book, valid_fraction=0.1))
    (train,), (valid,) = split_texts(corpus)
    assert train + valid == "".join(LINES)
    assert train.endswith("\n") and abs(len(valid) / len(train + valid) - 0.1) < 0.002
    assert corpus.vocab_size == 300 and corpus.eot_id == 0
    assert corpus.manifest.valid.bytes == len(valid.encode())


def test_few_text_files_are_cut_and_many_are_held_out(cache, tmp_path):
    books = ["".join(LINES[number : number + 20]) for number in range(0, 400, 20)]
    for number, book in enumerate(books[:19]):
        (tmp_path / f"{number:02}.txt").write_text(book)
    train, valid = split_texts(prepare(data(tmp_path, valid_fraction=0.1)))
    assert [a + b for a, b in zip(train, valid, strict=True)] == books[:19]
    (tmp_path / "19.txt").write_text(books[19])
    train, valid = split_texts(prepare(data(tmp_path, valid_fraction=0.1)))
    assert (len(train), len(valid)) == (18, 2)


def test_held_out_documents_do_not_depend_on_their_place(cache, stories):
    """Nor on copies, which stay on one side."""
    train, valid = split_texts(prepare(data(stories)))
    assert len(valid) == 10 and len(train) == 990
    lines = stories.read_text().splitlines(keepends=True)
    stories.write_text("".join(reversed(lines * 2)))
    assert split_texts(prepare(data(stories))) == ((train * 2)[::-1], (valid * 2)[::-1])


def test_recipes_share_a_corpus_and_equal_text_has_an_equal_hash(cache, tmp_path):
    book = write_book(tmp_path)
    first = prepare(data(book))
    assert prepare(data(book, repeat=True, split="unused")).folder == first.folder
    copy = tmp_path / "elsewhere" / "other name.txt"
    copy.parent.mkdir()
    copy.write_text(book.read_text())
    second = prepare(data(copy))
    assert second.folder != first.folder and second.data_hash == first.data_hash
    assert prepare(data(book, valid_fraction=0.02)).data_hash != first.data_hash
    assert prepare(data(book, tokenizer="bpe:301")).data_hash != first.data_hash
    from_jsonl = tmp_path / "book.jsonl"
    write_texts(from_jsonl, split_texts(first)[0])
    valid = tmp_path / "valid.txt"
    valid.write_text(split_texts(first)[1][0])
    # The same tokens by another way.
    assert prepare(data(from_jsonl, valid=str(valid))).data_hash == first.data_hash


def test_a_changed_file_is_another_corpus(cache, tmp_path):
    """F79: by its size or its time."""
    book = write_book(tmp_path)
    os.utime(book, (1e9, 1e9))
    first = prepare(data(book))
    book.write_text(book.read_text().replace("fox", "cat", 1))
    second = prepare(data(book))
    assert second.folder != first.folder and second.data_hash != first.data_hash
    os.utime(book, (1e9, 1e9))
    assert prepare(data(book)).folder == first.folder


def test_overlap_is_refused_unless_allowed(cache, stories, tmp_path):
    """F38"""
    valid = tmp_path / "valid.jsonl"
    write_texts(valid, ["new\n", *LINES[3:10]])
    place = rf"^{stories}:4 is word for word in the validation text.*\n.*allow_overlap = true"
    with pytest.raises(DataError, match=place):
        prepare(data(stories, valid=str(valid)))
    assert not list((cache / "corpora").glob("*/"))
    corpus = prepare(data(stories, valid=str(valid), allow_overlap=True))
    assert corpus.manifest.tally["overlap"] == 7 and corpus.valid.split.documents == 8


@pytest.mark.parametrize("has_valid", [False, True])
def test_a_thousandth_may_be_skipped_and_is_counted(cache, stories, tmp_path, has_valid):
    """With validation text of its own, the training text is read once."""
    book = write_book(tmp_path)
    valid = {"valid": str(book)} if has_valid else {}
    lines = stories.read_text().splitlines()
    stories.write_text("\n".join([*lines[:999], "{"]))
    tally = prepare(data(stories, on_bad_document="skip", **valid)).manifest.tally
    assert (tally["rows"], tally["skipped"]) == (1000 + has_valid, 1)
    assert tally["skipped_examples"][0].startswith(f"{stories}:1000: not JSON")
    stories.write_text("\n".join([*lines[:998], "{", "[]"]))
    with pytest.raises(DataError, match=r"^2 of 1,00\d rows are bad, more than 0\.1%"):
        prepare(data(stories, on_bad_document="skip", **valid))
    stories.write_text("\n".join([*lines[:994], *"[[[[[["]))
    five = r"(stories[^;\n]*; [^;]*){4}stories[^;\n]*\n  repair"
    with pytest.raises(DataError, match=r"^6 of 1,00\d rows are bad, more than 0\.1%:.*" + five):
        prepare(data(stories, on_bad_document="skip", **valid))
    with pytest.raises(DataError, match=r"stories\.jsonl:995: .*\n  repair .*on_bad_document"):
        prepare(data(stories, **valid))


def test_too_little_text(cache, tmp_path):
    path = tmp_path / "a.jsonl"
    for content in ("", '{"text": "one"}\n', '{"text": ""}\n'):
        path.write_text(content)
        with pytest.raises(DataError, match="no text is left for training"):
            prepare(data(path))
    line = tmp_path / "line.txt"
    line.write_text("no second line")
    with pytest.raises(DataError, match=r"left for validation.*\n  give more .*data\.valid"):
        prepare(data(line))


def test_at_least_one_document_is_held_out(cache, tmp_path):
    """A hundredth of three: one of the short ones, as the long one has most of the text."""
    write_texts(tmp_path / "a.jsonl", ["one", "two", "long " * 200])
    _, (valid,) = split_texts(prepare(data(tmp_path / "a.jsonl")))
    assert valid in ("one", "two")
    assert choose([(1, 50), (2, 10), (3, 10), (4, 10)], 2, 20) == (3, [1])
    assert choose([(1, 50)], 1, 20) == (-1, [])


def test_a_limit_holds_for_the_tokenizer_s_sample_too(cache, tmp_path):
    """1,000 tokens: documents of 1,000 characters, a letter each, until there are 8,000."""
    rows = [100 * (9 * letter + " ") for letter in "abcdefghijkl"]
    write_texts(tmp_path / "a.jsonl", rows)
    corpus = prepare(data(tmp_path / "a.jsonl", valid=str(write_book(tmp_path)), max_tokens=1000))
    equal = [train_tokenizer(300, rows[:n]).sha256 == corpus.tokenizer_sha256 for n in (7, 8, 9)]
    assert equal == [False, True, False]


def test_long_documents_do_not_fill_validation(cache, tmp_path):
    """Of 400 short documents and two of half the text each, 10 % by hash would be 41: a long one
    whose hash is among the smallest stays in training, so validation is short, and that is said."""
    rows = [f"{number}: {'row ' * 8}" for number in range(400)]
    long = "".join(LINES)
    number = 0
    while hashlib.sha256(f"{number} {long}".encode()).digest()[0] > 5:
        number += 1
    write_texts(tmp_path / "a.jsonl", [*rows, f"{number} {long}", f"other {long}"])
    corpus = prepare(data(tmp_path / "a.jsonl", valid_fraction=0.1))
    valid = split_texts(corpus)[1]
    assert len(valid) == 40 and max(map(len, valid)) < 100
    (note,) = corpus.manifest.notes
    assert note.startswith("validation has ") and "of the tokens, not 10.00%" in note


def test_a_tokenizer_that_cannot_reach_its_vocabulary_says_so(cache, tmp_path):
    (tmp_path / "a.txt").write_text("".join(LINES[:30]))
    corpus = prepare(Data(train=str(tmp_path / "a.txt"), tokenizer="bpe:5000", valid_fraction=0.2))
    (note,) = corpus.manifest.notes
    assert "too few pairs for 5,000 tokens; the vocabulary has " in note


def test_batches_on_many_threads_are_written_in_order(cache, stories, monkeypatch, tmp_path):
    expected = prepare(data(stories)).data_hash
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "second"))
    monkeypatch.setattr(building, "BATCH", 100_000)
    monkeypatch.setattr(tokenizer, "usable_cores", lambda: 7)
    assert prepare(data(stories)).data_hash == expected


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_long_text_takes_no_more_memory_than_a_short_one(tmp_path):
    """40 MB in one file. Not by getrusage: its peak begins with that of the process that forks."""
    script = """
import re, sys
from pathlib import Path
from efftrain_cli.data.prepare import prepare
from efftrain_cli.recipe.sections import Data
prepare(Data(train=sys.argv[1], tokenizer="bpe:600"))
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""
    (tmp_path / "long.txt").write_text("".join(LINES) * (40_000_000 // len("".join(LINES))))
    cache = str(tmp_path / "cache")
    peak = int(python(script, str(tmp_path / "long.txt"), EFFTRAIN_CACHE=cache).stdout)
    assert peak < 200_000
