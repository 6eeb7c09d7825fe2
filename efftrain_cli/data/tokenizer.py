"""Tokenizers: GPT-2's, any tokenizer.json, one of the Hub by its name, or a byte-level BPE of our
own.

All are read by the `tokenizers` library; what has GPT-2's pattern is encoded by tiktoken, which is
faster and gives the same ids. Both are imported inside functions: a run on ready shards needs none
of them until it samples.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from efftrain_cli.data import hub
from efftrain_cli.foundation.environment import expanded
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.records import text_digest

if TYPE_CHECKING:
    import numpy as np
    import tiktoken
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""Names of the end-of-text token, in the order in which they are looked for."""
_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_CHUNK = 1 << 16
"""Characters of a chunk of a long document that is encoded alone."""


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back. The end-of-text token is never produced from text that merely
    spells it."""

    backend: tokenizers.Tokenizer
    vocab_size: int
    """Largest id + 1."""
    eot_id: int
    """Id of the end-of-text token."""
    sha256: str
    """Fingerprint of what decides the ids: vocabulary, merges, normalizer, pre-tokenizer, end of
    text."""
    cuttable: bool
    """Long documents may be cut at `_safe_cut` without changing a token: byte-level, GPT-2's
    pattern, no normalizer."""

    parts: dict[str, Any] = field(repr=False, compare=False)
    """`backend` as its JSON, without what decides no id."""

    @cached_property
    def fast(self) -> tiktoken.Encoding | None:
        """The same ids by tiktoken; None where they could differ. Made at first use: checking a
        vocabulary takes a moment."""
        from efftrain_cli.data.gpt2_bpe import fast_encoding

        return fast_encoding(self.backend, self.parts) if self.cuttable else None

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of each id's text, int64 (vocab_size,): what a byte-level vocabulary says
        without decoding. Others are refused: there an id's text depends on its neighbours."""
        import numpy as np

        if (self.parts["decoder"] or {}).get("type") != "ByteLevel":
            raise DataError(
                "token files (.bin) can be read with byte-level tokenizers only, such as GPT-2's"
            )
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, id in self.backend.get_vocab(with_added_tokens=False).items():
            lengths[id] = len(token)  # each character stands for one byte
        for token in self.parts["added_tokens"]:
            lengths[token["id"]] = len(token["content"].encode())
        return lengths

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, as uint32 arrays; nothing is added at either end."""
        import numpy as np

        cut = [self._chunks(text) for text in texts]
        encoded = iter(self._encode_chunks(list(chain.from_iterable(cut))))
        return [np.concatenate([next(encoded) for _ in chunks]) for chunks in cut]

    def _encode_chunks(self, chunks: list[str]) -> list[np.ndarray]:
        import numpy as np

        if (
            sum(map(len, chunks)) < _CHUNK or self.fast is None
        ):  # a prompt, a task's few items: not worth the check
            return [
                np.array(encoding.ids, dtype=np.uint32)
                for encoding in self.backend.encode_batch_fast(chunks, add_special_tokens=False)
            ]
        encode = self.fast.encode_to_numpy  # without Python's lock, so threads run side by side
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda chunk: encode(chunk, disallowed_special=()), chunks))

    def _chunks(self, text: str) -> list[str]:
        if not self.cuttable or len(text) <= 2 * _CHUNK:
            return [text]
        chunks = []
        start = 0
        while (cut := _safe_cut(text, start + _CHUNK)) is not None:
            chunks.append(text[start:cut])
            start = cut
        return [*chunks, text[start:]]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def text_bytes(self, rows: np.ndarray) -> int:
        """Return the UTF-8 bytes of the text of ids, int64 (n, length); an end of text has none.

        A byte-level vocabulary says them id by id. With any other each row is decoded, and a
        character that its edge cuts counts as a replacement character, 3 bytes.
        """
        if (self.parts["decoder"] or {}).get("type") == "ByteLevel":
            return int(self.byte_lengths[rows[rows != self.eot_id]].sum())
        texts = [self.decode(row[row != self.eot_id].tolist()) for row in rows]
        return sum(len(text.encode()) for text in texts)

    def save(self, path: Path) -> None:
        """Write tokenizer.json."""
        self.backend.save(str(path))


_SINGLE_NEWLINE = re.compile(r"(?<=\S)\n(?=\S)")


def _safe_cut(text: str, start: int) -> int | None:
    """Find the first place from `start` on that follows a single newline between two visible
    characters. GPT-2's pattern always ends a word there, so cutting changes no token."""
    found = _SINGLE_NEWLINE.search(text, start - 1)
    return found and found.end()


def bpe_size(spec: str) -> int:
    """Return N of "bpe:N", from 257 on: a byte-level BPE has 256 bytes and the end of text. 0 if
    `spec` is not of that form."""
    if not spec.startswith("bpe:"):
        return 0
    number = spec.removeprefix("bpe:").replace("_", "")
    if not number.isdecimal() or not 257 <= int(number) <= 1_000_000:
        raise DataError(
            f"data.tokenizer = {spec!r}: N of bpe:N"
            " is a whole number from 257 (256 bytes and the end of text)"
        )
    return int(number)


def tokenizer_files(spec: str) -> tuple[Path, ...]:
    """List the files that data.tokenizer names: a tokenizer.json, or vocabulary and merges; none
    for "gpt2" and "bpe:N". One of the Hub, "owner/name", is downloaded if the Hub's cache does not
    have it.

    Raises:
        DataError: it names nothing that is there, or the Hub cannot be asked.
    """
    if spec == "gpt2" or bpe_size(spec):
        return ()
    path = expanded(spec, "write data.tokenizer without ~")
    if not path.exists():
        nothing = (
            f"data.tokenizer = {spec!r}: no such file or folder (looked in {Path.cwd()});"
            ' give a tokenizer.json, a folder with GPT-2\'s vocabulary and merges, "gpt2"'
            ' or "owner/name" (from the Hugging Face Hub) or "bpe:N" (trained on the corpus)'
        )
        named = hub.MODEL_NAME.fullmatch(spec)
        if named is None or path.suffix == ".json":
            raise DataError(nothing)
        try:
            return (hub.hub_tokenizer(named[1], named[2]),)
        except DataError as error:
            raise DataError(f"{nothing} (of the Hub: {error})") from error
    if path.is_file() and path.name not in _PAIRS[0] + _PAIRS[1]:
        return (path,)
    folder = path if path.is_dir() else path.parent
    for names in [("tokenizer.json",), *_PAIRS] if path.is_dir() else _PAIRS:
        if all((folder / name).is_file() for name in names):
            return tuple(folder / name for name in names)
    raise DataError(
        f"data.tokenizer = {spec!r}: the folder has neither tokenizer.json nor both of vocab.json"
        " and merges.txt (or encoder.json and vocab.bpe)"
    )


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load the tokenizer that a string names as `data.tokenizer` does, or that lies at a path.

    Raises:
        DataError: it is not there, not readable, or has no end-of-text token.
    """
    tokenizers = _library()
    # A folder may be called gpt2 too.
    if isinstance(spec, Path):
        spec = str(spec.absolute())
    if spec == "gpt2":
        try:
            files: tuple[Path, ...] = (hub.hub_file("openai-community/gpt2", "tokenizer.json"),)
        except DataError as error:
            raise DataError(
                f'data.tokenizer = "gpt2": {error}\n'
                "  connect, or give the folder with GPT-2's vocabulary and merges,"
                " a tokenizer.json, or bpe:N, which is trained on the corpus"
            ) from error
    else:
        files = tokenizer_files(spec)
    if not files:
        raise ValueError(f"{spec!r} is trained on a corpus, not loaded")
    try:
        if len(files) == 1:
            backend = tokenizers.Tokenizer.from_file(str(files[0]))
        else:
            backend = _byte_level(tokenizers.models.BPE.from_file(str(files[0]), str(files[1])))
            if backend.token_to_id(END_OF_TEXT) is not None:
                backend.add_special_tokens([END_OF_TEXT])
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"data.tokenizer = {spec!r}: {files[0]} cannot be read as a tokenizer: {error}"
        ) from error
    return _finished(backend, spec, _stated_end(files[0].parent))


def train_tokenizer(size: int, texts: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE of `size` tokens, end of text included; fewer if the text has too few
    pairs that repeat."""
    tokenizers = _library()
    backend = _byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _finished(backend, f"bpe:{size}")


def _library() -> ModuleType:
    # Set, not left open: else every process that we start later prints a warning about forking.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import tokenizers

    return tokenizers


def _byte_level(model: tokenizers.models.Model) -> tokenizers.Tokenizer:
    import tokenizers

    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _stated_end(folder: Path) -> str | None:
    """Return the end of text that tokenizer_config.json beside a tokenizer names."""
    try:
        stated = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["eos_token"]
        return stated["content"] if isinstance(stated, dict) else stated
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _finished(backend: tokenizers.Tokenizer, spec: str, stated: str | None = None) -> Tokenizer:
    """Wrap the library's tokenizer: special tokens off in text, no padding, no truncation, its end
    of text found, which a file may have `stated`."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    end = next((name for name in (*_ENDS, stated) if name in vocabulary), None)
    if end is None:
        raise DataError(
            f"data.tokenizer = {spec!r} has no end-of-text token; one of {', '.join(_ENDS)}"
            " is needed, or an eos_token in tokenizer_config.json beside it"
        )
    if max(vocabulary.values()) >= 1 << 24:
        raise DataError(
            f"data.tokenizer = {spec!r} has ids up to {max(vocabulary.values()):,};"
            f" at most {1 << 24:,} tokens are read"
        )
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True  # text that spells a special token is text
    parts = json.loads(backend.to_str())
    split = parts["pre_tokenizer"] or {}
    model = parts["model"]
    for names in (split, model):
        # Neither decides an id; files of the same tokenizer differ in them.
        for name in list(names):
            if name == "trim_offsets" or names[name] in (None, "", False):
                del names[name]
    identity = json.dumps(
        [
            model,
            parts["normalizer"],
            split,
            sorted((t["id"], t["content"]) for t in parts["added_tokens"]),
            end,
        ],
        sort_keys=True,
        ensure_ascii=True,
    )
    return Tokenizer(
        backend=backend,
        vocab_size=max(vocabulary.values()) + 1,
        eot_id=vocabulary[end],
        sha256=text_digest(identity),
        cuttable=split == {"type": "ByteLevel", "use_regex": True} and parts["normalizer"] is None,
        parts=parts,
    )


def bytes_per_target(path: Path, windows: np.ndarray) -> float:
    """Return the mean UTF-8 bytes of text of a target: nats per token over it and ln 2 are bits per
    byte.

    Args:
        path: tokenizer.json of the windows.
        windows: int64 (n, seq_len + 1); every id but each window's first is a target.
    """
    targets = windows[:, 1:]
    return load_tokenizer(str(path)).text_bytes(targets) / targets.size
