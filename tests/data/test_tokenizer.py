"""Tokenizers: GPT-2's own counts, our BPE, and the end of text that only we may write."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from efftrain_cli.data.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    bpe_size,
    cut_pieces,
    load_tokenizer,
    train_tokenizer,
)
from efftrain_cli.foundation.errors import DataError

SAMPLE = [
    Path(json.__file__).read_text(encoding="utf-8"),
    Path(random.__file__).read_text(encoding="utf-8"),
]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_tokenizer(400, SAMPLE)


@pytest.fixture(scope="module")
def gpt2(shared_data: Path) -> Tokenizer:
    return load_tokenizer(shared_data / "gpt2_tokenizer")


def test_gpt2_counts_shakespeare_as_everybody_does(gpt2, shared_data):
    """338,025 tokens; cut after 90 % of the characters, 301,966 and 36,059: the counts that nanoGPT
    prints."""
    text = (shared_data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    cut = int(len(text) * 0.9)
    counts = [len(ids) for ids in gpt2.encode([text, text[:cut], text[cut:]])]
    assert counts == [338_025, 301_966, 36_059]
    assert (gpt2.vocab_size, gpt2.eot_id) == (50257, 50256)


def test_long_documents_are_cut_where_no_token_changes(bpe):
    """Random text full of the hard cases, cut once per 64 K characters, against the library on the
    whole. Pieces, and so batches, do not depend on how the text is read."""
    rng = random.Random(5)
    characters = "word  \n\n\t\r's12é中\u3000.\x1c\x85🙂"
    text = "".join(rng.choices(characters, k=150_000))
    assert bpe.can_cut
    pieces = list(cut_pieces(iter([text])))
    assert len(pieces) == 3 and all(pieces)
    for size in (50_000, 7_001):
        stretches = [text[at : at + size] for at in range(0, len(text), size)]
        assert list(cut_pieces(iter(stretches))) == pieces
    assert list(cut_pieces(iter(["a\nb\nc", "d\n", "ef"]), 2)) == ["a\nb\n", "cd\n", "ef"]
    whole = bpe.backend.encode(text, add_special_tokens=False).ids
    assert np.concatenate(bpe.encode(pieces)).tolist() == whole


@pytest.mark.parametrize("step", [211, pytest.param(1, marks=pytest.mark.slow)])
def test_tiktoken_and_tokenizers_agree_over_unicode(gpt2, step):
    """Each character among letters, digits, spaces, line ends and apostrophes: the two libraries'
    word patterns are one."""
    assert gpt2.fast is not None
    codes = [*range(0x3100), *range(0x3100, 0xD800, step), *range(0xE000, 0x110000, step)]
    for c in map(chr, codes):
        text = f"a{c}b 1{c}2 {c} {c}{c}\n{c}x  {c} ' {c}'s{c}"
        slow = gpt2.backend.encode(text, add_special_tokens=False)
        assert gpt2.fast.encode_ordinary(text) == slow.ids


def changed(bpe: Tokenizer, folder: Path, edit: Callable[[dict[str, Any]], object]) -> Tokenizer:
    """The tokenizer of a changed tokenizer.json."""
    parts = json.loads(bpe.backend.to_str())
    edit(parts)
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    return load_tokenizer(folder)


def test_tiktoken_is_used_only_where_ids_are_certain(gpt2, bpe, tmp_path):
    text = SAMPLE[0] * 6
    for tokenizer in (gpt2, bpe):
        assert tokenizer.fast is not None
        # tiktoken would merge any pair that makes a token: each token, alone, is itself.
        for token, rank in tokenizer.fast._mergeable_ranks.items():
            assert tokenizer.fast.encode_single_token(token) == rank
        whole = tokenizer.backend.encode(text, add_special_tokens=False).ids
        assert len(text) > 1 << 16 and tokenizer.encode([text])[0].tolist() == whole

    def swap_ranks(parts: dict[str, Any]) -> None:
        merges = parts["model"]["merges"]
        merges[0], merges[50] = merges[50], merges[0]

    assert changed(bpe, tmp_path, lambda parts: None).fast is not None
    for edit in (
        swap_ranks,
        lambda parts: parts["model"].update(ignore_merges=True),
        lambda parts: parts.update(normalizer={"type": "NFC"}),
    ):
        other = changed(bpe, tmp_path, edit)
        assert other.fast is None and other.sha256 != bpe.sha256


def test_round_trip_and_spelled_end_of_text(bpe):
    text = f"def f():\n\treturn '{END_OF_TEXT}'  # ünï\x00 🙂"
    (ids,) = bpe.encode([text])
    assert bpe.decode(ids) == text
    assert bpe.eot_id not in ids
    assert bpe.decode([bpe.eot_id]) == END_OF_TEXT


def test_our_bpe_is_the_same_every_time(bpe, tmp_path):
    again = train_tokenizer(400, iter(SAMPLE))
    assert again.backend.to_str() == bpe.backend.to_str()
    assert (bpe.vocab_size, bpe.eot_id) == (400, 0)
    bpe.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path)
    assert (loaded.sha256, loaded.vocab_size, loaded.eot_id) == (bpe.sha256, 400, 0)
    assert train_tokenizer(401, SAMPLE).sha256 != bpe.sha256


def test_the_same_tokenizer_from_other_files_has_the_same_fingerprint(gpt2, shared_data, tmp_path):
    folder = shared_data / "gpt2_tokenizer"
    shutil.copy(folder / "encoder.json", tmp_path / "vocab.json")
    shutil.copy(folder / "vocab.bpe", tmp_path / "merges.txt")
    assert load_tokenizer(tmp_path / "vocab.json").sha256 == gpt2.sha256
    gpt2.save(tmp_path / "saved.json")
    assert load_tokenizer(tmp_path / "saved.json").sha256 == gpt2.sha256


def test_what_a_tokenizer_file_has_for_training_is_off(bpe, tmp_path):
    """Dropout, with which each preparation would give other tokens, padding, truncation, and added
    ends."""
    other = tokenizers.Tokenizer.from_str(bpe.backend.to_str())
    other.model.dropout = 0.2
    other.enable_truncation(3)
    other.enable_padding(length=50)
    other.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    other.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json")
    assert loaded.notes == ("data.tokenizer: its dropout of 0.2, meant for training, is off",)
    assert loaded.sha256 == bpe.sha256 and loaded.fast is not None
    for text in (SAMPLE[0], SAMPLE[0][:2000]):
        assert loaded.encode([text])[0].tolist() == bpe.encode([text])[0].tolist()


def test_tokenizers_that_are_not_there(tmp_path):
    assert [bpe_size(spec) for spec in ("gpt2", "bpe:257", "bpe:1_000_000")] == [0, 257, 10**6]
    for spec in ("bpe:256", "bpe:x", "bpe:-3", "bpe:1000001"):
        with pytest.raises(DataError, match="whole number from 257"):
            bpe_size(spec)
    for path in ("no/such", str(tmp_path)):
        with pytest.raises(DataError, match=r'no tokenizer there.*\n.*"bpe:N"'):
            load_tokenizer(path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match=r"broken\.json cannot be read as a tokenizer"):
        load_tokenizer(tmp_path / "broken.json")


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no names that are not UTF-8")
def test_a_folder_whose_name_is_not_utf_8(bpe, tmp_path):
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    bpe.save(folder / "tokenizer.json")
    bpe.backend.save(str(tmp_path / "tokenizer.json"))
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert load_tokenizer(folder).sha256 == bpe.sha256


def test_a_tokenizer_without_end_of_text_is_refused(bpe, tmp_path):
    (tmp_path / "t.json").write_text(bpe.backend.to_str().replace(END_OF_TEXT, "<stop>"))
    with pytest.raises(DataError, match="no end-of-text token"):
        load_tokenizer(tmp_path / "t.json")


def test_bytes_are_those_of_the_scored_targets():
    """258 tokens: 256 bytes, the end of text and "ab". Of each window all ids but the first are
    targets: here ab, end of text, and the two bytes of é; then x, ab, ab, ab."""
    own = train_tokenizer(258, ["ab" * 20])
    (ids,) = own.encode(["xabé"])
    x, ab, *accented = ids.tolist()
    windows = np.array([[x, ab, own.eot_id, *accented], [own.eot_id, x, ab, ab, ab]])
    assert len(accented) == 2
    expected = (2 + 0 + 1 + 1 + 1 + 2 + 2 + 2) / 8
    assert own.bytes_per_target(windows) == expected


def test_bytes_of_a_vocabulary_of_words_are_those_of_its_text(tmp_path):
    """Words joined by spaces: "to be", then "été", of 5 bytes each; ends of text have none."""
    words = {"[UNK]": 0, "to": 1, "be": 2, "été": 3, END_OF_TEXT: 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.add_special_tokens([END_OF_TEXT])
    backend.save(str(tmp_path / "tokenizer.json"))
    windows = np.array([[0, 1, 2, 4], [1, 4, 3, 4]])
    assert load_tokenizer(tmp_path).bytes_per_target(windows) == (5 + 5) / 6
