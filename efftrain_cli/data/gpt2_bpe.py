"""GPT-2's kind of BPE through tiktoken, which encodes several times as fast as tokenizers and gives
the same ids.

Both libraries merge, in each word of GPT-2's pattern, the adjacent pair of the lowest rank.
tokenizers merges the pairs that its list names, tiktoken any pair whose bytes together are a token.
The two agree on every text if a token's rank is above those of its two parts and if each token,
encoded alone, is itself: what stands between two borders that no merge crosses is then merged as it
would be alone, so the pair that makes a token is always the listed one. `fast_encoding` checks this
for the whole vocabulary; tests hold the word patterns of the two libraries together over all of
Unicode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""GPT-2's words, as tiktoken writes the pattern: possessive where that changes no match."""


def byte_of_character() -> dict[str, int]:
    """Map each of the 256 characters of a byte-level vocabulary to its byte (GPT-2, encoder.py,
    bytes_to_unicode)."""
    visible = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + number): byte for number, byte in enumerate(hidden)
    }


def fast_encoding(backend: tokenizers.Tokenizer, parts: dict[str, Any]) -> tiktoken.Encoding | None:
    """Return an encoding that gives `backend`'s ids for every text, or None if that is not certain.

    Args:
        backend: has GPT-2's pattern, without a space before the text, and no normalizer.
        parts: `backend` as its JSON.
    """
    model = parts["model"]
    if (
        model.get("type") != "BPE"
        or any(
            not token["special"] for token in parts["added_tokens"]
        )  # found in text before the pattern is
        or any(
            model.get(name)
            for name in (
                "dropout",
                "continuing_subword_prefix",
                "end_of_word_suffix",
                "byte_fallback",
                "ignore_merges",
            )
        )
    ):
        return None
    alphabet = byte_of_character()
    vocabulary = model["vocab"]
    if not all(character in vocabulary for character in alphabet):
        return None
    merged_from = {}
    for merge in model["merges"]:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        merged_from["".join(pair)] = pair
    if len(merged_from) != len(model["merges"]):
        return None
    previous = max(vocabulary[character] for character in alphabet)
    for token, pair in merged_from.items():  # in the order of the merges
        rank = vocabulary.get(token)
        if rank is None or len(pair) != 2 or rank <= previous:
            return None
        previous = rank
    ranks = {bytes([byte]): vocabulary[character] for character, byte in alphabet.items()}
    to_bytes = {ord(character): byte for character, byte in alphabet.items()}
    tokenize = backend.model.tokenize
    for token in merged_from:
        alone = tokenize(token)
        if len(alone) != 1 or alone[0].id != vocabulary[token]:
            return None
        # Latin-1 writes each of the first 256 characters as the byte of its number.
        ranks[token.translate(to_bytes).encode("latin-1")] = vocabulary[token]
    import tiktoken

    return tiktoken.Encoding("efftrain", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
