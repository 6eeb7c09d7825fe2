"""Token shards: what is written is what is read, and every damage is seen (F34, F36)."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from efftrain_cli.data import corpus as shards_module
from efftrain_cli.data.corpus import (
    HEADER_BYTES,
    Shard,
    ShardEntry,
    ShardWriter,
    TokenShards,
    dtype_for,
    open_shard,
)
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.training.session import prepare_session
from tests.damage import flip, flips


def write(
    folder: Path, documents: list[list[int]], vocab_size: int = 300, shard_tokens: int = 1 << 26
) -> TokenShards:
    writer = ShardWriter(
        folder,
        "train",
        vocab_size=vocab_size,
        eot_id=7,
        shard_tokens=shard_tokens,
    )
    for number, ids in enumerate(documents):
        writer.add(np.array(ids, dtype=np.uint32), f"document {number}")
    writer.close()
    return writer.opened()


def reopened(shard: Shard) -> TokenShards:
    """Open a shard again that a manifest knows as it was written."""
    entry = ShardEntry(file=shard.path.name, tokens=len(shard.ids), sha256=shard.sha256)
    return TokenShards([open_shard(shard.path.parent, entry, shard.vocab_size)])


@pytest.mark.parametrize(
    "vocab_size, dtype", [(300, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_documents_come_back_each_with_its_end(tmp_path, vocab_size, dtype):
    shards = write(tmp_path, [[1, 2], [], [vocab_size - 1]], vocab_size)
    shards.verify()
    (shard,) = shards.shards
    assert shard.ids.tolist() == [1, 2, 7, 7, vocab_size - 1, 7]
    assert shard.ids.dtype == dtype_for(vocab_size) == dtype
    content = shard.path.read_bytes()
    assert len(content) == HEADER_BYTES + 6 * np.dtype(dtype).itemsize
    assert content.startswith(b"efftrain tokens ")


def test_shards_close_with_a_document_and_read_as_one(tmp_path):
    documents = [list(range(10, 10 + n)) for n in (5, 1, 9, 0, 3, 12)]
    shards = write(tmp_path, documents, shard_tokens=8)
    assert [len(shard.ids) for shard in shards.shards] == [8, 10, 18]
    whole = [token for ids in documents for token in [*ids, 7]]
    assert shards.tokens == 36
    for length in (1, 4, 11, 36):
        starts = list(range(36 - length + 1))
        assert shards.read(starts, length).tolist() == [whole[s : s + length] for s in starts]
    assert shards.read([3], 2).dtype == np.int64


def test_truncation_is_seen_at_open(tmp_path):
    (shard,) = write(tmp_path, [list(range(8, 258))] * 4).shards
    path = shard.path
    content = path.read_bytes()
    rng = random.Random(1)
    for length in [
        0,
        1,
        HEADER_BYTES - 1,
        HEADER_BYTES,
        len(content) - 1,
        *(rng.randrange(len(content)) for _ in range(50)),
    ]:
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match="cut short") as refused:
            reopened(shard)
        assert str(path) in str(refused.value) and refused.value.exit_code == 3
        assert "efftrain prepare" in str(refused.value)
    path.write_bytes(content + b"\0\0")
    with pytest.raises(DataError, match="longer than its manifest says"):
        reopened(shard)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        reopened(shard)


def test_every_flipped_bit_is_seen_before_its_tokens_are_used(tmp_path):
    """200 random bits of header and ids, and those at their ends, at the first read anywhere in the
    shard."""
    (shard,) = write(tmp_path, [list(range(8, 258))] * 4).shards
    for _ in flips(shard.path, 200):
        with pytest.raises(DataError):
            reopened(shard).read([0], 2)
    for bit in (0, 8 * HEADER_BYTES - 1, 8 * HEADER_BYTES, -1):
        flip(shard.path, bit)
        with pytest.raises(DataError):
            reopened(shard).read([0], 2)
        flip(shard.path, bit)
    reopened(shard).verify()


def test_a_shard_with_a_header_of_its_own_is_read(tmp_path):
    """Format 1: a line of JSON in front of the ids, of which the manifest knows all that counts."""
    (shard,) = write(tmp_path, [[1, 2]]).shards
    content = shard.path.read_bytes()
    before = b'{"magic": "efftrain tokens", "schema_version": 1}'.ljust(HEADER_BYTES)
    shard.path.write_bytes(before + content[HEADER_BYTES:])
    assert reopened(shard).read([0], 3).tolist() == [[1, 2, 7]]


@pytest.mark.parametrize("failing, ids", [("fsync", 200), ("write", 200_000), ("close", 2)])
def test_a_disk_that_refuses_a_shard_is_named(tmp_path, monkeypatch, failing, ids):
    """The system's own errors of fsync and write name no file. Few ids wait in a buffer until the
    file is closed."""

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    if failing == "fsync":
        monkeypatch.setattr(os, "fsync", refuse)
    else:
        full = lambda *args: open("/dev/full", "wb")  # noqa: SIM115, E731
        monkeypatch.setattr(shards_module, "open", full, False)
    with pytest.raises(OSError) as refused:
        write(tmp_path, [[1] * ids])
    assert refused.value.filename == str(tmp_path / "train-00000.bin")


def test_ids_beyond_the_vocabulary_are_refused_when_written(tmp_path):
    with pytest.raises(DataError, match=r"document 1: token 2 is 300, but .* 300 tokens"):
        write(tmp_path, [[1], [5, 6, 300]])


def test_ids_beyond_the_vocabulary_are_refused_at_the_first_batch(tmp_path):
    """F36: a shard sound in every sum, from a program that did not check."""
    (shard,) = write(tmp_path, [list(range(8, 258))]).shards
    content = bytearray(shard.path.read_bytes())
    content[HEADER_BYTES + 2 * 41 : HEADER_BYTES + 2 * 42] = (300).to_bytes(2, "little")
    shard.path.write_bytes(content)
    shard.sha256 = hashlib.sha256(content[HEADER_BYTES:]).hexdigest()
    with pytest.raises(DataError) as refused:
        reopened(shard).read([0], 4)
    assert str(refused.value).startswith(
        f"{shard.path}: token 41 (byte {HEADER_BYTES + 82}) is 300, but the vocabulary has 300"
    )


def flip_bit(path: Path, byte: int) -> None:
    """Change a bit in place and set the modification time back."""
    stat = path.stat()
    time.sleep(0.05)  # time stamps have a resolution of a few milliseconds
    with open(path, "r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("number", [0, 1])
def test_a_shard_that_changes_after_its_check_is_checked_again(tmp_path, number):
    """F96: a bit flipped in a shard that was sound at its first batch, in bytes not read again."""
    shards = write(tmp_path, [list(range(8, 258))] * 4, shard_tokens=500)
    paths = [shard.path for shard in shards.shards]
    assert len(paths) == 2
    before = shards.read([0, 510], 4).tolist()
    flip_bit(paths[number], HEADER_BYTES + 400)
    sound, changed = (510, 0) if number == 0 else (0, 510)
    assert shards.read([sound], 4).tolist() == [before[sound == 510]]
    with pytest.raises(DataError, match="not those that were written") as refused:
        shards.read([changed], 4)
    assert refused.value.exit_code == 3 and str(paths[number]) in str(refused.value)
    flip_bit(paths[number], HEADER_BYTES + 400)
    assert shards.read([0, 510], 4).tolist() == before, "put back, it is sound"


def test_a_batch_looks_at_each_shard_once(tmp_path, monkeypatch):
    shards = write(tmp_path, [list(range(8, 258))] * 4, shard_tokens=500)
    paths = [shard.path for shard in shards.shards]
    shards.verify()
    looks = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path: looks.append(path) or stat(path))
    monkeypatch.setattr(Shard, "_verify", lambda shard: pytest.fail("verified already"))
    shards.read([0, 3, 500, 9, 600], 8)
    assert sorted(looks) == paths
    looks.clear()
    TokenShards(shards.shards[:1]).read([0, 3, 9], 8)
    assert looks == paths[:1]


def test_a_session_verifies_every_shard_before_step_1(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: {i * i} sheep cross the river\n" for i in range(2000)))
    recipe = load_recipe(
        "quickstart",
        [f"data.train={text}", "data.tokenizer=bpe:300", "train.tokens=4096", "data.repeat=true"],
    )
    session = prepare_session(recipe, torch.device("cpu"))
    shards = [*session.corpus.train.shards, *session.corpus.valid.shards]
    assert all(shard.verified for shard in shards)
    flip_bit(session.corpus.train.shards[0].path, HEADER_BYTES + 100)
    with pytest.raises(DataError, match="not those that were written"):
        prepare_session(recipe, torch.device("cpu"))
