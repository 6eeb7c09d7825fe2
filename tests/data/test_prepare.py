"""prepare: one corpus for one text, whole or not there, and refused where it would mislead (F34,
F35, F38)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from efftrain_cli.data.corpus import HEADER_BYTES, Corpus
from efftrain_cli.data.prepare import prepare
from efftrain_cli.data.tokenizer import load_tokenizer
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.recipe.sections import Data
from tests.damage import flip
from tests.data.conftest import LINES, data, write_texts


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    path = tmp_path / "stories.jsonl"
    write_texts(path)
    return path


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


def test_one_text_file_gives_its_end_to_validation(cache, book):
    corpus = prepare(data(book, valid_fraction=0.1))
    (train,), (valid,) = split_texts(corpus)
    assert train + valid == "".join(LINES)
    assert train.endswith("\n") and abs(len(valid) / len(train + valid) - 0.1) < 0.002
    assert corpus.vocab_size == 300 and corpus.eot_id == 0
    assert corpus.bytes_per_token == len(valid.encode()) / corpus.valid.tokens


def test_few_text_files_are_cut_and_many_are_held_out(cache, tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(19):
        (folder / f"{number:02}.txt").write_text("".join(LINES[number * 20 : number * 20 + 20]))
    train, valid = split_texts(prepare(data(folder, valid_fraction=0.1)))
    assert (len(train), len(valid)) == (19, 19)
    assert all(
        a + b == "".join(LINES[n * 20 : n * 20 + 20])
        for n, (a, b) in enumerate(zip(train, valid, strict=True))
    )
    (folder / "19.txt").write_text("".join(LINES[380:400]))
    train, valid = split_texts(prepare(data(folder, valid_fraction=0.1)))
    assert (len(train), len(valid)) == (18, 2)
    assert sorted(train + valid) == sorted("".join(LINES[n * 20 : n * 20 + 20]) for n in range(20))


def test_held_out_documents_do_not_depend_on_their_place(cache, stories, tmp_path):
    train, valid = split_texts(prepare(data(stories)))
    assert len(valid) == 20 and len(train) == 1980
    reversed_stories = tmp_path / "reversed.jsonl"
    reversed_stories.write_text("".join(reversed(stories.read_text().splitlines(keepends=True))))
    train_reversed, valid_reversed = split_texts(prepare(data(reversed_stories)))
    assert valid_reversed == valid[::-1] and train_reversed == train[::-1]


def test_copies_of_a_document_stay_on_one_side(cache, stories):
    stories.write_text(stories.read_text() * 3)
    train, valid = split_texts(prepare(data(stories)))
    assert not set(train) & set(valid)
    assert len(train) + len(valid) == 6000 and len(valid) == 60


def test_text_that_spells_the_end_of_text_does_not_end_it(cache, tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [f"row {i} <|endoftext|> more {i}" for i in range(100)]
    write_texts(path, rows)
    train, valid = split_texts(prepare(data(path)))
    assert sorted(train + valid) == sorted(rows)


def test_two_recipes_share_a_corpus_wherever_its_text_lies(cache, book, tmp_path):
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
    write_texts(from_jsonl, split_texts(first)[0])
    valid = tmp_path / "valid.txt"
    valid.write_text(split_texts(first)[1][0])
    assert (
        prepare(data(from_jsonl, valid=str(valid))).data_hash == first.data_hash
    )  # the same tokens by another way


def test_a_changed_file_is_seen_although_its_size_is_the_same(cache, book):
    os.utime(book, (1e9, 1e9))
    first = prepare(data(book))
    assert list((cache / "hashes").iterdir())  # settled, so its hash is remembered
    book.write_text(book.read_text().replace("fox", "cat", 1))
    assert prepare(data(book)).folder != first.folder
    os.utime(book, (1e9, 2e9))
    assert prepare(data(book)).folder != first.folder


def test_overlap_is_refused_unless_allowed(cache, stories, tmp_path):
    """F38"""
    valid = tmp_path / "valid.jsonl"
    write_texts(valid, ["new\n", *LINES[3:10]])
    with pytest.raises(DataError) as refused:
        prepare(data(stories, valid=str(valid)))
    said = str(refused.value)
    assert said.startswith("the validation text holds 7 training documents word for word")
    assert f"{stories}:4 = {valid}:2" in said and "data.allow_overlap = true" in said
    assert not list((cache / "corpora").glob("*/"))  # refused before anything was made
    corpus = prepare(data(stories, valid=str(valid), allow_overlap=True))
    assert corpus.manifest["overlap"] == 7 and len(split_texts(corpus)[1]) == 8
    with pytest.raises(DataError, match="word for word"):
        prepare(data(stories, valid=str(valid)))  # the cache has it, this recipe still refuses it


def test_skipped_documents_are_counted_and_refused_by_others(cache, stories):
    stories.write_text(stories.read_text() + "{\n")
    corpus = prepare(data(stories, on_bad_document="skip"))
    assert (
        corpus.manifest["skipped"] == 1 and corpus.train.documents + corpus.valid.documents == 2000
    )
    with pytest.raises(
        DataError,
        match=(
            r"^1 document that cannot be read: .*stories\.jsonl:2001, byte 153428:"
            r" .*\n  repair .*on_bad_document"
        ),
    ):
        prepare(data(stories))


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "empty"),
        ('{"text": "one"}\n', "no text is left for training"),
        ('{"text": ""}\n', "no text is left for training"),
    ],
)
def test_too_little_text(cache, tmp_path, content, said):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=said):
        prepare(data(path))
    line = tmp_path / "line.txt"
    line.write_text("no second line")
    with pytest.raises(
        DataError,
        match=r"(?s)no text is left for validation.*\n  give more documents, .*data\.valid",
    ):
        prepare(data(line))


def test_bad_settings_cost_nothing(cache, book):
    for bad in (data(book, tokenizer="bpe:3"), data(book, tokenizer="no/such"), data(("no.txt",))):
        with pytest.raises(DataError):
            prepare(bad)
    assert not cache.exists()


# --- damage and other people's files --------------------------------------------------------------


def test_damage_is_refused_with_exit_3(cache, book):
    """F34: each file of a corpus flipped, cut short and removed; with full verification nothing
    passes."""
    folder = prepare(data(book)).folder
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == [
        "manifest.json",
        "tokenizer.json",
        "train-00000.bin",
        "valid-00000.bin",
    ]
    for path in files:
        content = path.read_bytes()
        flip(path, 4 * len(content))
        for damaged in (path.read_bytes(), content[:-1], b""):
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


def test_a_flipped_token_is_seen_at_first_use(cache, book):
    corpus = prepare(data(book))
    path = corpus.folder / "train-00000.bin"
    flip(path, -40)
    corpus = prepare(data(book))  # its size is right
    with pytest.raises(
        DataError, match=r"train-00000\.bin: its tokens are not those that were written"
    ):
        corpus.train.read([0], 4)
    corpus.valid.read([0], 4)


def test_shards_of_another_corpus_or_tokenizer_are_refused(cache, book, tmp_path):
    """F34, F35: sound files in the wrong place."""
    corpus = prepare(data(book))
    other_tokenizer = prepare(data(book, tokenizer="bpe:301"))
    other_text = tmp_path / "b.txt"
    other_text.write_text("".join(LINES[:1000]))
    train = corpus.folder / "train-00000.bin"
    content = train.read_bytes()
    for other in (other_tokenizer.folder / train.name, corpus.folder / "valid-00000.bin"):
        shutil.copy(other, train)
        with pytest.raises(DataError, match=r"train-00000\.bin: .* are expected") as refused:
            prepare(data(book))
        assert refused.value.exit_code == 3
    ids = np.frombuffer(content, "<u2", offset=HEADER_BYTES)
    train.write_bytes(content[:HEADER_BYTES] + ids[::-1].tobytes())
    with pytest.raises(DataError, match="not those that were written"):
        prepare(data(book), verify="full")
    train.write_bytes(content)
    shutil.copy(other_tokenizer.tokenizer_path, corpus.tokenizer_path)
    with pytest.raises(DataError, match=r"tokenizer\.json: missing or changed"):
        prepare(data(book))


@pytest.mark.slow
def test_the_novels_with_gpt2s_own_tokens(cache, shared_data):
    """23 and 3 books; 3.59 and 0.30 million tokens, as counted when the folder was put together."""
    books = shared_data / "classic_books"
    corpus = prepare(
        Data(
            train=str(books / "train"),
            valid=str(books / "valid"),
            tokenizer=str(shared_data / "gpt2_tokenizer"),
        )
    )
    assert (corpus.train.documents, corpus.valid.documents) == (23, 3)
    assert round((corpus.train.tokens - 23) / 1e6, 2) == 3.59
    assert round((corpus.valid.tokens - 3) / 1e6, 2) == 0.30
    assert (corpus.vocab_size, corpus.eot_id, corpus.manifest["overlap"]) == (50257, 50256, 0)
    corpus.verify()
