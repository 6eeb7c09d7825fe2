"""Token shards: what is written is what is read, and every damage is seen (F34, F36)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from efftrain_cli.data import corpus as shards_module
from efftrain_cli.data.corpus import Corpus, ShardWriter, TokenShards, dtype_for
from efftrain_cli.data.prepare import prepare
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.training.session import prepare_session
from tests.damage import flip
from tests.data.conftest import data


def write(folder: Path, *shards: list[int], vocab_size: int = 300) -> TokenShards:
    """Write each list of ids as a shard, and open them."""
    writer = ShardWriter(folder, "train", vocab_size)
    for ids in shards:
        writer.add(np.array(ids, dtype=np.uint32))
        writer.close()
    return TokenShards(folder, writer.entries, vocab_size)


@pytest.mark.parametrize(
    "vocab_size, dtype", [(300, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_ids_come_back_and_a_file_is_nothing_else(tmp_path, vocab_size, dtype):
    shards = write(tmp_path, [1, 2, vocab_size - 1], vocab_size=vocab_size)
    shards.verify({})
    assert shards.read([0], 3).tolist() == [[1, 2, vocab_size - 1]]
    assert shards.ids[0].dtype == dtype_for(vocab_size) == dtype
    content = (tmp_path / "train-00000.bin").read_bytes()
    assert content == np.array([1, 2, vocab_size - 1], dtype=dtype).tobytes()


def test_ids_beyond_the_vocabulary_are_refused_when_written(tmp_path):
    """F36: what was written is all that a verified shard can hold."""
    with pytest.raises(DataError, match=r"token id 300, but .* 300 tokens \(ids from 0\)\n"):
        write(tmp_path, [5, 6, 300])


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
def test_a_shard_that_changes_while_it_is_in_use_is_checked(tmp_path, number):
    """F96: a bit flipped in bytes that the read does not touch."""
    shards = write(tmp_path, list(range(8, 258)), list(range(8, 258)))
    path = tmp_path / f"train-0000{number}.bin"
    before = shards.read([0, 260], 4).tolist()
    flip_bit(path, 400)
    sound, changed = (260, 0) if number == 0 else (0, 260)
    assert shards.read([sound], 4).tolist() == [before[sound == 260]]
    with pytest.raises(DataError, match="not those that were written") as refused:
        shards.read([changed], 4)
    assert refused.value.exit_code == 3 and str(path) in str(refused.value)
    flip_bit(path, 400)
    assert shards.read([0, 260], 4).tolist() == before, "put back, it is sound"


def test_a_shard_cut_short_while_in_use_is_an_error_and_no_crash(tmp_path):
    """F72: without the check this read would end the process by SIGBUS."""
    shards = write(tmp_path, list(range(8, 258)) * 100)
    path = tmp_path / "train-00000.bin"
    os.truncate(path, 25_000)
    with pytest.raises(DataError, match=r"train-00000\.bin: 25,000 bytes where 50,000"):
        shards.read([shards.tokens - 20], 10)


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards whose content is hashed from now on."""
    names: list[str] = []
    real = shards_module.sha256_of

    def counted(path: Path) -> str:
        if path.suffix == ".bin":
            names.append(path.name)
        return real(path)

    monkeypatch.setattr(shards_module, "sha256_of", counted)
    return names


def test_shards_are_hashed_once_and_again_if_their_file_changes(cache, book, monkeypatch):
    """Files and stamps of them: a second start hashes nothing, a touched file is hashed, and so is
    everything with `full`."""
    corpus = prepare(data(book))
    names = hashed(monkeypatch)

    def verify(full: bool = False) -> list[str]:
        names.clear()
        prepare(data(book)).verify(full)
        return sorted(names)

    both = ["train-00000.bin", "valid-00000.bin"]
    assert verify() == both
    assert verify() == []
    assert verify(full=True) == both
    flip_bit(corpus.folder / "train-00000.bin", 100)
    with pytest.raises(DataError, match="not those that were written"):
        verify()
    flip_bit(corpus.folder / "train-00000.bin", 100)
    assert verify() == ["train-00000.bin"]
    (corpus.folder / "verified.json").write_text("{")
    assert verify() == both


def test_a_session_verifies_every_shard_before_step_1(cache, book):
    settings = ["data.tokenizer=bpe:300", "train.tokens=4096", "data.repeat=true"]
    recipe = load_recipe("quickstart", [f"data.train={book}", *settings])
    corpus: Corpus = prepare_session(recipe, torch.device("cpu")).corpus
    flip_bit(corpus.folder / "train-00000.bin", 100)
    with pytest.raises(DataError, match="not those that were written"):
        prepare_session(recipe, torch.device("cpu"))


def test_damage_is_refused_with_exit_3(cache, book):
    """F34: each file of a corpus flipped, cut short and removed; with full verification nothing
    passes."""
    folder = prepare(data(book)).folder
    files = sorted(folder.iterdir())
    names = ["manifest.json", "tokenizer.json", "train-00000.bin", "valid-00000.bin"]
    assert [path.name for path in files] == names
    for path in files:
        content = path.read_bytes()
        flip(path, 4 * len(content))
        for damaged in (path.read_bytes(), content[:-1], b""):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=r"efftrain prepare") as refused:
                prepare(data(book)).verify(full=True)
            assert str(path) in str(refused.value) and refused.value.exit_code == 3
        if path.name != "manifest.json":
            path.unlink()
            with pytest.raises(DataError, match=path.name):
                prepare(data(book))
        path.write_bytes(content)
    prepare(data(book)).verify(full=True)


def test_shards_of_another_corpus_or_tokenizer_are_refused(cache, book):
    """F34, F35: sound files in the wrong place."""
    corpus = prepare(data(book))
    other = prepare(data(book, tokenizer="bpe:301"))
    train = corpus.folder / "train-00000.bin"
    content = train.read_bytes()
    for wrong in (other.folder / train.name, corpus.folder / "valid-00000.bin"):
        train.write_bytes(wrong.read_bytes())
        with pytest.raises(DataError, match=r"train-00000\.bin: .* are expected"):
            prepare(data(book))
    train.write_bytes(content[2:] + content[:2])
    with pytest.raises(DataError, match="not those that were written"):
        prepare(data(book)).verify(full=True)
    train.write_bytes(content)
    corpus.tokenizer_path.write_bytes(other.tokenizer_path.read_bytes())
    with pytest.raises(DataError, match=r"tokenizer\.json: missing or changed"):
        prepare(data(book))
