"""Where text may come from beside .txt: other files, token files, and several sources mixed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from efftrain_cli.data import documents as reader
from efftrain_cli.data.corpus import Corpus, Part, TokenShards
from efftrain_cli.data.documents import read_documents
from efftrain_cli.data.prepare import prepare
from efftrain_cli.data.split import apportion
from efftrain_cli.data.text import BadDocuments, TextFile, find_text
from efftrain_cli.data.tokenizer import load_tokenizer, train_tokenizer
from efftrain_cli.data.windows import Windows, data_warnings
from efftrain_cli.foundation.errors import DataError, RecipeError
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.recipe.sections import Data, TextSource
from tests.data.conftest import LINES, data, texts, write_texts

pytestmark = pytest.mark.usefixtures("cache")


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


def documents_of(shards: TokenShards, corpus: Corpus) -> list[list[int]]:
    ids = shards.read([0], shards.tokens)[0]
    ends = np.flatnonzero(ids == corpus.eot_id)
    return [part.tolist()[:-1] for part in np.split(ids, ends + 1)[:-1]]


# --- files ----------------------------------------------------------------------------------------


def test_json_csv_markdown_and_zstd(tmp_path):
    (tmp_path / "list.json").write_text(
        json.dumps([{"text": "one"}, {"text": ""}, {"text": "two\nlines"}], indent=2)
    )
    (tmp_path / "single.json").write_text(json.dumps({"text": "alone"}, indent=2))
    (tmp_path / "lines.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "t.csv").write_text(
        '\ufeffid,text\n1,plain\n2,"quoted, with\nan end of line"\n3,\n'
    )
    (tmp_path / "notes.md").write_text("# title\r\ntext")
    (tmp_path / "wiki.raw").write_text(" = A = \n")
    frames = [zstd(b'{"text": "z1"}\n{"te'), zstd(b'xt": "z2"}\n')]
    (tmp_path / "z.jsonl.zst").write_bytes(b"".join(frames))
    assert texts(tmp_path / "list.json") == ["one", "two\nlines"]
    assert texts(tmp_path / "single.json") == ["alone"]
    assert texts(tmp_path / "lines.json") == ["a", "b"]
    assert texts(tmp_path / "t.csv") == ["plain", "quoted, with\nan end of line"]
    assert texts(tmp_path / "notes.md") == ["# title\ntext"]
    assert texts(tmp_path / "wiki.raw") == [" = A = \n"]
    assert texts(tmp_path / "z.jsonl.zst") == ["z1", "z2"]


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.json", b'[{"text": 1}]', r"a\.json: record 1: field 'text' is int"),
        ("a.json", b"[]", "holds no records"),
        ("a.json", b'[{"text": "x"}, {"te', r"a\.json:1, byte 17: not JSON"),
        ("a.csv", b"id,body\n1,x\n", r"no column 'text'; it has 'id', 'body'"),
        ("a.csv", b"text\n\xff\n", r"a\.csv:2: not UTF-8: byte 0xff"),
        ("a.csv", b"te\xffxt\nfine\n", r"a\.csv:1: not UTF-8"),
        ("a.csv", b'text\n"open', r"a\.csv:2: not CSV"),
        ("a.csv", b"", "holds no rows"),
        (
            "a.jsonl.zst",
            b"no zstd at all",
            r"a\.jsonl\.zst: the compressed file is damaged or cut short after line 0:",
        ),
        (
            "a.jsonl.zst",
            zstd(b'{"text": "x"}\n' * 9999)[:-7],
            (
                r"compressed file is damaged or cut short after line [\d,]+: Truncated compressed"
                r" stream"
            ),
        ),
        (
            "a.jsonl",
            b'{"text": "x", "n": ' + b"7" * 5000 + b"}\n",
            r"a\.jsonl:1, byte 0: not JSON that can be read",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        texts(tmp_path / name)


def test_rows_of_csv_that_are_not_utf8_are_skipped(tmp_path):
    """Lines 3 and 5 are damaged; line 5 is the second of a quoted text."""
    path = tmp_path / "a.csv"
    path.write_bytes(b'text\nfine\nbad \xff\n"two\nli\xe9nes"\nlast\n')
    bad = BadDocuments("skip")
    (source,) = find_text(Data(train=str(path))).train
    assert [d.text for d in read_documents(source, "text", bad)] == ["fine", "last"]
    assert (bad.seen, bad.skipped) == (4, 2)
    places = [example.partition(" (")[0] for example in bad.examples]
    assert places == [f"{path}:3: not UTF-8: byte 0xff", f"{path}:5: not UTF-8: byte 0xe9"]


def test_a_line_without_end_costs_bounded_memory(tmp_path, monkeypatch):
    """F71, with the limit lowered: the line is named or skipped, and what follows it is read."""
    monkeypatch.setattr(reader, "LINE_BYTES", 1000)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(
        gzip.compress(b'{"text": "before"}\n' + b" " * 10_000_000 + b'\n{"text": "after"}\n')
    )
    with pytest.raises(
        DataError,
        match=r"bomb\.jsonl\.gz:2, byte 19: a line of 10,000,001 bytes; at most 1,000 are read",
    ):
        texts(path)
    bad = BadDocuments("skip")
    (source,) = find_text(Data(train=str(path))).train
    assert [d.text for d in read_documents(source, "text", bad)] == ["before", "after"]
    assert (bad.seen, bad.skipped) == (3, 1)


def test_what_a_folder_leaves_out_is_said_or_refused(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "a.txt").write_text("".join(LINES[:50]))
    (folder / "cover.html").write_text("x" * 100)
    (folder / "README.md").write_text("y" * 50)
    found = find_text(Data(train=str(folder)))
    assert [source.path.name for source in found.train] == ["a.txt"]
    (note,) = found.notes
    assert "2 of 3 files, 150 of " in note
    assert "bytes, are not read (1 .md, 1 .html)" in note  # as often: README.md comes first
    (folder / "big.rst").write_text("z" * 100_000)
    with pytest.raises(
        DataError, match=r"(?s)are not read .*read is only 1 \.txt\n  name .*data\.format = \"txt\""
    ):
        find_text(Data(train=str(folder)))
    everything = find_text(Data(train=str(folder), format="txt"))
    assert [source.path.name for source in everything.train] == [
        "README.md",
        "a.txt",
        "big.rst",
        "cover.html",
    ]
    assert everything.notes == ()
    (folder / "a.txt").unlink()
    with pytest.raises(DataError, match=r"are not read"):
        find_text(
            Data(train=str(folder))
        )  # .md is read where there is nothing else, but it is not most of this folder
    (folder / "README.md").unlink()
    with pytest.raises(
        DataError,
        match=r'no file of a known kind .*; it has 1 \.rst, 1 \.html\. data\.format = "txt"',
    ):
        find_text(Data(train=str(folder)))


def test_a_list_that_is_not_toml_says_how_to_write_one():
    with pytest.raises(DataError) as refused:
        find_text(Data(train='["a.txt","b'))
    assert str(refused.value).endswith("""list in quotes: --set 'data.train=["a.txt", "b.txt"]'""")


# --- token files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "suffix, content",
    [
        ("jsonl", b"{"),
        ("txt", b"\xff"),
        ("csv", b"id\n1\n"),
        ("parquet", b"PAR1"),
        ("bin", b"\1"),
        ("jsonl.gz", b"\x1f\x8b"),
        ("txt", None),
    ],
)
def test_a_file_name_ends_no_line_of_a_message(tmp_path, suffix, content):
    path = tmp_path / f"a\nb.{suffix}"
    if content is not None:
        path.write_bytes(content)
    source = TextFile(path, "txt" if content is None else suffix.split(".")[0])  # type: ignore[arg-type]
    with pytest.raises(DataError) as refused:
        list(read_documents(source, "text", BadDocuments("error"), eot_id=0))
    assert "a\\nb." in str(refused.value) and str(path) not in str(refused.value)


def test_token_files_of_nanogpt_and_llmc_give_their_ids(tmp_path):
    tokenizer = train_tokenizer(400, LINES)
    tokenizer.save(tmp_path / "tokenizer.json")
    ids = [tokenizer.encode([line])[0].astype(np.uint16) for line in LINES]
    eot = np.array([tokenizer.eot_id], dtype=np.uint16)
    nano = np.concatenate(
        [part for line in ids for part in (line, eot)]
    )  # end of text after each document
    llmc = np.concatenate([part for line in ids for part in (eot, line)])  # and before each
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(llmc)
    nano.tofile(tmp_path / "nano.bin")
    (tmp_path / "llmc.bin").write_bytes(header.tobytes() + llmc.tobytes())
    header[:3] = 20240801, 7, len(llmc)
    (tmp_path / "llama.bin").write_bytes(header.tobytes() + llmc.astype("<u4").tobytes())
    write_texts(tmp_path / "lines.jsonl")
    write_texts(tmp_path / "valid.jsonl", LINES[:20])
    corpora = [
        prepare(
            Data(
                train=str(tmp_path / name),
                tokenizer=str(tmp_path / "tokenizer.json"),
                valid=str(tmp_path / "valid.jsonl"),
                allow_overlap=True,
            )
        )
        for name in ("nano.bin", "llmc.bin", "llama.bin", "lines.jsonl")
    ]
    assert len({corpus.data_hash for corpus in corpora}) == 1
    assert {corpus.manifest["train"]["bytes"] for corpus in corpora} == {sum(map(len, LINES))}
    alone = prepare(
        Data(train=str(tmp_path / "nano.bin"), tokenizer=str(tmp_path / "tokenizer.json"))
    )
    held_out, kept = documents_of(alone.valid, alone), documents_of(alone.train, alone)
    assert len(held_out) == 20 and sorted(held_out + kept) == sorted(line.tolist() for line in ids)
    assert alone.manifest["valid"]["bytes"] == sum(
        len(tokenizer.decode(document)) for document in held_out
    )


@pytest.mark.parametrize(
    "content, beside, said",
    [
        (b"123", None, r"not a whole number of uint16 ids"),
        (b"", None, "the file is empty"),
        (
            np.array([20240520, 1, 99] + [0] * 253, dtype="<i4").tobytes(),
            None,
            r"1,024 bytes where llm.c's header says 1,222.*cut short",
        ),
        (np.array([20240520, 3, 0] + [0] * 253, dtype="<i4").tobytes(), None, "llm.c's version 3"),
        (b"12" * 600, "meta.pkl", r"meta\.pkl beside it"),
        (
            np.full(600, 4000, dtype="<u2").tobytes(),
            None,
            r"token 0 is 4000, but the tokenizer's vocabulary has 300",
        ),
    ],
)
def test_token_files_that_cannot_be_meant(tmp_path, content, beside, said):
    train_tokenizer(300, LINES[:50]).save(tmp_path / "tokenizer.json")
    (tmp_path / "a.bin").write_bytes(content)
    (tmp_path / "b.bin").write_bytes(np.arange(100, dtype="<u2").tobytes())
    if beside:
        (tmp_path / beside).write_bytes(b"")
    data = Data(
        train=str(tmp_path / "a.bin"),
        valid=str(tmp_path / "b.bin"),
        tokenizer=str(tmp_path / "tokenizer.json"),
    )
    with pytest.raises(DataError, match=said):
        prepare(data)


def test_a_tokenizer_cannot_be_trained_on_tokens(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(100, dtype="<u2").tobytes())
    with pytest.raises(DataError, match=r'holds token ids.*data\.tokenizer.*"gpt2"'):
        prepare(data(tmp_path / "a.bin"))


# --- several sources ------------------------------------------------------------------------------


def test_shares_add_up():
    assert apportion([1, 1, 1], 10) == [4, 3, 3]
    assert apportion([0.7, 0.2, 0.1], 10_000) == [7000, 2000, 1000]
    assert sum(apportion([3.3, 0.01, 7.7, 1e-3], 997)) == 997


def test_a_mix_is_a_function_of_position(tmp_path):
    """Tokens that name their source: every beginning of the stream has each source's share, every
    window of a source comes once per epoch of it, and any position gives the same alone as in a
    long read."""
    from tests.data.test_windows import counting_shards

    whole = counting_shards(tmp_path, 6000)
    whole.parts = (Part("a", 0.7, 3000), Part("b", 0.2, 2000), Part("c", 0.1, 1000))
    windows = Windows(whole, 10, seed=3)
    starts = windows.starts(0, 25_000)
    owner = np.searchsorted([3000, 5000], starts, side="right")
    for part, weight in enumerate((0.7, 0.2, 0.1)):
        ahead = np.cumsum(owner == part) - weight * np.arange(1, 25_001)
        assert np.abs(ahead).max() <= 2
    for part, (base, tokens) in enumerate(((0, 3000), (3000, 2000), (5000, 1000))):
        own = starts[owner == part]
        per_epoch = tokens // 10 - 1
        assert (own >= base).all() and (own + 11 <= base + tokens).all()
        for epoch in range(3):
            assert len(set(own[epoch * per_epoch : (epoch + 1) * per_epoch].tolist())) == per_epoch
    again = Windows(whole, 10, seed=3)
    assert [int(again.starts(p, 1)[0]) for p in (0, 9_999, 10_000, 24_321)] == starts[
        [0, 9_999, 10_000, 24_321]
    ].tolist()
    assert windows.epochs_of_sources(2990) == pytest.approx(
        {"a": 7.0, "b": 2990 * 0.2 / 199, "c": 2990 * 0.1 / 99}
    )
    assert windows.epochs(windows.per_epoch) == 1 and windows.per_epoch == 299 * 10_000 // 7000
    with pytest.raises(
        RecipeError, match=r"one of the sources \(a 7\.00, b 3\.01, c 3\.02\)\n.*data\.repeat"
    ):
        windows.check_budget(2990, Data())
    valid = windows.validation_starts(20)
    assert [
        int(np.sum((np.array(valid) >= low) & (np.array(valid) < high)))
        for low, high in ((0, 3000), (3000, 5000), (5000, 6000))
    ] == [14, 4, 2]


def test_sources_have_fields_and_weights_of_their_own(tmp_path, cache):
    write_texts(tmp_path / "a.jsonl", LINES[:1000])
    (tmp_path / "b.csv").write_text(
        "body\n" + "".join(f"{line.strip()}\n" for line in LINES[1000:])
    )

    def data(*weights: float, **keys: Any) -> Data:
        paths = ((str(tmp_path / "a.jsonl"), None), (str(tmp_path / "b.csv"), "body"))
        sources = tuple(
            TextSource(path=p, text_field=f, weight=w)
            for (p, f), w in zip(paths, weights, strict=True)
        )
        return Data(sources=sources, tokenizer="bpe:300", valid_fraction=0.05, **keys)

    corpus = prepare(data(3.0, 1.0))
    assert [(part.weight, Path(part.name).name) for part in corpus.train.parts] == [
        (3.0, "a.jsonl"),
        (1.0, "b.csv"),
    ]
    assert sum(part.tokens for part in corpus.train.parts) == corpus.train.tokens
    assert sum(part.tokens for part in corpus.valid.parts) == corpus.valid.tokens
    first = documents_of(TokenShards(corpus.train.shards[:1]), corpus)
    decoded = load_tokenizer(corpus.tokenizer_path).decode(first[0])
    assert decoded in LINES[:1000]
    assert prepare(data(1.0, 1.0)).folder == corpus.folder  # weights change no token
    limited = prepare(data(3.0, 1.0, max_tokens=8000))
    assert [part.tokens // 100 for part in limited.train.parts] == [60, 20]


def test_sources_in_a_recipe(tmp_path):
    recipe = tmp_path / "mix.toml"
    recipe.write_text(
        'base = "small"\n[[data.sources]]\npath = "stdlib"\nweight = 3\n[[data.sources]]\npath ='
        ' "b.csv"\ntext_field = "body"\n'
    )
    loaded = load_recipe(str(recipe))
    assert loaded.data.sources == (
        TextSource(path="stdlib", weight=3.0),
        TextSource(path="b.csv", text_field="body"),
    )
    assert load_recipe(str(recipe), ["data.sources.1.weight=0.5"]).data.sources[1].weight == 0.5
    with pytest.raises(
        RecipeError, match=r"data\.train = \"x\.txt\"[\s\S]*beside \[\[data\.sources\]\]"
    ):
        load_recipe(str(recipe), ["data.train=x.txt"])
    with pytest.raises(RecipeError, match=r"source 1 .*a weight is at least a thousandth"):
        load_recipe(str(recipe), ["data.sources.1.weight=0.001"])
    from efftrain_cli.recipe.recipe import dump_recipe

    (tmp_path / "again.toml").write_text(dump_recipe(loaded))
    assert load_recipe(str(tmp_path / "again.toml")) == loaded


# --- what is said ---------------------------------------------------------------------------------


def test_warnings_of_little_text(tmp_path):
    from tests.data.test_windows import counting_shards

    windows = Windows(counting_shards(tmp_path, 1010), 10, seed=0)  # 100 windows
    assert data_warnings(windows, 5000, 8) == []
    (epochs,) = data_warnings(windows, 5100, 8)
    assert epochs.startswith("the run reads the text 51 times")
    (few,) = data_warnings(windows, 100, 1)
    assert few.startswith("validation is on 1 window only")


def test_a_tokenizer_that_cannot_reach_its_vocabulary_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("".join(LINES[:30]))
    corpus = prepare(Data(train=str(tmp_path / "a.txt"), tokenizer="bpe:5000", valid_fraction=0.2))
    (note,) = corpus.notes
    assert "too few pairs for 5,000 tokens; the vocabulary has " in note


def test_other_bytes_under_the_old_time_are_found_by_a_full_check(tmp_path):
    """F79: equal size and time stamp, other content."""
    import os

    path = tmp_path / "a.jsonl"
    write_texts(path)
    os.utime(path, (1e9, 1e9))
    text = data(path)
    first = prepare(text)
    path.write_text(path.read_text().replace("fox", "cat", 1))
    os.utime(path, (1e9, 1e9))
    assert (
        prepare(text).folder == first.folder
    )  # not seen: hashes of files that seem unchanged are remembered
    assert prepare(text, verify="full").folder != first.folder


def test_a_shard_cut_short_while_in_use_is_an_error_and_no_crash(tmp_path):
    """F72: without the check this read would end the process by SIGBUS."""
    path = tmp_path / "a.jsonl"
    write_texts(path)
    corpus = prepare(data(path))
    corpus.train.read([0], 10)
    shard = corpus.folder / "train-00000.bin"
    with open(shard, "r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    with pytest.raises(DataError, match=r"train-00000\.bin: .* cut short while in use"):
        corpus.train.read([corpus.train.tokens - 20], 10)


def test_text_below_a_hidden_folder_is_said_to_be_hidden(tmp_path):
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"such as \.cache, are not read: name one to read it"):
        find_text(Data(train=str(tmp_path)))
    assert len(find_text(Data(train=str(tmp_path / ".cache"))).train) == 1


def test_texts_with_a_comma_between_them_are_shown_as_a_list(tmp_path):
    with pytest.raises(DataError, match=r'written as a list: \["a\.txt", "b\.txt"\]'):
        find_text(Data(train="a.txt, b.txt"))
    (tmp_path / "a,b.txt").write_text("text")
    assert len(find_text(Data(train=str(tmp_path / "a,b.txt"))).train) == 1
