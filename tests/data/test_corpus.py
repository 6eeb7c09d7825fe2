"""Token shards: what is written is what is read, and every damage is seen (F34, F36)."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import numpy as np
import pytest

from efftrain_cli.data import corpus as shards_module
from efftrain_cli.data.corpus import ShardWriter, TokenShards
from efftrain_cli.data.prepare import prepare
from efftrain_cli.foundation.errors import DataError
from tests.data.book import data, write_book


def write(folder: Path, *shards: list[int], vocab_size: int = 300) -> TokenShards:
    """Write each list of ids as a shard, and open them."""
    writer = ShardWriter(folder / "train.bin", vocab_size)
    for ids in shards:
        writer.add(np.array(ids, dtype=np.uint32))
        writer.close()
    return TokenShards(writer.path, writer.split, vocab_size)


@pytest.mark.parametrize(
    "vocab_size, dtype", [(300, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_ids_come_back_and_a_file_is_nothing_else(tmp_path, vocab_size, dtype):
    """Two shards; verification covers the second too."""
    ids = [1, 2, vocab_size - 1, 7]
    shards = write(tmp_path, ids[:3], ids[3:], vocab_size=vocab_size)
    shards.verify([])
    assert shards.read([0, 1], 3).tolist() == [ids[:3], ids[1:]]
    assert (tmp_path / "train.bin").read_bytes() == np.array(ids, dtype=dtype).tobytes()


def test_ids_beyond_the_vocabulary_are_refused_when_written(tmp_path):
    """F36: what was written is all that a verified shard can hold."""
    with pytest.raises(DataError, match=r"token id 300, but .* 300 tokens \(ids from 0\)\n"):
        write(tmp_path, [5, 6, 300])


def flip_bit(path: Path, byte: int) -> None:
    """Change a bit in place and set the modification time back."""
    stat = path.stat()
    time.sleep(0.01)  # time stamps have a resolution of a few milliseconds
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_file_that_changes_while_it_is_in_use_is_checked(tmp_path):
    """F96: a bit flipped in bytes that the read does not touch, of the second shard."""
    shards = write(tmp_path, list(range(8, 258)), list(range(8, 258)))
    before = shards.read([0], 4).tolist()
    flip_bit(shards.path, 900)
    with pytest.raises(DataError, match="not those that were written") as refused:
        shards.read([0], 4)
    assert refused.value.exit_code == 3 and str(shards.path) in str(refused.value)
    flip_bit(shards.path, 900)
    assert shards.read([0], 4).tolist() == before, "put back, it is sound"


def test_a_shard_cut_short_while_in_use_is_an_error_and_no_crash(tmp_path):
    """F72: without the check this read would end the process by SIGBUS."""
    shards = write(tmp_path, list(range(8, 258)) * 100)
    os.truncate(shards.path, 25_000)
    with pytest.raises(DataError, match=r"train\.bin: 25,000 bytes where 50,000"):
        shards.read([shards.tokens - 20], 10)


def test_tokens_are_hashed_once_and_again_if_their_file_changes(cache, tmp_path, monkeypatch):
    """A second start hashes nothing, a touched file is hashed, and so is everything with `full`."""
    book = write_book(tmp_path)
    corpus = prepare(data(book))
    hashed: list[int] = []

    class Counted:
        """hashlib, whose sha256 notes how many ids it is given."""

        @staticmethod
        def sha256(ids: memoryview) -> object:
            hashed.append(len(ids))
            return hashlib.sha256(ids)

    monkeypatch.setattr(shards_module, "hashlib", Counted)

    def verify(**full: bool) -> list[int]:
        hashed.clear()
        prepare(data(book)).verify(**full)
        return hashed

    both = [corpus.train.tokens, corpus.valid.tokens]
    assert verify() == both
    assert verify() == []
    assert verify(full=True) == both
    flip_bit(corpus.train.path, 100)
    with pytest.raises(DataError, match="not those that were written"):
        verify()
    flip_bit(corpus.train.path, 100)
    assert verify() == both[:1]
    (corpus.folder / "verified.json").write_text("{")
    assert verify() == both


def test_damage_is_refused_with_exit_3(cache, tmp_path):
    """F34, F35: each file of a corpus flipped, cut short and removed, and files of another corpus;
    with full verification nothing passes."""
    book = write_book(tmp_path)
    other = prepare(data(book, tokenizer="bpe:301")).folder
    folder = prepare(data(book)).folder
    names = ["manifest.json", "tokenizer.json", "train.bin", "valid.bin"]
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        path = folder / name
        content = path.read_bytes()
        damaged = [content[:-1], (other / name).read_bytes()]
        if path.suffix == ".bin":
            damaged.append(content[2:] + content[:2])
        for wrong in damaged:
            path.write_bytes(wrong)
            with pytest.raises(DataError, match=r"efftrain prepare") as refused:
                prepare(data(book)).verify(full=True)
            assert str(folder) in str(refused.value) and refused.value.exit_code == 3
        if name != "manifest.json":
            path.unlink()
            with pytest.raises(DataError, match=name):
                prepare(data(book))
        path.write_bytes(content)
    prepare(data(book)).verify(full=True)
