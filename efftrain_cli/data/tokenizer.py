"""Tokenizers: GPT-2's, any tokenizer.json, one of the Hub by its name, or a byte-level BPE of our
own.

All are read by the `tokenizers` library; what has GPT-2's pattern is encoded by tiktoken, which is
several times as fast and gives the same ids. Both are imported inside functions: a run on ready
shards needs none of them until it samples.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efftrain_cli.data import hub
from efftrain_cli.foundation.environment import expanded, usable_cores
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.records import text_digest

if TYPE_CHECKING:
    import numpy as np
    import tiktoken
    import tokenizers

VOCABULARY = 1 << 24
"""Token ids at most."""
END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""Names of the end-of-text token, in the order in which they are looked for."""
_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_PIECE = 1 << 16
"""Characters of a long document that are encoded at once, at least."""
_BORDER = re.compile(r"(?<=\S)\n(?=\S)")
"""A single newline: GPT-2's pattern always ends a word there, so a cut behind it changes no
token."""
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""GPT-2's words, as tiktoken writes them: possessive where that changes no match."""
_OTHER_BPE = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
"""Options of a BPE that tiktoken lacks."""


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back. The end-of-text token is never produced from text that merely
    spells it."""

    backend: tokenizers.Tokenizer
    vocab_size: int
    """Largest token id + 1."""
    eot_id: int
    """Id of the end-of-text token."""
    sha256: str
    """Fingerprint of what decides the ids: vocabulary, merges, normalizer, pre-tokenizer, end of
    text."""
    can_cut: bool
    """Whether a cut at `_BORDER` changes no token: GPT-2's pattern, no normalizer."""
    notes: tuple[str, ...] = ()
    """What was turned off in the file, in sentences."""

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, uint32; nothing is added at either end."""
        import numpy as np

        # A prompt, or a task's few items, is not worth a second vocabulary.
        if sum(map(len, texts)) <= _PIECE or self.fast is None:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        encode = partial(self.fast.encode_to_numpy, disallowed_special=())
        threads = usable_cores()

        def encode_share(first: int) -> list[np.ndarray]:
            return [encode(text) for text in texts[first::threads]]

        ids: list[Any] = [None] * len(texts)
        with ThreadPoolExecutor(threads) as pool:
            shares = pool.map(encode_share, range(threads))
            for first, share in enumerate(shares):
                ids[first::threads] = share
        return ids

    @cached_property
    def fast(self) -> tiktoken.Encoding | None:
        """The same tokenizer for tiktoken; None if ids could differ.

        tokenizers merges the pairs that its list names, in their order; tiktoken merges any pair
        that makes a token, in the order of ids. tests/data/test_tokenizer.py compares the two on
        all of Unicode and on every token.
        """
        parts = json.loads(self.backend.to_str())
        model = parts["model"]
        vocabulary = model["vocab"]
        characters = bytes_by_character()
        if (
            not self.can_cut
            or model["type"] != "BPE"
            or any(map(model.get, _OTHER_BPE))
            or not all(token["special"] for token in parts["added_tokens"])
            or not vocabulary.keys() >= characters.keys()
        ):
            return None
        merged = ["".join(pair) for pair in model["merges"]]
        ids = [vocabulary[token] for token in merged]
        if ids != sorted(set(ids)):
            return None
        ranks = {}
        for token in (*characters, *merged):
            spelled = bytes(characters[each] for each in token)
            ranks[spelled] = vocabulary[token]
        import tiktoken

        return tiktoken.Encoding(
            "efftrain",
            pat_str=_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={},
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def bytes_per_target(self, windows: np.ndarray) -> float:
        """Return the mean UTF-8 bytes of text of a target: nats per token over it and ln 2 are bits
        per byte. An end of text has none.

        A byte-level vocabulary says them id by id. With any other each row is decoded, and a
        character that its edge cuts counts as a replacement character, 3 bytes.

        Args:
            windows: int64 (n, seq_len + 1); every id but each window's first is a target.
        """
        import numpy as np

        targets = windows[:, 1:]
        decoder = json.loads(self.backend.to_str())["decoder"] or {}
        if decoder.get("type") != "ByteLevel":
            size = 0
            for row in targets:
                text = self.decode(row[row != self.eot_id].tolist())
                size += len(text.encode())
            return size / targets.size
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, id in self.backend.get_vocab(with_added_tokens=False).items():
            lengths[id] = len(token)  # each character stands for one byte
        for id, added in self.backend.get_added_tokens_decoder().items():
            lengths[id] = len(added.content.encode())
        lengths[self.eot_id] = 0
        return int(lengths[targets].sum()) / targets.size

    def save(self, path: Path) -> None:
        """Write tokenizer.json."""
        # The library opens no file whose name is not UTF-8.
        path.write_text(
            self.backend.to_str(pretty=True),
            encoding="utf-8",
            newline="\n",
        )


def cut_pieces(texts: Iterator[str], least: int = _PIECE) -> Iterator[str]:
    """Yield a text, given in stretches, in pieces of `least` characters and the rest of a line,
    whose ids in a row are those of the text if the tokenizer `can_cut`."""
    text = ""
    start = 0
    searched = 0
    for more in texts:
        text = text[start:] + more
        searched -= start
        start = 0
        while border := _BORDER.search(text, max(start + least, searched)):
            yield text[start : border.end()]
            start = border.end()
        searched = len(text) - 1
    if start < len(text):
        yield text[start:]


def bytes_by_character() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to its byte (GPT-2, bytes_to_unicode)."""
    characters = {}
    hidden = 0
    for byte in range(256):
        if byte in range(33, 127) or (byte > 160 and byte != 173):
            characters[chr(byte)] = byte
        else:
            characters[chr(256 + hidden)] = byte
            hidden += 1
    return characters


def bpe_size(spec: str) -> int:
    """Return N of "bpe:N", from 257 on: a byte-level BPE has 256 bytes and the end of text. 0 if
    `spec` is not of that form."""
    if not spec.startswith("bpe:"):
        return 0
    number = spec.removeprefix("bpe:").replace("_", "")
    if not number.isdecimal() or not 257 <= int(number) <= 1_000_000:
        raise DataError(
            f"data.tokenizer = {spec!r}: N of bpe:N is a whole number from 257\n"
            "  give 256 bytes and the end of text at least, as bpe:512 does"
        )
    return int(number)


def tokenizer_files(spec: str) -> list[Path]:
    """Return the files that data.tokenizer names: a tokenizer.json, or vocabulary and merges. One
    of the Hub, "gpt2" or "owner/name", is downloaded if the Hub's cache does not have it.

    Raises:
        DataError: it names nothing that is there, or the Hub cannot be asked.
    """
    path = expanded(spec, "write data.tokenizer without ~")
    folder = path.parent if path.is_file() else path
    for names in (("tokenizer.json",), *_PAIRS):
        files = [folder / name for name in names]
        if path in (folder, *files) and all(file.is_file() for file in files):
            return files
    if path.is_file():
        return [path]
    reason: object = f"looked in {Path.cwd()}"
    named = hub.MODEL_NAME.fullmatch("openai-community/gpt2" if spec == "gpt2" else spec)
    if named is not None and path.suffix != ".json" and not path.exists():
        try:
            return [hub.hub_file(named[1], "tokenizer.json", named[2])]
        except DataError as error:
            reason = error
    raise DataError(
        f"data.tokenizer = {spec!r}: no tokenizer there ({reason})\n"
        "  give a tokenizer.json, a folder with it or with GPT-2's vocabulary and merges,"
        ' "owner/name" of the Hugging Face Hub, or "bpe:N", which is trained on the text'
    )


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load the tokenizer that a string names as `data.tokenizer` does, or that lies at a path.

    Raises:
        DataError: it is not there, not readable, or has no end-of-text token.
    """
    import tokenizers

    files = tokenizer_files(str(spec))
    try:
        if len(files) == 1:
            # See `save`.
            backend = tokenizers.Tokenizer.from_str(files[0].read_text("utf-8"))
        else:
            backend = _byte_level(tokenizers.models.BPE.from_file(*map(str, files)))
            if backend.token_to_id(END_OF_TEXT) is not None:
                backend.add_special_tokens([END_OF_TEXT])
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"data.tokenizer = {str(spec)!r}: {files[0]} cannot be read as a tokenizer: {error}\n"
            "  give a tokenizer.json of the tokenizers library, or vocabulary and merges"
        ) from error
    return _finish(backend, str(spec))


def train_tokenizer(size: int, texts: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE of `size` tokens, end of text included; fewer if the text has too few
    pairs that repeat."""
    import tokenizers

    backend = _byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _finish(backend, f"bpe:{size}")


def _byte_level(model: tokenizers.models.Model) -> tokenizers.Tokenizer:
    import tokenizers

    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _finish(backend: tokenizers.Tokenizer, spec: str) -> Tokenizer:
    """Turn off what a file has for its training: special tokens in text, padding, truncation,
    dropout. Find the end of text."""
    # Set, not left open: else every process that we start later prints a warning about forking.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    vocabulary = backend.get_vocab(with_added_tokens=True)
    ends = [name for name in _ENDS if name in vocabulary]
    if not ends:
        raise DataError(
            f"data.tokenizer = {spec!r} has no end-of-text token: none of {', '.join(_ENDS)}\n"
            "  give another tokenizer, or add one of them to its tokenizer.json"
        )
    largest = max(vocabulary.values())
    if largest >= VOCABULARY:
        raise DataError(
            f"data.tokenizer = {spec!r} has ids up to {largest:,}; at most {VOCABULARY:,}"
            " tokens are read\n  give a smaller vocabulary"
        )
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True  # text that spells a special token is text
    notes = []
    dropout = getattr(backend.model, "dropout", None)
    if dropout:
        backend.model.dropout = None
        notes.append(f"data.tokenizer: its dropout of {dropout:g}, meant for training, is off")
    parts = json.loads(backend.to_str())
    split = _without_defaults(parts["pre_tokenizer"] or {})
    added = sorted((token["id"], token["content"]) for token in parts["added_tokens"])
    model = _without_defaults(parts["model"])
    identity = [model, parts["normalizer"], split, added, ends[0]]
    return Tokenizer(
        backend=backend,
        vocab_size=largest + 1,
        eot_id=vocabulary[ends[0]],
        sha256=text_digest(json.dumps(identity, sort_keys=True)),
        can_cut=split == {"type": "ByteLevel", "use_regex": True} and not parts["normalizer"],
        notes=tuple(notes),
    )


def _without_defaults(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of tokenizer.json without keys that decide no id and differ between files."""
    kept = {}
    for name, value in part.items():
        if name != "trim_offsets" and value not in (None, "", False):
            kept[name] = value
    return kept
